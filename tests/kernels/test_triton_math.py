"""The Triton kernels' own functions, interpreted, against float64."""

import math

import pytest
import torch
from interpreted_triton import interpreted

FULL_TURN = 2 * 3.1415927410125732
INFINITY, NAN, LN_2 = math.inf, math.nan, math.log(2)


def normal(scale, count=512):
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(0))


def softplus(x):
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def grid(low, high):
    return torch.linspace(low, high, 4096)


LAST_OF_TURN = torch.nextafter(torch.tensor([FULL_TURN]), torch.zeros(1))
TURN = torch.cat((grid(0, FULL_TURN)[:-1], LAST_OF_TURN))
# Function, what it is in float64, arguments, the error allowed: relative, or of 1 where the last column says so.
ACCURATE = {
    "exp": ("exp", torch.exp, grid(-87.3, 88.7), 1.2e-7, False),
    "exp of small decays": ("exp", torch.exp, -normal(1e-3).abs(), 1.2e-7, False),
    "softplus": ("softplus", softplus, grid(-12, 12), 5e-7, False),
    "softplus, tiny": ("softplus", softplus, grid(-87, -12), 5e-7, False),
    "softplus, large": ("softplus", softplus, grid(12, 1000), 1.2e-7, False),
    "sigmoid": ("sigmoid", torch.sigmoid, grid(-87, 87), 2e-7, False),
    "silu": ("silu", torch.nn.functional.silu, grid(-20, 1000), 2e-6, False),
    "tanh": ("tanh", torch.tanh, grid(-12, 12), 2e-7, False),
    "tanh, near 0": ("tanh", torch.tanh, grid(-0.7, 0.7), 2e-7, False),
    "tanh, tiny": ("tanh", torch.tanh, normal(1e-4), 1.2e-7, False),
    "wrap": ("wrap_angle", lambda x: x.remainder(FULL_TURN), normal(30), 5e-7, True),
    "wrap what is wrapped": ("wrap_angle", lambda x: x, TURN, 0, True),
    "cos": ("cos", torch.cos, TURN, 1.2e-7, True),
    "sin": ("sin", torch.sin, TURN, 1.2e-7, True),
    "sin, tiny": ("sin", torch.sin, normal(1e-4).abs(), 1.2e-7, False),
}
EXACT = {
    "exp": ("exp", [-INFINITY, INFINITY, 0.0, -0.0, 1e-45, -1e-45, -1e4, 1e4, -3e38, 3e38, NAN],
            [0.0, INFINITY, 1.0, 1.0, 1.0, 1.0, 0.0, INFINITY, 0.0, INFINITY, NAN]),
    "softplus": ("softplus", [-INFINITY, INFINITY, 0.0, -0.0, -1e4, 1e4, -3e38, 3e38, NAN],
                 [0.0, INFINITY, LN_2, LN_2, 0.0, 1e4, 0.0, 3e38, NAN]),
    "sigmoid": ("sigmoid", [-INFINITY, INFINITY, 0.0, -0.0, -1e4, 1e4, NAN], [0.0, 1.0, 0.5, 0.5, 0.0, 1.0, NAN]),
    "silu": ("silu", [INFINITY, 0.0, -0.0, -1e4, 1e4, -3e38, 3e38, NAN],
             [INFINITY, 0.0, 0.0, 0.0, 1e4, 0.0, 3e38, NAN]),
    "tanh": ("tanh", [-INFINITY, INFINITY, 0.0, -0.0, 1e-38, -50.0, 50.0, -3e38, 3e38, NAN],
             [-1.0, 1.0, 0.0, 0.0, 1e-38, -1.0, 1.0, -1.0, 1.0, NAN]),
    "wrap": ("wrap_angle", [0.0, -0.0, FULL_TURN, -1e-9, -1e-45, 2 * FULL_TURN, 1.0, INFINITY, -INFINITY, NAN],
             [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, NAN, NAN, NAN]),
    "cos": ("cos", [0.0, -0.0, NAN], [1.0, 1.0, NAN]),
    "sin": ("sin", [0.0, -0.0, 1e-38, NAN], [0.0, 0.0, 1e-38, NAN]),
}

# NumPy, which interprets them, warns of what NaN and infinities are meant to do.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.fixture(scope="module")
def evaluate():
    """evaluate(name, x): the function of `kernels/triton_math.py` on a vector."""
    with interpreted() as modules:
        kernels = modules["math_kernels"]

        def run(name, x):
            x = torch.tensor(x) if isinstance(x, list) else x
            padded = torch.zeros(1 << (len(x) - 1).bit_length())
            padded[: len(x)] = x
            target = torch.empty_like(padded)
            kernels.apply[(1,)](padded, target, len(padded), name)
            return target[: len(x)]

        run.kernels = kernels
        yield run


@pytest.mark.parametrize("name, true, x, tolerance, absolute", ACCURATE.values(), ids=ACCURATE)
def test_accurate(evaluate, name, true, x, tolerance, absolute):
    expected = true(x.double())
    error = (evaluate(name, x) - expected).abs()
    assert (error <= tolerance * (1 if absolute else expected.abs())).all(), error.max()


@pytest.mark.parametrize("name, x, expected", EXACT.values(), ids=EXACT)
def test_exact(evaluate, name, x, expected):
    torch.testing.assert_close(evaluate(name, x), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_wrapped_angles_are_within_a_turn(evaluate):
    x = torch.cat((normal(1e4), normal(1e30), FULL_TURN * torch.arange(-200, 200) + normal(1e-5, 400)))
    wrapped = evaluate("wrap_angle", x)
    assert ((wrapped >= 0) & (wrapped < FULL_TURN)).all()


def test_turns_are_the_nearest_integers(evaluate):
    """Small ones too, which are added up by the million, and those next to half a turn or many turns away."""
    half = torch.tensor([0.5, 1.5, 0.25, 3.0, 2.0**21, 2.0**22])
    below, above = torch.nextafter(half, torch.zeros(1)), torch.nextafter(half, torch.full((1,), 9e9))
    turns = torch.cat((normal(1e-8), normal(1e-4), normal(1.0), half, below, above[:-1]))
    turns = torch.cat((turns, -turns))
    turns = torch.cat((turns, torch.zeros(4096 - len(turns))))
    found = torch.empty(4096, dtype=torch.int32)
    evaluate.kernels.turn[(1,)](turns, found, len(turns))
    error = (found.double() - turns.double() * 2**32 + 2**31).remainder(2**32) - 2**31
    assert error[turns.abs() < 0.4].abs().max() <= 0.5
    assert (error.abs() <= 1 + turns.abs() * 2**32 * 2**-23).all()  # what float32 knows of them


def test_cos_and_sin_of_turns(evaluate):
    turns = torch.linspace(-(2**31), 2**31 - 1, 4096, dtype=torch.float64).to(torch.int32)
    cos, sin = torch.empty(2, 4096)
    evaluate.kernels.cos_sin_of_turn[(1,)](turns, cos, sin, 4096)
    theta = turns.double() * (2 * math.pi / 2**32)
    assert (cos - theta.cos()).abs().max() < 1.2e-7 and (sin - theta.sin()).abs().max() < 1.2e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_stochastic_rounding(evaluate, dtype):
    """Between neighbours by the odds of the place between them; what is exact, infinite or no number stays."""
    exact = torch.tensor([1.0, -2.5, 0.0, INFINITY, -INFINITY, NAN, 2.0**-14, 1e-3]).to(dtype).float()
    smallest = 2.0**-24 if dtype == torch.float16 else 2.0**-133
    between = torch.tensor([1.001, -3.1234, 0.7e-3, 6.001e4, -1e-4, 3.3 * smallest, 0.25 * smallest, -1.6 * smallest])
    if dtype == torch.bfloat16:
        between[5:] = torch.tensor([1e-30, -2e-38, 3e38])
    draws = 2048
    for values, stays in ((exact, True), (between, False)):
        generator = torch.Generator().manual_seed(1)
        source = values.repeat_interleave(draws)
        bits = torch.randint(-(2**31), 2**31, source.shape, generator=generator, dtype=torch.int64).to(torch.int32)
        target = torch.empty(len(source), dtype=dtype)
        evaluate.kernels.round_stochastically[(1,)](source, bits.view(torch.uint32), target, len(source))
        rounded = target.float().view(-1, draws)
        if stays:
            torch.testing.assert_close(rounded, values[:, None].expand_as(rounded), rtol=0, atol=0, equal_nan=True)
            continue
        for value, results in zip(values, rounded):
            low, high = results.min(), results.max()
            assert low < value < high and ((results == low) | (results == high)).all()
            share = ((value - low) / (high - low)).item()
            assert abs((results == high).float().mean().item() - share) < 4 * (share * (1 - share) / draws) ** 0.5


def test_stochastic_rounding_to_bfloat16_saturates(evaluate):
    """As to float16, below."""
    largest = torch.finfo(torch.bfloat16).max
    source = torch.tensor([largest, 3.39e38, 3.4e38, -3.4e38]).repeat(16)
    bits = torch.full_like(source, -1, dtype=torch.int32)
    target = torch.empty(len(source), dtype=torch.bfloat16)
    evaluate.kernels.round_stochastically[(1,)](source, bits.view(torch.uint32), target, len(source))
    assert torch.equal(target.float(), torch.tensor([largest, largest, largest, -largest]).repeat(16))


def test_stochastic_rounding_to_float16_saturates(evaluate):
    """What is finite stays finite: beyond the largest float16 there is no neighbour above."""
    source = torch.tensor([65503.0, 65504.0, 65510.0, 65519.0, 1e5, 3e38, -65504.0, -65530.0]).repeat(16)
    bits = torch.randint(-(2**31), 2**31, source.shape, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    target = torch.empty(len(source), dtype=torch.float16)
    evaluate.kernels.round_stochastically[(1,)](source, bits.view(torch.uint32), target, len(source))
    rounded = target.float().view(-1, 8)
    assert ((rounded[:, 0] == 65504) | (rounded[:, 0] == 65472)).all()
    assert (rounded[:, 1:6] == 65504).all() and (rounded[:, 6:] == -65504).all()
