"""The Triton scan on a GPU, at full size. With a memory checker:

    compute-sanitizer --tool memcheck pytest tests/gpu/test_triton_scan.py -k short
"""

from dataclasses import replace

import golden
import pytest
import torch
from full_size import ALL, DEVICE, DTYPES, OFFICIAL, int32, of, on_cpu
from random_layers import Pages, errors, moved, random_projected, random_states, random_weights

from vllm_mamba3.kernels import Mamba3Layout, chunked_scan, mamba3_scan
from vllm_mamba3.kernels.reference import reference


def scan(pages, weights, rows, slots, lengths, goes_on, computed=None):
    """The output; weights and rows on the GPU."""
    out = torch.full((len(rows), weights.layout.inner_size), torch.nan, dtype=rows.dtype, device=DEVICE)
    ends = int32([0, *lengths]).cumsum(0).int()
    mamba3_scan(rows, weights, pages.pools, int32(slots), ends, torch.tensor(goes_on, device=DEVICE), out,
                None if computed is None else int32(computed), implementation="triton")
    return out


@ALL
@DTYPES
@pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_short_packed_sequences_are_as_near_float64_as_an_eager_evaluation(layout, dtype, ssm_dtype):
    """At most twice its error, new and under way, beside empty ones and padding; no other byte is touched."""
    weights = random_weights(layout, 0)
    batch = [(1, 3, True), (65, 1, False), (0, 5, True), (17, 0, True), (40, 6, True)]
    lengths, slots, goes_on = zip(*batch)
    initial, rows = random_states(layout, len(batch), 1, dtype), random_projected(layout, sum(lengths), 2, dtype)
    initial = initial._replace(ssm=initial.ssm.to(ssm_dtype).float())
    pages = Pages(layout, dtype, 8, ssm_dtype, DEVICE)
    for sequence, (_, slot, started) in enumerate(batch):
        if started and slot:
            pages.write(slot, initial, sequence)
    outside = pages.outside([1, 3, 6])
    out = scan(pages, moved(weights, DEVICE), rows.to(DEVICE), slots, lengths, goes_on)
    assert torch.equal(pages.outside([1, 3, 6]), outside)
    for sequence, (part, row_out) in enumerate(zip(rows.split(lengths), out.cpu().split(lengths))):
        if not slots[sequence]:
            assert not row_out.any()
        elif len(part):
            states = of(initial, sequence) if goes_on[sequence] else None
            true = reference(part, weights, states)
            eager_out, eager = reference(part, weights, states, torch.float32, dtype)
            allowed = errors(eager_out.to(dtype), eager._replace(ssm=eager.ssm.to(ssm_dtype)), *true)
            found = errors(row_out, on_cpu(pages.read(slots[sequence])), *true)
            assert all(found[name] <= 2 * allowed[name] for name in found), (sequence, found, allowed)


@OFFICIAL
@DTYPES
def test_same_bits_alone_packed_and_repeated(layout, dtype):
    weights, lengths = moved(random_weights(layout, 0), DEVICE), [700, 1, 64, 1300]
    rows, initial = random_projected(layout, sum(lengths), 1, dtype).to(DEVICE), random_states(layout, 4, 2, dtype)

    def run(order):
        pages, parts = Pages(layout, dtype, 5, device=DEVICE), rows.split(lengths)
        for slot in range(1, 5):
            pages.write(slot, initial, slot - 1)
        out = scan(pages, weights, torch.cat([parts[i] for i in order]), [i + 1 for i in order],
                   [lengths[i] for i in order], [True] * len(order))
        return dict(zip(order, out.split([lengths[i] for i in order]))), pages

    out, pages = run([0, 1, 2, 3])
    for _ in range(20):
        again, pages_again = run([0, 1, 2, 3])
        assert all(torch.equal(out[i], again[i]) for i in out) and torch.equal(pages.bytes, pages_again.bytes)
    for order in ([3, 1, 0, 2], [0], [1], [2], [3]):
        other, other_pages = run(order)
        for i in order:
            assert torch.equal(other[i], out[i])
            assert all(map(torch.equal, other_pages.read(i + 1), pages.read(i + 1)))


@OFFICIAL
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "from-the-piece"])
def test_split_anywhere_is_whole(layout, aligned):
    weights, length = moved(random_weights(layout, 0), DEVICE), 1200
    rows = random_projected(layout, length, 1, torch.float32).to(DEVICE)
    whole = Pages(layout, torch.float32, 2, device=DEVICE)
    out = scan(whole, weights, rows, [1], [length], [False])
    for cut in (1, 17, 63, 64, 65, 511, 512, 513, 777, 1199):
        pages = Pages(layout, torch.float32, 2, device=DEVICE)
        first = scan(pages, weights, rows[:cut], [1], [cut], [False], [0] if aligned else None)
        second = scan(pages, weights, rows[cut:], [1], [length - cut], [True], [cut] if aligned else None)
        found = errors(torch.cat((first, second)), pages.read(1), out, whole.read(1))
        assert all(error < 1e-5 for error in found.values()), (cut, found)


@pytest.mark.parametrize("layout", [Mamba3Layout(2, 64, 128, 1, 32), Mamba3Layout(2, 64, 128, 1, 32, 4, True)],
                         ids=["siso", "mimo"])
def test_1_000_000_tokens(layout):
    """In pieces of 8,192: every state as near float64's as it is after the last piece alone."""
    weights, pages, true = random_weights(layout, 0), Pages(layout, torch.float32, 2, device=DEVICE), None
    narrow, wide = moved(weights, DEVICE), moved(weights, DEVICE, torch.float64)
    for piece in range(123):
        rows = random_projected(layout, 8192, piece, torch.float32).to(DEVICE)
        out = scan(pages, narrow, rows, [1], [8192], [piece > 0])
        true_out, true = chunked_scan(rows.double(), wide, [8192], true)
    found = errors(out, pages.read(1), true_out, of(true, 0))
    assert all(error < 2e-5 for error in found.values()), found


@pytest.mark.skipif(not golden.FOLDER.is_dir(), reason="the captured runs of the official kernels are not here")
@pytest.mark.parametrize("name", golden.ERRORS)
def test_captured_runs_of_the_official_kernels(name):
    rows, weights, captured = golden.load_rows(name)
    batch, length = captured.shape[:2]
    pages = Pages(weights.layout, torch.float32, batch + 1, device=DEVICE)
    out = scan(pages, moved(weights, DEVICE), rows.float().to(DEVICE), range(1, batch + 1), batch * [length],
               batch * [False])
    out = out.cpu().double().view(captured.shape)
    assert (out - captured).norm() <= 1.1 * golden.ERRORS[name] * captured.norm()


@OFFICIAL
def test_memory_of_a_long_prompt(layout):
    """131,072 tokens of the 1.5b's layer take at most 2 GB beside rows and output."""
    layout = replace(layout, num_heads=64)
    rows = torch.randn(131_072, layout.projection_size, dtype=torch.bfloat16, device=DEVICE)
    pages, weights = Pages(layout, torch.bfloat16, 2, device=DEVICE), moved(random_weights(layout, 0), DEVICE)
    scan(pages, weights, rows[:64], [1], [64], [False])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = scan(pages, weights, rows, [1], [len(rows)], [False])
    assert torch.cuda.max_memory_allocated() - before - out.nbytes <= 2e9
    assert out.isfinite().all()
