"""The step around mamba_ssm's own kernel, where it is installed, against the float64 reference, and in a CUDA graph."""

import pytest
import torch
from random_layers import (
    MIMO_187M,
    SISO_187M,
    Pages,
    Variant,
    errors,
    moved,
    random_projected,
    random_states,
)

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, mamba3_step
from vllm_mamba3.kernels.reference import reference
from vllm_mamba3.kernels.step import mamba_ssm_step

VARIANTS = {
    "siso-187m": Variant(SISO_187M),
    "siso-187m-out-norm-softplus": Variant(SISO_187M, True, "softplus"),
    "mimo-187m": Variant(MIMO_187M),
    "mimo-187m-out-norm": Variant(MIMO_187M, True),
    "siso-two-tiles": Variant(Mamba3Layout(4, 128, 64, 2, 16)),
    "mimo-rank-3": Variant(Mamba3Layout(8, 64, 32, 4, 16, 3, True)),
}
ALL_VARIANTS = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
SLOTS, STARTS, LENGTH = [5, 2, 0, 3], [1], 8  # the third is padding, the second starts
# ||error|| / ||value|| against float64. A bfloat16 layer takes and returns rows and keeps k and v in 8 bits, once its
# ssm state too. The tanh in the kernel's gate has 11.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
GATE_BOUND = 5e-4


@pytest.fixture(scope="module", autouse=True)
def installed():
    try:
        mamba_ssm_step.check_available()
    except ValueError as missing:
        pytest.skip(str(missing))


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@ALL_VARIANTS
@pytest.mark.parametrize("dtype, ssm_dtype", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
def test_against_the_reference(variant, dtype, ssm_dtype):
    """Tokens of sequences that start and that go on, beside padding: output, states, and every byte of no sequence."""
    weights, size = variant.weights(torch.float64), variant.layout
    initial, pages = random_states(size, len(SLOTS), 1, dtype), Pages(size, dtype, 7, ssm_dtype, "cuda")
    initial = initial._replace(ssm=initial.ssm.to(ssm_dtype).float())
    for sequence, slot in enumerate(SLOTS):
        if slot and sequence not in STARTS:
            pages.write(slot, initial, sequence)
    outside = pages.outside([slot for slot in SLOTS if slot])
    tokens = random_projected(size, LENGTH * len(SLOTS), 2, dtype).unflatten(0, (LENGTH, len(SLOTS)))
    tokens[:, SLOTS.index(0)] = torch.nan
    outs = torch.full((LENGTH, len(SLOTS), size.inner_size), torch.nan, dtype=dtype, device="cuda")
    for token, (rows, out) in enumerate(zip(tokens.cuda(), outs)):
        goes_on = torch.tensor([token > 0 or sequence not in STARTS for sequence in range(len(SLOTS))], device="cuda")
        mamba3_step(rows, moved(weights, "cuda"), pages.pools, int32(SLOTS), out, goes_on, implementation="mamba_ssm")

    assert torch.equal(pages.outside([slot for slot in SLOTS if slot]), outside)
    assert not outs[:, SLOTS.index(0)].any()
    bounds = dict.fromkeys(("out", *Mamba3States._fields), BOUNDS[dtype])
    if weights.out_norm is None:
        bounds["out"] = max(bounds["out"], GATE_BOUND)
    for sequence, slot in enumerate(SLOTS):
        if slot:
            before = None if sequence in STARTS else Mamba3States(*(state[sequence] for state in initial))
            states = Mamba3States(*(state.cpu() for state in pages.read(slot)))
            found = errors(outs[:, sequence].cpu(), states, *reference(tokens[:, sequence], weights, before))
            assert all(found[name] <= bounds[name] for name in bounds), found


@ALL_VARIANTS
def test_in_a_cuda_graph(variant):
    """Captured on padding alone, replayed with sequences in its rows: the same bits as without a graph."""
    weights, size = moved(variant.weights(torch.float64), "cuda"), variant.layout
    rows = torch.zeros(len(SLOTS), size.projection_size, dtype=torch.bfloat16, device="cuda")
    slots, goes_on = int32([0] * len(SLOTS)), torch.zeros(len(SLOTS), dtype=torch.bool, device="cuda")
    out = torch.full((len(SLOTS), size.inner_size), torch.nan, dtype=torch.bfloat16, device="cuda")
    in_graph, eager = (Pages(size, torch.bfloat16, 7, None, "cuda") for _ in range(2))

    def step(pages, out):
        mamba3_step(rows, weights, pages.pools, slots, out, goes_on, implementation="mamba_ssm")

    step(in_graph, out)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(in_graph, out)
    assert (in_graph.bytes == -1).all()
    expected = torch.empty_like(out)
    for turn in range(2):
        rows.copy_(random_projected(size, len(SLOTS), turn, torch.bfloat16))
        slots.copy_(int32(SLOTS))
        goes_on.fill_(turn > 0)
        graph.replay()
        step(eager, expected)
        assert torch.equal(out, expected) and torch.equal(in_graph.bytes, eager.bytes)
