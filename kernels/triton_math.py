"""Functions of one float32 that the Triton kernels share, to the accuracy of a mathematics library.

`tl.exp` is the GPU's fast exponential, wrong by up to 2^-22, and always to the same side for the same input: of a
decay that is applied ten thousand times that leaves 2e-3. `tl.sin` and `tl.cos` keep a stack for arguments of any size; angles
here are within a turn. The coefficients are those of Cephes (S. Moshier, expf.c, tanhf.c, sinf.c).
"""

import triton
import triton.language as tl

# Angles advance by multiples of the float32 π and wrap at twice the same; see `PI` in torch_math.py.
PI = tl.constexpr(3.1415927410125732)
LN2_HIGH, LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.12194440e-4)
# π/2 in three parts, the first two short enough that up to four times each is exact.
QUARTER_HIGH, QUARTER_MIDDLE, QUARTER_LOW = (
    tl.constexpr(1.5703125), tl.constexpr(4.8351287841796875e-4), tl.constexpr(3.1391647326017846e-07)
)


@triton.jit
def exp(x):
    """e^x; 0 below -87.3."""
    exponent = x
    x = tl.where(x < -87.3, -87.3, tl.where(x > 88.7, 88.7, x))  # a NaN passes, here and below
    power = tl.floor(x * 1.44269504 + 0.5)
    r = tl.fma(-power, LN2_HIGH, x)
    r = tl.fma(-power, LN2_LOW, r)
    series = 1.9875691500e-4 * r + 1.3981999507e-3
    series = series * r + 8.3334519073e-3
    series = series * r + 4.1665795894e-2
    series = series * r + 1.6666665459e-1
    series = series * r + 5.0000001201e-1
    series = series * r * r + r + 1
    half = (power * 0.5).to(tl.int32)  # in two steps: 2^128 is no float32
    rest = power.to(tl.int32) - half
    result = series * _power_of_two(half) * _power_of_two(rest)
    return tl.where(exponent < -87.3, 0.0, tl.where(exponent > 88.7, float("inf"), result))


@triton.jit
def _power_of_two(n):
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def softplus(x):
    """log(1 + e^x), accurate where it is small: the step size of a head that hardly moves."""
    e = exp(-tl.abs(x))
    u = 1 + e
    arrived = u - 1  # what of e is in u; log(u) is corrected for the rest
    log1p = tl.where(arrived == 0, e, tl.log(u) * (e / tl.where(arrived == 0, 1.0, arrived)))
    return tl.where(x > 0, x + log1p, log1p)


@triton.jit
def sigmoid(x):
    return 1 / (1 + exp(-x))


@triton.jit
def silu(x):
    """x sigmoid(x), with the fast exponential: nothing is built upon the output's last bit."""
    return x / (1 + tl.exp(-x))


@triton.jit
def tanh(x):
    z = x * x
    series = -5.70498872745e-3 * z + 2.06390887954e-2
    series = series * z - 5.37397155531e-2
    series = series * z + 1.33314422036e-1
    series = series * z - 3.33332819422e-1
    near = series * z * x + x
    size = tl.abs(x)
    far = 1 - 2 / (exp(2 * size) + 1)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def wrap_angle(theta):
    """theta modulo 2π, in [0, 2π)."""
    turn = 2 * PI
    wrapped = tl.fma(-tl.floor(theta / turn), turn, theta)
    wrapped = tl.where(wrapped < 0, wrapped + turn, wrapped)  # where the quotient was rounded up to a whole number
    return tl.where(wrapped < 0, 0.0, tl.where(wrapped >= turn, 0.0, wrapped))


@triton.jit
def cos_sin(theta):
    """cos and sin of an angle in [0, 2π)."""
    quarter = tl.floor(theta * 0.6366197723675814 + 0.5)  # 0 to 4
    r = theta - quarter * QUARTER_HIGH - quarter * QUARTER_MIDDLE - quarter * QUARTER_LOW  # within ±π/4
    return _cos_sin_of_quarter(r, quarter.to(tl.int32))


@triton.jit
def _cos_sin_of_quarter(r, turns):
    """cos and sin of r + turns π/2, r within ±π/4."""
    z = r * r
    sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r
    cosine = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1
    swap = (turns & 1) == 1
    cos, sin = tl.where(swap, sine, cosine), tl.where(swap, cosine, sine)
    cos = tl.where(((turns + 1) & 2) == 2, -cos, cos)
    return cos, tl.where((turns & 2) == 2, -sin, sin)


@triton.jit
def turn(turns):
    """An angle, at most 2^22 turns, as the nearest integer, of which 2^32 are a turn: they add up exactly, and wrap by
    themselves. What is not finite is lost."""
    part = tl.floor((turns - tl.floor(turns + 0.5)) * 4294967296.0 + 0.5)
    return tl.where(part < -2147483648.0, -2147483648.0, part).to(tl.int32)  # just below half a turn it may be more


@triton.jit
def radians(turn):
    """The angle of an integer of `turn`, in [0, 2π)."""
    theta = turn.to(tl.uint32, bitcast=True).to(tl.float32) * (2 * PI / 4294967296.0)
    return tl.where(theta >= 2 * PI, 0.0, theta)


@triton.jit
def cos_sin_of_turn(turn):
    """cos and sin of an integer of `turn`."""
    quarter = (turn + 0x20000000) >> 30
    r = (turn - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09  # within ±π/4
    return _cos_sin_of_quarter(r, quarter)


@triton.jit
def decay_rate(dd_A, floor, SOFTPLUS: tl.constexpr):
    """-A: positive, and never below the floor."""
    if SOFTPLUS:
        rate = softplus(dd_A)
    else:
        rate = tl.where(dd_A >= 0, 1 + dd_A, 1 / (1 - dd_A))
    return tl.where(rate < floor, floor, rate)  # a NaN passes


@triton.jit
def round_stochastically(x, dtype: tl.constexpr, bits):
    """x in a 16-bit dtype, rounded up or down with the odds of its place between the two; bits: 32 random ones. What is
    finite stays so."""
    as_bits = x.to(tl.uint32, bitcast=True)
    if dtype == tl.bfloat16:
        dropped: tl.constexpr = 16
        largest: tl.constexpr = 3.3895313892515355e38
    else:
        dropped: tl.constexpr = 13
        largest: tl.constexpr = 65504.0
    mask: tl.constexpr = (1 << dropped) - 1
    finite = tl.abs(x) < float("inf")
    rounded = ((as_bits + (bits & mask)) & (0xFFFFFFFF - mask)).to(tl.float32, bitcast=True)
    if dtype == tl.float16:  # below 2^-14 its steps are all of 2^-24
        steps = tl.floor(x * 16777216.0 + (bits >> 8).to(tl.float32) * 5.9604644775390625e-08)
        rounded = tl.where(tl.abs(x) < 6.103515625e-05, steps * 5.9604644775390625e-08, rounded)
    rounded = tl.where(rounded > largest, largest, tl.where(rounded < -largest, -largest, rounded))
    return tl.where(finite, rounded, x).to(dtype)
