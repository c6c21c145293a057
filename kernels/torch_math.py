"""What implementations in PyTorch share: from a projected row to keys, queries and step sizes, and the gate; and the
states of a step, out of their pools and back.

The mathematics is vectorised over leading dimensions and differentiable. Symbols: the glossary of `reference.py`.
"""

import math
from typing import NamedTuple

import torch
from torch.nn import functional as F

from vllm_mamba3.kernels.layout import Mamba3Layout, Mamba3States, Mamba3Weights, compute_dtype

# From here on softplus(x) is x to the last bit of a float64; torch's own default, 20, is off by 1e-10.
SOFTPLUS_LINEAR_FROM = 40.0
# π as each dtype rounds it. Advanced by multiples of π and wrapped at 2π, an angle is a fraction of a turn, and any π
# will do, as long as both are the same. With a better 2π to wrap at than the float32 π to advance by, every turn would
# leave 1.7e-7 behind, always to the same side.
PI = {torch.float32: 3.1415927410125732, torch.float64: math.pi}


class TokenInputs(NamedTuple):
    """What one layer's recurrence takes of each token; `...` is any number of leading dimensions.

    z and x (..., H, P), in the model's dtype, all else in the compute dtype; BC (..., 2, R, G, N): B and C after their
    norms, before bias and rotation; dt, A_dt and trapezoid (..., H): step size, log decay A·dt, and λ; angle (..., n):
    as projected.
    """

    z: torch.Tensor
    x: torch.Tensor
    BC: torch.Tensor
    dt: torch.Tensor
    A_dt: torch.Tensor
    trapezoid: torch.Tensor
    angle: torch.Tensor


def prepare(projected: torch.Tensor, weights: Mamba3Weights) -> TokenInputs:
    """Split rows of the fused projection (..., d_in_proj), and apply activations and norms."""
    size, lead = weights.layout, projected.shape[:-1]
    inner, _, key, _, heads, _, _, angles = size.projection_widths
    z, x, rest = projected.split((inner, inner, projected.shape[-1] - 2 * inner), -1)
    rest = rest.to(compute_dtype(projected.dtype))
    BC, dd_dt, dd_A, trap, angle = rest.split((2 * key, heads, heads, heads, angles), -1)
    norms = torch.stack((weights.B_norm, weights.C_norm))
    dt = F.softplus(dd_dt + weights.dt_bias, threshold=SOFTPLUS_LINEAR_FROM)
    return TokenInputs(
        z=z.unflatten(-1, (size.num_heads, size.head_dim)),
        x=x.unflatten(-1, (size.num_heads, size.head_dim)),
        BC=rms_norm(BC.reshape(*lead, 2, size.rank, size.num_groups, size.state_size), norms[:, None, None],
                    weights.norm_eps),
        dt=dt,
        A_dt=-decay_rate(dd_A, weights).mul(dt),
        trapezoid=torch.sigmoid(trap),
        angle=angle,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=eps) * weight


def decay_rate(dd_A: torch.Tensor, weights: Mamba3Weights) -> torch.Tensor:
    """-A of the glossary: positive, and never below the floor."""
    if weights.A_activation == "softplus":
        rate = F.softplus(dd_A, threshold=SOFTPLUS_LINEAR_FROM)
    else:  # each half of heavy_tail sees only its own side, so that no gradient meets 1 / (1 - 1);
        # at 0 one of them has the slope, clamp's side
        rate = F.relu(dd_A) + (1 - dd_A.clamp(max=0)).reciprocal()
    return rate.clamp(min=weights.A_floor)


def angle_rate(angle: torch.Tensor) -> torch.Tensor:
    """Radians the angles advance per unit of dt."""
    return PI[angle.dtype] * torch.tanh(angle)


def wrap_angle(theta: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """theta modulo 2π, in [0, 2π), where it was made from an `angle_rate` in `dtype`; see `PI`."""
    turn = 2 * PI[dtype]
    wrapped = theta.remainder(turn)
    return wrapped.clamp(max=turn * (1 - torch.finfo(theta.dtype).eps))  # -1e-9 has been rounded up to a full turn


def rotate(vectors: torch.Tensor, theta: torch.Tensor, size: Mamba3Layout) -> torch.Tensor:
    """Rotate the first pairs of the last dimension (N) of `vectors` by theta (n), broadcast over the leading ones.

    `vectors` may be overwritten: the caller has no other use for it.
    """
    n, half = size.num_angles, size.state_size // 2
    cos, sin = torch.cos(theta), torch.sin(theta)
    if size.is_mimo:
        a, b = vectors[..., :n], vectors[..., half : half + n]
        first, second = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(a * sin, b, cos)
        return torch.cat((first, vectors[..., n:half], second, vectors[..., half + n :]), -1)
    pairs = vectors[..., : 2 * n].unflatten(-1, (n, 2))
    if size.state_size % 2:  # complex numbers must start at even places
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
        return torch.cat((turned.flatten(-2), vectors[..., 2 * n :]), -1)
    torch.view_as_complex(pairs).mul_(torch.complex(cos, sin))
    return vectors


def add_bias(BC: torch.Tensor, weights: Mamba3Weights) -> torch.Tensor:
    """B and C of each head, before rotation: from (2, S, G, ..., R, N) of the groups to (2, S, H, ..., R, N)."""
    bias = torch.stack((weights.B_bias, weights.C_bias)).unflatten(1, (weights.layout.num_groups, -1))
    bias = bias.view(2, 1, *bias.shape[1:3], *(BC.dim() - 5) * (1,), *bias.shape[3:])  # (2, 1, G, H/G, ..., R, N)
    return (BC.unsqueeze(3) + bias).flatten(2, 3)


def keys_and_queries(inputs: TokenInputs, weights: Mamba3Weights, angle: torch.Tensor):
    """From a token of each sequence and the angle state (S, H, n): that after the token, and k and q (S, H, R, N)."""
    angle = torch.addcmul(angle, angle_rate(inputs.angle).unsqueeze(1), inputs.dt.unsqueeze(-1))
    angle = wrap_angle(angle, inputs.dt.dtype)
    BC = add_bias(inputs.BC.permute(1, 0, 3, 2, 4), weights)
    k, q = rotate(BC, angle.unsqueeze(2), weights.layout)
    return angle, k, q


def gate(y: torch.Tensor, z: torch.Tensor, weights: Mamba3Weights) -> torch.Tensor:
    """From the read-out y (..., H, R, P), which already holds D's part, and z (..., H, P) to the output (..., H, P)."""
    z = z.to(y.dtype)
    if weights.out_norm is not None:
        y = rms_norm(y, weights.out_norm.to(y.dtype).view(-1, 1, y.shape[-1]), weights.norm_eps)
    if weights.mimo_z is None:
        return y.squeeze(-2) * F.silu(z)
    return (y * F.silu(z.unsqueeze(-2) * weights.mimo_z) * weights.mimo_o).sum(-2)


def gather(pools: Mamba3States, slots: torch.Tensor,
           has_initial_state: torch.Tensor | None) -> tuple[Mamba3States, Mamba3States]:
    """What the slots (S,) hold, and the states that their sequences go on from: zeros for new ones and for padding.

    Nothing depends on values, here and in `scatter`, so that both run in a CUDA graph.
    """
    rows, live = slots.clamp(min=0).long(), slots > 0
    held = Mamba3States(*(pool.index_select(0, rows) for pool in pools))
    fresh = ~live if has_initial_state is None else ~(live & has_initial_state)
    return held, Mamba3States(*(state.masked_fill(over(fresh, state), 0) for state in held))


def scatter(pools: Mamba3States, slots: torch.Tensor, held: Mamba3States, states: Mamba3States) -> None:
    """Write the states into their slots, rounded to the pools' dtypes; for padding, what the slot `held`."""
    rows, live = slots.clamp(min=0).long(), slots > 0
    for pool, state, old in zip(pools, states, held):
        pool.index_copy_(0, rows, torch.where(over(live, state), state.to(pool.dtype), old))


def over(rows: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A mask of rows, shaped to broadcast over a state's other dimensions."""
    return rows.view(-1, *(state.dim() - 1) * (1,))
