"""The step around mamba_ssm's kernel, through its door and with a stand-in for the kernel, against the reference; and
what it refuses."""

import sys

import pytest
import torch
from random_layers import (
    MIMO_187M,
    SISO_187M,
    TOLERANCE,
    VARIANTS,
    Pages,
    Variant,
    assert_close,
    errors,
    random_projected,
    random_states,
)
from step_checks import check_batch_of_sequences, check_keys_are_rounded_first
from torch.nn import functional as F

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, mamba3_step
from vllm_mamba3.kernels.reference import reference
from vllm_mamba3.kernels.step import mamba_ssm_step

ALL_VARIANTS = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def stand_in(state, Bstate, Xstate, A, B, C, D, x, dt, trap, xproj, outproj, state_out, out, z, zproj, tile_D,
             num_warps):
    """What mamba_ssm 2.3.2's `mamba3_step_fn` computes, and what it takes for granted of its arguments.

    With outproj, out is (S, H, P), gated and projected; without it (S, R, H, P), and z is not looked at.
    """
    (S, H, P, N), R = state.shape, B.shape[1]
    assert (tile_D, num_warps, state_out) == (64, 4, None)
    assert (z is None) == (zproj is None) == (outproj is None)
    expected = [((S, R, H, N), (Bstate, B, C)), ((S, H, P), (Xstate, x, z)), ((S, H), (A, dt, trap)), ((H,), (D,)),
                ((R, H, P), (xproj, zproj, outproj)), ((S, R, H, P) if outproj is None else (S, H, P), (out,))]
    for shape, tensors in expected:
        for tensor in tensors:
            assert tensor is None or (tensor.shape == shape and tensor.dtype == torch.float32)
    for tensor in (state, Bstate, Xstate, A, B, C, D, x, dt, trap, xproj, outproj, out, z, zproj):
        if tensor is not None:
            assert tensor.stride() == torch.empty(tensor.shape).stride() and tensor.data_ptr() % 16 == 0

    alpha = torch.exp(A * dt)
    beta, gamma = (1 - trap) * dt * alpha, trap * dt
    new = state.float() * alpha[..., None, None]
    new += torch.einsum("bh,bhp,rhp,brhn->bhpn", gamma, x, xproj, B)
    new += torch.einsum("bh,bhp,rhp,brhn->bhpn", beta, Xstate, xproj, Bstate)
    state.copy_(new)
    y = torch.einsum("bhpn,brhn->brhp", new, C) + D[:, None] * x[:, None] * xproj
    if outproj is not None:
        y = torch.einsum("brhp,rhp->bhp", y * F.silu(z[:, None] * zproj), outproj)
    out.copy_(y)


@pytest.fixture
def step(monkeypatch):
    """The door, as if this were a GPU with mamba_ssm, and the kernel took any size."""
    monkeypatch.setattr(mamba_ssm_step, "check_supported", lambda *arguments: None)
    monkeypatch.setattr(mamba_ssm_step, "cute_step", lambda: stand_in)
    return lambda *arguments: mamba3_step(*arguments, implementation="mamba_ssm")


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def of(states: Mamba3States, sequence: int) -> Mamba3States:
    return Mamba3States(*(state[sequence] for state in states))


@ALL_VARIANTS
def test_batch_of_sequences_is_each_alone(variant, step):
    check_batch_of_sequences(step, variant, torch.float32, TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", ["siso", "mimo-rank-4"])
def test_keys_are_rounded_first(name, step):
    check_keys_are_rounded_first(step, VARIANTS[name], torch.bfloat16)


@pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ALL_VARIANTS
def test_half_precision_is_as_good_as_eager(variant, dtype, ssm_dtype, step):
    """After 10 tokens the error against float64 is at most twice that of the reference in the same precision."""
    weights, size = variant.weights(torch.float32), variant.layout
    rows, initial = random_projected(size, 10, 1, dtype), random_states(size, 1, 2, dtype)
    initial = initial._replace(ssm=initial.ssm.to(ssm_dtype).float())
    eager_outs, eager, pages = [], of(initial, 0), Pages(size, dtype, 2, ssm_dtype)
    out = torch.empty(10, size.inner_size, dtype=dtype)
    pages.write(1, initial, 0)
    for token in range(10):
        row = rows[token : token + 1]
        eager_out, eager = reference(row, weights, eager, torch.float32, dtype)
        eager = eager._replace(ssm=eager.ssm.to(ssm_dtype).float())
        eager_outs.append(eager_out.to(dtype))
        step(row, weights, pages.pools, int32(1), out[token : token + 1])
    true = reference(rows, weights, of(initial, 0))
    found, allowed = errors(out, pages.read(1), *true), errors(torch.cat(eager_outs), eager, *true)
    assert all(found[name] <= 2 * allowed[name] for name in found), (found, allowed)


@pytest.mark.parametrize("variant", [VARIANTS["siso"], VARIANTS["mimo-rank-4"]], ids=["siso", "mimo-out-norm"])
@pytest.mark.parametrize("sequences", [1, 2])
def test_rows_out_and_pools_with_any_strides(variant, sequences, step):
    """The kernel gets its arguments laid out as it takes them, wherever they come from."""
    weights, size = variant.weights(torch.float32), variant.layout
    rows, initial = random_projected(size, sequences, 1, torch.float32), random_states(size, 3, 2, torch.float32)
    wide_rows = torch.full((sequences, size.projection_size + 1), torch.nan)
    wide_rows[:, 1:] = rows
    wide_out = torch.full((sequences, 2 * size.inner_size), 7.0)
    pools = Mamba3States(*(state.transpose(0, -1).contiguous().transpose(0, -1) for state in initial))
    step(wide_rows[:, 1:], weights, pools, int32(*range(1, sequences + 1)), wide_out[:, ::2])
    for i in range(sequences):
        true = reference(rows[i : i + 1], weights, of(initial, i + 1))
        assert_close(2e-5, wide_out[i : i + 1, ::2], of(pools, i + 1), *true)
    assert (wide_out[:, 1::2] == 7).all()


SUPPORTED = Mamba3Layout(4, 64, 32, 1, 8)
REFUSED = {
    "head_dim 16": (Mamba3Layout(4, 16, 32, 1, 8), torch.float32, {}, "a head_dim that is a multiple of 64, .*"
        "'mamba_ssm', and got head_dim 16, state_size 32 and num_heads 4; use 'triton'"),
    "head_dim 96": (Mamba3Layout(4, 96, 32, 1, 8), torch.float32, {}, "got head_dim 96, state_size 32"),
    "state_size 96": (Mamba3Layout(4, 64, 96, 1, 8), torch.float32, {}, "state_size of 32 or 64 or 128, .*size 96"),
    "6 heads": (Mamba3Layout(6, 64, 32, 1, 8), torch.float32, {}, "num_heads a multiple of 4 .* num_heads 6"),
    "float64": (SUPPORTED, torch.float64, {}, "in float32 with implementation 'mamba_ssm', and got .* in float64"),
    "on a CPU": (SUPPORTED, torch.float32, {}, "a CUDA device with implementation 'mamba_ssm', and got them on cpu"),
    "several tokens": (SUPPORTED, torch.float32,
        dict(slots=int32(1)[:, None], cu_seqlens=int32(0, 1), num_accepted_tokens=int32(1)),
        "one token a sequence .*'mamba_ssm', and got cu_seqlens"),
    "rounding": (SUPPORTED, torch.bfloat16, dict(rounding_seed=torch.zeros(1, dtype=torch.int64)),
        "no rounding_seed with implementation 'mamba_ssm', and got a rounding_seed"),
}


@pytest.mark.parametrize("layout, dtype, more, message", REFUSED.values(), ids=REFUSED)
def test_refused_through_the_door(layout, dtype, more, message):
    pages = Pages(layout, dtype, 2, dtype)
    out, before = torch.zeros(1, layout.inner_size, dtype=dtype), pages.bytes.clone()
    arguments = dict(projected=random_projected(layout, 1, 0, dtype), weights=Variant(layout).weights(dtype),
                     states=pages.pools, slots=int32(1), out=out, implementation="mamba_ssm")
    with pytest.raises(ValueError, match=f"^mamba3_step .*{message}"):
        mamba3_step(**arguments | more)
    assert torch.equal(pages.bytes, before) and not out.any()


@pytest.mark.parametrize("layout", [SISO_187M, MIMO_187M, Mamba3Layout(8, 128, 64, 2, 16)], ids=str)
def test_supported_on_a_gpu(layout):
    """Refused for the device alone."""
    rows = torch.empty(1, layout.projection_size, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="expects tensors on a CUDA device"):
        mamba_ssm_step.check_supported(rows, Variant(layout).weights(torch.float32), None, None, False, False)


def test_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    with pytest.raises(ValueError, match="can't import it: .*pip install .*'mamba-ssm>=.*-dsl and quack-kernels"):
        mamba_ssm_step.check_available()
