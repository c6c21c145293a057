# Everything a fresh machine needs but Python (3.11 or later) and a C++ compiler, which vLLM's CPU build compiles with.

PYTHON ?= python3
VENV ?= .venv
DEVICE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
BIN := $(VENV)/bin

.PHONY: demo test clean

demo: $(VENV)/installed
	$(BIN)/python examples/state_tracking/demo.py

test: $(VENV)/installed
	$(BIN)/pytest $(PYTEST_ARGS)

# On a CPU the builds of these three that come with vLLM do not load beside its torch, and break `from vllm import LLM`.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(DEVICE),test]'
	[ $(DEVICE) = cuda ] || $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV)
