"""The step in plain PyTorch: one token for each of many sequences, in place. Mirrors `kernels/reference.py`.

On a GPU nothing depends on values, so that it runs in a CUDA graph: a padding row computes from zeros and, when it
writes, writes back what its slot holds. On a CPU padding is left out, and the ssm state, by far the largest tensor of a
step, is updated where it lies: gathering it and putting it back takes about as long as the update.
"""

from typing import NamedTuple

import torch

from vllm_mamba3.kernels.layout import Mamba3States, Mamba3Weights, compute_dtype
from vllm_mamba3.kernels.torch_math import TokenInputs, gate, gather, keys_and_queries, over, prepare, scatter


class Update(NamedTuple):
    """What one token does to the ssm state of each head, S ← alpha S + values keys, and what it reads from it, S q.

    alpha (S, H, 1, 1), values (S, H, P, 2R), keys (S, H, 2R, N), q (S, H, R, N): the token's own R values and keys and
    the previous token's R, as one product.
    """

    alpha: torch.Tensor
    values: torch.Tensor
    keys: torch.Tensor
    q: torch.Tensor


def check_supported(projected, weights, pools, out, several, stochastic_rounding) -> None:
    """Refuse what `mamba3_step` can ask for and this cannot do."""
    if stochastic_rounding:
        raise ValueError("mamba3_step takes a rounding_seed with implementation 'triton', and got it with 'torch'")


def torch_step(projected: torch.Tensor, weights: Mamba3Weights, pools: Mamba3States, slots: torch.Tensor,
               has_initial_state: torch.Tensor | None, out: torch.Tensor, cu_seqlens: torch.Tensor | None = None,
               num_accepted_tokens: torch.Tensor | None = None, rounding_seed: None = None) -> None:
    """`mamba3_step`, without its checks."""
    run = step_where_it_lies if projected.device.type == "cpu" else step_gathered
    weights = weights.to(compute_dtype(projected.dtype))
    if cu_seqlens is None:
        run(projected, weights, pools, slots, has_initial_state, out)
    else:
        step_several(run, projected, weights, pools, slots, has_initial_state, out, cu_seqlens, num_accepted_tokens)


def step_several(run, projected, weights, pools, slots, has_initial_state, out, cu_seqlens, num_accepted_tokens):
    """Several tokens a sequence: the state goes on to the next token's slot, and is taken further there."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    before = slots.gather(1, num_accepted_tokens.long().unsqueeze(1) - 1).squeeze(1)
    nowhere = len(out)  # where the rows of sequences that are through go
    results = out.new_zeros(nowhere + 1, out.shape[1])
    for token in range(slots.shape[1]):
        rows = starts + token
        runs = (rows < ends) & (before > 0) & (slots[:, token] > 0)
        after = torch.where(runs, slots[:, token], 0)
        for pool in pools:
            # Sequences that do not run copy the null block onto itself.
            pool.index_copy_(0, after.long(), pool.index_select(0, torch.where(runs, before, 0).long()))
        result = out.new_empty(len(slots), out.shape[1])
        run(projected.index_select(0, torch.where(runs, rows, 0)), weights, pools, after, has_initial_state, result)
        results.index_copy_(0, torch.where(runs, rows, nowhere), result)
        before, has_initial_state = after, None
    within = torch.arange(nowhere, device=out.device).unsqueeze(1) < ends[-1]
    out.copy_(torch.where(within, results[:nowhere], out))


def step_where_it_lies(projected, weights, pools, slots, has_initial_state, out):
    live = [row for row, slot in enumerate(slots.tolist()) if slot > 0]
    padded = len(live) < len(slots)
    if padded:
        out.zero_()
        if not live:
            return
        live = torch.tensor(live)
        projected, slots = projected[live], slots[live]
        has_initial_state = None if has_initial_state is None else has_initial_state[live]
    slots = slots.long()
    angle, k, v = (pool.index_select(0, slots) for pool in (pools.angle, pools.k, pools.v))
    places = [pools.ssm[slot] for slot in slots.tolist()]
    wide = compute_dtype(projected.dtype)
    ssm = [place.to(wide) for place in places]  # itself, unless it is kept in 16 bits
    if has_initial_state is not None:
        fresh = ~has_initial_state
        for sequence in fresh.nonzero().flatten().tolist():
            ssm[sequence].zero_()
        angle, k, v = (state.masked_fill_(over(fresh, state), 0) for state in (angle, k, v))

    inputs = prepare(projected, weights)
    update, angle, k = token_update(inputs, weights, angle, k, v)
    y = torch.stack([update_ssm(*of_sequence) for of_sequence in zip(ssm, *update)])
    for place, state in zip(places, ssm):
        if place is not state:
            place.copy_(state)
    result = read_out(y, inputs, weights)
    if padded:
        out.index_copy_(0, live, result.to(out.dtype))
    else:
        out.copy_(result)
    for pool, state in zip((pools.angle, pools.k, pools.v), (angle, k, inputs.x)):
        pool.index_copy_(0, slots, state.to(pool.dtype))


def step_gathered(projected, weights, pools, slots, has_initial_state, out):
    held, (angle, ssm, k, v) = gather(pools, slots, has_initial_state)
    inputs = prepare(projected, weights)
    update, angle, k = token_update(inputs, weights, angle, k, v)
    ssm = ssm.to(compute_dtype(projected.dtype))
    y = update_ssm(ssm.flatten(0, 1), *(part.flatten(0, 1) for part in update)).unflatten(0, ssm.shape[:2])
    out.copy_(read_out(y, inputs, weights).masked_fill(slots[:, None] <= 0, 0))
    scatter(pools, slots, held, Mamba3States(angle, ssm, k, inputs.x))


def token_update(inputs: TokenInputs, weights: Mamba3Weights, angle: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """From a token of each sequence and the states angle, k and v before it: its `Update`, and angle and k after it."""
    dt, gamma = inputs.dt, inputs.trapezoid * inputs.dt
    alpha = torch.exp(inputs.A_dt)
    beta = (dt - gamma) * alpha
    angle, own_k, q = keys_and_queries(inputs, weights, angle)
    own_k = own_k.to(k.dtype).transpose(1, 2)
    keys = torch.stack((own_k, k), 1).to(dt.dtype)  # (S, 2, R, H, N)
    values = torch.stack((inputs.x * gamma.unsqueeze(-1), v * beta.unsqueeze(-1)), 1)  # (S, 2, H, P)
    values = values.transpose(1, 2).unsqueeze(3)
    if weights.mimo_x is not None:
        values = values * weights.mimo_x.unsqueeze(1)
    update = Update(alpha[..., None, None], values.flatten(2, 3).transpose(2, 3), keys.flatten(1, 2).transpose(1, 2), q)
    return update, angle, own_k


def update_ssm(ssm: torch.Tensor, alpha: torch.Tensor, values: torch.Tensor, keys: torch.Tensor, q: torch.Tensor):
    """Apply an `Update` to ssm (..., P, N), three-dimensional and in place; returns S q, (..., R, P)."""
    ssm.mul_(alpha).baddbmm_(values, keys)
    return torch.bmm(q, ssm.transpose(1, 2))


def read_out(y: torch.Tensor, inputs: TokenInputs, weights: Mamba3Weights) -> torch.Tensor:
    """From S q (S, H, R, P) to the output (S, H·P)."""
    x = inputs.x.unsqueeze(2).to(y.dtype)
    x = x if weights.mimo_x is None else x * weights.mimo_x
    return gate(torch.addcmul(y, x, weights.D[:, None, None]), inputs.z, weights).flatten(1)
