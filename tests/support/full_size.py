"""What tests of kernels on a GPU share: layers at full size, and states to and fro."""

import pytest
import torch

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States

LAYOUTS = {
    "siso-187m": Mamba3Layout(24, 64, 128, 1, 32),
    "siso-1.5b": Mamba3Layout(64, 64, 128, 1, 32),
    "mimo-187m": Mamba3Layout(24, 64, 128, 1, 32, 4, True),
    "mimo-1.5b": Mamba3Layout(64, 64, 128, 1, 32, 4, True),
    "siso-odd": Mamba3Layout(6, 12, 22, 3, 5),
    "siso-wide": Mamba3Layout(2, 128, 256, 2, 128),
    "mimo-rank-3": Mamba3Layout(4, 48, 96, 2, 24, 3, True),
}
ALL = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
OFFICIAL = pytest.mark.parametrize("layout", [LAYOUTS["siso-187m"], LAYOUTS["mimo-187m"]], ids=["siso", "mimo"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
DEVICE = "cuda"


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def on_cpu(states: Mamba3States) -> Mamba3States:
    return Mamba3States(*(state.cpu() for state in states))


def of(states: Mamba3States, sequence: int) -> Mamba3States:
    return Mamba3States(*(state[sequence] for state in states))
