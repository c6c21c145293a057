"""The Triton step on a GPU, at full size. With a memory checker (an hour and more for all of it, so some of it):

    compute-sanitizer --tool memcheck pytest tests/gpu/test_triton_step.py -k "short or spare"
"""

import pytest
import torch
from full_size import ALL, DTYPES, LAYOUTS, OFFICIAL, int32, of, on_cpu
from random_layers import Pages, errors, moved, random_projected, random_states, random_weights

from vllm_mamba3.kernels import Mamba3States, chunked_scan, mamba3_step
from vllm_mamba3.kernels.reference import reference

SSM_DTYPES = pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def rounded_reference(rows, weights, states, dtype, kv_dtype, ssm_dtype):
    """The reference token by token, with the ssm state kept in `ssm_dtype` between them."""
    outs = []
    for row in rows.split(1):
        out, states = reference(row, weights, states, dtype, kv_dtype)
        states = states._replace(ssm=states.ssm.to(ssm_dtype).to(dtype))
        outs.append(out)
    return torch.cat(outs), states


@ALL
@DTYPES
@SSM_DTYPES
def test_short_sequences_are_as_near_float64_as_an_eager_evaluation(layout, dtype, ssm_dtype):
    """Two sequences of 8 tokens, one of them new, beside padding: at most twice an eager evaluation's error."""
    weights, slots, length = random_weights(layout, 0), [3, 0, 1], 8
    initial, rows = random_states(layout, 3, 1, dtype), random_projected(layout, 3 * length, 2, dtype)
    initial = initial._replace(ssm=initial.ssm.to(ssm_dtype).float())
    rows = rows.unflatten(0, (length, 3))
    pages = Pages(layout, dtype, 5, ssm_dtype, "cuda")
    pages.write(3, initial, 0)
    outside = pages.outside([1, 3])
    out = torch.full((length, 3, layout.inner_size), torch.nan, dtype=dtype, device="cuda")
    for token in range(length):
        goes_on = torch.tensor([True, True, token > 0], device="cuda")
        mamba3_step(rows[token].cuda(), moved(weights, "cuda"), pages.pools, int32(slots), out[token], goes_on)
    assert torch.equal(pages.outside([1, 3]), outside)
    assert not out[:, 1].any()
    for sequence, states in ((0, of(initial, 0)), (2, None)):
        true = reference(rows[:, sequence], weights, states)
        eager = rounded_reference(rows[:, sequence], weights, states, torch.float32, dtype, ssm_dtype)
        allowed = errors(eager[0].to(dtype), eager[1], *true)
        found = errors(out[:, sequence].cpu(), on_cpu(pages.read(slots[sequence])), *true)
        assert all(found[name] <= 2 * allowed[name] for name in found), (found, allowed)


@OFFICIAL
@DTYPES
def test_same_bits_in_every_batch_and_every_time(layout, dtype):
    weights, states = moved(random_weights(layout, 0), "cuda"), random_states(layout, 1, 1, dtype)
    row = random_projected(layout, 1, 2, dtype).cuda()
    kept = []
    for batch, place, slot in [(1, 0, 1)] * 20 + [(2, 1, 5), (7, 3, 2), (64, 63, 40), (300, 123, 299)]:
        pages = Pages(layout, dtype, 301, None, "cuda")
        pages.bytes[:] = torch.randint(-128, 127, pages.bytes.shape, dtype=torch.int8, device="cuda")
        pages.write(slot, states, 0)
        rows = random_projected(layout, batch, batch, dtype).cuda()
        rows[place] = row
        others = [other for other in range(1, 301) if other != slot]
        slots = others[:place] + [slot] + others[place : batch - 1]
        out = torch.full((batch, layout.inner_size), torch.nan, dtype=dtype, device="cuda")
        mamba3_step(rows, weights, pages.pools, int32(slots), out)
        kept.append((out[place], *pages.read(slot)))
    for again in kept[1:]:
        assert all(map(torch.equal, again, kept[0]))


@ALL
def test_spare_bytes_around_every_state_stay(layout):
    """Full pools, full batch: nothing but the states of the slots used is written, least of all the null block."""
    weights, pages = moved(random_weights(layout, 0), "cuda"), Pages(layout, torch.bfloat16, 40, None, "cuda")
    before, slots = pages.outside([]), [*range(39, 0, -2)]
    out = torch.empty(len(slots) + 2, layout.inner_size, dtype=torch.bfloat16, device="cuda").fill_(7)
    rows = random_projected(layout, len(slots), 0, torch.bfloat16).cuda()
    mamba3_step(rows, weights, pages.pools, int32(slots), out[1:-1], torch.zeros(len(slots), device="cuda").bool())
    after = pages.bytes.clone()
    for slot in slots:
        for states in pages._states:
            after[slot, states] = before[slot, states]
    assert torch.equal(after, before)
    assert (out[0] == 7).all() and (out[-1] == 7).all() and out[1:-1].isfinite().all()


@OFFICIAL
@SSM_DTYPES
def test_short_runs_of_several_tokens_are_steps(layout, ssm_dtype):
    """To rounding, each token's state in its slot, from the state of the last token accepted."""
    weights, initial = moved(random_weights(layout, 0), "cuda"), random_states(layout, 3, 1, torch.bfloat16)
    one, several = (Pages(layout, torch.bfloat16, 16, ssm_dtype, "cuda") for _ in range(2))
    slots, lengths, accepted = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [0, 0, 0, 0]], [4, 2, 3, 1], [1, 3, 4, 1]
    for sequence in range(3):
        several.write(slots[sequence][accepted[sequence] - 1], initial, sequence)
        one.write(13 + sequence, initial, sequence)
    rows = random_projected(layout, sum(lengths) + 1, 2, torch.bfloat16).cuda()
    out = torch.full((len(rows), layout.inner_size), torch.nan, dtype=torch.bfloat16, device="cuda")
    ends = int32([0, 4, 6, 9, 10])
    mamba3_step(rows, weights, several.pools, int32(slots), out, cu_seqlens=ends, num_accepted_tokens=int32(accepted))
    expected = torch.empty_like(out[:1])
    for sequence in range(3):
        for token in range(lengths[sequence]):
            row = ends[sequence] + token
            mamba3_step(rows[row : row + 1], weights, one.pools, int32([13 + sequence]), expected)
            torch.testing.assert_close(out[row : row + 1], expected, rtol=2e-2, atol=1e-5)
            for a, b in zip(several.read(slots[sequence][token]), one.read(13 + sequence)):
                torch.testing.assert_close(a, b, rtol=1e-5 if a.dtype == torch.float32 else 2e-2, atol=1e-5)
    assert not out[9].any() and out[10].isnan().all()
    unused = [8, 13, 14, 15, 0]
    assert (several.bytes[unused] == -1).all()


@OFFICIAL
def test_100_000_steps(layout):
    """Every angle turning one way, from 0 and from 6.28: no further from float64 than twice the torch step's drift."""
    steps, piece = 100_000, 5_000
    weights = random_weights(layout, 0)
    on_device, generator = moved(weights, "cuda"), torch.Generator("cuda").manual_seed(0)
    initial = random_states(layout, 2, 1, torch.float32)
    initial.angle[0], initial.angle[1] = 0, 6.28
    pools = {name: Pages(layout, torch.float32, 3, None, "cuda") for name in ("triton", "torch")}
    for pages in pools.values():
        pages.write(1, initial, 0), pages.write(2, initial, 1)
    rows = torch.zeros(piece, 2, layout.projection_size, device="cuda")
    place, slots = torch.zeros(1, dtype=torch.long, device="cuda"), int32([1, 2])
    outs = {name: torch.zeros(2, layout.inner_size, device="cuda") for name in pools}

    def step():
        row = rows.index_select(0, place)[0]
        for name, pages in pools.items():
            mamba3_step(row, on_device, pages.pools, slots, outs[name], implementation=name)
        place.add_(1)

    true = Mamba3States(*(state.double().cuda() for state in initial))
    wide = moved(on_device, "cuda", torch.float64)
    graph = None
    for _ in range(steps // piece):
        rows.normal_(generator=generator)
        rows[..., -layout.num_angles :].abs_()
        done = 0
        if graph is None:
            step()
            done, graph = 1, torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        else:
            place.zero_()
        for _ in range(piece - done):
            graph.replay()
        packed = rows.double().transpose(0, 1).flatten(0, 1)
        true_out, true = chunked_scan(packed, wide, [piece, piece], true)
    true_out = true_out.unflatten(0, (2, piece))[:, -1].cpu()
    for sequence in range(2):
        found, allowed = (
            errors(outs[name][sequence].cpu(), on_cpu(pools[name].read(sequence + 1)), true_out[sequence],
                   on_cpu(of(true, sequence)))
            for name in ("triton", "torch"))
        print(f"after {steps} steps: triton {found}, torch {allowed}")
        assert all(found[name] <= 2 * allowed[name] + 1e-7 for name in found), (found, allowed)
        angles = pools["triton"].read(sequence + 1).angle
        assert ((angles >= 0) & (angles < 2 * torch.pi)).all()


@OFFICIAL
def test_short_replays_of_a_cuda_graph(layout):
    """Captured on padding alone, replayed with sequences in its rows."""
    weights, pages = moved(random_weights(layout, 0), "cuda"), Pages(layout, torch.bfloat16, 9, None, "cuda")
    rows = torch.zeros(6, layout.projection_size, dtype=torch.bfloat16, device="cuda")
    slots, goes_on = int32([0] * 6), torch.zeros(6, dtype=torch.bool, device="cuda")
    out = torch.full((6, layout.inner_size), torch.nan, dtype=torch.bfloat16, device="cuda")
    mamba3_step(rows, weights, pages.pools, slots, out, goes_on)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mamba3_step(rows, weights, pages.pools, slots, out, goes_on)
    assert (pages.bytes == -1).all()
    eager, expected = Pages(layout, torch.bfloat16, 9, None, "cuda"), torch.empty_like(out)
    for turn in range(2):
        rows.copy_(random_projected(layout, 6, turn, torch.bfloat16))
        slots.copy_(int32([5, 2, 0, 7, 3, 1]))
        goes_on.fill_(turn > 0)
        graph.replay()
        mamba3_step(rows, weights, eager.pools, slots, expected, goes_on)
        assert torch.equal(out, expected) and torch.equal(pages.bytes, eager.bytes)


@OFFICIAL
@pytest.mark.parametrize("ssm_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_stochastic_rounding(layout, ssm_dtype):
    """Every element is a neighbour of the exact value, and the mean over seeds is the value."""
    weights, initial = moved(random_weights(layout, 0), "cuda"), random_states(layout, 1, 1, torch.bfloat16)
    row, rounded = random_projected(layout, 1, 2, torch.bfloat16).cuda(), []
    out = torch.empty(1, layout.inner_size, dtype=torch.bfloat16, device="cuda")
    exact = Pages(layout, torch.bfloat16, 2, torch.float32, "cuda")
    initial = initial._replace(ssm=initial.ssm.to(ssm_dtype).float())
    exact.write(1, initial, 0)
    mamba3_step(row, weights, exact.pools, int32([1]), out)
    exact = exact.read(1).ssm
    for seed in (*range(200), 0):
        pages = Pages(layout, torch.bfloat16, 2, ssm_dtype, "cuda")
        pages.write(1, initial, 0)
        mamba3_step(row, weights, pages.pools, int32([1]), out, rounding_seed=torch.tensor([seed], device="cuda"))
        rounded.append(pages.read(1).ssm)
    assert torch.equal(rounded[0], rounded.pop()) and not torch.equal(rounded[0], rounded[1])
    rounded = torch.stack(rounded).float()
    step = torch.finfo(ssm_dtype).eps * exact.abs().clamp(min=torch.finfo(ssm_dtype).tiny)
    assert ((rounded - exact).abs() <= step).all()
    assert ((rounded.mean(0) - exact) / step).mean().abs() < 1e-3
    assert ((rounded.mean(0) - exact).abs() < 0.3 * step).all()


def test_short_refusal_of_another_device():
    layout = LAYOUTS["siso-odd"]
    pages = Pages(layout, torch.float32, 2, None, "cuda")
    rows, out = random_projected(layout, 1, 0, torch.float32).cuda(), torch.empty(1, layout.inner_size, device="cuda")
    with pytest.raises(ValueError, match="expects the weights on cuda:0"):
        mamba3_step(rows, random_weights(layout, 0, torch.float32), pages.pools, int32([1]), out)
