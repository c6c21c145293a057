"""The scan in plain PyTorch: chunked, vectorised over chunks and heads, differentiable. Mirrors `kernels/reference.py`.

Inside a chunk that starts from the state S and its previous token (k', v'), with a_t the running sum of A·dt,

    y_t = exp(a_t) S⁺ q_t + Σ_{s<t} exp(a_t - a_s) g_s (k_s · q_t) v_s + γ_t (k_t · q_t) v_t,
    S⁺ = S + (1 - λ_0) dt_0 v' k'ᵀ,   g_s = γ_s + (1 - λ_{s+1}) dt_{s+1},

since the next token's β carries its own α. g reaches over the chunk's end to the sequence's next token, which makes
Σ_s exp(a_L - a_s) g_s v_s k_sᵀ + exp(a_L) S⁺ the next chunk's S⁺ as it is, and, at the sequence's last token, which has
no next one, the final state S.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

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

# How much of the keys to work on at a time; see `head_blocks`.
BYTES_OF_KEYS = {"cpu": 2 << 20, "gpu": 128 << 20}


# Forgets everything, in float64 too; lower ones would only take digits from the sums that they are added to.
LOWEST_LOG_DECAY = -1e3


class ChunkPlan:
    """Where the tokens of packed sequences lie when each sequence is cut into chunks of `size`, the last one padded.

    The chunks lie step by step: all sequences' first chunks, then all second ones, and so on, the longest sequence in
    front at each step, so that states pass from one run of chunks to the front of the next. `order` lists the
    sequences in that order, in which everything below is. `running` says how many are left at each step; `after`, which
    chunk follows each one in its sequence, num_chunks for none; `last` and `last_offset`, where each sequence's last
    token lies; `position` (T,), where each packed token lies, or None where it lies where it was.
    """

    def __init__(self, lengths: Sequence[int], chunk_size: int, device: torch.device):
        self.size = chunk_size
        order = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
        counts = [-(-lengths[sequence] // chunk_size) for sequence in order]
        self.running = [sum(count > step for count in counts) for step in range(counts[0])]
        starts = [sum(self.running[:step]) for step in range(counts[0])]
        self.num_chunks = starts[-1] + self.running[-1]
        after = [starts[step + 1] + place if step + 1 < counts[place] else self.num_chunks
                 for step, running in enumerate(self.running) for place in range(running)]
        self.after = torch.tensor(after, device=device)
        self.last = torch.tensor([starts[count - 1] + place for place, count in enumerate(counts)], device=device)
        self.last_offset = torch.tensor([(lengths[sequence] - 1) % chunk_size for sequence in order], device=device)
        self.order = self.back = self.position = None
        if order != list(range(len(order))):
            self.order = torch.tensor(order, device=device)
            self.back = torch.argsort(self.order)
        if len(lengths) > 1 or lengths[0] % chunk_size:
            place = torch.argsort(torch.tensor(order)).repeat_interleave(torch.tensor(lengths))
            offset = torch.cat([torch.arange(length) for length in lengths])
            chunk = torch.tensor(starts)[offset // chunk_size] + place
            self.position = (chunk * chunk_size + offset % chunk_size).to(device)

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

    def sort(self, states: Mamba3States) -> Mamba3States:
        """States of the sequences as they were packed, in the order of the plan."""
        return states if self.order is None else Mamba3States(*(state.index_select(0, self.order) for state in states))

    def unsort(self, states: Mamba3States) -> Mamba3States:
        """The inverse of `sort`."""
        return states if self.back is None else Mamba3States(*(state.index_select(0, self.back) for state in states))

    def walk(self, state: torch.Tensor, advance: Callable[..., torch.Tensor], *chunks: torch.Tensor):
        """Carry a state from chunk to chunk, all sequences side by side and none seeing another's.

        `state` is what each sequence starts with; advance(state, *parts of chunks) takes it over one step's chunks.
        Returns the state each chunk starts with (C, ...), and what each sequence ends with.
        """
        starts, ended = [], []
        for parts in zip(*(tensor.split(self.running) for tensor in chunks)):
            running = len(parts[0])
            if running < len(state):
                ended.append(state[running:])
                state = state[:running]
            starts.append(state)
            state = advance(state, *parts)
        return torch.cat(starts), torch.cat((state, *reversed(ended)))


def chunked_scan(projected: torch.Tensor, weights: Mamba3Weights, lengths: Sequence[int],
                 initial: Mamba3States | None = None) -> tuple[torch.Tensor, Mamba3States]:
    """Run packed sequences through one layer, between its projections; differentiable in everything but lengths.

    Args:
        projected: (T, d_in_proj), the rows of the fused projection, one sequence after another.
        weights: the layer's.
        lengths: of the sequences; none may be empty. Their sum is T.
        initial: the states before each sequence's first token, sequences first; none means zeros.

    Returns: the gated output (T, H·P) in the dtype of `projected`, and the states after each sequence's last token.

    Raises: ValueError for lengths that are not those of sequences in `projected`.
    """
    if not lengths or min(lengths) < 1 or sum(lengths) != len(projected):
        raise ValueError(f"chunked_scan expects lengths of at least 1 that add up to the {len(projected)} rows of "
                         f"projected, and got {list(lengths)}")
    weights = weights.to(compute_dtype(projected.dtype))
    out, states = scan_inputs(prepare(projected, weights), weights, lengths, initial, projected.dtype)
    return out.to(projected.dtype), states


def check_supported(projected, weights, pools, out) -> None:
    """All that `mamba3_scan` can ask for."""


def torch_scan(projected: torch.Tensor, weights: Mamba3Weights, pools: Mamba3States, slots: torch.Tensor,
               cu_seqlens: torch.Tensor, has_initial_state: torch.Tensor, out: torch.Tensor,
               num_computed_tokens: torch.Tensor | None = None) -> None:
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


class Chunks(NamedTuple):
    """What heads take of tokens cut into chunks.

    z and x (C, L, H, P); BC (2, C, G, L, R, N); theta (C, H, L, n): θ, not wrapped; gamma, carried, g (C, H, L): γ,
    (1 - λ) dt, and g of the equation above; decay (C, H, L): a of the equation, in float64, since of a chunk in which
    something is forgotten at once small differences of large sums are what matters.
    """

    z: torch.Tensor
    x: torch.Tensor
    BC: torch.Tensor
    theta: torch.Tensor
    gamma: torch.Tensor
    carried: torch.Tensor
    g: torch.Tensor
    decay: torch.Tensor

    def of_heads(self, heads: slice, groups: slice) -> "Chunks":
        return Chunks(self.z[:, :, heads], self.x[:, :, heads], self.BC[:, :, groups], *(t[:, heads] for t in self[3:]))


def scan_inputs(inputs: TokenInputs, weights: Mamba3Weights, lengths: Sequence[int], initial: Mamba3States | None,
                kv_dtype: torch.dtype) -> tuple[torch.Tensor, Mamba3States]:
    """`chunked_scan` from prepared inputs on; keys, values and output are rounded to `kv_dtype`."""
    size = weights.layout
    plan = ChunkPlan(lengths, max(1, min(ROWS_PER_CHUNK // size.rank, max(lengths))), inputs.x.device)
    z, x, BC, dt, A_dt, trapezoid, rate = (plan.pad(t) for t in inputs._replace(angle=angle_rate(inputs.angle)))
    initial = None if initial is None else plan.sort(initial)
    dt, A_dt, trapezoid = (t.transpose(1, 2) for t in (dt, A_dt, trapezoid))  # (C, H, L)
    theta, final_angle = running_angle(rate, dt, initial, plan)
    gamma, carried = trapezoid * dt, (1 - trapezoid) * dt
    BC = BC.permute(2, 0, 4, 1, 3, 5).contiguous()  # head by head, as the products of `scan_heads` take them
    chunks = Chunks(z, x, BC, theta, gamma, carried, gamma + next_token(carried, plan),
                    A_dt.double().clamp(min=LOWEST_LOG_DECAY).cumsum(-1))
    blocks = [scan_heads(*block, kv_dtype, plan) for block in head_blocks(chunks, weights, initial)]
    out, ssm, k = (torch.cat(parts, dim) for parts, dim in zip(zip(*blocks), (2, 1, 2)))
    v = x[plan.last, plan.last_offset].to(kv_dtype)
    return plan.unpad(out).flatten(1), plan.unsort(Mamba3States(final_angle, ssm, k, v))


def head_blocks(chunks: Chunks, weights: Mamba3Weights, initial: Mamba3States | None):
    """The layer as several layers of fewer heads, since heads have nothing to do with one another.

    What a head holds is some ten tensors of the size of its keys. On a CPU a few heads' fit the cache, and the memory
    that one block gives back serves the next; on a GPU this bounds the memory that a long prompt takes.
    """
    size = weights.layout
    tokens, per_group = chunks.x.shape[0] * chunks.x.shape[1], size.num_heads // size.num_groups
    limit = BYTES_OF_KEYS["cpu" if chunks.x.device.type == "cpu" else "gpu"]
    most = max(1, limit // (tokens * size.rank * size.state_size * chunks.BC.element_size()))
    if most >= size.num_heads:
        yield chunks, weights, initial
        return
    count = max(n for n in range(1, most + 1) if not size.num_heads % n and not (per_group % n and n % per_group))
    for first in range(0, size.num_heads, count):
        heads = slice(first, first + count)
        groups = slice(first // per_group, (heads.stop - 1) // per_group + 1)
        yield chunks.of_heads(heads, groups), weights.of_heads(heads), None if initial is None else Mamba3States(
            initial.angle[:, heads], initial.ssm[:, heads], initial.k[:, :, heads], initial.v[:, heads])


def scan_heads(chunks: Chunks, weights: Mamba3Weights, initial: Mamba3States | None, kv_dtype: torch.dtype,
               plan: ChunkPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output (C, L, H, P) in `kv_dtype`, and each sequence's final ssm and k."""
    size, dtype, (gamma, carried, g, decay) = weights.layout, chunks.BC.dtype, chunks[4:]
    # Head by head: (C, H, L, R, N or P), so that the matrix products below see plain batches.
    k, q = rotate(add_bias(chunks.BC, weights), chunks.theta.unsqueeze(-2), size)
    k = k.to(kv_dtype)
    final_k = k[plan.last, :, plan.last_offset].transpose(1, 2)
    v = chunks.x.transpose(1, 2).unsqueeze(-2).to(dtype, memory_format=torch.contiguous_format)
    v = v if weights.mimo_x is None else v * weights.mimo_x[:, None]
    rows_k, rows_q, rows_v = (t.to(dtype).flatten(2, 3).flatten(0, 1) for t in (k, q, v))  # (C·H, L·R, N or P)

    added = v * (g * fading(decay[..., -1:] - decay, dtype))[..., None, None]
    added = torch.bmm(added.flatten(2, 3).flatten(0, 1).transpose(1, 2), rows_k).unflatten(0, (plan.num_chunks, -1))
    left = fading(decay[..., -1], dtype)[..., None, None]
    if initial is None:
        start = added.new_zeros(len(final_k), *added.shape[1:])
    else:
        start = start_with_previous_token(initial, carried, weights)
    starts, final_ssm = plan.walk(start, lambda state, added, left: torch.addcmul(added, state, left), added, left)

    scores = torch.bmm(rows_q, rows_k.transpose(1, 2)).unflatten(-1, (-1, size.rank)).unflatten(1, (-1, size.rank))
    scores = scores * token_weights(decay, g, gamma).flatten(0, 1)[:, :, None, :, None]
    scores = scores.flatten(3, 4).flatten(1, 2)
    scores.diagonal(dim1=1, dim2=2).unflatten(0, (plan.num_chunks, -1)).add_(weights.D[:, None])  # D x, x being v's row
    y = torch.bmm(rows_q, starts.flatten(0, 1).transpose(1, 2)).view(v.shape) * fading(decay, dtype)[..., None, None]
    y = torch.baddbmm(y.view(rows_v.shape), scores, rows_v).view(v.shape)
    return gate(y.transpose(1, 2), chunks.z, weights).to(kv_dtype), final_ssm, final_k


def fading(log: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp of a log decay; of -80 for anything below, beside which nothing it is added to would show the difference.

    Where its result is denormal, exp takes thirty times as long on a CPU.
    """
    return torch.exp(log.clamp(min=-80).to(dtype))


def running_angle(rate: torch.Tensor, dt: torch.Tensor, initial: Mamba3States | None, plan: ChunkPlan):
    """θ after each token (C, H, L, n), not wrapped, and each sequence's last (sequences, H, n), wrapped.

    From chunk to chunk it goes in float64, so that a long sequence loses nothing.
    """
    within = (rate.unsqueeze(1) * dt.unsqueeze(-1)).cumsum(-2)
    total = within[..., -1, :].double()
    first = total.new_zeros(plan.running[0], *total.shape[1:]) if initial is None else initial.angle.double()
    before, final = plan.walk(first, torch.add, total)
    before, final = (wrap_angle(angle, dt.dtype).to(dt.dtype) for angle in (before, final))
    return within + before.unsqueeze(-2), wrap_angle(final, dt.dtype)


def next_token(carried: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
    """Each token's successor's value (C, H, L), 0 at a sequence's last token."""
    first = F.pad(carried[..., 0], (0, 0, 0, 1))
    return torch.cat((carried[..., 1:], first.index_select(0, plan.after).unsqueeze(-1)), -1)


def token_weights(decay: torch.Tensor, g: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """What token s (last dimension) adds to token t of its chunk, apart from k_s · q_t and v_s: (C, H, L, L)."""
    span = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).clamp(max=0)  # later tokens' would overflow; tril drops them
    weights = (fading(span, g.dtype) * g.unsqueeze(-2)).tril(-1)
    weights.diagonal(dim1=-2, dim2=-1).copy_(gamma)
    return weights


def start_with_previous_token(initial: Mamba3States, carried: torch.Tensor, weights: Mamba3Weights) -> torch.Tensor:
    """S⁺ of each sequence's first chunk: (sequences, H, P, N)."""
    k, v = initial.k.to(carried.dtype).transpose(1, 2), initial.v.to(carried.dtype).unsqueeze(-2)
    v = v if weights.mimo_x is None else v * weights.mimo_x
    share = carried[: len(k), :, 0][..., None, None]
    return initial.ssm.to(carried.dtype) + torch.matmul((share * v).transpose(-1, -2), k)
