"""Reference and torch scan against what the official kernels returned, the published 187m weights among it."""

import golden
import pytest
import torch

from vllm_mamba3.kernels import chunked_scan, reference
from vllm_mamba3.kernels.scan.torch_scan import scan_inputs

pytestmark = pytest.mark.skipif(
    not golden.FOLDER.is_dir(), reason="the captured runs of the official kernels are not beside this repository"
)


@pytest.fixture(scope="module", params=golden.ERRORS)
def case(request):
    return request.param, *golden.load(request.param, torch.float64)


def error(out, captured):
    return ((out - captured).norm() / captured.norm()).item()


def test_reference(case):
    name, inputs, weights, captured = case
    outs = []
    for sequence in range(captured.shape[0]):
        state, rows = reference.zero_states(weights.layout, torch.float64, torch.float64), []
        for z, x, BC, dt, A_dt, trapezoid, angle in zip(*(tensor[sequence] for tensor in inputs)):
            y, state = reference.token(x, BC[0], BC[1], A_dt, dt, trapezoid, angle, weights, state)
            rows.append(reference.gate(y, z, weights))
        outs.append(torch.stack(rows))
    assert error(torch.stack(outs), captured) <= 1.1 * golden.ERRORS[name]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_torch_scan(case, dtype):
    name, _, _, captured = case
    inputs, weights, _ = golden.load(name, dtype)
    batch, length = captured.shape[:2]
    packed = type(inputs)(*(tensor.flatten(0, 1) for tensor in inputs))
    out, _ = scan_inputs(packed, weights, batch * [length], None, dtype)
    assert error(out.view(captured.shape).double(), captured) <= 1.1 * golden.ERRORS[name]


@pytest.mark.parametrize("name", golden.ERRORS)
def test_from_the_projected_row(name):
    """Activations, norms and the split of the row among it, in float32."""
    rows, weights, captured = golden.load_rows(name)
    batch, length = captured.shape[:2]
    out, _ = chunked_scan(rows.float(), weights, batch * [length])
    assert error(out.double().view(captured.shape), captured) <= 1.1 * golden.ERRORS[name]
