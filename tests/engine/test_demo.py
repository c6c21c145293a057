"""The shipped checkpoints through the real `vllm serve`: what `make demo` does, and the accuracy gate for any kernel."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "state_tracking" / "demo.py"


@pytest.mark.parametrize("kind", ["siso", "mimo"])
def test_demo_answers_held_out_strings(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # as by default, and not as in these tests
    done = subprocess.run([sys.executable, DEMO, kind, "--strings", "300"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    accuracy = re.fullmatch(r"accuracy parity=(\d\.\d+) modular=(\d\.\d+)", last)
    assert accuracy and min(map(float, accuracy.groups())) >= 0.99, done.stdout
