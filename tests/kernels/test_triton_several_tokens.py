"""Several tokens a sequence, as in speculative decoding: each token is a step, from the slot of the last accepted."""

from typing import NamedTuple

import pytest
import torch
from interpreted_triton import interpreted
from random_layers import VARIANTS, Pages, Variant, random_projected, random_states

from vllm_mamba3.kernels import Mamba3Layout, mamba3_step


class Sequence(NamedTuple):
    slots: list[int]
    length: int
    accepted: int
    goes_on: bool = True


SEQUENCES = {
    "from the first token's own slot": Sequence([1, 2, 3], 3, 1),
    "from a slot beyond its tokens": Sequence([4, 5, 6], 1, 3),
    "padding": Sequence([0, 0, 0], 2, 1),
    "no tokens": Sequence([7, 8, 9], 0, 2),
    "starts": Sequence([10, 11, 12], 2, 2, goes_on=False),
    "over the slot it came from": Sequence([13, 14, 15], 3, 2),
    "padding below 0": Sequence([-1, -1, -1], 1, 3),
}
UNTOUCHED = [0, 5, 6, 7, 8, 9, 12]  # the null block, states that are read alone, what no token has
FREE = 16  # from here on, a slot a sequence, where the same tokens are taken one by one
SMALL = Variant(Mamba3Layout(1, 4, 8, 1, 3))


@pytest.fixture(scope="module", params=["triton", "torch"])
def implementation(request):
    if request.param == "torch":
        yield "torch"
        return
    with interpreted():
        yield "triton"


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def assert_same(found, expected, implementation):
    """To the bit, for the kernel. Matrix products of another batch size may add up in another order."""
    if implementation == "triton":
        assert torch.equal(found, expected)
    else:
        rtol = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[found.dtype]
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("name, dtype, ssm_dtype", [
    ("siso", torch.float32, torch.float32), ("siso", torch.float16, torch.bfloat16),
    ("mimo-rank-2-groups", torch.float32, torch.float32)], ids=["siso", "siso-16-bits", "mimo"])
def test_each_token_is_a_step(implementation, name, dtype, ssm_dtype):
    layer, sequences = VARIANTS[name], list(SEQUENCES.values())
    weights, size = layer.weights(torch.float32), layer.layout
    pages, initial = Pages(size, dtype, FREE + len(sequences), ssm_dtype), random_states(size, 7, 1, dtype)
    for index, sequence in enumerate(sequences):
        if sequence.goes_on and sequence.slots[0] > 0:
            pages.write(sequence.slots[sequence.accepted - 1], initial, index)
            pages.write(FREE + index, initial, index)
    before = pages.bytes[UNTOUCHED].clone()
    ends = torch.tensor([0, *(sequence.length for sequence in sequences)]).cumsum(0).int()
    rows = random_projected(size, int(ends[-1]) + 2, 2, dtype)
    out = torch.full((len(rows), size.inner_size), torch.nan, dtype=dtype)
    mamba3_step(rows, weights, pages.pools, int32(*(sequence.slots for sequence in sequences)), out,
                torch.tensor([sequence.goes_on for sequence in sequences]), cu_seqlens=ends,
                num_accepted_tokens=int32(*(sequence.accepted for sequence in sequences)),
                implementation=implementation)
    assert torch.equal(pages.bytes[UNTOUCHED], before)
    assert out[len(rows) - 2 :].isnan().all()  # rows of no sequence
    expected = torch.empty_like(out[:1])
    for index, sequence in enumerate(sequences):
        kept = []
        for token in range(sequence.length):
            row = slice(int(ends[index]) + token, int(ends[index]) + token + 1)
            if sequence.slots[0] <= 0:
                assert not out[row].any()
                continue
            goes_on = torch.tensor([sequence.goes_on or token > 0])
            mamba3_step(rows[row], weights, pages.pools, int32(FREE + index), expected, goes_on,
                        implementation=implementation)
            assert_same(out[row], expected, implementation)
            kept.append(pages.read(FREE + index))
        for slot, states in zip(sequence.slots, kept):
            for a, b in zip(pages.read(slot), states):
                assert_same(a, b, implementation)


def two_sequences(implementation, **changes):
    """The output and the pages after two tokens of one sequence and one of another, both under way."""
    pages, initial = Pages(SMALL.layout, torch.float32, 6), random_states(SMALL.layout, 4, 1, torch.float32)
    for slot in range(1, 5):
        pages.write(slot, initial, slot - 1)
    out = torch.full((3, SMALL.layout.inner_size), torch.nan)
    arguments = dict(slots=int32([1, 2], [3, 4]), cu_seqlens=int32(0, 2, 3), num_accepted_tokens=int32(1, 2))
    mamba3_step(random_projected(SMALL.layout, 3, 2, torch.float32), SMALL.weights(torch.float32), pages.pools, out=out,
                implementation=implementation, **arguments | changes)
    return out, pages.bytes


def test_without_flags_all_go_on(implementation):
    found = two_sequences(implementation, has_initial_state=None)
    assert all(map(torch.equal, found, two_sequences(implementation, has_initial_state=torch.tensor([True, True]))))


@pytest.mark.parametrize("slot", [0, -1])
@pytest.mark.parametrize("token", [0, 1])
def test_a_token_without_a_slot_touches_no_state(implementation, slot, token):
    """In a sequence whose other token has one: the output is zero, the null block stays, and so does its neighbour."""
    lengths = dict(cu_seqlens=int32(0, 1, 3), num_accepted_tokens=int32(1, 2 - token))
    whole, _ = two_sequences(implementation, **lengths)
    slots = int32([1, 2], [3, 4])
    slots[1, token] = slot
    out, pages = two_sequences(implementation, slots=slots, **lengths)
    assert (pages[[0, 5]] == -1).all()
    assert not out[1 + token].any()
    assert_same(out[0], whole[0], implementation)


def test_a_sequence_that_is_padding_stays_so(implementation):
    """Its last accepted token had no slot: what slots its tokens have now makes no difference."""
    out, pages = two_sequences(implementation, slots=int32([1, 2], [3, 0]), cu_seqlens=int32(0, 1, 3))
    assert not out[1:].any() and (pages[[0, 5]] == -1).all()
    expected, _ = two_sequences(implementation, slots=int32([1, 2], [0, 0]), cu_seqlens=int32(0, 1, 3))
    assert_same(out[0], expected[0], implementation)
    out, pages = two_sequences(implementation, slots=int32([3, 4, 0], [1, 2, 5]), cu_seqlens=int32(0, 2, 3),
                               num_accepted_tokens=int32(3, 1))
    untouched = Pages(SMALL.layout, torch.float32, 6)
    for slot in range(1, 5):
        untouched.write(slot, random_states(SMALL.layout, 4, 1, torch.float32), slot - 1)
    assert not out[:2].any() and torch.equal(pages[[0, 3, 4, 5]], untouched.bytes[[0, 3, 4, 5]])


def test_more_sequences_than_rows(implementation):
    """As when most of a batch has nothing to do in this step."""
    out, pages = two_sequences(implementation, cu_seqlens=int32(0, 2, 3))
    more = dict(slots=int32([1, 2], [3, 4], [5, 0], [0, 0], [-1, -1]), cu_seqlens=int32(0, 2, 3, 3, 3, 3),
                num_accepted_tokens=int32(1, 2, 1, 1, 1))
    assert all(map(torch.equal, two_sequences(implementation, **more), (out, pages)))


@pytest.mark.parametrize("name, column", {
    "slots": int32([1, 3], [2, 4]).t(),
    "has_initial_state": torch.tensor([[True, True], [False, False]])[:, 0],
    "cu_seqlens": int32([0, 1], [2, 2], [3, 3])[:, 0],
    "num_accepted_tokens": int32([1, 1], [2, 1])[:, 0],
}.items(), ids=lambda value: value if isinstance(value, str) else "strided")
def test_arguments_with_any_stride(implementation, name, column):
    """Columns of something larger are as good as rows of their own."""
    assert not column.is_contiguous()
    expected = two_sequences(implementation, **{name: column.contiguous()})
    assert all(map(torch.equal, two_sequences(implementation, **{name: column}), expected))


@pytest.mark.parametrize("ssm_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stochastic_rounding_is_that_of_a_step_of_the_same_row(ssm_dtype):
    """A row's random numbers depend on the seed and on where the row is, whichever sequence it belongs to."""
    size, weights = SMALL.layout, SMALL.weights(torch.float32)
    rows, initial = random_projected(size, 3, 2, torch.float32), random_states(size, 2, 1, torch.float32)
    pages, seed = Pages(size, torch.float32, 7, ssm_dtype), torch.tensor([11])
    for sequence, slots in enumerate(([1, 5], [3, 6])):
        for slot in slots:
            pages.write(slot, initial, sequence)
    out, expected = (torch.empty(3, size.inner_size) for _ in range(2))
    with interpreted():
        mamba3_step(rows, weights, pages.pools, int32([1, 2], [3, 4]), out, cu_seqlens=int32(0, 2, 3),
                    num_accepted_tokens=int32(1, 1), rounding_seed=seed, implementation="triton")
        for row, (slot, single) in enumerate([(1, 5), (2, 5), (3, 6)]):
            alone = torch.zeros(3, dtype=torch.int32)
            alone[row] = single
            mamba3_step(rows, weights, pages.pools, alone, expected, rounding_seed=seed, implementation="triton")
            assert torch.equal(out[row], expected[row])
            assert all(map(torch.equal, pages.read(slot), pages.read(single)))
