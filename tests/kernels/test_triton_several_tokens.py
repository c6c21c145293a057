"""Several tokens a sequence, as in speculative decoding: each token is a step, from the slot of the last one accepted."""

import pytest
import torch
from interpreted_triton import interpreted
from random_layers import VARIANTS, Pages, random_projected, random_states

from vllm_mamba3.kernels import mamba3_step

SLOTS = [[1, 2, 3], [4, 5, 6], [0, 0, 0], [7, 8, 9], [10, 11, 12]]
LENGTHS, ACCEPTED = [3, 1, 2, 0, 2], [1, 3, 1, 2, 2]
GOES_ON = [True, True, True, True, False]
SPARE = 13  # where the same sequences are taken step by step


@pytest.fixture(scope="module", params=["triton", "torch"])
def implementation(request):
    if request.param == "torch":
        yield "torch"
        return
    with interpreted():
        yield "triton"


@pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["siso", "mimo-rank-2-groups"])
def test_each_token_is_a_step(implementation, name, ssm_dtype):
    layer = VARIANTS[name]
    weights, size = layer.weights(torch.float32), layer.layout
    pages, initial = Pages(size, torch.float32, SPARE + 5, ssm_dtype), random_states(size, 5, 1, torch.float32)
    for sequence in (0, 1, 3):
        pages.write(SLOTS[sequence][ACCEPTED[sequence] - 1], initial, sequence)
        pages.write(SPARE + sequence, initial, sequence)
    untouched = [0, 6, 7, 8, 9, 12]  # the null block, a state that was read alone, what was not written
    before = pages.bytes[untouched].clone()
    rows = random_projected(size, sum(LENGTHS) + 2, 2, torch.float32)
    out = torch.full((len(rows), size.inner_size), torch.nan)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    mamba3_step(rows, weights, pages.pools, slots, out, torch.tensor(GOES_ON), cu_seqlens=ends,
                num_accepted_tokens=torch.tensor(ACCEPTED, dtype=torch.int32), implementation=implementation)
    assert torch.equal(pages.bytes[untouched], before)
    assert out[len(rows) - 2 :].isnan().all()  # rows of no sequence
    expected = torch.empty(1, size.inner_size)
    for sequence, length in enumerate(LENGTHS):
        for token in range(length):
            row = slice(int(ends[sequence]) + token, int(ends[sequence]) + token + 1)
            if SLOTS[sequence][0] == 0:
                assert not out[row].any()
                continue
            spare = torch.tensor([SPARE + sequence], dtype=torch.int32)
            goes_on = torch.tensor([GOES_ON[sequence] or token > 0])
            mamba3_step(rows[row], weights, pages.pools, spare, expected, goes_on, implementation=implementation)
            torch.testing.assert_close(out[row], expected, rtol=1e-6, atol=1e-6)
            for a, b in zip(pages.read(SLOTS[sequence][token]), pages.read(SPARE + sequence)):
                torch.testing.assert_close(a, b, rtol=1e-6 if a.dtype == torch.float32 else 1e-2, atol=1e-6)
