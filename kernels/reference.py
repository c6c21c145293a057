"""The recurrence, token by token: the truth that every faster implementation is tested against.

Source: Mamba-3 (arXiv 2603.15569) as mamba_ssm's main branch computes it. One token, per head; all in one dtype.

| symbol | name                           | shape               | formula                                                |
| ------ | ------------------------------ | ------------------- | ------------------------------------------------------ |
| H P N  | heads, head_dim, state_size    |                     |                                                        |
| R G n  | MIMO rank, groups, angles      |                     | R = 1 in SISO; G divides H                             |
| z x    | gate, input                    | (H, P)              | projected                                              |
| B C    | key, query of a group          | (R, G, N)           | RMSNorm over N of what is projected                    |
| dt     | step size                      | (H,)                | softplus(dd_dt + dt_bias)                              |
| A      | decay rate, negative           | (H,)                | -max(act(dd_A), A_floor)                               |
| act    | A's activation                 |                     | heavy_tail: 1 + a if a >= 0 else 1 / (1 - a); softplus |
| λ      | trapezoid                      | (H,)                | sigmoid(trap)                                          |
| α β γ  | weights of S, of the previous and of this token | (H,) | α = exp(A dt), β = (1 - λ) dt α, γ = λ dt            |
| θ      | angle state                    | (H, n) in [0, 2π)   | θ + π tanh(angle) dt, modulo 2π                        |
| k q    | rotated key and query          | (R, H, N)           | rotate(B + B_bias, θ), rotate(C + C_bias, θ)           |
| v      | value                          | (H, P)              | x                                                      |
| S      | ssm state                      | (H, P, N)           | α S + γ Σ_r (x mimo_x_r) k_rᵀ + β Σ_r (v' mimo_x_r) k'_rᵀ; ' is the previous token's |
| y_r    | read-out                       | (H, P)              | S q_r + D x mimo_x_r                                   |
| out    | gated output                   | (H, P)              | Σ_r mimo_o_r y_r silu(z mimo_z_r)                      |

With an output norm (is_outproj_norm) y_r is normalised over P, scaled by out_norm, and only then gated. In SISO mimo_x,
mimo_z and mimo_o are absent and count as 1. SISO rotates neighbours (2i, 2i + 1), MIMO halves (i, i + N/2), for i < n.

k is rounded to the dtype of its state as soon as it is made. A token's key is used twice, by the token itself and, from
the state, by the next one; rounded at birth it is the same both times, so that it does not matter where a sequence is
split.
"""

import math

import torch

from vllm_mamba3.kernels.layout import Mamba3Layout, Mamba3States, Mamba3Weights


def zero_states(layout: Mamba3Layout, dtype: torch.dtype, kv_dtype: torch.dtype, device=None) -> Mamba3States:
    """The four states of a sequence that starts: angle and ssm in `dtype`, k and v in `kv_dtype`."""
    shapes = layout.state_shapes
    wide, narrow = dict(dtype=dtype, device=device), dict(dtype=kv_dtype, device=device)
    return Mamba3States(torch.zeros(shapes.angle, **wide), torch.zeros(shapes.ssm, **wide),
                        torch.zeros(shapes.k, **narrow), torch.zeros(shapes.v, **narrow))


def reference(projected: torch.Tensor, weights: Mamba3Weights, initial: Mamba3States | None = None,
              dtype: torch.dtype = torch.float64, kv_dtype: torch.dtype | None = None,
              ) -> tuple[torch.Tensor, Mamba3States]:
    """Run one sequence through one layer, between its projections.

    Args:
        projected: (T, d_in_proj), any floating dtype: the rows of the fused projection, T >= 0.
        weights: the layer's.
        initial: the states before the first token; none means zeros.
        dtype: what everything is computed in, and what the result is returned in.
        kv_dtype: what k and v are kept in; none means `dtype`.

    Returns: the gated output (T, H·P) before out_proj, and the states after the last token.
    """
    size, weights = weights.layout, weights.to(dtype)
    state = initial or zero_states(size, dtype, kv_dtype or dtype, projected.device)
    kv_dtype = kv_dtype or dtype
    state = Mamba3States(state.angle.to(dtype), state.ssm.to(dtype), state.k.to(kv_dtype), state.v.to(kv_dtype))
    rows = []
    for row in projected.to(dtype):
        z, x, B, C, dd_dt, dd_A, trap, angle = row.split(size.projection_widths)
        B = rms_norm(B.view(size.rank, size.num_groups, size.state_size), weights.B_norm, weights.norm_eps)
        C = rms_norm(C.view(size.rank, size.num_groups, size.state_size), weights.C_norm, weights.norm_eps)
        dt = torch.logaddexp(dd_dt + weights.dt_bias, torch.zeros_like(dd_dt))
        A = decay_rate(dd_A, weights.A_activation, weights.A_floor)
        z, x = z.view(size.num_heads, size.head_dim), x.view(size.num_heads, size.head_dim)
        y, state = token(x, B, C, A * dt, dt, torch.sigmoid(trap), angle, weights, state)
        rows.append(gate(y, z, weights).flatten())
    return torch.stack(rows) if rows else projected.new_zeros((0, size.inner_size), dtype=dtype), state


def token(x, B, C, A_dt, dt, trapezoid, angle, weights: Mamba3Weights, state: Mamba3States):
    """One token from its normed B and C on: the read-out y (R, H, P), not yet gated, and the states after it."""
    size, (theta, S, k_before, v_before) = weights.layout, state
    dtype, (mimo_x, _, _) = x.dtype, mimo_weights(weights)
    repeats = size.num_heads // size.num_groups
    theta = (theta + math.pi * torch.tanh(angle) * dt[:, None]) % (2 * math.pi)
    k = rotate(B.repeat_interleave(repeats, 1) + weights.B_bias.transpose(0, 1), theta, size).to(k_before.dtype)
    q = rotate(C.repeat_interleave(repeats, 1) + weights.C_bias.transpose(0, 1), theta, size)
    alpha, beta, gamma = torch.exp(A_dt), (1 - trapezoid) * dt * torch.exp(A_dt), trapezoid * dt

    def outer(value, key):  # Σ_r (value mimo_x_r) key_rᵀ: (H, P, N)
        return torch.einsum("hp,hrp,rhn->hpn", value.to(dtype), mimo_x, key.to(dtype))

    def scaled(factor, matrix):
        return factor[:, None, None] * matrix

    S = scaled(alpha, S) + scaled(gamma, outer(x, k)) + scaled(beta, outer(v_before, k_before))
    y = torch.einsum("hpn,rhn->rhp", S, q) + weights.D[:, None] * torch.einsum("hp,hrp->rhp", x, mimo_x)
    return y, Mamba3States(theta, S, k, x.to(v_before.dtype))


def gate(y, z, weights: Mamba3Weights):
    """From the read-out y (R, H, P) and z (H, P) to the layer's output (H, P)."""
    _, mimo_z, mimo_o = mimo_weights(weights)
    if weights.out_norm is not None:
        y = rms_norm(y, weights.out_norm.view(y.shape[1:]), weights.norm_eps)
    return torch.einsum("rhp,hrp,hrp->hp", y, torch.nn.functional.silu(z[:, None] * mimo_z), mimo_o)


def mimo_weights(weights: Mamba3Weights):
    if weights.mimo_x is not None:
        return weights.mimo_x, weights.mimo_z, weights.mimo_o
    return 3 * (weights.D.new_ones(weights.layout.num_heads, 1, weights.layout.head_dim),)


def rms_norm(x, weight, eps: float):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def decay_rate(dd_A, activation: str, floor: float):
    """A of the glossary: negative, and never above -floor."""
    if activation == "softplus":
        rate = torch.logaddexp(dd_A, torch.zeros_like(dd_A))
    else:
        rate = torch.where(dd_A >= 0, 1 + dd_A, 1 / (1 - dd_A))
    return -rate.clamp(min=floor)


def rotate(vector, theta, size: Mamba3Layout):
    """Rotate n pairs of the last dimension (R, H, N) by theta (H, n); the rest stays."""
    n, half = size.num_angles, size.state_size // 2
    first = torch.arange(n) if size.is_mimo else 2 * torch.arange(n)
    second = first + half if size.is_mimo else first + 1
    a, b = vector[..., first], vector[..., second]
    rotated = vector.clone()
    rotated[..., first] = a * torch.cos(theta) - b * torch.sin(theta)
    rotated[..., second] = a * torch.sin(theta) + b * torch.cos(theta)
    return rotated
