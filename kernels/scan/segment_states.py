"""The ssm state at the start of each segment: what each segment adds to it, then what is left of all before it.

States on the way are S⁺ of torch_scan.py, which holds the next token's part of the token before it already. They lie
as (2, P, pairs): the columns of the first elements of the pairs, then those of the second ones.
"""

import triton
import triton.language as tl

from vllm_mamba3.kernels import triton_math
from vllm_mamba3.kernels.scan.chunk import angles, columns, decays, norm_bias_rotate, of_ranks, product, step_size


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "slots"])
def added_kernel(projected, row_stride, rates, cu_seqlens, sequence_of, first_token, slots, starts, added, decay,
                 dt_bias, B_bias, B_norm, mimo_x, A_floor, epsilon, k_pool,
                 H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
                 UNIT: tl.constexpr, ANGLES: tl.constexpr, HALVES: tl.constexpr, SOFTPLUS: tl.constexpr,
                 TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, PAIRS: tl.constexpr,
                 BLOCK_R: tl.constexpr, PARTS: tl.constexpr, PARTS_OF_K: tl.constexpr):
    """Grid: segments, heads. Writes what a segment adds to the state, (segments, H, 2, P, PAIRS), and the log of what
    it leaves of the state before, (segments, H); of a sequence's last segment neither, which nobody asks for."""
    row_stride *= UNIT
    segment, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(sequence_of + segment)
    if sequence >= 0:
        begin, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
        first = tl.load(first_token + segment)
        if (first + TOKENS < end) & (tl.load(slots + sequence) > 0):
            p, i = tl.arange(0, BLOCK_P), tl.arange(0, PAIRS)
            of_row, rank = tl.arange(0, ROWS) // BLOCK_R, tl.arange(0, ROWS) % BLOCK_R
            scalars, bias = projected + 2 * H * P + 2 * R * G * N, tl.load(dt_bias + h).to(tl.float32)
            keys = projected + 2 * H * P + h // (H // G) * N
            angle = tl.load(starts + (segment * H + h) * ANGLES + i, i < ANGLES, 0)
            first_half, second_half = tl.zeros((BLOCK_P, PAIRS), tl.float32), tl.zeros((BLOCK_P, PAIRS), tl.float32)
            total = 0.0
            for start in range(0, TOKENS, ROWS // BLOCK_R):
                token = (first + start + of_row).to(tl.int64)
                there = (token >= begin) & (rank < R)
                dt, _, g, high, low, total_high, total_low = decays(
                    scalars, rates, token, there, rank == 0, end, row_stride, bias, A_floor, h, H, ANGLES, SOFTPLUS)
                theta, angle = angles(rates, token, there, rank == 0, dt, angle, i, ANGLES)
                cos, sin = triton_math.cos_sin_of_turn(theta)
                k_first, k_second = norm_bias_rotate(
                    (keys + token * row_stride + rank * G * N)[:, None], B_norm,
                    B_bias + of_ranks(rank, h, N, R, BLOCK_R), there[:, None], cos, sin, epsilon, N, HALVES, PAIRS)
                weight = g * triton_math.exp((total_high - high) + (total_low - low))
                v = tl.load(projected + H * P + h * P + (token * row_stride)[None, :] + p[:, None],
                            there[None, :] & (p < P)[:, None], 0).to(tl.float32)
                if mimo_x is not None:
                    v *= tl.load(mimo_x + ((h * R + rank) * P)[None, :] + p[:, None],
                                 (rank < R)[None, :] & (p < P)[:, None], 0).to(tl.float32)
                v *= weight[None, :]
                left = triton_math.exp(total_high + total_low)
                k_first = k_first.to(k_pool.dtype.element_ty).to(tl.float32)
                k_second = k_second.to(k_pool.dtype.element_ty).to(tl.float32)
                first_half = first_half * left + product(v, k_first, PARTS, PARTS_OF_K)
                second_half = second_half * left + product(v, k_second, PARTS, PARTS_OF_K)
                total += total_high
            at = added + (segment * H + h) * 2 * P * PAIRS + p[:, None] * PAIRS + i[None, :]
            tl.store(at, first_half, (p < P)[:, None])
            tl.store(at + P * PAIRS, second_half, (p < P)[:, None])
            tl.store(decay + segment * H + h, total)


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "slots", "has_initial_state"])
def states_kernel(projected, row_stride, cu_seqlens, first_segment, slots, has_initial_state, added, decay, dt_bias,
                  mimo_x, angle_pool, ssm_pool, k_pool, v_pool, angle_stride, ssm_stride, k_stride, v_stride,
                  H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
                  UNIT: tl.constexpr, ANGLES: tl.constexpr, HALVES: tl.constexpr, BLOCK_P: tl.constexpr,
                  PAIRS: tl.constexpr):
    """Grid: sequences, heads, twice the blocks of rows. Puts the state at the start of each segment in the place of
    what the segment adds."""
    row_stride *= UNIT
    sequence, h = tl.program_id(0), tl.program_id(1)
    second, block = tl.program_id(2) % 2, tl.program_id(2) // 2
    slot = tl.load(slots + sequence).to(tl.int64)
    segment, end = tl.load(first_segment + sequence).to(tl.int64), tl.load(first_segment + sequence + 1).to(tl.int64)
    if (slot > 0) & (segment < end):
        p, i = block * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, PAIRS)
        first_column, second_column = columns(i, N, HALVES)
        column = tl.where(second == 1, second_column, first_column)
        goes_on = tl.load(has_initial_state + sequence) != 0
        rows, width = tl.where(goes_on, P, 0), tl.where(goes_on, N, 0)  # how much there is to read of its states
        # What the first token of these takes of the one before it.
        scalars = projected + 2 * H * P + 2 * R * G * N
        token = tl.load(cu_seqlens + sequence).to(tl.int64) + tl.zeros((1,), tl.int64)
        dt, trapezoid = step_size(scalars, token, token >= 0, row_stride, tl.load(dt_bias + h).to(tl.float32), h, H)
        state = tl.load(ssm_pool + slot * ssm_stride + (h * P + p[:, None]) * N + column[None, :],
                        (p < rows)[:, None] & (column < width)[None, :], 0).to(tl.float32)
        v = tl.load(v_pool + slot * v_stride + h * P + p, p < rows, 0).to(tl.float32)
        v *= (1 - trapezoid) * dt
        # An angle that is no number: as an integer it was lost, but not in its state.
        angle = tl.load(angle_pool + slot * angle_stride + h * ANGLES + i, i < tl.where(goes_on, ANGLES, 0), 0)
        state += tl.sum(angle * 0, 0)
        for r in tl.static_range(R):
            k = tl.load(k_pool + slot * k_stride + (r * H + h) * N + column, column < width, 0).to(tl.float32)
            v_r = v
            if mimo_x is not None:
                v_r = v * tl.load(mimo_x + (h * R + r) * P + p, p < P, 0).to(tl.float32)
            state += v_r[:, None] * k[None, :]
        of_segment = ((segment * H + h) * 2 + second) * P * PAIRS
        at = added + of_segment + p[:, None] * PAIRS + i[None, :]
        while segment + 1 < end:
            more = tl.load(at, (p < P)[:, None], 0)
            left = triton_math.exp(tl.load(decay + segment * H + h))
            tl.store(at, state, (p < P)[:, None])
            state = state * left + more
            at += H * 2 * P * PAIRS
            segment += 1
        tl.store(at, state, (p < P)[:, None])
