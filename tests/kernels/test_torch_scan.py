"""The torch scan, through its door and as the differentiable function, against the reference token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import (
    TOLERANCE,
    VARIANTS,
    Pages,
    Variant,
    assert_close,
    errors,
    random_projected,
    random_states,
    random_weights,
)

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, mamba3_scan, mamba3_step
from vllm_mamba3.kernels.reference import reference
from vllm_mamba3.kernels.scan.torch_scan import BYTES_OF_KEYS, ROWS_PER_CHUNK, chunked_scan
from vllm_mamba3.kernels.torch_math import PI, decay_rate, wrap_angle

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
ALL_VARIANTS = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def of(states: Mamba3States, sequence: int) -> Mamba3States:
    return Mamba3States(*(state[sequence] for state in states))


def scan(pages, weights, projected, slots, lengths, has_initial_state):
    out = torch.full((len(projected), weights.layout.inner_size), torch.nan, dtype=projected.dtype)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    mamba3_scan(projected, weights, pages.pools, torch.tensor(slots, dtype=torch.int32), ends,
                torch.tensor(has_initial_state, dtype=torch.bool), out)
    return out


@pytest.mark.parametrize("dd_A", [30.0, 300.0, 1e4, 3e38])
def test_a_token_that_forgets_all_leaves_the_ones_behind_it_exact(dd_A):
    """What is left of the running sum of the log decay after it is small, and the sum is not."""
    layout = VARIANTS["siso"].layout
    weights = random_weights(layout, 0, torch.float32)
    projected = random_projected(layout, 60, 1, torch.float32)
    columns = sum(layout.projection_widths[:5])
    projected[:, columns : columns + layout.num_heads] = -20.0  # slow decay, but for
    projected[3, columns : columns + layout.num_heads] = dd_A
    out, states = chunked_scan(projected, weights, [60])
    expected, expected_states = reference(projected, weights)
    for found, right in ((out, expected), (states.ssm[0], expected_states.ssm)):
        assert (found - right).norm() < 2e-6 * right.norm()


@ALL_VARIANTS
@DTYPES
def test_packed_sequences_are_each_alone(variant, dtype):
    """Through the door, over pages full of NaN: lengths around the chunk's, empty and padding sequences, with and
    without initial states, one batch. Every byte that belongs to no sequence stays as it was."""
    weights, chunk = variant.weights(dtype), ROWS_PER_CHUNK // variant.layout.rank
    # length, slot, whether it goes on from an initial state
    batch = [(1, 5, True), (chunk + 1, 2, False), (0, 9, True), (chunk - 1, 7, True), (3, 0, False), (chunk, 4, False),
             (1, 3, False), (63, 8, True), (2, -1, True), (65, 1, True), (0, 0, False), (2 * chunk, 6, True)]
    lengths, slots, goes_on = zip(*batch)
    pages, initial = Pages(variant.layout, dtype, 11), random_states(variant.layout, len(batch), 3, dtype)
    for sequence, (_, slot, initialised) in enumerate(batch):
        if initialised and slot > 0:
            pages.write(slot, initial, sequence)
    written = [slot for length, slot, _ in batch if length and slot > 0]
    before = pages.outside(written)
    projected = random_projected(variant.layout, sum(lengths), 1, dtype)
    out = scan(pages, weights, projected, slots, lengths, goes_on)

    assert torch.equal(pages.outside(written), before)
    for sequence, (rows, row_out) in enumerate(zip(projected.split(lengths), out.split(lengths))):
        if slots[sequence] <= 0:
            assert not row_out.any()
        elif len(rows):
            expected = reference(rows, weights, of(initial, sequence) if goes_on[sequence] else None)
            assert_close(TOLERANCE[dtype], row_out, pages.read(slots[sequence]), *expected)


@ALL_VARIANTS
@DTYPES
def test_split_anywhere_is_whole(variant, dtype):
    weights, chunk = variant.weights(dtype), ROWS_PER_CHUNK // variant.layout.rank
    projected, initial = random_projected(variant.layout, 70, 1, dtype), random_states(variant.layout, 1, 2, dtype)
    out, states = chunked_scan(projected, weights, [70], initial)
    for cut in (1, 13, chunk - 1, chunk, min(chunk + 1, 69), 69):
        first, between = chunked_scan(projected[:cut], weights, [cut], initial)
        second, after = chunked_scan(projected[cut:], weights, [70 - cut], between)
        assert_close(TOLERANCE[dtype], torch.cat((first, second)), after, out, states)


@ALL_VARIANTS
@DTYPES
def test_step_after_scan_is_scan(variant, dtype):
    weights, pages = variant.weights(dtype), Pages(variant.layout, dtype, 2)
    projected = random_projected(variant.layout, 40, 1, dtype)
    out, states = chunked_scan(projected, weights, [40])
    parts = [scan(pages, weights, projected[:35], [1], [35], [False])]
    for row in projected[35:].split(1):
        parts.append(torch.empty(1, variant.layout.inner_size, dtype=dtype))
        mamba3_step(row, weights, pages.pools, torch.ones(1, dtype=torch.int32), parts[-1])
    assert_close(TOLERANCE[dtype], torch.cat(parts), Mamba3States(*(s[None] for s in pages.read(1))), out, states)


@pytest.mark.parametrize("heads_at_once", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_heads_a_few_at_a_time_are_all_heads(monkeypatch, heads_at_once, groups):
    variant = Variant(Mamba3Layout(6, 4, 8, groups, 2, 2, True), out_norm=True)
    weights, projected = variant.weights(torch.float64), random_projected(variant.layout, 100, 1)
    initial = random_states(variant.layout, 3, 2)
    expected = chunked_scan(projected, weights, [7, 33, 60], initial)
    chunks_of_tokens = (1 + 2 + 2) * 32
    monkeypatch.setitem(BYTES_OF_KEYS, "cpu", heads_at_once * chunks_of_tokens * 2 * 8 * 8)
    assert_close(1e-13, *chunked_scan(projected, weights, [7, 33, 60], initial), *expected)


@st.composite
def layers(draw):
    number = lambda most: draw(st.integers(1, most))
    is_mimo, groups = draw(st.booleans()), number(3)
    state_size = 2 * number(7) if is_mimo else 1 + number(14)
    layout = Mamba3Layout(groups * number(3), number(7), state_size, groups, draw(st.integers(1, state_size // 2)),
                          number(4) if is_mimo else 1, is_mimo)
    return Variant(layout, draw(st.booleans()), draw(st.sampled_from(["heavy_tail", "softplus"])))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(layers(), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**20))
def test_any_shape(variant, lengths, with_initial, seed):
    weights, projected = variant.weights(torch.float64, seed), random_projected(variant.layout, sum(lengths), seed + 1)
    initial = random_states(variant.layout, len(lengths), seed + 2) if with_initial else None
    out, states = chunked_scan(projected, weights, lengths, initial)
    for sequence, (rows, row_out) in enumerate(zip(projected.split(lengths), out.split(lengths))):
        expected = reference(rows, weights, of(initial, sequence) if with_initial else None)
        assert_close(1e-10, row_out, of(states, sequence), *expected)


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf], ids=str)
@ALL_VARIANTS
def test_a_sequence_does_not_spoil_its_neighbours(variant, spoilt):
    weights, lengths = variant.weights(torch.float32), [20, 90, 20, 90]
    clean = random_projected(variant.layout, sum(lengths), 1, torch.float32)
    dirty = clean.clone()
    dirty[20:110:7] = spoilt
    out, states = chunked_scan(dirty, weights, lengths)
    expected, expected_states = chunked_scan(clean, weights, lengths)
    keep = torch.tensor([True, False, True, True])
    rows = keep.repeat_interleave(torch.tensor(lengths))
    assert not out[~rows].isfinite().all()
    assert_close(2e-5, out[rows], Mamba3States(*(s[keep] for s in states)), expected[rows],
                 Mamba3States(*(s[keep] for s in expected_states)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ALL_VARIANTS
def test_half_precision_is_as_good_as_eager(variant, dtype):
    """The error against float64 is at most twice that of the reference in the same precision."""
    weights, projected = variant.weights(torch.float32), random_projected(variant.layout, 80, 1, dtype)
    initial = random_states(variant.layout, 1, 2, dtype)
    true = reference(projected, weights, of(initial, 0))
    eager_out, eager_states = reference(projected, weights, of(initial, 0), torch.float32, dtype)
    eager = errors(eager_out.to(dtype), eager_states, *true)
    out, states = chunked_scan(projected, weights, [80], initial)
    assert (out.dtype, states.k.dtype, states.ssm.dtype) == (dtype, dtype, torch.float32)
    found = errors(out, of(states, 0), *true)
    assert all(found[name] <= 2 * eager[name] for name in found), (found, eager)


@pytest.mark.parametrize("step_size", [3.0, 30.0])
@ALL_VARIANTS
@DTYPES
def test_extreme_step_sizes(variant, dtype, step_size):
    """Decays that leave nothing, beside ones that leave everything: finite, and as good as with moderate ones."""
    weights, projected = variant.weights(dtype), random_projected(variant.layout, 40, 1, dtype)
    dt, A = projected.split(variant.layout.projection_widths, -1)[4:6]
    dt[::3] += step_size
    A[::2] *= 20
    initial = random_states(variant.layout, 1, 2, dtype)
    out, states = chunked_scan(projected, weights, [40], initial)
    expected, expected_states = reference(projected, weights, of(initial, 0))
    # An angle of hundreds of radians a token is no better known than to its rounding.
    tolerance = TOLERANCE[dtype] * (1 if step_size < 30 else 10)
    assert_close(tolerance, out, of(states, 0), expected, expected_states)


def test_long_sequences_keep_their_angle():
    """20,000 tokens in pieces of 1,000, every angle turning one way: float32 against float64."""
    layout = Mamba3Layout(2, 2, 8, 1, 4)
    projected = random_projected(layout, 20_000, 0, torch.float32)
    projected[:, -4:].abs_()
    weights, narrow, wide = random_weights(layout, 0, torch.float32), None, None
    for rows in projected.split(1000):
        _, narrow = chunked_scan(rows, weights, [len(rows)], narrow)
        _, wide = chunked_scan(rows.double(), weights.to(torch.float64), [len(rows)], wide)
    assert_close(5e-5, narrow.v, narrow, wide.v, wide)


GRADIENT_LAYERS = {"siso": Mamba3Layout(2, 2, 4, 1, 1), "siso-odd": Mamba3Layout(2, 2, 5, 2, 1),
                   "mimo": Mamba3Layout(2, 2, 4, 2, 1, 2, True)}


@pytest.mark.parametrize("layout", GRADIENT_LAYERS.values(), ids=GRADIENT_LAYERS)
def test_gradients(monkeypatch, layout):
    """Of output and states, in rows, weights and initial states: heads one at a time, two sequences, four chunks."""
    monkeypatch.setitem(chunked_scan.__globals__, "ROWS_PER_CHUNK", 2 * layout.rank)
    monkeypatch.setitem(BYTES_OF_KEYS, "cpu", 1)
    weights, projected = random_weights(layout, 0, out_norm=True), random_projected(layout, 6, 1)
    initial = random_states(layout, 2, 2)
    names = [name for name in weights.TENSORS if getattr(weights, name) is not None]

    def run(projected, *tensors):
        layer = type(weights)(layout, **dict(zip(names, tensors)))
        out, states = chunked_scan(projected, layer, [5, 1], Mamba3States(*tensors[len(names):]))
        return out, states.angle.cos(), *states[1:]

    inputs = [projected, *(getattr(weights, name) for name in names), *initial]
    assert torch.autograd.gradcheck(run, [tensor.requires_grad_() for tensor in inputs], fast_mode=True)


@pytest.mark.parametrize("dd_A, slope", [(-2.0, 1 / 9), (-1e-12, 1.0), (0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (2.0, 1.0)])
def test_slope_of_heavy_tail(dd_A, slope):
    dd_A = torch.tensor([dd_A], dtype=torch.float64, requires_grad=True)
    decay_rate(dd_A, random_weights(GRADIENT_LAYERS["siso"], 0)).backward()
    assert dd_A.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("lengths", [[], [0, 5], [2, 2], [6]], ids=str)
def test_lengths_that_are_not_the_rows_are_refused(lengths):
    layout = GRADIENT_LAYERS["siso"]
    with pytest.raises(ValueError, match="lengths of at least 1 that add up to the 5 rows"):
        chunked_scan(random_projected(layout, 5, 0), random_weights(layout, 0), lengths)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_wrapped_angles_are_within_a_turn(dtype):
    """Those too, which rounding takes to the full turn."""
    theta = torch.tensor([-1e-30, -1e-9, 0, 2 * torch.pi, 2 * PI[dtype], 1e3, -1e3], dtype=dtype)
    wrapped = wrap_angle(theta, dtype)
    assert ((wrapped >= 0) & (wrapped < 2 * torch.pi)).all()
    torch.testing.assert_close(wrapped.cos(), theta.cos(), rtol=0, atol=1e-4)
