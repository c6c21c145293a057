"""The Triton step under Triton's interpreter against the reference. On a GPU: tests/gpu/test_triton_step.py."""

import pytest
import torch
from interpreted_triton import interpreted
from random_layers import VARIANTS, Pages, Variant, assert_close, errors, random_projected, random_states

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, mamba3_step
from vllm_mamba3.kernels.reference import reference

TOLERANCE = 2e-6  # float32, after a few tokens
LAYERS = VARIANTS | {
    "siso-head-dim-1": Variant(Mamba3Layout(2, 1, 8, 1, 4)),
    "siso-state-in-two-runs": Variant(Mamba3Layout(2, 4, 64, 2, 7), out_norm=True),
    "mimo-rank-5": Variant(Mamba3Layout(2, 3, 6, 1, 2, 5, True), out_norm=True),
}
ALL = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
TWO = pytest.mark.parametrize("layer", [VARIANTS["siso"], VARIANTS["mimo-rank-4"]], ids=["siso", "mimo"])


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


@ALL
@pytest.mark.parametrize("rows_first", [True, False], ids=["rows first", "runs first"])
def test_batch_of_sequences_is_each_alone(layer, rows_first, triton, monkeypatch):
    """Sequences that start and that go on, among padding, over pages full of NaN: output, states, and every byte that
    belongs to no sequence. In both arrangements of the tile; which of them is used depends on Triton's version."""
    monkeypatch.setattr(triton["triton_step"], "ROWS_FIRST", rows_first)
    weights, size = layer.weights(torch.float32), layer.layout
    slots, goes_on, padding = [6, 0, 2, 5, -1], [True, True, False, True, False], (1, 4)
    pages, initial = Pages(size, torch.float32, 7), random_states(size, len(slots), 3, torch.float32)
    for sequence in (0, 3):
        pages.write(slots[sequence], initial, sequence)
    before = pages.outside([6, 2, 5])
    tokens = random_projected(size, 2 * len(slots), 1, torch.float32).view(2, len(slots), -1)
    tokens[:, padding] = torch.nan
    outs = torch.full((2, len(slots), size.inner_size), torch.nan)
    for token, (rows, out) in enumerate(zip(tokens, outs)):
        step(rows, weights, pages.pools, int32(*slots), out, None if token else torch.tensor(goes_on))
    assert torch.equal(pages.outside([6, 2, 5]), before)
    assert not outs[:, padding].any()
    for sequence in (0, 2, 3):
        expected = reference(tokens[:, sequence], weights, of(initial, sequence) if goes_on[sequence] else None)
        assert_close(TOLERANCE, outs[:, sequence], pages.read(slots[sequence]), *expected)


@TWO
@pytest.mark.parametrize("dtype, ssm_dtype", [
    (torch.float32, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16), (torch.bfloat16, torch.float16)], ids=str)
def test_as_near_float64_as_an_eager_evaluation(layer, dtype, ssm_dtype):
    """After 10 tokens, in any pair of dtypes: at most twice the error of the reference evaluated in them.

    Triton's interpreter cuts to bfloat16 where a GPU rounds, which doubles that, so a state in it is left to the GPU.
    """
    factor = 4 if dtype == torch.bfloat16 else 2
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
    assert all(found[name] <= factor * allowed[name] for name in found), (found, allowed)


@TWO
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


@TWO
def test_extreme_step_sizes(layer):
    """Heads that hardly move, that forget all, and whose rate is at its floor."""
    weights, size = layer.weights(torch.float32), layer.layout
    rows, initial = random_projected(size, 1, 1, torch.float32), random_states(size, 1, 2, torch.float32)
    dd_dt, dd_A = (rows[:, -size.num_angles - part * size.num_heads :][:, : size.num_heads] for part in (3, 2))
    dd_dt[0, :3], dd_A[0, :4] = torch.tensor([-30.0, 60.0, 5.0]), torch.tensor([0.0, 3.0, 200.0, -1e6])
    pages, out = Pages(size, torch.float32, 2), torch.empty(1, size.inner_size)
    pages.write(1, initial, 0)
    step(rows, weights, pages.pools, int32(1), out)
    # An angle that turns thirty times in a step has lost five bits of its float32.
    assert_close(2e-5, out, pages.read(1), *reference(rows, weights, of(initial, 0)))


def test_angle_keeps_its_precision():
    """200 steps, every angle turning one way: no further from float64 than twice an eager evaluation."""
    layer = Variant(Mamba3Layout(1, 1, 8, 1, 4))
    weights, rows = layer.weights(torch.float32), random_projected(layer.layout, 200, 1, torch.float32)
    rows[:, -4:].abs_()
    pages, out = Pages(layer.layout, torch.float32, 2), torch.empty(1, 1)
    step(rows[:1], weights, pages.pools, int32(1), out, torch.tensor([False]))
    for row in rows[1:].split(1):
        step(row, weights, pages.pools, int32(1), out)
    true_out, true = reference(rows, weights)
    eager_out, eager = reference(rows, weights, dtype=torch.float32)
    allowed = errors(eager_out[-1:], eager, true_out[-1:], true)["angle"]
    assert errors(out, pages.read(1), true_out[-1:], true)["angle"] <= 2 * allowed
    assert ((pages.read(1).angle >= 0) & (pages.read(1).angle < 2 * torch.pi)).all()


def test_rows_with_any_stride():
    layer = VARIANTS["siso"]
    weights, size = layer.weights(torch.float32), layer.layout
    wide = torch.full((3, size.projection_size + 5), torch.nan)
    wide[:, 2:-3] = random_projected(size, 3, 1, torch.float32)
    wide_out = torch.full((3, size.inner_size + 4), 7.0)
    pages = Pages(size, torch.float32, 4)
    step(wide[:, 2:-3], weights, pages.pools, int32(3, 1, 2), wide_out[:, 1:-3], torch.zeros(3).bool())
    for sequence, slot in enumerate((3, 1, 2)):
        one = slice(sequence, sequence + 1)
        assert_close(TOLERANCE, wide_out[one, 1:-3], pages.read(slot), *reference(wide[one, 2:-3], weights))
    assert (wide_out[:, [0, -1, -2, -3]] == 7).all()


def stochastic_states(layer, ssm_dtype, seeds):
    """The exact ssm state after a token, in float32, and the one rounded with each seed."""
    weights, size = layer.weights(torch.float32), layer.layout
    row, initial = random_projected(size, 1, 2, torch.float32), random_states(size, 1, 1, torch.float32)
    initial = initial._replace(ssm=initial.ssm.to(ssm_dtype).float())
    out, exact = torch.empty(1, size.inner_size), Pages(size, torch.float32, 2)
    exact.write(1, initial, 0)
    step(row, weights, exact.pools, int32(1), out)
    rounded = []
    for seed in seeds:
        pages = Pages(size, torch.float32, 2, ssm_dtype)
        pages.write(1, initial, 0)
        step(row, weights, pages.pools, int32(1), out, rounding_seed=torch.tensor([seed]))
        rounded.append(pages.read(1).ssm)
    return exact.read(1).ssm, torch.stack(rounded)


@pytest.mark.parametrize("ssm_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stochastic_rounding(ssm_dtype):
    """To one of the two neighbours, to the same by the same seed, and on average to the value."""
    exact, rounded = stochastic_states(VARIANTS["siso-odd-sizes"], ssm_dtype, [*range(30), 0])
    assert torch.equal(rounded[0], rounded[-1]) and not torch.equal(rounded[0], rounded[1])
    difference = rounded[:-1].float() - exact
    step_size = torch.finfo(ssm_dtype).eps * 2 ** exact.abs().log2().floor()
    assert (difference.abs() < step_size).all()
    in_steps = difference / step_size  # of standard deviation 1/2 at most
    assert abs(in_steps.mean()) < 4 * 0.5 / in_steps.numel() ** 0.5
