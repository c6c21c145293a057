"""The step around mamba_ssm's own step kernel: the official state update behind our door, for parity and for doubt, not
for speed. Mirrors `kernels/reference.py`.

The kernel is `mamba3_step_fn`, in CuTe. As its source (mamba_ssm 2.3.2) has it, it computes in float32: updates the ssm
state in place, rounding one of 16 bits to the nearest, reads out, adds D's part, and unless there is an output norm
applies the gate and the MIMO projections. It only reads the k and v states, which the caller takes further. It takes A
negative, trap after its sigmoid, B and C after norm, bias and rotation. All of that is torch_math.py's work here, so
that A's activation is the model's, whatever mamba_ssm's version. Two of its functions are the GPU's approximate ones:
the decay's exp, wrong by up to 2^-22, and the gate's tanh, by up to 2^-11.

But for the ssm state, the kernel is given float32, whatever the model's dtype: k and v are exact in it, and neither q
nor what is read out is rounded on the way.
"""

from collections.abc import Callable
from functools import cache

import torch

from vllm_mamba3.kernels.layout import Mamba3States, Mamba3Weights
from vllm_mamba3.kernels.torch_math import (
    TokenInputs,
    decay_rate,
    gate,
    gather,
    keys_and_queries,
    prepare,
    scatter,
)

# Rows of the ssm state and warps of a block, as mamba_ssm itself launches it. A block reads and writes a whole tile,
# past head_dim too (state-spaces/mamba #1024), and adds up all of N only with 16 rows to a warp.
TILE, WARPS = 64, 4
STATE_SIZES = (32, 64, 128)
HEADS_MULTIPLE = 4  # it takes rows (H,) of float32 only if each starts at a multiple of 16 bytes


@cache
def cute_step() -> Callable[..., None]:
    """mamba_ssm's `mamba3_step_fn`, or ValueError with the line that installs it.

    That line leaves mamba_ssm's dependencies out: 2.3.2 asks for other versions of tilelang and apache-tvm-ffi than
    vLLM 0.32 and 0.33, which bring those of the kernel.
    """
    try:
        from mamba_ssm.ops.cute.mamba3.mamba3_step_fn import mamba3_step_fn
    except ImportError as error:
        raise ValueError(
            f"mamba3_step calls mamba_ssm's CuTe kernel with implementation 'mamba_ssm', and can't import it: {error}. "
            "Install it with: pip install --no-deps --no-build-isolation 'mamba-ssm>=2.3.2,<2.4'; the kernel itself "
            "needs nvidia-cutlass-dsl and quack-kernels, which come with vLLM for CUDA"
        ) from error
    return mamba3_step_fn


def check_available() -> None:
    """Refuse, at start-up, where what this needs is not installed."""
    cute_step()


def check_supported(projected, weights, pools, out, several, stochastic_rounding) -> None:
    """Refuse what `mamba3_step` can ask for and this cannot do."""
    size = weights.layout
    if several or stochastic_rounding:
        raise ValueError("mamba3_step takes one token a sequence and no rounding_seed with implementation 'mamba_ssm', "
                         f"and got {'cu_seqlens' if several else 'a rounding_seed'}; use 'triton'")
    if projected.dtype == torch.float64:
        raise ValueError("mamba3_step computes in float32 with implementation 'mamba_ssm', and got projected in "
                         "float64; use 'torch'")
    if size.head_dim % TILE or size.state_size not in STATE_SIZES or size.num_heads % HEADS_MULTIPLE:
        raise ValueError(
            f"mamba3_step expects a head_dim that is a multiple of {TILE}, a state_size of "
            f"{' or '.join(map(str, STATE_SIZES))}, and num_heads a multiple of {HEADS_MULTIPLE} with implementation "
            f"'mamba_ssm', and got head_dim {size.head_dim}, state_size {size.state_size} and num_heads "
            f"{size.num_heads}; use 'triton'"
        )
    if projected.device.type != "cuda":
        raise ValueError("mamba3_step expects tensors on a CUDA device with implementation 'mamba_ssm', and got them "
                         f"on {projected.device}; use 'torch'")


def mamba_ssm_step(projected: torch.Tensor, weights: Mamba3Weights, pools: Mamba3States, slots: torch.Tensor,
                   has_initial_state: torch.Tensor | None, out: torch.Tensor, cu_seqlens: None = None,
                   num_accepted_tokens: None = None, rounding_seed: None = None) -> None:
    """`mamba3_step`, without its checks. The first call for a layout compiles the kernel: not within a CUDA graph."""
    weights = weights.to(torch.float32)
    held, (angle, ssm, k, v) = gather(pools, slots, has_initial_state)
    inputs = prepare(projected, weights)
    angle, own_k, q = keys_and_queries(inputs, weights, angle)
    own_k, q = own_k.to(k.dtype).transpose(1, 2), q.transpose(1, 2)  # (S, R, H, N)
    A = -decay_rate(projected.split(weights.layout.projection_widths, -1)[5].float(), weights)
    result = update_and_read_out(ssm, k, v, own_k, q, A, inputs, weights)
    out.copy_(result.flatten(1).masked_fill(slots[:, None] <= 0, 0))
    scatter(pools, slots, held, Mamba3States(angle, ssm, own_k, inputs.x))


def update_and_read_out(ssm: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own_k: torch.Tensor, q: torch.Tensor,
                        A: torch.Tensor, inputs: TokenInputs, weights: Mamba3Weights) -> torch.Tensor:
    """Take ssm (S, H, P, N) one token further in place; returns the output (S, H, P).

    k and v are those of the token before, own_k and q (S, R, H, N) and A (S, H) the token's own.
    """
    size, gates = weights.layout, weights.out_norm is None
    projections = (size.rank, size.num_heads, size.head_dim)
    mimo_x, mimo_z, mimo_o = (
        ssm.new_ones(projections, dtype=torch.float32) if tensor is None else _laid_out(tensor.transpose(0, 1))
        for tensor in (weights.mimo_x, weights.mimo_z, weights.mimo_o)
    )
    shape = projections[1:] if gates else projections
    y = ssm.new_empty((len(ssm), *shape), dtype=torch.float32)
    with torch.cuda.device_of(ssm):
        cute_step()(
            state=ssm, Bstate=_laid_out(k), Xstate=_laid_out(v), A=_laid_out(A), B=_laid_out(own_k), C=_laid_out(q),
            D=_laid_out(weights.D), x=_laid_out(inputs.x), dt=_laid_out(inputs.dt), trap=_laid_out(inputs.trapezoid),
            xproj=mimo_x, outproj=mimo_o if gates else None, state_out=None, out=y,
            z=_laid_out(inputs.z) if gates else None, zproj=mimo_z if gates else None, tile_D=TILE, num_warps=WARPS,
        )
    return y if gates else gate(y.transpose(1, 2), inputs.z, weights)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float32 as the kernel takes it: row after row, from an address that is a multiple of 16 bytes. What
    `contiguous` returns may start anywhere."""
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
