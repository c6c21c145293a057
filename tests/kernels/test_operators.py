"""Both operations as torch.library operators: their schemas, their fakes, and torch.compile over the doors."""

import pytest
import torch
from random_layers import VARIANTS, random_projected, random_states
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_mamba3.kernels import Mamba3States, mamba3_scan, mamba3_step
from vllm_mamba3.kernels.operators import define_operator, weights_as_arguments

SLOTS, ENDS = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
GOES_ON = torch.tensor([True, False])
TWO = pytest.mark.parametrize("variant", [VARIANTS["siso"], VARIANTS["mimo-rank-4"]], ids=["siso", "mimo"])


@TWO
@pytest.mark.parametrize("name", ["step", "scan"])
def test_schema_and_fake(variant, name):
    rows = 2 if name == "step" else 7
    out = torch.empty(rows, variant.layout.inner_size)
    rest = {"step": (SLOTS, GOES_ON, out, None, None, None), "scan": (SLOTS, ENDS, GOES_ON, out, None)}[name]
    torch.library.opcheck(
        getattr(torch.ops.vllm_mamba3, name).default,
        (random_projected(variant.layout, rows, 0, torch.float32),
         *weights_as_arguments(variant.weights(torch.float32)),
         *random_states(variant.layout, 4, 0, torch.float32), *rest, "torch"),
    )


def test_weights_arrive_as_they_left():
    """All of them, with the numbers: had one been lost on the way, the output would be another."""
    seen = []
    weights = VARIANTS["mimo-rank-2-groups"].weights(torch.float32)
    weights = type(weights)(weights.layout, *weights.tensors(), A_floor=0.25, A_activation="softplus", norm_eps=1e-3)
    operator = define_operator("seen", "int number", lambda projected, weights, *rest: seen.append(weights))
    operator(torch.empty(0), *weights_as_arguments(weights), *random_states(weights.layout, 1, 0, torch.float32), 0)
    (arrived,) = seen
    assert arrived.layout == weights.layout
    assert (arrived.A_floor, arrived.A_activation, arrived.norm_eps) == (0.25, "softplus", 1e-3)
    assert all(a is b or torch.equal(a, b) for a, b in zip(arrived.tensors(), weights.tensors()))


@TWO
def test_compiled_whole(variant):
    """A function that calls both doors compiles without a graph break, for any number of rows, and does the same."""
    weights, width = variant.weights(torch.float32), variant.layout.projection_size
    in_proj = torch.randn(width, 6, generator=torch.Generator().manual_seed(0))

    def layer(x, states, slots, ends, goes_on):
        projected = x @ in_proj.T
        scanned, stepped = (projected.new_empty(rows, variant.layout.inner_size) for rows in (len(x), len(slots)))
        mamba3_scan(projected, weights, states, slots, ends, goes_on, scanned)
        mamba3_step(projected[: len(slots)], weights, states, slots, stepped)
        return 2 * scanned, stepped

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (4, 9):
        x = torch.randn(3 + length, 6, generator=torch.Generator().manual_seed(1))
        ends = torch.tensor([0, 3, 3 + length], dtype=torch.int32)
        states = random_states(variant.layout, 4, 2, torch.float32)
        states_of_compiled = Mamba3States(*(state.clone() for state in states))
        expected = layer(x, states, SLOTS, ends, GOES_ON)
        found = compiled(x, states_of_compiled, SLOTS, ends, GOES_ON)
        for a, b in zip((*found, *states_of_compiled), (*expected, *states)):
            assert torch.equal(a, b)


def test_fakes_need_no_data():
    """Traced with fake tensors, which hold no numbers, the doors check shapes alone."""
    variant = VARIANTS["siso"]
    weights, states = variant.weights(torch.float32), random_states(variant.layout, 4, 0, torch.float32)
    before = [state.clone() for state in states]

    def step(projected, slots):
        out = projected.new_empty(2, variant.layout.inner_size)
        mamba3_step(projected, weights, states, slots, out)
        return out

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = torch.compile(step, fullgraph=True, backend="eager")(
            mode.from_tensor(random_projected(variant.layout, 2, 0, torch.float32)), mode.from_tensor(SLOTS))
    assert out.shape == (2, variant.layout.inner_size)
    assert all(map(torch.equal, before, states))
