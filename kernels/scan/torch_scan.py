"""The scan in plain PyTorch: chunked, vectorised over chunks and heads, differentiable. Mirrors `kernels/reference.py`.

Inside a chunk that starts from the state S and its previous token (k', v'), with a_t the running sum of A·dt,

    y_t = exp(a_t) S⁺ q_t + Σ_{s<t} exp(a_t - a_s) g_s (k_s · q_t) v_s + γ_t (k_t · q_t) v_t,
    S⁺ = S + (1 - λ_0) dt_0 v' k'ᵀ,   g_s = γ_s + (1 - λ_{s+1}) dt_{s+1},

since the next token's β carries its own α. g reaches over the chunk's end to the sequence's next token, which makes
Σ_s exp(a_L - a_s) g_s v_s k_sᵀ + exp(a_L) S⁺ the next chunk's S⁺ as it is, and, at the sequence's last token, which has
no next one, the final state S.
"""

from collections.abc import Sequence

import torch

from vllm_mamba3.kernels.layout import Mamba3States, Mamba3Weights, compute_dtype
from vllm_mamba3.kernels.torch_math import (
    TokenInputs,
    add_bias,
    angle_rate,
    gate,
    prepare,
    rotate,
    wrap_angle,
)

# Rows of the chunk's attention-like matrix: L tokens times R ranks. 64 was the fastest of 16 to 128 for the shapes of
# siso-187m and mimo-187m on a CPU (tests/benchmarks/bench_cpu.py).
ROWS_PER_CHUNK = 64


class ChunkPlan:
    """Where the tokens of packed sequences lie when each sequence is cut into chunks of `size`, the last one padded.

    Empty sequences take no part. `first` and `count` say which chunks are each other sequence's; `position` (T,) says
    where a packed token lies, or is None where it lies where it was.
    """

    def __init__(self, lengths: Sequence[int], chunk_size: int, device: torch.device):
        lengths = [length for length in lengths if length]
        self.size = chunk_size
        counts = [-(-length // chunk_size) for length in lengths]
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        self.num_chunks = sum(counts)
        self.most = max(counts)
        self.first = torch.tensor(firsts, device=device)
        self.count = torch.tensor(counts, device=device)
        self.last_offset = torch.tensor([(length - 1) % chunk_size for length in lengths], device=device)
        self.position = None
        if any(length % chunk_size for length in lengths):
            lengths_, starts = torch.tensor(lengths), torch.tensor([0, *lengths]).cumsum(0)[:-1]
            shift = torch.tensor(firsts) * chunk_size - starts
            self.position = (torch.arange(sum(lengths)) + shift.repeat_interleave(lengths_)).to(device)

    def pad(self, tokens: torch.Tensor) -> torch.Tensor:
        """(T, ...) -> (C, L, ...), zeros where no token lies."""
        if self.position is not None:
            padded = tokens.new_zeros(self.num_chunks * self.size, *tokens.shape[1:])
            tokens = padded.index_copy(0, self.position, tokens)
        return tokens.unflatten(0, (self.num_chunks, self.size))

    def unpad(self, tokens: torch.Tensor) -> torch.Tensor:
        """(C, L, ...) -> (T, ...)."""
        tokens = tokens.flatten(0, 1)
        return tokens if self.position is None else tokens.index_select(0, self.position)


def chunked_scan(projected: torch.Tensor, weights: Mamba3Weights, lengths: Sequence[int],
                 initial: Mamba3States | None = None) -> tuple[torch.Tensor, Mamba3States]:
    """Run packed sequences through one layer, between its projections; differentiable in everything but lengths.

    Args:
        projected: (T, d_in_proj), the rows of the fused projection, one sequence after another.
        weights: the layer's.
        lengths: of the sequences; none may be empty. Their sum is T.
        initial: the states before each sequence's first token, sequences first; none means zeros.

    Returns: the gated output (T, H·P) in the dtype of `projected`, and the states after each sequence's last token.
    """
    weights = weights.to(compute_dtype(projected.dtype))
    out, states = scan_inputs(prepare(projected, weights), weights, lengths, initial, projected.dtype)
    return out.to(projected.dtype), states


def torch_scan(projected: torch.Tensor, weights: Mamba3Weights, pools: Mamba3States, slots: torch.Tensor,
               cu_seqlens: torch.Tensor, has_initial_state: torch.Tensor, out: torch.Tensor) -> None:
    """`mamba3_scan`, without its checks. Waits for the device, once, to learn the lengths."""
    lengths, rows = cu_seqlens.diff().tolist(), slots.tolist()
    live = [sequence for sequence, (length, row) in enumerate(zip(lengths, rows)) if length and row > 0]
    if len(live) < len(lengths):
        keep = torch.tensor([length > 0 and row > 0 for length, row in zip(lengths, rows)], device=slots.device)
        tokens = keep.repeat_interleave(cu_seqlens.diff()).nonzero().squeeze(-1)
        out.zero_()
        if not live:
            return
        projected, slots, has_initial_state = projected[tokens], slots[keep], has_initial_state[keep]
    rows = slots.long()
    states = Mamba3States(*(
        pool[rows].masked_fill(~has_initial_state.view(-1, *(pool.dim() - 1) * (1,)), 0) for pool in pools
    ))
    result, states = chunked_scan(projected, weights, [lengths[sequence] for sequence in live], states)
    if len(live) < len(lengths):
        out.index_copy_(0, tokens, result)
    else:
        out.copy_(result)
    for pool, state in zip(pools, states):
        pool.index_copy_(0, rows, state.to(pool.dtype))


def scan_inputs(inputs: TokenInputs, weights: Mamba3Weights, lengths: Sequence[int], initial: Mamba3States | None,
                kv_dtype: torch.dtype) -> tuple[torch.Tensor, Mamba3States]:
    """`chunked_scan` from prepared inputs on; keys are rounded to `kv_dtype`, the output is in the compute dtype."""
    size, dtype = weights.layout, inputs.x.dtype
    plan = ChunkPlan(lengths, max(1, min(ROWS_PER_CHUNK // size.rank, max(lengths))), inputs.x.device)
    x, BC, dt, A_dt, trapezoid, angle = (plan.pad(t) for t in inputs[1:])
    dt, A_dt, trapezoid = (t.transpose(1, 2) for t in (dt, A_dt, trapezoid))  # (C, H, L)

    # Head by head from here on: (C, H, L, R, N or P), so that the matrix products below see plain batches.
    theta, final_angle = running_angle(angle, dt, initial, plan)
    k, q = rotate(add_bias(BC.permute(2, 0, 1, 3, 4, 5), weights).transpose(2, 3), theta[:, :, :, None], size)
    k = k.to(kv_dtype).to(dtype)
    v = x.transpose(1, 2).unsqueeze(-2)
    v = v if weights.mimo_x is None else v * weights.mimo_x[:, None]
    rows_k, rows_q, rows_v = (t.flatten(2, 3).flatten(0, 1) for t in (k, q, v))  # (C·H, L·R, N or P)

    gamma, carried = trapezoid * dt, (1 - trapezoid) * dt
    g = gamma + next_token(carried, plan)
    decay = A_dt.cumsum(-1)
    added = v * (g * torch.exp(decay[..., -1:] - decay))[..., None, None]
    added = torch.bmm(added.flatten(2, 3).flatten(0, 1).transpose(1, 2), rows_k).unflatten(0, (plan.num_chunks, -1))
    start = None if initial is None else state_with_previous_token(initial, carried, weights, plan)
    starts, final_ssm = pass_states(added, torch.exp(decay[..., -1]), start, plan)

    scores = torch.bmm(rows_q, rows_k.transpose(1, 2)).unflatten(-1, (-1, size.rank)).unflatten(1, (-1, size.rank))
    scores = scores * token_weights(decay, g, gamma).flatten(0, 1)[:, :, None, :, None]
    y = torch.bmm(scores.flatten(3, 4).flatten(1, 2), rows_v).view(v.shape)
    from_start = torch.bmm(rows_q, starts.flatten(0, 1).transpose(1, 2)).view(v.shape)
    y = torch.addcmul(y, from_start, torch.exp(decay)[..., None, None])
    y = torch.addcmul(y, v, weights.D[:, None, None, None])

    out = gate(plan.unpad(y.transpose(1, 2)), inputs.z, weights).flatten(1)
    last = plan.first + plan.count - 1
    final_k = k[last, :, plan.last_offset].transpose(1, 2).to(kv_dtype)
    return out, Mamba3States(final_angle, final_ssm, final_k, x[last, plan.last_offset].to(kv_dtype))


def running_angle(angle: torch.Tensor, dt: torch.Tensor, initial: Mamba3States | None, plan: ChunkPlan):
    """θ after each token (C, H, L, n), not wrapped, and each sequence's last (sequences, H, n), wrapped.

    The chunks' totals are added up in float64, so that a long sequence, or one behind others, loses nothing.
    """
    within = (angle_rate(angle).unsqueeze(1) * dt.unsqueeze(-1)).cumsum(-2)
    total = within[..., -1, :].double()
    before = total.cumsum(0) - total
    offset = -before[plan.first]
    if initial is not None:
        offset = offset + initial.angle
    before = wrap_angle(before + offset.repeat_interleave(plan.count, 0))
    last = plan.first + plan.count - 1
    final = wrap_angle(wrap_angle(before[last] + total[last]).to(within.dtype))
    return within + before.to(within.dtype).unsqueeze(-2), final


def next_token(carried: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
    """Each token's successor's value (C, H, L), 0 at a sequence's last token."""
    first = carried[..., 0].index_fill(0, plan.first, 0)  # nothing reaches into a sequence from the one before it
    following = torch.cat((first[1:], torch.zeros_like(first[:1])))
    return torch.cat((carried[..., 1:], following.unsqueeze(-1)), -1)


def token_weights(decay: torch.Tensor, g: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """What token s (last dimension) adds to token t of its chunk, apart from k_s · q_t and v_s: (C, H, L, L)."""
    earlier = torch.ones(2 * decay.shape[-1:], dtype=torch.bool, device=decay.device).tril(-1)
    span = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~earlier, -torch.inf)
    return torch.addcmul(torch.diag_embed(gamma), torch.exp(span), g.unsqueeze(-2))


def state_with_previous_token(initial: Mamba3States, carried: torch.Tensor, weights: Mamba3Weights, plan: ChunkPlan):
    """S⁺ of each sequence's first chunk: (sequences, H, P, N)."""
    k, v = initial.k.to(carried.dtype).transpose(1, 2), initial.v.to(carried.dtype).unsqueeze(-2)
    v = v if weights.mimo_x is None else v * weights.mimo_x
    share = carried[plan.first, :, 0][..., None, None]
    return initial.ssm.to(carried.dtype) + torch.matmul((share * v).transpose(-1, -2), k)


def pass_states(added: torch.Tensor, decay: torch.Tensor, start: torch.Tensor | None, plan: ChunkPlan):
    """Carry states from chunk to chunk, all sequences side by side.

    added (C, H, P, N) is what each chunk adds to the state, decay (C, H) what it leaves of the one it got; start is
    each sequence's first. Returns the state each chunk starts from, and each sequence's last.
    """
    order = torch.argsort(plan.count, descending=True, stable=True)  # so that those still going on come first
    first, count = plan.first[order], plan.count[order].tolist()
    state = added.new_zeros(len(count), *added.shape[1:]) if start is None else start[order]
    starts, chunks, ended = [], [], []
    for step in range(plan.most):
        running = sum(c > step for c in count)
        ended.append(state[running:])
        state, chunk = state[:running], first[:running] + step
        starts.append(state)
        chunks.append(chunk)
        state = torch.addcmul(added[chunk], state, decay[chunk][..., None, None])
    final = torch.cat((state, *reversed(ended)))[torch.argsort(order)]
    return torch.cat(starts)[torch.argsort(torch.cat(chunks))], final
