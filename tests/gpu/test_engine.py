"""LLM.generate on a GPU, at the shapes of the official 187m checkpoints with random values, against the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_cache import OFFICIAL_CONFIGS
from random_checkpoints import write_checkpoint

CHECK = Path(__file__).with_name("check_engine.py")
TIMEOUT = 300  # seconds; about half a minute on an H200, alone


@pytest.fixture(scope="module", params=["siso", "mimo"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    yield write_checkpoint(folder, OFFICIAL_CONFIGS[f"state-spaces/mamba3-{request.param}-187m"])
    (folder / "pytorch_model.bin").unlink()


# The environment, and what LLM is given.
MODES = {
    "eager": ({}, ["enforce_eager=true"]),
    "CUDA graphs": ({}, []),
    "CUDA graphs, bfloat16 state": ({}, ['mamba_ssm_cache_dtype="bfloat16"']),
    "CUDA graphs, Triton scan": ({"VLLM_MAMBA3_SCAN": "triton"}, []),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runner", ["1", "0"], ids=["runner V2", "runner V1"])
def test_engine_gives_the_references_tokens(checkpoint, runner, mode):
    environment, settings = MODES[mode]
    done = subprocess.run([sys.executable, "-X", "faulthandler", CHECK, checkpoint, runner, *settings],
                          env=os.environ | environment, capture_output=True, text=True, timeout=TIMEOUT)
    print(*(line for line in done.stdout.splitlines() if line.startswith("largest difference")), sep="\n")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-10000:]
