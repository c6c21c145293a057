"""The step in plain PyTorch: one token for each of many sequences, in place. Mirrors `kernels/reference.py`.

Nothing here depends on values, so that it runs in a CUDA graph: a padding row computes from zeros and, when it writes,
writes back what its slot holds.
"""

import torch

from vllm_mamba3.kernels.layout import Mamba3States, Mamba3Weights, compute_dtype
from vllm_mamba3.kernels.torch_math import (
    angle_rate,
    gate,
    key_and_query_bias,
    prepare,
    rotate,
    to_heads,
    wrap_angle,
)


def torch_step(projected: torch.Tensor, weights: Mamba3Weights, pools: Mamba3States, slots: torch.Tensor,
               has_initial_state: torch.Tensor | None, out: torch.Tensor) -> None:
    """`mamba3_step`, without its checks."""
    live = slots > 0
    rows = slots.clamp(min=0).long()
    before = Mamba3States(*(pool[rows] for pool in pools))
    fresh = ~live if has_initial_state is None else ~(live & has_initial_state)
    states = Mamba3States(*(state.masked_fill(over(fresh, state), 0) for state in before))
    y, states = step_rows(projected, weights.to(compute_dtype(projected.dtype)), states)
    out.copy_(y.masked_fill(~live[:, None], 0))
    for pool, state, old in zip(pools, states, before):
        pool.index_copy_(0, rows, torch.where(over(live, state), state.to(pool.dtype), old))


def over(rows: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A mask of rows, shaped to broadcast over a state's other dimensions."""
    return rows.view(-1, *(state.dim() - 1) * (1,))


def step_rows(projected: torch.Tensor, weights: Mamba3Weights, states: Mamba3States):
    """One token for each row of projected (S, d_in_proj) and of the states: the output (S, H·P) and the new states."""
    size, inputs = weights.layout, prepare(projected, weights)
    dt, gamma = inputs.dt, inputs.trapezoid * inputs.dt
    alpha = torch.exp(inputs.A_dt)
    beta = (dt - gamma) * alpha

    theta = wrap_angle(torch.addcmul(states.angle, angle_rate(inputs.angle).unsqueeze(1), dt.unsqueeze(-1)))
    BC = to_heads(inputs.BC.permute(1, 0, 3, 2, 4), 2, size) + key_and_query_bias(weights)[:, None]
    k, q = rotate(BC, theta.unsqueeze(2), size)  # (S, H, R, N)
    k_state = k.to(states.k.dtype)

    # Both rank-R updates as one product of (P, 2R) and (2R, N): this token's values and keys, and the last token's.
    now, last = inputs.x.unsqueeze(2), states.v.to(dt.dtype).unsqueeze(2)
    v = torch.stack((now * gamma[..., None, None], last * beta[..., None, None]), 2)  # (S, H, 2, 1, P)
    if weights.mimo_x is not None:
        now, v = now * weights.mimo_x, v * weights.mimo_x.unsqueeze(1)
    keys = torch.stack((k_state, states.k.transpose(1, 2)), 2).to(dt.dtype)  # (S, H, 2, R, N)
    ssm = states.ssm.to(dt.dtype) * alpha[..., None, None]
    ssm = torch.baddbmm(ssm.flatten(0, 1), v.flatten(2, 3).flatten(0, 1).transpose(1, 2), keys.flatten(2, 3).flatten(0, 1))

    y = torch.bmm(q.flatten(0, 1), ssm.transpose(1, 2)).view(now.shape)
    y = torch.addcmul(y, now, weights.D[:, None, None])
    out = gate(y, inputs.z, weights).flatten(1)
    return out, Mamba3States(theta, ssm.view(states.ssm.shape), k_state.transpose(1, 2), inputs.x)
