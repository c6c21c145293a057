"""The Triton scan under Triton's interpreter, through its door, against the reference token by token."""

from dataclasses import replace

import pytest
import torch
from interpreted_triton import interpreted
from random_layers import VARIANTS, Pages, Variant, assert_close, errors, random_projected, random_states

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, mamba3_scan, mamba3_step
from vllm_mamba3.kernels.reference import reference
from vllm_mamba3.kernels.scan.torch_scan import chunked_scan

TOLERANCE = 2e-6  # float32
ROWS, CHUNKS = 16, 2  # of the launch here, so that short sequences have several segments
SMALL = {
    "siso": Variant(Mamba3Layout(1, 4, 8, 1, 3)),
    "mimo": Variant(Mamba3Layout(1, 3, 8, 1, 2, 2, True)),
}
SISO_AND_MIMO = pytest.mark.parametrize("layer", SMALL.values(), ids=SMALL)

# NumPy, which interprets them, warns of what NaN and infinities are meant to do.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")


@pytest.fixture(scope="module", autouse=True)
def launch():
    """launch(rows, chunks): how the scan is launched from here on."""
    from vllm_mamba3.kernels.scan.launch import Launch

    with interpreted() as modules, pytest.MonkeyPatch.context() as patch:
        def of(rows, chunks):
            patch.setattr(modules["triton_scan"], "launch_for", lambda layout: Launch(rows, chunks, 4))

        of(ROWS, CHUNKS)
        yield of


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def of(states: Mamba3States, sequence: int) -> Mamba3States:
    return Mamba3States(*(state[sequence] for state in states))


def scan(pages, weights, projected, slots, lengths, goes_on, computed=None):
    out = torch.full((len(projected), weights.layout.inner_size), torch.nan, dtype=projected.dtype)
    mamba3_scan(projected, weights, pages.pools, int32(*slots), int32(0, *lengths).cumsum(0).int(),
                torch.tensor(goes_on), out, computed, implementation="triton")
    return out


@pytest.mark.parametrize("layer", VARIANTS.values(), ids=VARIANTS)
def test_packed_sequences_are_each_alone(layer):
    """Over pages full of NaN: lengths around a chunk's and a segment's, empty and padding sequences, with and without
    initial states, one batch. Every byte that belongs to no sequence stays as it was."""
    weights, size = layer.weights(torch.float32), layer.layout
    chunk = ROWS // (1 << (size.rank - 1).bit_length())
    batch = [(1, 5, True), (chunk + 1, 2, False), (0, 9, True), (chunk - 1, 7, True), (3, 0, False), (chunk, 4, False),
             (CHUNKS * chunk + 1, 8, True), (2, -(2**31), True), (CHUNKS * chunk, 1, False), (0, 0, False)]
    lengths, slots, goes_on = zip(*batch)
    pages, initial = Pages(size, torch.float32, 11), random_states(size, len(batch), 3, torch.float32)
    for sequence, (_, slot, initialised) in enumerate(batch):
        if initialised and slot > 0:
            pages.write(slot, initial, sequence)
    written = [slot for length, slot, _ in batch if length and slot > 0]
    before = pages.outside(written)
    projected = random_projected(size, sum(lengths), 1, torch.float32)
    out = scan(pages, weights, projected, slots, lengths, goes_on)

    assert torch.equal(pages.outside(written), before)
    for sequence, (rows, row_out) in enumerate(zip(projected.split(lengths), out.split(lengths))):
        if slots[sequence] <= 0:
            assert not row_out.any()
        elif len(rows):
            expected = reference(rows, weights, of(initial, sequence) if goes_on[sequence] else None)
            assert_close(TOLERANCE, row_out, pages.read(slots[sequence]), *expected)


@pytest.mark.parametrize("name", ["siso", "mimo-rank-4"])
def test_as_it_is_launched(name, launch):
    """With chunks and segments of the size that GPUs get."""
    from vllm_mamba3.kernels.scan.launch import launch_for

    layer = Variant(Mamba3Layout(1, 4, 8, 1, 2, VARIANTS[name].layout.rank, VARIANTS[name].layout.is_mimo))
    rows, chunks, _ = launch_for(layer.layout)
    launch(rows, chunks)
    length = launch_for(layer.layout).tokens(layer.layout) + 1
    pages, projected = Pages(layer.layout, torch.float32, 2), random_projected(layer.layout, length, 1, torch.float32)
    out = scan(pages, layer.weights(torch.float32), projected, [1], [length], [False])
    launch(ROWS, CHUNKS)
    true_out, true = chunked_scan(projected.double(), layer.weights(torch.float32).to(torch.float64), [length])
    assert_close(TOLERANCE, out, pages.read(1), true_out, of(true, 0))


@pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@SISO_AND_MIMO
def test_as_near_float64_as_an_eager_evaluation(layer, dtype, ssm_dtype):
    """At most twice the error of the reference in the same dtypes, whose ssm state is rounded at the end."""
    weights, projected = layer.weights(torch.float32), random_projected(layer.layout, 40, 1, dtype)
    initial = random_states(layer.layout, 1, 2, dtype)
    initial = initial._replace(ssm=initial.ssm.to(ssm_dtype).float())
    true = reference(projected, weights, of(initial, 0))
    eager_out, eager = reference(projected, weights, of(initial, 0), torch.float32, dtype)
    allowed = errors(eager_out.to(dtype), eager._replace(ssm=eager.ssm.to(ssm_dtype)), *true)
    pages = Pages(layer.layout, dtype, 2, ssm_dtype)
    pages.write(1, initial, 0)
    out = scan(pages, weights, projected, [1], [40], [True])
    found = errors(out, pages.read(1), *true)
    assert all(found[name] <= 2 * allowed[name] for name in found), (found, allowed)


@SISO_AND_MIMO
def test_same_bits_alone_and_packed(layer):
    weights, lengths = layer.weights(torch.float32), [5, 35, 12]
    projected, initial = random_projected(layer.layout, 52, 1, torch.float32), random_states(layer.layout, 3, 2)
    packed, alone = (Pages(layer.layout, torch.float32, 4) for _ in range(2))
    for slot in (1, 2, 3):
        packed.write(slot, initial, slot - 1)
        alone.write(slot, initial, slot - 1)
    out = scan(packed, weights, projected, [3, 1, 2], lengths, [True, True, False])
    parts = [scan(alone, weights, rows, [slot], [len(rows)], [goes_on]) for rows, slot, goes_on in
             zip(projected.split(lengths), (3, 1, 2), (True, True, False))]
    assert torch.equal(out, torch.cat(parts)) and torch.equal(packed.bytes, alone.bytes)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "from-the-piece"])
@SISO_AND_MIMO
def test_split_anywhere_is_whole(layer, aligned):
    """Then a step, too."""
    weights, projected = layer.weights(torch.float32), random_projected(layer.layout, 50, 1, torch.float32)
    expected = reference(projected, weights)
    for cut in (1, 16, 33):
        pages, out = Pages(layer.layout, torch.float32, 2), torch.empty(1, layer.layout.inner_size)
        first = scan(pages, weights, projected[:cut], [1], [cut], [False], int32(0) if aligned else None)
        second = scan(pages, weights, projected[cut:49], [1], [49 - cut], [True], int32(cut) if aligned else None)
        mamba3_step(projected[49:], weights, pages.pools, int32(1), out, implementation="triton")
        assert_close(TOLERANCE, torch.cat((first, second, out)), pages.read(1), *expected)


@SISO_AND_MIMO
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf], ids=str)
def test_a_sequence_does_not_spoil_its_neighbours(layer, spoilt):
    weights, lengths = layer.weights(torch.float32), [5, 40, 5]
    clean = random_projected(layer.layout, 50, 1, torch.float32)
    dirty = clean.clone()
    dirty[5:45:7] = spoilt
    outs = []
    for rows in (clean, dirty):
        pages = Pages(layer.layout, torch.float32, 4)
        outs.append((scan(pages, weights, rows, [1, 2, 3], lengths, [False] * 3), pages.bytes[[0, 1, 3]]))
    (expected, kept), (out, pages) = outs
    assert torch.equal(out[:5], expected[:5]) and torch.equal(out[45:], expected[45:]) and torch.equal(pages, kept)
    assert not out[5:45].isfinite().all()


@SISO_AND_MIMO
@pytest.mark.parametrize("where", ["angle", "dd_dt", "dd_A", "trap", "angle state"])
def test_what_is_no_number_is_not_hidden(layer, where):
    weights, size = layer.weights(torch.float32), layer.layout
    projected, initial = random_projected(size, 40, 1, torch.float32), random_states(size, 1, 2, torch.float32)
    pages = Pages(size, torch.float32, 2)
    pages.write(1, initial, 0)
    if where == "angle state":
        pages.pools.angle[1, :, 0] = torch.nan
    else:
        column = dict(dd_dt=4, dd_A=5, trap=6, angle=7)[where]
        start = sum(size.projection_widths[:column])
        projected[20, start : start + (1 if where == "angle" else size.num_heads)] = torch.nan
    out = scan(pages, weights, projected, [1], [40], [True])
    assert not out[20:].isfinite().any() and not pages.read(1).ssm.isfinite().any()


@SISO_AND_MIMO
def test_norms_without_an_epsilon(layer):
    """Rows before and after the sequence's have a norm of zero."""
    weights = replace(layer.weights(torch.float32), norm_eps=0.0)
    projected = random_projected(layer.layout, 37, 1, torch.float32)
    pages = Pages(layer.layout, torch.float32, 2)
    out = scan(pages, weights, projected, [1], [37], [False], int32(5))
    assert_close(TOLERANCE, out, pages.read(1), *reference(projected, weights))


@pytest.mark.parametrize("dd_A", [30.0, 1e4, 3e38])
@SISO_AND_MIMO
def test_a_token_that_forgets_all_leaves_the_ones_behind_it_exact(layer, dd_A):
    """What is left of the running sum of the log decay after it is small, and the sum is not."""
    weights, size = layer.weights(torch.float32), layer.layout
    projected = random_projected(size, 60, 1, torch.float32)
    columns = sum(size.projection_widths[:5])
    projected[:, columns : columns + size.num_heads] = -20.0  # slow decay, but for
    projected[3, columns : columns + size.num_heads] = dd_A
    pages = Pages(size, torch.float32, 2)
    out = scan(pages, weights, projected, [1], [60], [False])
    assert_close(TOLERANCE, out, pages.read(1), *reference(projected, weights))


@SISO_AND_MIMO
def test_long_sequences_keep_their_angle(layer):
    """Every angle turning one way, in pieces: as integers angles add up exactly."""
    weights, size = layer.weights(torch.float32), layer.layout
    projected = random_projected(size, 300, 1, torch.float32)
    projected[:, -size.num_angles :].abs_()
    pages, goes_on = Pages(size, torch.float32, 2), False
    for rows in projected.split(100):
        scan(pages, weights, rows, [1], [len(rows)], [goes_on])
        goes_on = True
    _, true = chunked_scan(projected.double(), weights.to(torch.float64), [300])
    difference = (pages.read(1).angle.double() - true.angle[0] + torch.pi).remainder(2 * torch.pi) - torch.pi
    assert difference.abs().max() < 5e-6


def test_rows_and_out_with_any_stride():
    layer = SMALL["siso"]
    weights, size = layer.weights(torch.float32), layer.layout
    wide = torch.full((40, size.projection_size + 5), torch.nan)
    wide[:, 2:-3] = random_projected(size, 40, 1, torch.float32)
    wide_out, pages = torch.full((40, size.inner_size + 4), 7.0), Pages(size, torch.float32, 2)
    mamba3_scan(wide[:, 2:-3], weights, pages.pools, int32(1), int32(0, 40), torch.tensor([False]), wide_out[:, 1:-3],
                implementation="triton")
    assert_close(TOLERANCE, wide_out[:, 1:-3], pages.read(1), *reference(wide[:, 2:-3], weights))
    assert (wide_out[:, [0, -1, -2, -3]] == 7).all()
