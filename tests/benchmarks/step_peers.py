"""The decode kernels that ours is measured against, each on inputs of its own: random, bfloat16.

Every function takes a layer's sizes and a batch, and returns a call that runs one step of one layer. Where torch sees
no GPU the inputs lie on the CPU, for a dry run.
"""

import sys
import types
from collections.abc import Callable

import torch

from vllm_mamba3.kernels import Mamba3Layout, Mamba3Weights, mamba3_step

Step = Callable[[], object]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def permutation(count: int) -> torch.Tensor:
    """Slots 1 to count in any order, as a pool's sequences lie after a while."""
    return (torch.randperm(count, device=DEVICE) + 1).int()


def ours(weights: Mamba3Weights, pools_of, batch: int) -> Step:
    """`mamba3_step`: all between the projections. pools_of(slots) gives the pools."""
    size, pools = weights.layout, pools_of(batch + 1)
    projected, slots = normal(batch, size.projection_size), permutation(batch)
    out, goes_on = normal(batch, size.inner_size), torch.ones(batch, dtype=torch.bool, device=DEVICE)
    return lambda: mamba3_step(projected, weights, pools, slots, out, goes_on)


def official_module(size: Mamba3Layout):
    """mamba_ssm's whole layer, with random weights; d_model is H·P / 2."""
    do_without_mamba1()
    from mamba_ssm.modules import mamba3

    if size.is_mimo and mamba3.mamba3_mimo_combined is None:
        mamba3.mamba3_mimo_combined = NotImplemented  # its prefill, which needs TileLang; the step does without
    module = mamba3.Mamba3(size.inner_size // 2, size.state_size, headdim=size.head_dim, ngroups=size.num_groups,
                           is_mimo=size.is_mimo, mimo_rank=size.rank, device=DEVICE, dtype=torch.bfloat16)
    return module.requires_grad_(False)


def do_without_mamba1() -> None:
    """mamba_ssm imports the extension of Mamba-1 whatever is asked of it."""
    sys.modules.setdefault("selective_scan_cuda", types.ModuleType("selective_scan_cuda"))


def official_step(size: Mamba3Layout, batch: int, module, state_dtype: torch.dtype) -> Step:
    """`Mamba3.step`, with the two projections; it takes all four states further by itself."""
    heads, rows = size.num_heads, normal(batch, size.inner_size // 2)
    angle = normal(batch, heads, size.num_angles, dtype=torch.float32)
    ssm = normal(batch, heads, size.head_dim, size.state_size, dtype=state_dtype)
    k, v = normal(batch, size.rank, heads, size.state_size), normal(batch, heads, size.head_dim)
    return lambda: module.step(rows, angle, ssm, k, v)


def official_projections(size: Mamba3Layout, batch: int, module) -> Step:
    """The two matrix products of that step."""
    rows, inner = normal(batch, size.inner_size // 2), normal(batch, size.inner_size)
    return lambda: (module.in_proj(rows), module.out_proj(inner))


def official_cute(size: Mamba3Layout, batch: int, state_dtype: torch.dtype) -> Step:
    """`mamba3_step_fn` in CuTe: the state update, read-out and gate, of states already gathered."""
    do_without_mamba1()
    from mamba_ssm.ops.cute.mamba3.mamba3_step_fn import mamba3_step_fn

    heads, rank, rows = size.num_heads, size.rank, (batch, size.num_heads, size.head_dim)
    keys, wide = (batch, rank, heads, size.state_size), dict(dtype=torch.float32)
    # As `Mamba3.step` passes them: float32 parameters, or ones like x.
    projections = [normal(rank, heads, size.head_dim, dtype=torch.float32 if size.is_mimo else torch.bfloat16)
                   for _ in range(3)]
    arguments = dict(
        state=normal(*rows, size.state_size, dtype=state_dtype), Bstate=normal(*keys), Xstate=normal(*rows),
        A=-normal(batch, heads, **wide).abs(), B=normal(*keys), C=normal(*keys), D=normal(heads, **wide),
        x=normal(*rows), dt=normal(batch, heads, **wide).abs(), trap=normal(batch, heads, **wide).sigmoid(),
        xproj=projections[0], outproj=projections[1], state_out=None, out=normal(*rows), z=normal(*rows),
        zproj=projections[2], tile_D=64, num_warps=4,
    )
    return lambda: mamba3_step_fn(**arguments)


def official_siso(size: Mamba3Layout, batch: int) -> Step:
    """`mamba3_siso_step` in Triton, of states already gathered; it returns new ones, the ssm state in float32."""
    do_without_mamba1()
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


def vllm_mamba2(size: Mamba3Layout, batch: int, state_dtype: torch.dtype) -> Step:
    """vLLM's `selective_state_update` as Mamba-2 calls it, of a state of the same size, through slots."""
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

    heads, wide = size.num_heads, dict(dtype=torch.float32)
    per_head = (heads, size.head_dim, size.state_size)
    pool = normal(batch + 1, *per_head, dtype=state_dtype)
    x, out = normal(batch, heads, size.head_dim), normal(batch, heads, size.head_dim)
    B, C = normal(batch, size.num_groups, size.state_size), normal(batch, size.num_groups, size.state_size)
    dt = normal(batch, heads)[:, :, None].expand(-1, -1, size.head_dim)
    A = -normal(heads, **wide).abs()[:, None, None].expand(per_head)
    D, dt_bias = (normal(heads)[:, None].expand(-1, size.head_dim) for _ in range(2))
    slots = permutation(batch)
    return lambda: selective_state_update(pool, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True,
                                          state_batch_indices=slots, out=out)
