"""The torch step and scan on a GPU against the float64 reference, and the step in a CUDA graph."""

import pytest
import random_layers
import torch

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, mamba3_scan, mamba3_step
from vllm_mamba3.kernels.reference import reference

LAYOUTS = {
    "siso, 187m": Mamba3Layout(24, 64, 128, 1, 32),
    "mimo, 187m": Mamba3Layout(24, 64, 128, 1, 32, rank=4, is_mimo=True),
    "odd": Mamba3Layout(6, 12, 22, 3, 5),
}
LENGTHS = [1, 63, 64, 65, 0, 17]
SLOTS = [5, 2, 0, 7, 3, 1]  # the third is padding
STARTED = [True, False, True, True, True, False]
# ||error|| / ||value|| against float64. A bfloat16 layer keeps k and v, and takes and returns rows, in 8 bits.
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 1e-2}


@pytest.fixture(params=BOUNDS, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=LAYOUTS)
def layer(request, dtype):
    """Weights and states of a layer on the GPU, in 9 slots, with the null block full of NaN."""
    layout = LAYOUTS[request.param]
    weights = random_layers.random_weights(layout, 0)
    pools = random_layers.random_states(layout, 9, 1, dtype)
    for pool in pools:
        pool[0] = torch.nan
    return weights, Mamba3States(*(pool.cuda() for pool in pools))


def relative(value, expected):
    value, expected = value.detach().cpu().double(), expected.double()
    return ((value - expected).norm() / expected.norm()).item()


def check(weights, before, pools, slot, started, rows, out, bound):
    """One sequence's output and states against the float64 reference."""
    initial = Mamba3States(*(pool[slot].cpu() for pool in before)) if started else None
    expected, states = reference(rows.cpu(), weights, initial)
    assert relative(out, expected) < bound
    turn = pools.angle[slot].cpu().double() - states.angle
    assert torch.remainder(turn + torch.pi, 2 * torch.pi).sub(torch.pi).abs().max() < 10 * bound
    for name in ("ssm", "k", "v"):
        assert relative(getattr(pools, name)[slot], getattr(states, name)) < bound


def test_scan(layer, dtype):
    weights, pools = layer
    before = Mamba3States(*(pool.clone() for pool in pools))
    rows = random_layers.random_projected(weights.layout, sum(LENGTHS), 2, dtype).cuda()
    out = torch.full((len(rows), weights.layout.inner_size), torch.nan, dtype=dtype, device="cuda")
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device="cuda")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mamba3_scan(rows, random_layers.moved(weights, "cuda", wide), pools, slots, ends.int().cuda(),
                torch.tensor(STARTED).cuda(), out, implementation="torch")
    for index, (slot, started, length) in enumerate(zip(SLOTS, STARTED, LENGTHS)):
        tokens = slice(int(ends[index]), int(ends[index + 1]))
        if slot and length:
            check(weights, before, pools, slot, started, rows[tokens], out[tokens], BOUNDS[dtype])
    for pool, old in zip(pools, before):
        for slot in set(range(9)) - {s for s, length in zip(SLOTS, LENGTHS) if s and length}:
            assert torch.equal(pool[slot].view(torch.uint8), old[slot].view(torch.uint8))


def test_step_in_a_cuda_graph(layer, dtype):
    """Captured on padding alone, replayed twice with sequences in its rows."""
    weights, pools = layer
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    on_device = random_layers.moved(weights, "cuda", wide)
    rows = torch.zeros(len(SLOTS), weights.layout.projection_size, dtype=dtype, device="cuda")
    slots = torch.zeros(len(SLOTS), dtype=torch.int32, device="cuda")
    started = torch.zeros(len(SLOTS), dtype=torch.bool, device="cuda")
    out = torch.full((len(rows), weights.layout.inner_size), torch.nan, dtype=dtype, device="cuda")

    def step():
        mamba3_step(rows, on_device, pools, slots, out, started, implementation="torch")

    step()  # whatever is set up at the first call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(2):
        before = Mamba3States(*(pool.clone() for pool in pools))
        rows.copy_(random_layers.random_projected(weights.layout, len(SLOTS), 3 + turn, dtype))
        slots.copy_(torch.tensor(SLOTS))
        started.copy_(torch.tensor(STARTED))
        graph.replay()
        torch.cuda.synchronize()
        for index, (slot, has_state) in enumerate(zip(SLOTS, STARTED)):
            if slot:
                one = slice(index, index + 1)
                check(weights, before, pools, slot, has_state, rows[one], out[one], BOUNDS[dtype])
        for pool, old in zip(pools, before):
            for slot in set(range(9)) - set(SLOTS) | {0}:
                assert torch.equal(pool[slot].view(torch.uint8), old[slot].view(torch.uint8))
