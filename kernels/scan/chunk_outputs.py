"""The output of each segment, chunk by chunk, from the state it starts with; and the states after each sequence."""

import triton
import triton.language as tl

from vllm_mamba3.kernels import triton_math
from vllm_mamba3.kernels.scan.chunk import angles, columns, decays, norm_bias_rotate, of_ranks, product


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "slots"])
def outputs_kernel(projected, row_stride, out, out_stride, rates, cu_seqlens, sequence_of, first_token, slots, starts,
                   states, ssm_pool, k_pool, v_pool, ssm_stride, k_stride, v_stride,
                   dt_bias, B_bias, C_bias, B_norm, C_norm, D, mimo_x, mimo_z, mimo_o, out_norm, A_floor, epsilon,
                   H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
                   UNIT: tl.constexpr, ANGLES: tl.constexpr, HALVES: tl.constexpr, SOFTPLUS: tl.constexpr,
                   TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, PAIRS: tl.constexpr,
                   BLOCK_R: tl.constexpr, PARTS: tl.constexpr, PARTS_OF_K: tl.constexpr, PARTS_OF_V: tl.constexpr):
    """Grid: segments, heads. Writes the output, and in a sequence's last segment the states ssm, k and v."""
    row_stride *= UNIT
    segment, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(sequence_of + segment)
    if sequence >= 0:
        begin, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
        first, slot = tl.load(first_token + segment), tl.load(slots + sequence).to(tl.int64)
        CHUNK: tl.constexpr = ROWS // BLOCK_R
        p, i = tl.arange(0, BLOCK_P), tl.arange(0, PAIRS)
        of_row, rank = tl.arange(0, ROWS) // BLOCK_R, tl.arange(0, ROWS) % BLOCK_R
        of_out = tl.arange(0, CHUNK)
        if slot <= 0:  # padding
            for start in range(0, TOKENS, CHUNK):
                token = (first + start + of_out).to(tl.int64)
                tl.store(out + (token * out_stride)[:, None] + h * P + p[None, :],
                         tl.zeros((CHUNK, BLOCK_P), out.dtype.element_ty),
                         ((token >= begin) & (token < end))[:, None] & (p < P)[None, :])
        else:
            first_column, second_column = columns(i, N, HALVES)
            scalars, bias = projected + 2 * H * P + 2 * R * G * N, tl.load(dt_bias + h).to(tl.float32)
            keys, D_h = projected + 2 * H * P + h // (H // G) * N, tl.load(D + h).to(tl.float32)
            angle = tl.load(starts + (segment * H + h) * ANGLES + i, i < ANGLES, 0)
            at = states + (segment * H + h) * 2 * P * PAIRS + p[:, None] * PAIRS + i[None, :]
            first_half = tl.load(at, (p < P)[:, None], 0)
            second_half = tl.load(at + P * PAIRS, (p < P)[:, None], 0)
            for start in range(0, tl.minimum(TOKENS, end - first), CHUNK):
                token = (first + start + of_row).to(tl.int64)
                there = (token >= begin) & (token < end) & (rank < R)
                dt, gamma, g, high, low, total_high, total_low = decays(
                    scalars, rates, token, there, rank == 0, end, row_stride, bias, A_floor, h, H, ANGLES, SOFTPLUS)
                theta, angle = angles(rates, token, there, rank == 0, dt, angle, i, ANGLES)
                cos, sin = triton_math.cos_sin_of_turn(theta)
                source = (keys + token * row_stride + rank * G * N)[:, None]
                of_bias = of_ranks(rank, h, N, R, BLOCK_R)
                k_first, k_second = norm_bias_rotate(source, B_norm, B_bias + of_bias, there[:, None], cos, sin,
                                                     epsilon, N, HALVES, PAIRS)
                q_first, q_second = norm_bias_rotate(source + R * G * N, C_norm, C_bias + of_bias, there[:, None],
                                                     cos, sin, epsilon, N, HALVES, PAIRS)
                k_first, k_second = k_first.to(k_pool.dtype.element_ty), k_second.to(k_pool.dtype.element_ty)
                is_last = (there & (token == end - 1))[:, None]
                of_key = k_pool + slot * k_stride + ((rank * H + h) * N)[:, None]
                tl.store(of_key + first_column[None, :], k_first, is_last & (first_column < N)[None, :])
                tl.store(of_key + second_column[None, :], k_second, is_last & (second_column < N)[None, :])
                k_first, k_second = k_first.to(tl.float32), k_second.to(tl.float32)

                of_v = there[:, None] & (p < P)[None, :]
                of_rank = ((h * R + rank) * P)[:, None] + p[None, :]
                row = (token * row_stride)[:, None] + h * P + p[None, :]
                x = tl.load(projected + H * P + row, of_v, 0)
                tl.store(v_pool + slot * v_stride + h * P + p[None, :] + tl.zeros_like(row), x,
                         is_last & (rank == 0)[:, None] & (p < P)[None, :])
                v, z, o = x.to(tl.float32), tl.load(projected + row, of_v, 0).to(tl.float32), 1.0
                if mimo_x is not None:
                    v *= tl.load(mimo_x + of_rank, of_v, 0).to(tl.float32)
                    z *= tl.load(mimo_z + of_rank, of_v, 0).to(tl.float32)
                    o = tl.load(mimo_o + of_rank, of_v, 0).to(tl.float32)

                y = product(q_first, tl.trans(first_half), PARTS, PARTS)
                y += product(q_second, tl.trans(second_half), PARTS, PARTS)
                y *= triton_math.exp(high + low)[:, None]
                scores = product(q_first, tl.trans(k_first), PARTS, PARTS_OF_K)
                scores += product(q_second, tl.trans(k_second), PARTS, PARTS_OF_K)
                between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
                after, same = token[:, None] > token[None, :], token[:, None] == token[None, :]
                weights = tl.where(after, tl.exp(tl.where(after, between, 0.0)) * g[None, :],
                                   tl.where(same, gamma[None, :], 0.0))
                y += product(scores * weights, v, PARTS, PARTS_OF_V)
                y += D_h * v

                weight, left = g * triton_math.exp((total_high - high) + (total_low - low)), total_high + total_low
                left, weighted = triton_math.exp(left), tl.trans(v * weight[:, None])
                first_half = first_half * left + product(weighted, k_first, PARTS, PARTS_OF_K)
                second_half = second_half * left + product(weighted, k_second, PARTS, PARTS_OF_K)

                if out_norm is not None:
                    scale = tl.rsqrt(tl.sum(y * y, 1) / P + epsilon)
                    y = y * scale[:, None] * tl.load(out_norm + h * P + p, p < P, 0).to(tl.float32)[None, :]
                y = y * triton_math.silu(z) * o
                if BLOCK_R > 1:
                    y = tl.sum(tl.reshape(tl.where(of_v, y, 0.0), (CHUNK, BLOCK_R, BLOCK_P)), 1)
                token = (first + start + of_out).to(tl.int64)
                tl.store(out + (token * out_stride)[:, None] + h * P + p[None, :], y.to(out.dtype.element_ty),
                         ((token >= begin) & (token < end))[:, None] & (p < P)[None, :])
            if first + TOKENS >= end:
                state = ssm_pool + slot * ssm_stride + (h * P + p[:, None]) * N
                kept = (p < P)[:, None]
                tl.store(state + first_column[None, :], first_half.to(ssm_pool.dtype.element_ty),
                         kept & (first_column < N)[None, :])
                tl.store(state + second_column[None, :], second_half.to(ssm_pool.dtype.element_ty),
                         kept & (second_column < N)[None, :])
