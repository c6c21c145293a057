"""The Triton step's stochastic rounding of an ssm state of 16 bits, under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from interpreted_triton import interpreted
from random_layers import Pages, Variant, random_projected, random_states

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, mamba3_step

LAYER = Variant(Mamba3Layout(1, 8, 16, 1, 4))  # an ssm state of 128 elements
DTYPES = pytest.mark.parametrize("ssm_dtype", [torch.bfloat16, torch.float16], ids=str)
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}  # the distance between subnormal numbers


@pytest.fixture(scope="module", autouse=True)
def triton():
    with interpreted() as modules:
        yield modules


def random_initial(ssm_dtype):
    states = random_states(LAYER.layout, 1, 1, torch.float32)
    return states._replace(ssm=states.ssm.to(ssm_dtype).float())


def ssm_after(row, initial: Mamba3States, ssm_dtype, seed: int | None, sequences: int = 1) -> torch.Tensor:
    """The ssm states after one step of so many sequences that are all alike."""
    pages, out = Pages(LAYER.layout, torch.float32, sequences + 1, ssm_dtype), torch.empty(sequences, 8)
    slots = torch.arange(1, sequences + 1, dtype=torch.int32)
    for slot in slots.tolist():
        pages.write(slot, initial, 0)
    mamba3_step(row.expand(sequences, -1), LAYER.weights(torch.float32), pages.pools, slots, out,
                rounding_seed=None if seed is None else torch.tensor([seed]), implementation="triton")
    return pages.pools.ssm[1:].float()


def in_steps(rounded, exact, ssm_dtype):
    """How far each element was rounded, in distances between the dtype's numbers there."""
    distance = torch.finfo(ssm_dtype).eps * 2 ** exact.abs().log2().floor()
    return (rounded - exact) / distance.clamp(min=SMALLEST[ssm_dtype])


@pytest.mark.parametrize("ssm_dtype, scale", [
    pytest.param(torch.bfloat16, 1, id="bfloat16"), pytest.param(torch.float16, 1, id="float16"),
    pytest.param(torch.float16, 2.0**-21, id="float16-subnormal")])
def test_to_a_neighbour_and_on_average_to_the_value(ssm_dtype, scale):
    row, initial = random_projected(LAYER.layout, 1, 2, torch.float32), random_initial(ssm_dtype)
    if scale != 1:  # a state that decays: nothing is added to it
        row[:, 8:16], initial.v[:] = 0, 0
        initial = initial._replace(ssm=(scale * initial.ssm).to(ssm_dtype).float())
    exact = ssm_after(row, initial, torch.float32, None)
    assert scale == 1 or exact.abs().max() < torch.finfo(ssm_dtype).tiny
    seeds = [*range(36), -1, 2**40 + 1, 2**63 - 1, -(2**63)]
    difference = in_steps(torch.cat([ssm_after(row, initial, ssm_dtype, seed) for seed in seeds]), exact, ssm_dtype)
    assert (difference.abs() < 1).all()
    # Of standard deviation 1/2 at most: each element's mean, and the mean of all.
    assert (difference.mean(0).abs() < 5 * 0.5 / len(seeds) ** 0.5).all()
    assert difference.mean().abs() < 4 * 0.5 / difference.numel() ** 0.5


@DTYPES
def test_a_seed_is_its_bits(ssm_dtype):
    row, initial = random_projected(LAYER.layout, 1, 2, torch.float32), random_initial(ssm_dtype)
    first, again, other = (ssm_after(row, initial, ssm_dtype, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


@DTYPES
def test_sequences_are_rounded_apart(ssm_dtype):
    """The same state in two rows of a batch: how one is rounded says nothing of how the other is."""
    row, initial = random_projected(LAYER.layout, 1, 2, torch.float32), random_initial(ssm_dtype)
    exact = ssm_after(row, initial, torch.float32, None)
    pairs = torch.stack([ssm_after(row, initial, ssm_dtype, seed, 2) for seed in range(10)])
    one, two = in_steps(pairs, exact, ssm_dtype).unbind(1)
    assert (one * two).mean().abs() < 4 * 0.25 / one.numel() ** 0.5


def test_heads_are_rounded_apart():
    """Two heads with the same weights and inputs: how one is rounded says nothing of how the other is."""
    size = replace(LAYER.layout, num_heads=2)
    one = LAYER.weights(torch.float32)
    tensors = {name: tensor.repeat(2, *(1,) * (tensor.dim() - 1)) for name, tensor in zip(one.TENSORS, one.tensors())
               if tensor is not None and not name.endswith("norm")}
    weights, initial = replace(one, layout=size, **tensors), random_initial(torch.bfloat16)
    row = random_projected(LAYER.layout, 1, 2, torch.float32)
    parts = row.split(LAYER.layout.projection_widths, -1)
    row = torch.cat([part if i in (2, 3, 7) else part.repeat(1, 2) for i, part in enumerate(parts)], -1)
    exact, rounded = ssm_after(random_projected(LAYER.layout, 1, 2, torch.float32), initial, torch.float32, None), []
    for seed in range(10):
        pages = Pages(size, torch.float32, 2, torch.bfloat16)
        pages.write(1, Mamba3States(*(state.repeat_interleave(2, 2 if name == "k" else 1)
                                      for name, state in initial._asdict().items())), 0)
        mamba3_step(row, weights, pages.pools, torch.ones(1, dtype=torch.int32), torch.empty(1, 16),
                    rounding_seed=torch.tensor([seed]), implementation="triton")
        rounded.append(pages.pools.ssm[1].float())
    first, second = in_steps(torch.stack(rounded), exact, torch.bfloat16).unbind(1)
    assert (first * second).mean().abs() < 4 * 0.25 / first.numel() ** 0.5


def test_every_bit_of_a_seed_counts():
    """Also the high half; and the second row's numbers are not the first row's of the next seed."""
    row, initial = random_projected(LAYER.layout, 1, 2, torch.float32), random_initial(torch.bfloat16)
    low, high = (ssm_after(row, initial, torch.bfloat16, seed) for seed in (1, 2**40 + 1))
    assert not torch.equal(low, high)
    assert not torch.equal(ssm_after(row, initial, torch.bfloat16, 0, 2)[1:], low)


@DTYPES
def test_infinities_and_nan_stay(ssm_dtype):
    row, initial = random_projected(LAYER.layout, 1, 2, torch.float32), random_initial(ssm_dtype)
    initial.ssm.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    rounded = ssm_after(row, initial, ssm_dtype, 0).view(-1)
    assert rounded[0].isnan() and rounded[1] == torch.inf and rounded[2] == -torch.inf
    assert rounded[3:].isfinite().all()


@DTYPES
def test_without_a_seed_to_the_nearest(ssm_dtype):
    row, initial = random_projected(LAYER.layout, 1, 2, torch.float32), random_initial(ssm_dtype)
    exact = ssm_after(row, initial, torch.float32, None)
    assert torch.equal(ssm_after(row, initial, ssm_dtype, None), exact.to(ssm_dtype).float())
