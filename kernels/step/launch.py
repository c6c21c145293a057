"""How the Triton step is launched: by device, head shape and state dtype; never by the batch, so that a sequence's bits
do not depend on it."""

from typing import NamedTuple

import torch
import triton

from vllm_mamba3.kernels.layout import Mamba3Layout


class Launch(NamedTuple):
    """inner: neighbours of a row of the ssm state that neighbouring threads load; a row is folded into state_size /
    inner of them, which one thread adds up on its own. warps: warps a program, which is one head of one sequence.
    registers: the most that a thread may take, so that more programs fit on a multiprocessor; None for no limit."""

    inner: int
    warps: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """What Triton is told of it; `inner` is the kernel's own. Multiplications are fused with additions, as was
        measured; from Triton 3.10 on that is no longer its default."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "enable_fp_fusion": True} | limit


# Measured by tests/benchmarks/bench_step.py: device, head_dim, state_size, bytes of an ssm element, rank.
MEASURED: dict[tuple[str, int, int, int, int], Launch] = {
    ("NVIDIA H200", 64, 128, 4, 1): Launch(inner=32, warps=4),
    ("NVIDIA H200", 64, 128, 4, 4): Launch(inner=32, warps=4, registers=168),
}


def launch_for(device: str, layout: Mamba3Layout, ssm_dtype: torch.dtype, plain: bool = True) -> Launch:
    """What was measured for this device and shape, else: 128 bytes of a row side by side (a cache line, which eight
    threads load 16 bytes each), and 64 elements of the state to a thread.

    plain: one token a sequence, a state rounded to the nearest. Anything else takes more registers than was measured.
    """
    known = MEASURED.get((device, layout.head_dim, layout.state_size, ssm_dtype.itemsize, layout.rank))
    if known:
        return known if plain else known._replace(registers=None)
    row, column = triton.next_power_of_2(layout.state_size), triton.next_power_of_2(layout.head_dim)
    warps = max(1, min(row * column // (64 * 32), 8))
    return Launch(inner=min(row, 128 // ssm_dtype.itemsize), warps=warps)
