"""The torch step, through its door and as it runs on a GPU, against the reference token by token."""

import pytest
import torch
from random_layers import (
    TOLERANCE,
    VARIANTS,
    Pages,
    assert_close,
    errors,
    random_projected,
    random_states,
    random_weights,
)
from step_checks import check_batch_of_sequences, check_keys_are_rounded_first

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, mamba3_step
from vllm_mamba3.kernels.reference import reference
from vllm_mamba3.kernels.scan.torch_scan import chunked_scan
from vllm_mamba3.kernels.step.torch_step import step_gathered

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
ALL_VARIANTS = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def gathered(projected, weights, pools, slots, out, has_initial_state=None):
    """The door's signature around what runs on a GPU."""
    step_gathered(projected, weights, pools, slots, has_initial_state, out)


STEPS = pytest.mark.parametrize("step", [mamba3_step, gathered], ids=["door", "as-on-a-gpu"])


def of(states: Mamba3States, sequence: int) -> Mamba3States:
    return Mamba3States(*(state[sequence] for state in states))


@ALL_VARIANTS
@DTYPES
@STEPS
def test_batch_of_sequences_is_each_alone(variant, dtype, step):
    check_batch_of_sequences(step, variant, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["siso", "mimo-rank-4"])
@STEPS
def test_keys_are_rounded_first(name, dtype, step):
    check_keys_are_rounded_first(step, VARIANTS[name], dtype)


@STEPS
def test_only_padding(step):
    variant = VARIANTS["siso"]
    pages = Pages(variant.layout, torch.float32, 3)
    before, out = pages.bytes.clone(), torch.full((2, variant.layout.inner_size), torch.nan)
    step(torch.full((2, variant.layout.projection_size), torch.nan), variant.weights(torch.float32), pages.pools,
         torch.tensor([0, -1], dtype=torch.int32), out)
    assert torch.equal(pages.bytes, before) and not out.any()


@STEPS
@pytest.mark.parametrize("spoilt", ["row", "state"])
def test_a_sequence_does_not_spoil_its_neighbours(step, spoilt):
    variant = VARIANTS["mimo-rank-4"]
    weights, size = variant.weights(torch.float32), variant.layout
    states, rows = random_states(size, 3, 0, torch.float32), random_projected(size, 3, 1, torch.float32)
    expected = [reference(rows[i : i + 1], weights, of(states, i)) for i in range(3)]
    pages = Pages(size, torch.float32, 4)
    for slot in (1, 2, 3):
        pages.write(slot, states, slot - 1)
    for tensor in (rows,) if spoilt == "row" else (pool[1:] for pool in pages.pools):
        tensor[1] = torch.nan
    out = torch.empty(3, size.inner_size)
    step(rows, weights, pages.pools, torch.tensor([1, 2, 3], dtype=torch.int32), out)
    assert not out[1].isfinite().any()
    for i in (0, 2):
        assert_close(2e-5, out[i : i + 1], pages.read(i + 1), *expected[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ALL_VARIANTS
@STEPS
def test_half_precision_is_as_good_as_eager(variant, dtype, step):
    """After 30 tokens the error against float64 is at most twice that of the reference in the same precision."""
    weights, size = variant.weights(torch.float32), variant.layout
    rows, initial = random_projected(size, 30, 1, dtype), random_states(size, 1, 2, dtype)
    true = reference(rows, weights, of(initial, 0))
    eager_out, eager_states = reference(rows, weights, of(initial, 0), torch.float32, dtype)
    eager = errors(eager_out.to(dtype), eager_states, *true)
    pages, out = Pages(size, dtype, 2), torch.empty(30, size.inner_size, dtype=dtype)
    pages.write(1, initial, 0)
    for token in range(30):
        step(rows[token : token + 1], weights, pages.pools, torch.ones(1, dtype=torch.int32), out[token : token + 1])
    found = errors(out, pages.read(1), *true)
    assert all(found[name] <= 2 * eager[name] for name in found), (found, eager)


def test_hours_of_decoding_keep_their_angle():
    """10,000 steps in float32, every angle turning one way, against float64."""
    layout = Mamba3Layout(2, 1, 8, 1, 4)
    weights, rows = random_weights(layout, 0, torch.float32), random_projected(layout, 10_000, 1, torch.float32)
    rows[:, -4:].abs_()
    pages, slots, out = Pages(layout, torch.float32, 2), torch.ones(1, dtype=torch.int32), torch.empty(1, 2)
    mamba3_step(rows[:1], weights, pages.pools, slots, out, torch.tensor([False]))
    for row in rows[1:].split(1):
        mamba3_step(row, weights, pages.pools, slots, out)
    true_out, true = chunked_scan(rows.double(), weights.to(torch.float64), [len(rows)])
    assert_close(5e-5, out, pages.read(1), true_out[-1:], of(true, 0))
