"""What both passes over a chunk compute of its rows: decays, keys and queries, and products as float32 has them.

A chunk is ROWS rows, each token's BLOCK_R ranks one after another, of which R are there. Rows before and after the
sequence's tokens have a step size of zero and values of zero: they change nothing.
"""

import triton
import triton.language as tl

from vllm_mamba3.kernels import triton_math

MOST_TURNS = tl.constexpr(2.0**22)
LOWEST_LOG_DECAY = tl.constexpr(-1e3)  # forgets everything; lower ones would only take digits from the sums


@triton.jit
def step_size(scalars, token, there, row_stride, dt_bias, h, H: tl.constexpr):
    """dt and the trapezoid's λ of tokens; `scalars` points at dd_dt of the first head of the first token. dt is zero
    of a token that is not there."""
    at = scalars + token * row_stride + h
    dd_dt, trap = tl.load(at, there, 0).to(tl.float32), tl.load(at + 2 * H, there, 0).to(tl.float32)
    return tl.where(there, triton_math.softplus(dd_dt + dt_bias), 0.0), triton_math.sigmoid(trap)


@triton.jit
def decays(scalars, rates, token, there, first_rank, end, row_stride, dt_bias, A_floor, h, H: tl.constexpr,
           ANGLES: tl.constexpr, SOFTPLUS: tl.constexpr):
    """Of the rows of a chunk (ROWS,): γ, g and dt (see torch_scan.py), and the running sum of the log decay as two
    float32, high and low, since of a chunk in which something is forgotten at once small differences of large sums
    are what matters; and their total, so too."""
    dt, trapezoid = step_size(scalars, token, there, row_stride, dt_bias, h, H)
    dt += tl.load(rates + token * (ANGLES + 1) + ANGLES, there, 0)
    next_dt, next_trapezoid = step_size(scalars, token + 1, there & (token + 1 < end), row_stride, dt_bias, h, H)
    dd_A = tl.load(scalars + token * row_stride + H + h, there, 0).to(tl.float32)
    log = -triton_math.decay_rate(dd_A, A_floor, SOFTPLUS) * dt
    log = tl.where(log < LOWEST_LOG_DECAY, LOWEST_LOG_DECAY, log)
    log = tl.where(there & first_rank, log, 0.0).to(tl.float64)
    running, total = tl.cumsum(log, 0), tl.sum(log, 0)
    high, total_high = running.to(tl.float32), total.to(tl.float32)
    low, total_low = (running - high.to(tl.float64)).to(tl.float32), (total - total_high.to(tl.float64)).to(tl.float32)
    gamma = trapezoid * dt
    g = gamma + (1 - next_trapezoid) * next_dt
    return dt, gamma, tl.where(there, g, 0.0), high, low, total_high, total_low


@triton.jit
def columns(i, N: tl.constexpr, HALVES: tl.constexpr):
    """Where in a row of N the pairs i lie: their first and second elements; N or more where there is none."""
    if HALVES:
        first, second = tl.where(i < N // 2, i, N), i + N // 2
    else:
        first, second = 2 * i, 2 * i + 1
    return first, second


@triton.jit
def load_pairs(row, there, N: tl.constexpr, HALVES: tl.constexpr, PAIRS: tl.constexpr):
    """Rows of N that start at row (ROWS, 1), zeros beyond: the first and second elements of pairs, in float32."""
    if HALVES:
        first, second = columns(tl.arange(0, PAIRS)[None, :], N, HALVES)
        a, b = tl.load(row + first, there & (first < N), 0), tl.load(row + second, there & (second < N), 0)
    else:  # neighbours: loaded together
        both = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(row + both, there & (both < N), 0)
        a, b = tl.split(tl.reshape(both, (both.shape[0], PAIRS, 2)))
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def turns(rate, dt):
    """By how much angles turn (tokens, angles), as integers: rate, of π, times dt. Beyond 2^22 turns a token, where
    float32 has no fractions to speak of, as far as that."""
    half = 0.5 * dt
    return triton_math.turn(rate * tl.where(half > MOST_TURNS, MOST_TURNS, half)[:, None])


@triton.jit
def angles(rates, token, there, first_rank, dt, start, i, ANGLES: tl.constexpr):
    """The angles (ROWS, pairs) after each row, from those before the chunk (pairs,), and after the last one."""
    turning = (there & first_rank)[:, None] & (i < ANGLES)[None, :]
    rate = tl.load(rates + (token * (ANGLES + 1))[:, None] + i[None, :], turning, 0)
    theta = tl.cumsum(turns(rate, dt), 0) + start[None, :]
    row = tl.arange(0, theta.shape[0])[:, None]
    return theta, tl.sum(tl.where(row == theta.shape[0] - 1, theta, 0), 0)


@triton.jit
def of_ranks(rank, h, N: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """Where the biases of head h lie for rows of these ranks: (ROWS, 1), or (1, 1) where all ranks are the same."""
    if BLOCK_R == 1:
        rank = tl.zeros((1,), tl.int32)
    return ((h * R + tl.where(rank < R, rank, 0)) * N)[:, None]


@triton.jit
def norm_bias_rotate(row, norm, bias, there, cos, sin, epsilon, N: tl.constexpr, HALVES: tl.constexpr,
                     PAIRS: tl.constexpr):
    """B or C of rows, normed, biased and rotated: the first and the second elements of the pairs, (ROWS, pairs) each.

    row (ROWS, 1) points at each row's first element, bias, by `of_ranks`, at that of its rank's bias.
    """
    a, b = load_pairs(row, there, N, HALVES, PAIRS)
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / N + epsilon)[:, None]
    scale = tl.where(there, scale, 0.0)  # with an epsilon of 0 it would be infinite
    all_there = tl.full((1, 1), True, tl.int1)
    norm_a, norm_b = load_pairs(norm + tl.zeros((1, 1), tl.int32), all_there, N, HALVES, PAIRS)
    bias_a, bias_b = load_pairs(bias, all_there, N, HALVES, PAIRS)
    a, b = a * scale * norm_a + bias_a, b * scale * norm_b + bias_b
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def product(a, b, PARTS_OF_A: tl.constexpr, PARTS_OF_B: tl.constexpr):
    """a b, (M, K) and (K, N) in float32, by products of bfloat16: each taken as a sum of so many of them.

    One holds 8 bits of a float32's 24; products of parts that lie below the last bit taken are left out.
    """
    MOST: tl.constexpr = PARTS_OF_A if PARTS_OF_A > PARTS_OF_B else PARTS_OF_B
    result = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
    rest_of_a = a
    for i in tl.static_range(PARTS_OF_A):
        part_of_a = rest_of_a.to(tl.bfloat16)
        rest_of_a = rest_of_a - part_of_a.to(tl.float32)
        rest_of_b = b
        for j in tl.static_range(PARTS_OF_B):
            part_of_b = rest_of_b.to(tl.bfloat16)
            rest_of_b = rest_of_b - part_of_b.to(tl.float32)
            if i + j < MOST:
                result = tl.dot(part_of_a, part_of_b, result)
    return result
