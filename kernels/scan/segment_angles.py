"""The angle at the start of each segment: how far each turns within one, then their running sum.

Angles are integers, of which 2^32 are a turn: their sums are exact in any order, over a million tokens too.
"""

import triton
import triton.language as tl

from vllm_mamba3.kernels import triton_math
from vllm_mamba3.kernels.scan.chunk import step_size, turns


@triton.jit(do_not_specialize=["tokens"])
def rates_kernel(projected, row_stride, rates, tokens, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
                 G: tl.constexpr, R: tl.constexpr, UNIT: tl.constexpr, ANGLES: tl.constexpr, BLOCK_T: tl.constexpr,
                 BLOCK_A: tl.constexpr):
    """Grid: blocks of tokens. Writes tanh of each token's angles, which all heads share, and behind them a zero, or
    NaN if one of them is: (tokens, ANGLES + 1). As an integer a NaN would be lost."""
    row_stride *= UNIT
    token, i = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_A)
    there = (token < tokens)[:, None] & (i < ANGLES)[None, :]
    speeds = projected + 2 * H * P + 2 * R * G * N + 3 * H
    speed = tl.load(speeds + (token * row_stride)[:, None] + i[None, :], there, 0).to(tl.float32)
    rate, row = triton_math.tanh(speed), rates + token * (ANGLES + 1)
    tl.store(row[:, None] + i[None, :], rate, there)
    tl.store(row + ANGLES, tl.sum(rate * 0, 1), token < tokens)


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens"])
def turns_kernel(projected, row_stride, rates, cu_seqlens, sequence_of, first_token, turned, dt_bias,
                 H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
                 UNIT: tl.constexpr, ANGLES: tl.constexpr, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr,
                 BLOCK_A: tl.constexpr):
    """Grid: segments, heads. Writes by how much each angle turns in the segment, (segments, H, ANGLES)."""
    row_stride *= UNIT
    segment, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(sequence_of + segment)
    if sequence >= 0:
        begin, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
        first, i = tl.load(first_token + segment), tl.arange(0, BLOCK_A)
        scalars, bias = projected + 2 * H * P + 2 * R * G * N, tl.load(dt_bias + h).to(tl.float32)
        total = tl.zeros((BLOCK_A,), tl.int32)
        for start in range(0, TOKENS, BLOCK_T):
            token = (first + start + tl.arange(0, BLOCK_T)).to(tl.int64)
            there = (token >= begin) & (token < end)
            dt, _ = step_size(scalars, token, there, row_stride, bias, h, H)
            rate = tl.load(rates + (token * (ANGLES + 1))[:, None] + i[None, :],
                           there[:, None] & (i < ANGLES)[None, :], 0)
            total += tl.sum(turns(rate, dt), 0)
        tl.store(turned + (segment * H + h) * ANGLES + i, total, i < ANGLES)


@triton.jit(do_not_specialize_on_alignment=["slots", "has_initial_state"])
def angles_kernel(turned, starts, first_segment, slots, has_initial_state, angle_pool, angle_stride,
                  H: tl.constexpr, ANGLES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_A: tl.constexpr):
    """Grid: sequences, heads. From how far angles turn in each segment, writes the angles at its start, (segments, H,
    ANGLES), and the angle states."""
    sequence, h, i = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK_A)
    slot = tl.load(slots + sequence).to(tl.int64)
    first, end = tl.load(first_segment + sequence), tl.load(first_segment + sequence + 1)
    if (slot > 0) & (first < end):
        known = tl.where(tl.load(has_initial_state + sequence) != 0, ANGLES, 0)
        state = angle_pool + slot * angle_stride + h * ANGLES + i
        before = tl.load(state, i < known, 0)
        angle = triton_math.turn(before / (2 * triton_math.PI))
        for start in range(first, end, BLOCK_S):
            segment = (start + tl.arange(0, BLOCK_S)).to(tl.int64)[:, None]
            at, there = (segment * H + h) * ANGLES + i[None, :], (segment < end) & (i < ANGLES)[None, :]
            turn = tl.load(turned + at, there, 0)
            tl.store(starts + at, angle[None, :] + tl.cumsum(turn, 0) - turn, there)
            angle += tl.sum(turn, 0)
        tl.store(state, triton_math.radians(angle) + before * 0, i < ANGLES)  # what was no number stays none
