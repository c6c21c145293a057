"""The decode kernels that ours is measured against, each on inputs of its own: random, bfloat16, float32 ssm state.

Every function takes a layer's sizes and a batch, and returns a call that runs one step of one layer.
"""

import sys
import types
from collections.abc import Callable

import torch

from vllm_mamba3.kernels import Mamba3Layout, Mamba3Weights, mamba3_step

Step = Callable[[], object]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def permutation(count: int) -> torch.Tensor:
    """Slots 1 to count in any order, as a pool's sequences lie after a while."""
    return (torch.randperm(count, device="cuda") + 1).int()


def ours(weights: Mamba3Weights, pools_of, batch: int, implementation: str = "triton") -> Step:
    """`mamba3_step`: all between the projections. pools_of(slots) gives the pools."""
    size, pools = weights.layout, pools_of(batch + 1)
    projected, slots = normal(batch, size.projection_size), permutation(batch)
    out, goes_on = normal(batch, size.inner_size), torch.ones(batch, dtype=torch.bool, device="cuda")
    return lambda: mamba3_step(projected, weights, pools, slots, out, goes_on, implementation=implementation)


def official_module(size: Mamba3Layout):
    """mamba_ssm's whole layer, with random weights; d_model is H·P / 2."""
    sys.modules.setdefault("selective_scan_cuda", types.ModuleType("selective_scan_cuda"))  # of Mamba-1, not needed
    from mamba_ssm.modules import mamba3

    if size.is_mimo and mamba3.mamba3_mimo_combined is None:
        mamba3.mamba3_mimo_combined = NotImplemented  # its prefill, which needs TileLang; the step does without
    module = mamba3.Mamba3(size.inner_size // 2, size.state_size, headdim=size.head_dim, ngroups=size.num_groups,
                           is_mimo=size.is_mimo, mimo_rank=size.rank, device="cuda", dtype=torch.bfloat16)
    return module.requires_grad_(False)


def official_step(size: Mamba3Layout, batch: int, module) -> Step:
    """`Mamba3.step`, with the two projections."""
    heads, rows = size.num_heads, normal(batch, size.inner_size // 2)
    angle, ssm = normal(batch, heads, size.num_angles, dtype=torch.float32), normal(
        batch, heads, size.head_dim, size.state_size, dtype=torch.float32)
    k, v = normal(batch, size.rank, heads, size.state_size), normal(batch, heads, size.head_dim)

    def step():
        _, new_angle, _, new_k, new_v = module.step(rows, angle, ssm, k, v)
        for state, new in ((angle, new_angle), (k, new_k), (v, new_v)):
            if new is not state:
                state.copy_(new)

    return step


def official_projections(size: Mamba3Layout, batch: int, module) -> Step:
    """The two matrix products of that step."""
    rows, inner = normal(batch, size.inner_size // 2), normal(batch, size.inner_size)
    return lambda: (module.in_proj(rows), module.out_proj(inner))


def official_cute(size: Mamba3Layout, batch: int) -> Step:
    """`mamba3_step_fn` in CuTe: the state update, read-out and gate, of states already gathered."""
    sys.modules.setdefault("selective_scan_cuda", types.ModuleType("selective_scan_cuda"))
    from mamba_ssm.ops.cute.mamba3.mamba3_step_fn import mamba3_step_fn

    heads, rank, rows = size.num_heads, size.rank, (batch, size.num_heads, size.head_dim)
    keys, projection = (batch, rank, heads, size.state_size), (rank, heads, size.head_dim)
    wide = dict(dtype=torch.float32)
    arguments = dict(
        state=normal(*rows, size.state_size, **wide), Bstate=normal(*keys), Xstate=normal(*rows),
        A=-normal(batch, heads, **wide).abs(), B=normal(*keys), C=normal(*keys), D=normal(heads, **wide),
        x=normal(*rows), dt=normal(batch, heads, **wide).abs(), trap=normal(batch, heads, **wide).sigmoid(),
        xproj=normal(*projection), outproj=normal(*projection), state_out=None, out=normal(*rows), z=normal(*rows),
        zproj=normal(*projection), tile_D=64, num_warps=4,
    )
    return lambda: mamba3_step_fn(**arguments)


def official_siso(size: Mamba3Layout, batch: int) -> Step:
    """`mamba3_siso_step` in Triton, of states already gathered; it returns new ones."""
    sys.modules.setdefault("selective_scan_cuda", types.ModuleType("selective_scan_cuda"))
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_step import mamba3_siso_step

    heads, state, wide = size.num_heads, size.state_size, dict(dtype=torch.float32)
    q, k, v, z = normal(batch, 1, state), normal(batch, 1, state), *(
        normal(batch, heads, size.head_dim) for _ in range(2))
    dt = normal(batch, heads, **wide).abs()
    states = (normal(batch, heads, size.num_angles, **wide), normal(batch, heads, size.head_dim, state, **wide),
              normal(batch, heads, state), normal(batch, heads, size.head_dim))
    angles = normal(batch, heads, size.num_angles, **wide)
    bias = normal(heads, state, **wide), normal(heads, state, **wide)
    D, trap = normal(heads, **wide), normal(batch, heads, **wide)
    return lambda: mamba3_siso_step(q, k, v, -dt, dt, trap, *bias, angles, D, z, states)


def vllm_mamba2(size: Mamba3Layout, batch: int) -> Step:
    """vLLM's `selective_state_update` as Mamba-2 calls it, of a state of the same size, through slots."""
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

    heads, wide = size.num_heads, dict(dtype=torch.float32)
    per_head = (heads, size.head_dim, size.state_size)
    pool = normal(batch + 1, *per_head, **wide)
    x, out = normal(batch, heads, size.head_dim), normal(batch, heads, size.head_dim)
    B, C = normal(batch, size.num_groups, size.state_size), normal(batch, size.num_groups, size.state_size)
    dt = normal(batch, heads)[:, :, None].expand(-1, -1, size.head_dim)
    A = -normal(heads, **wide).abs()[:, None, None].expand(per_head)
    D, dt_bias = (normal(heads)[:, None].expand(-1, size.head_dim) for _ in range(2))
    slots = permutation(batch)
    return lambda: selective_state_update(pool, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True,
                                          state_batch_indices=slots, out=out)
