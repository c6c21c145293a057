"""The Triton step under Triton's interpreter against the reference. On a GPU: tests/gpu/test_triton_step.py."""

from dataclasses import replace

import pytest
import torch
from interpreted_triton import interpreted
from random_layers import VARIANTS, Pages, Variant, assert_close, errors, random_projected, random_states
from step_checks import check_batch_of_sequences, check_keys_are_rounded_first

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, mamba3_step
from vllm_mamba3.kernels.reference import reference

TOLERANCE = 2e-6  # float32, after a few tokens
LAYERS = VARIANTS | {
    "siso-head-dim-1": Variant(Mamba3Layout(2, 1, 8, 1, 4)),
    "siso-state-in-two-runs": Variant(Mamba3Layout(2, 4, 64, 2, 7), out_norm=True),
    "mimo-rank-5": Variant(Mamba3Layout(2, 3, 6, 1, 2, 5, True), out_norm=True),
    "mimo-smallest": Variant(Mamba3Layout(1, 1, 2, 1, 1, 2, True)),
}
SMALL = {
    "small-siso": Variant(Mamba3Layout(2, 4, 8, 1, 3)),
    "small-mimo": Variant(Mamba3Layout(2, 3, 8, 1, 2, 3, True)),
}
SISO_AND_MIMO = pytest.mark.parametrize("layer", SMALL.values(), ids=SMALL)
ONE_ANGLE_A_PAIR = Variant(Mamba3Layout(1, 1, 8, 1, 4))

SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
# Layer, dtype of the rows, of the ssm state.
PRECISIONS = [
    *((name, dtype, SINGLE) for name in VARIANTS for dtype in (HALF, BRAIN)),
    *((name, *dtypes) for name in SMALL for dtypes in (
        (SINGLE, SINGLE), (SINGLE, HALF), (SINGLE, BRAIN), (HALF, HALF), (BRAIN, HALF), (BRAIN, BRAIN))),
    *((name, *dtypes) for name in ("siso", "mimo-rank-4") for dtypes in (
        (SINGLE, SINGLE), (HALF, HALF), (BRAIN, HALF))),
]

# NumPy, which interprets them, warns of what NaN and infinities are meant to do.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.fixture(scope="module", autouse=True)
def triton():
    with interpreted() as modules:
        yield modules


def step(*arguments, **keywords):
    mamba3_step(*arguments, **keywords, implementation="triton")


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def of(states: Mamba3States, sequence: int) -> Mamba3States:
    return Mamba3States(*(state[sequence] for state in states))


@pytest.mark.parametrize("rows_first", [True, False], ids=["rows-first", "runs-first"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_batch_of_sequences_is_each_alone(layer, rows_first, triton, monkeypatch):
    """In both arrangements of the tile; which of them is used depends on Triton's version."""
    monkeypatch.setattr(triton["triton_step"], "ROWS_FIRST", rows_first)
    check_batch_of_sequences(step, layer, torch.float32, TOLERANCE, tokens=2)


@pytest.mark.parametrize("name, dtype, ssm_dtype", PRECISIONS, ids=lambda value: str(value).removeprefix("torch."))
def test_as_near_float64_as_an_eager_evaluation(name, dtype, ssm_dtype):
    """After 10 tokens at most twice the error of the reference in the same dtypes, its ssm state rounded after each."""
    layer = (VARIANTS | SMALL)[name]
    weights, size, length = layer.weights(torch.float32), layer.layout, 10
    rows, initial = random_projected(size, length, 1, dtype), of(random_states(size, 1, 2, dtype), 0)
    initial = initial._replace(ssm=initial.ssm.to(ssm_dtype).float())
    pages, out = Pages(size, dtype, 2, ssm_dtype), torch.empty(length, size.inner_size, dtype=dtype)
    pages.write(1, initial, ...)
    true, eager, eager_out = reference(rows, weights, initial), initial, []
    for row, to in zip(rows.split(1), out.split(1)):
        step(row, weights, pages.pools, int32(1), to)
        result, eager = reference(row, weights, eager, torch.float32, dtype)
        eager = eager._replace(ssm=eager.ssm.to(ssm_dtype).float())
        eager_out.append(result.to(dtype))
    allowed, found = errors(torch.cat(eager_out), eager, *true), errors(out, pages.read(1), *true)
    assert all(found[name] <= 2 * allowed[name] for name in found), (found, allowed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@SISO_AND_MIMO
def test_keys_are_rounded_first(layer, dtype):
    check_keys_are_rounded_first(step, layer, dtype)


@SISO_AND_MIMO
@pytest.mark.parametrize("ssm_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_read_out_has_not_been_rounded(layer, ssm_dtype):
    """The output comes from the state in float32, whatever the pool keeps of it."""
    weights, size = layer.weights(torch.float32), layer.layout
    rows, out = random_projected(size, 1, 1, torch.float32), torch.empty(1, size.inner_size)
    step(rows, weights, Pages(size, torch.float32, 2, ssm_dtype).pools, int32(1), out, torch.tensor([False]))
    expected, _ = reference(rows, weights)
    assert (out - expected).norm() < TOLERANCE * expected.norm()


@SISO_AND_MIMO
@pytest.mark.parametrize("name", ["dd_dt", "dd_A"])
def test_a_scalar_that_is_no_number_is_not_hidden(layer, name):
    weights, size = layer.weights(torch.float32), layer.layout
    rows, initial = random_projected(size, 1, 1, torch.float32), random_states(size, 1, 2, torch.float32)
    scalars(rows, size, name)[0, 0] = torch.nan
    pages, out = Pages(size, torch.float32, 2), torch.empty(1, size.inner_size)
    pages.write(1, initial, 0)
    step(rows, weights, pages.pools, int32(1), out)
    of_head = out.view(size.num_heads, size.head_dim)
    assert of_head[0].isnan().all() and of_head[1].isfinite().all()


@SISO_AND_MIMO
@pytest.mark.parametrize("spoilt", ["row", "state"])
def test_a_sequence_does_not_spoil_its_neighbours(layer, spoilt):
    weights, size = layer.weights(torch.float32), layer.layout
    states, rows = random_states(size, 3, 0, torch.float32), random_projected(size, 3, 1, torch.float32)
    pages, out = Pages(size, torch.float32, 4), torch.empty(3, size.inner_size)
    for slot in (1, 2, 3):
        pages.write(slot, states, slot - 1)
    for tensor in (rows,) if spoilt == "row" else (pool[1:] for pool in pages.pools):
        tensor[1] = torch.nan
    step(rows, weights, pages.pools, int32(1, 2, 3), out)
    assert not out[1].isfinite().any()
    for i in (0, 2):
        assert_close(TOLERANCE, out[i : i + 1], pages.read(i + 1), *reference(rows[i : i + 1], weights, of(states, i)))


def scalars(rows, size: Mamba3Layout, name: str):
    """The columns of a scalar a head, dd_dt or dd_A."""
    start = sum(size.projection_widths[: 4 if name == "dd_dt" else 5])
    return rows[:, start : start + size.num_heads]


@pytest.mark.parametrize("name", ["siso", "siso-groups-full-rotation", "mimo-rank-4"])
def test_extreme_step_sizes(name):
    """Heads that hardly move, that forget all, and whose rate is at its floor; both activations of the rate."""
    layer = VARIANTS[name]
    weights, size = replace(layer.weights(torch.float32), A_floor=0.25), layer.layout
    rows, initial = random_projected(size, 1, 1, torch.float32), random_states(size, 1, 2, torch.float32)
    scalars(rows, size, "dd_dt")[0, :3] = torch.tensor([-30.0, 60.0, 5.0])
    scalars(rows, size, "dd_A")[0, :4] = torch.tensor([0.0, 3.0, 200.0, -1e6])
    pages, out = Pages(size, torch.float32, 2), torch.empty(1, size.inner_size)
    pages.write(1, initial, 0)
    step(rows, weights, pages.pools, int32(1), out)
    # An angle that turns thirty times in a step has lost five bits of its float32.
    assert_close(2e-5, out, pages.read(1), *reference(rows, weights, of(initial, 0)))


@SISO_AND_MIMO
def test_step_sizes_of_1e_14_are_not_zero(layer):
    """From no state, what they leave in the ssm state is all that there is."""
    weights, size = layer.weights(torch.float32), layer.layout
    rows = random_projected(size, 1, 1, torch.float32)
    scalars(rows, size, "dd_dt")[:] = -30
    pages, out = Pages(size, torch.float32, 2), torch.empty(1, size.inner_size)
    step(rows, weights, pages.pools, int32(1), out, torch.tensor([False]))
    true_out, true = reference(rows, weights)
    assert 0 < true.ssm.abs().max() < 1e-12
    assert_close(TOLERANCE, out, pages.read(1), true_out, true)


def test_angles_at_a_full_turn():
    """Over it, back from 0, by less than an angle can express, and not at all."""
    layer, last = ONE_ANGLE_A_PAIR, torch.nextafter(torch.tensor(2 * torch.pi), torch.tensor(0.0))
    weights, size = layer.weights(torch.float32), layer.layout
    rows, initial = random_projected(size, 1, 1, torch.float32), random_states(size, 1, 2, torch.float32)
    initial.angle[:] = torch.tensor([last, 0, 0, last])
    rows[:, -4:] = torch.tensor([0.5, -0.5, -1e-7, 0])
    pages, out = Pages(size, torch.float32, 2), torch.empty(1, size.inner_size)
    pages.write(1, initial, 0)
    step(rows, weights, pages.pools, int32(1), out)
    assert_close(TOLERANCE, out, pages.read(1), *reference(rows, weights, of(initial, 0)))
    assert pages.read(1).angle[0, 3] == last


@pytest.mark.parametrize("steps", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_angle_keeps_its_precision(steps):
    """Every angle turning one way: no further from float64 than twice an eager evaluation."""
    layer = ONE_ANGLE_A_PAIR
    weights, rows = layer.weights(torch.float32), random_projected(layer.layout, steps, 1, torch.float32)
    rows[:, -4:].abs_()
    pages, out = Pages(layer.layout, torch.float32, 2), torch.empty(1, 1)
    step(rows[:1], weights, pages.pools, int32(1), out, torch.tensor([False]))
    for row in rows[1:].split(1):
        step(row, weights, pages.pools, int32(1), out)
    true_out, true = reference(rows, weights)
    eager_out, eager = reference(rows, weights, dtype=torch.float32)
    allowed = errors(eager_out[-1:], eager, true_out[-1:], true)["angle"]
    found = errors(out, pages.read(1), true_out[-1:], true)["angle"]
    assert found <= 2 * allowed, (found, allowed)
    assert ((pages.read(1).angle >= 0) & (pages.read(1).angle < 2 * torch.pi)).all()


def test_rows_and_slots_with_any_stride():
    layer = SMALL["small-siso"]
    weights, size = layer.weights(torch.float32), layer.layout
    wide = torch.full((3, size.projection_size + 5), torch.nan)
    wide[:, 2:-3] = random_projected(size, 3, 1, torch.float32)
    wide_out = torch.full((3, size.inner_size + 4), 7.0)
    slots = int32(3, 9, 1, 9, 2, 9).view(3, 2)[:, 0]
    pages = Pages(size, torch.float32, 4)
    step(wide[:, 2:-3], weights, pages.pools, slots, wide_out[:, 1:-3], torch.zeros(3).bool())
    for sequence, slot in enumerate((3, 1, 2)):
        one = slice(sequence, sequence + 1)
        assert_close(TOLERANCE, wide_out[one, 1:-3], pages.read(slot), *reference(wide[one, 2:-3], weights))
    assert (wide_out[:, [0, -1, -2, -3]] == 7).all()


def test_flags_with_any_stride():
    """A column of flags is as good as a row of them."""
    layer = SMALL["small-siso"]
    weights, size = layer.weights(torch.float32), layer.layout
    rows, initial = random_projected(size, 2, 1, torch.float32), random_states(size, 2, 2, torch.float32)
    pages, out = Pages(size, torch.float32, 3), torch.empty(2, size.inner_size)
    for slot in (1, 2):
        pages.write(slot, initial, slot - 1)
    flags = torch.tensor([[True, True], [False, False]])
    step(rows, weights, pages.pools, int32(1, 2), out, flags[:, 0])
    assert_close(TOLERANCE, out[:1], pages.read(1), *reference(rows[:1], weights, of(initial, 0)))
    assert_close(TOLERANCE, out[1:], pages.read(2), *reference(rows[1:], weights))


@SISO_AND_MIMO
def test_weights_of_16_bits(layer):
    weights, size = layer.weights(torch.bfloat16), layer.layout
    rows, initial = random_projected(size, 1, 1, torch.float32), random_states(size, 1, 2, torch.float32)
    pages, out = Pages(size, torch.float32, 2), torch.empty(1, size.inner_size)
    pages.write(1, initial, 0)
    step(rows, weights, pages.pools, int32(1), out)
    assert_close(TOLERANCE, out, pages.read(1), *reference(rows, weights, of(initial, 0)))
