"""The step as one Triton kernel: from the projected row to the gated output, states in place. Mirrors
`kernels/reference.py`.

Grid: one program a sequence and head, heads first. It holds the head's ssm state (P, N) in registers, in float32,
whatever the pool's dtype; everything else is a vector over N or over P, in float32 too. A program reads all it needs of
its head's four states before it writes any of them, with a barrier between, since one thread's old key is another
thread's new one.

The state is a tile (P, N / INNER, INNER), each row folded into runs: a run is loaded by few threads, 16 bytes each, and
the runs of a row are added up within a thread. So the sum over N in the read-out takes three exchanges among threads
for each of a thread's rows, where a row spread over a whole warp would take five, of four times as many rows.
"""

from contextlib import nullcontext
from functools import cache

import torch
import triton
import triton.language as tl

from vllm_mamba3.kernels import triton_math
from vllm_mamba3.kernels.layout import Mamba3Layout, Mamba3States, Mamba3Weights
from vllm_mamba3.kernels.step.launch import launch_for
from vllm_mamba3.kernels.triton_checks import check_triton_call

# Neighbouring runs of threads shall have neighbouring rows of the tile. The compiler spreads threads along the columns,
# as they lie in memory, and then along the first of the other two dimensions, or from Triton 3.7 on the last.
ROWS_FIRST = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
SEED_STRIDE = tl.constexpr(0x1E3779B97F4A7C15)  # odd and large: the rows' random streams lie far apart


@triton.jit
def _load_with_partner(row, norm, bias, j, partner, in_row):
    """What `_norm_bias_rotate` takes of each j, and of the j that it rotates with."""
    return (
        tl.load(row + j, in_row, 0).to(tl.float32), tl.load(row + partner, in_row, 0).to(tl.float32),
        tl.load(norm + j, in_row, 0).to(tl.float32), tl.load(norm + partner, in_row, 0).to(tl.float32),
        tl.load(bias + j, in_row, 0).to(tl.float32), tl.load(bias + partner, in_row, 0).to(tl.float32),
    )


@triton.jit
def _norm_bias_rotate(loaded, sum_of_squares, cos, sin, epsilon, N: tl.constexpr):
    """A B or C of one rank, (N / INNER, INNER): normed, biased and rotated."""
    mine, theirs, norm, norm_of_theirs, bias, bias_of_theirs = loaded
    scale = tl.rsqrt(sum_of_squares / N + epsilon)
    return (mine * scale * norm + bias) * cos + (theirs * scale * norm_of_theirs + bias_of_theirs) * sin


@triton.jit
def _add_2(a, b, a_too, b_too):
    return a + a_too, b + b_too


@triton.jit
def _add_8(a, b, c, d, e, f, g, h, a_too, b_too, c_too, d_too, e_too, f_too, g_too, h_too):
    return a + a_too, b + b_too, c + c_too, d + d_too, e + e_too, f + f_too, g + g_too, h + h_too


@triton.jit
def _sum_each(vectors):
    """The sum of each vector (N,), of an even number of them: of eight in one exchange among the warps, the rest by two."""
    whole: tl.constexpr = len(vectors) // 8 * 8
    sums = ()
    for first in tl.static_range(0, whole, 8):
        eight = ()
        for i in tl.static_range(8):
            eight += (vectors[first + i],)
        sums += tl.reduce(eight, 0, _add_8)
    for first in tl.static_range(whole, len(vectors), 2):
        sums += tl.reduce((vectors[first], vectors[first + 1]), 0, _add_2)
    return sums


@triton.jit
def _stack(columns, COUNT: tl.constexpr):
    """Vectors (P,) as the first columns of (P, COUNT), with zeros beyond; COUNT is 2, 4, 8, ..."""
    for _ in tl.static_range(COUNT - len(columns)):
        columns += (tl.zeros_like(columns[0]),)
    half: tl.constexpr = COUNT // 2
    if half == 1:
        stacked = tl.join(columns[0], columns[1])
    else:
        evens, odds = (), ()
        for i in tl.static_range(half):
            evens += (columns[2 * i],)
            odds += (columns[2 * i + 1],)
        pairs = tl.join(_stack(evens, half), _stack(odds, half))  # (P, COUNT / 2, 2)
        stacked = tl.reshape(pairs, (pairs.shape[0], COUNT))
    return stacked


@triton.jit
def _over_rows(values, ROWS_FIRST: tl.constexpr):
    """A value for each row of the tile: (P,) to three dimensions."""
    return values[:, None, None] if ROWS_FIRST else values[None, :, None]


@triton.jit
def _over_columns(values, ROWS_FIRST: tl.constexpr):
    """A value for each column: (N / INNER, INNER) to three dimensions."""
    return values[None, :, :] if ROWS_FIRST else values[:, None, :]


@triton.jit
def _step_one_token(
    row, out, before, after, goes_on, live, h, seed,
    angle_pool, ssm_pool, k_pool, v_pool, angle_stride, ssm_stride, k_stride, v_stride,
    dt_bias, B_bias, C_bias, B_norm, C_norm, D, mimo_x, mimo_z, mimo_o, out_norm, A_floor, epsilon,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, ANGLES: tl.constexpr, R: tl.constexpr,
    HALVES: tl.constexpr, SOFTPLUS: tl.constexpr, INNER: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, ROWS_FIRST: tl.constexpr,
):
    """Head h of one token, from the row at `row` to the output at `out`, from the states in slot `before` to `after`.

    Unless it goes on from a state, zeros are its states; unless it is live, it writes zeros to the output alone.
    """
    p = tl.arange(0, BLOCK_P)
    j = tl.arange(0, BLOCK_N // INNER)[:, None] * INNER + tl.arange(0, INNER)[None, :]
    head, in_row = h * P + p, j < N
    # Element j of a key turns with its partner by angle i, as the first or the second of the two.
    if HALVES:
        second = j >= N // 2
        i = tl.where(second, j - N // 2, j)
        partner = tl.where(second, i, i + N // 2)
    else:
        second = (j & 1) == 1
        i, partner = j // 2, j ^ 1
    turns = in_row & (i < ANGLES)
    partner = tl.where(turns, partner, j)

    # All loads before the first use of any, in this order: first what needs no slot, whose own load is under way; last
    # the ssm state, which takes longest, and while it comes keys and queries are made.
    scalars = row + 2 * H * P + 2 * R * G * N
    dd_dt, dd_A, trap = tl.load(scalars + h), tl.load(scalars + H + h), tl.load(scalars + 2 * H + h)
    dt_bias_h, D_h = tl.load(dt_bias + h).to(tl.float32), tl.load(D + h).to(tl.float32)
    speed = tl.load(scalars + 3 * H + i, turns, 0).to(tl.float32)
    x, z = tl.load(row + H * P + head, p < P, 0), tl.load(row + head, p < P, 0).to(tl.float32)
    keys = row + 2 * H * P + h // (H // G) * N
    B, C, mimo = (), (), ()
    for r in tl.static_range(R):
        bias = (h * R + r) * N
        B += (_load_with_partner(keys + r * G * N, B_norm, B_bias + bias, j, partner, in_row),)
        C += (_load_with_partner(keys + (R + r) * G * N, C_norm, C_bias + bias, j, partner, in_row),)
        if mimo_x is not None:
            mimo += (tl.load(mimo_x + (h * R + r) * P + p, p < P, 0).to(tl.float32),)
    P_before, N_before = tl.where(goes_on, P, 0), tl.where(goes_on, N, 0)  # how much there is to read of the states
    P_after, N_after = tl.where(live, P, 0), tl.where(live, N, 0)  # and to write
    theta = tl.load(angle_pool + before * angle_stride + h * ANGLES + i, turns & (j < N_before), 0)
    v_before = tl.load(v_pool + before * v_stride + head, p < P_before, 0).to(tl.float32)
    k_before = ()
    for r in tl.static_range(R):
        k_before += (tl.load(k_pool + before * k_stride + (r * H + h) * N + j, j < N_before, 0),)
    tile = _over_rows(head, ROWS_FIRST) * N + _over_columns(j, ROWS_FIRST)
    tile_p, tile_in_row = _over_rows(p, ROWS_FIRST), _over_columns(in_row, ROWS_FIRST)
    state = tl.load(ssm_pool + before * ssm_stride + tile, (tile_p < P_before) & tile_in_row, 0).to(tl.float32)

    dt = triton_math.softplus(dd_dt.to(tl.float32) + dt_bias_h)
    rate = triton_math.decay_rate(dd_A.to(tl.float32), A_floor, SOFTPLUS)
    trapezoid = triton_math.sigmoid(trap.to(tl.float32))
    alpha, gamma = triton_math.exp(-rate * dt), trapezoid * dt
    beta = (dt - gamma) * alpha
    theta = triton_math.wrap_angle(tl.fma(triton_math.tanh(speed) * triton_math.PI, dt, theta))
    cos, sin = triton_math.cos_sin(theta)
    cos, sin = tl.where(turns, cos, 1.0), tl.where(turns, tl.where(second, sin, -sin), 0.0)

    squares, k, q = (), (), ()
    for r in tl.static_range(R):
        squares += (tl.reshape(B[r][0] * B[r][0], (BLOCK_N,)), tl.reshape(C[r][0] * C[r][0], (BLOCK_N,)))
    sums = _sum_each(squares)
    for r in tl.static_range(R):
        k += (_norm_bias_rotate(B[r], sums[2 * r], cos, sin, epsilon, N).to(k_pool.dtype.element_ty),)
        q += (_norm_bias_rotate(C[r], sums[2 * r + 1], cos, sin, epsilon, N),)

    # Of the read-out: (P, R), whose rows are ranks in the weights; (P,) without ranks.
    if R == 1:
        at, in_read_out, x_read_out = head, p < P, x
    else:
        of_rank = tl.arange(0, BLOCK_R)[None, :]
        at, in_read_out = (h * R + of_rank) * P + p[:, None], (of_rank < R) & (p[:, None] < P)
        x_read_out, z = x[:, None], z[:, None]
    Dx, o = D_h * x_read_out.to(tl.float32), 1.0
    if mimo_x is not None:
        Dx *= tl.load(mimo_x + at, in_read_out, 0).to(tl.float32)
        z *= tl.load(mimo_z + at, in_read_out, 0).to(tl.float32)
        o = tl.load(mimo_o + at, in_read_out, 0).to(tl.float32)

    own, previous = x.to(tl.float32) * gamma, v_before * beta
    state *= alpha
    for r in tl.static_range(R):
        own_r, previous_r = own, previous
        if mimo_x is not None:
            own_r, previous_r = own * mimo[r], previous * mimo[r]
        # Of two keys the compiler does not know which it could hand to the other threads in 16 bits, to be unpacked by
        # each; it hands them on in 32. The second is never taken: both are zeros where j >= N.
        k_now, k_then = k[r].to(tl.float32), k_before[r].to(tl.float32)
        state += _over_rows(own_r, ROWS_FIRST) * _over_columns(tl.where(in_row, k_now, k_then), ROWS_FIRST)
        state += _over_rows(previous_r, ROWS_FIRST) * _over_columns(tl.where(in_row, k_then, k_now), ROWS_FIRST)

    tl.debug_barrier()  # every thread has read its part of the states; from here on they are overwritten
    if seed is not None:
        bits = tl.randint(seed, tile, 7)  # seven rounds are the fewest that pass all tests (Salmon et al. 2011)
        kept = triton_math.round_stochastically(state, ssm_pool.dtype.element_ty, bits)
    else:
        kept = state.to(ssm_pool.dtype.element_ty)
    tl.store(ssm_pool + after * ssm_stride + tile, kept, (tile_p < P_after) & tile_in_row)
    tl.store(angle_pool + after * angle_stride + h * ANGLES + i, theta, turns & (second == 0) & (j < N_after))
    tl.store(v_pool + after * v_stride + head, x.to(v_pool.dtype.element_ty), p < P_after)
    for r in tl.static_range(R):
        tl.store(k_pool + after * k_stride + (r * H + h) * N + j, k[r], j < N_after)

    y = ()
    for r in tl.static_range(R):
        y += (tl.sum(tl.sum(state * _over_columns(q[r], ROWS_FIRST), 1 if ROWS_FIRST else 0), 1),)
    y = (y[0] if R == 1 else _stack(y, BLOCK_R)) + Dx
    if out_norm is not None:
        scale = tl.rsqrt(tl.sum(tl.where(in_read_out, y * y, 0.0), 0) / P + epsilon)
        y *= scale if R == 1 else scale[None, :]
        norm = tl.load(out_norm + head, p < P, 0).to(tl.float32)
        y *= norm if R == 1 else norm[:, None]
    result = y * triton_math.silu(z) * o
    if R > 1:
        result = tl.sum(result, 1)
    tl.store(out + head, result.to(out.dtype.element_ty), p < P_after)
    tl.store(out + head, tl.zeros((BLOCK_P,), out.dtype.element_ty), (p >= P_after) & (p < P))


@triton.jit(
    do_not_specialize=["slots_stride"],
    do_not_specialize_on_alignment=["slots", "has_initial_state", "cu_seqlens", "num_accepted_tokens"],
)
def step_kernel(
    projected, out, slots, has_initial_state, cu_seqlens, num_accepted_tokens, rounding_seed,
    row_stride, out_stride, slots_stride,
    angle_pool, ssm_pool, k_pool, v_pool, angle_stride, ssm_stride, k_stride, v_stride,
    dt_bias, B_bias, C_bias, B_norm, C_norm, D, mimo_x, mimo_z, mimo_o, out_norm, A_floor, epsilon,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, ANGLES: tl.constexpr, R: tl.constexpr,
    HALVES: tl.constexpr, SOFTPLUS: tl.constexpr, INNER: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, ROWS_FIRST: tl.constexpr,
):
    h = tl.program_id(0) % H
    sequence = (tl.program_id(0) // H).to(tl.int64)
    slots += sequence * slots_stride
    goes_on = True
    if has_initial_state is not None:
        goes_on = tl.load(has_initial_state + sequence) != 0
    if cu_seqlens is None:  # one token
        slot = tl.load(slots).to(tl.int64)
        seed = rounding_seed
        if rounding_seed is not None:
            seed = tl.load(rounding_seed) + sequence * SEED_STRIDE
        _step_one_token(
            projected + sequence * row_stride, out + sequence * out_stride, slot, slot, (slot > 0) & goes_on, slot > 0,
            h, seed, angle_pool, ssm_pool, k_pool, v_pool, angle_stride, ssm_stride, k_stride, v_stride,
            dt_bias, B_bias, C_bias, B_norm, C_norm, D, mimo_x, mimo_z, mimo_o, out_norm, A_floor, epsilon,
            H, P, N, G, ANGLES, R, HALVES, SOFTPLUS, INNER, BLOCK_P, BLOCK_N, BLOCK_R, ROWS_FIRST,
        )
    else:  # several tokens, each with a slot for the state after it
        first, end = tl.load(cu_seqlens + sequence).to(tl.int64), tl.load(cu_seqlens + sequence + 1).to(tl.int64)
        before = tl.load(slots + tl.load(num_accepted_tokens + sequence) - 1).to(tl.int64)
        goes_on = (before > 0) & goes_on
        for token in range(first, end):
            after = tl.load(slots + (token - first)).to(tl.int64)
            live = (before > 0) & (after > 0)
            token_seed = rounding_seed  # of the loop's own: what it carries from token to token keeps its type
            if rounding_seed is not None:
                token_seed = tl.load(rounding_seed) + token * SEED_STRIDE
            _step_one_token(
                projected + token * row_stride, out + token * out_stride, before, after, live & goes_on, live,
                h, token_seed, angle_pool, ssm_pool, k_pool, v_pool, angle_stride, ssm_stride, k_stride, v_stride,
                dt_bias, B_bias, C_bias, B_norm, C_norm, D, mimo_x, mimo_z, mimo_o, out_norm, A_floor, epsilon,
                H, P, N, G, ANGLES, R, HALVES, SOFTPLUS, INNER, BLOCK_P, BLOCK_N, BLOCK_R, ROWS_FIRST,
            )
            tl.debug_barrier()  # the next token reads what this one wrote
            before, goes_on = tl.where(live, after, 0), live  # a sequence that has ended stays so


def check_supported(projected, weights, pools, out, several, stochastic_rounding) -> None:
    """Refuse what `mamba3_step` can ask for and this cannot do."""
    check_triton_call("mamba3_step", step_kernel, projected, weights, pools, out)


def triton_step(projected: torch.Tensor, weights: Mamba3Weights, pools: Mamba3States, slots: torch.Tensor,
                has_initial_state: torch.Tensor | None, out: torch.Tensor, cu_seqlens: torch.Tensor | None = None,
                num_accepted_tokens: torch.Tensor | None = None, rounding_seed: torch.Tensor | None = None) -> None:
    """`mamba3_step`, without its checks."""
    size = weights.layout
    small = (has_initial_state, cu_seqlens, num_accepted_tokens)
    has_initial_state, cu_seqlens, num_accepted_tokens = (
        None if tensor is None else tensor.contiguous() for tensor in small
    )
    slots = slots if cu_seqlens is None else slots.contiguous()
    plain = cu_seqlens is None and rounding_seed is None
    launch = launch_for(_device_name(projected.device), size, pools.ssm.dtype, plain)
    with torch.cuda.device(projected.device) if projected.is_cuda else nullcontext():
        step_kernel[(slots.shape[0] * size.num_heads,)](
            projected, out, slots, has_initial_state, cu_seqlens, num_accepted_tokens, rounding_seed,
            projected.stride(0), out.stride(0), slots.stride(0),
            *pools, *(pool.stride(0) for pool in pools),
            *weights.tensors(), weights.A_floor, weights.norm_eps,
            **constants_of(size, weights.A_activation, launch.inner), **launch.options(),
        )


def constants_of(size: Mamba3Layout, A_activation: str, inner: int) -> dict[str, int]:
    """What the kernel is compiled for, by the names of its arguments."""
    return dict(
        H=size.num_heads, P=size.head_dim, N=size.state_size, G=size.num_groups, ANGLES=size.num_angles, R=size.rank,
        HALVES=size.is_mimo, SOFTPLUS=A_activation == "softplus", INNER=inner,
        BLOCK_P=triton.next_power_of_2(size.head_dim), BLOCK_N=triton.next_power_of_2(size.state_size),
        BLOCK_R=triton.next_power_of_2(size.rank), ROWS_FIRST=ROWS_FIRST,
    )


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
