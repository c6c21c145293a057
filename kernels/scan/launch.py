"""How the Triton scan is launched: by shape alone, never by lengths, so that nothing is compiled while serving and a
sequence's bits do not depend on what it is packed with. (For the same reason the kernels are not specialised on what
varies from batch to batch: counts, and where in memory a batch's slots and lengths lie.)"""

from typing import NamedTuple

import triton

from vllm_mamba3.kernels.layout import Mamba3Layout


class Launch(NamedTuple):
    """rows: of a chunk, tokens times ranks, a power of two and at least 16. chunks: to a segment. warps: a program."""

    rows: int
    chunks: int
    warps: int

    def tokens(self, layout: Mamba3Layout) -> int:
        """Of a segment."""
        return self.rows // triton.next_power_of_2(layout.rank) * self.chunks


def launch_for(layout: Mamba3Layout) -> Launch:
    """64 rows, as matrix units take them, or a token's ranks if they are more; and eight chunks a segment for SISO,
    sixteen for MIMO, whose chunks have fewer tokens: what segments add takes memory."""
    rows = max(64, triton.next_power_of_2(layout.rank))
    return Launch(rows=rows, chunks=8 if layout.rank == 1 else 16, warps=4)
