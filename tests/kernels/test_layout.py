"""Widths, shapes and dtypes of a layer's tensors, and the sizes that no layer can have."""

import random_layers
import pytest
import torch

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, Mamba3Weights


def test_widths_of_the_official_checkpoints():
    assert random_layers.SISO_187M.projection_size == 3432
    assert random_layers.MIMO_187M.projection_size == 4200
    assert random_layers.SISO_187M.inner_size == 1536


def test_projection_widths_are_in_the_order_of_the_fused_projection():
    layout = Mamba3Layout(num_heads=6, head_dim=5, state_size=8, num_groups=3, num_angles=2, rank=4, is_mimo=True)
    assert layout.projection_widths == (30, 30, 96, 96, 6, 6, 6, 2)


def test_state_shapes_and_dtypes():
    assert random_layers.MIMO_187M.state_shapes == Mamba3States((24, 32), (24, 64, 128), (4, 24, 128), (24, 64))
    assert Mamba3States.dtypes(torch.bfloat16) == (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)
    assert set(Mamba3States.dtypes(torch.float64)) == {torch.float64}


SIZES = dict(num_heads=4, head_dim=8, state_size=16, num_groups=2, num_angles=4, rank=2, is_mimo=True)


@pytest.mark.parametrize("change, message", [
    (dict(num_heads=0), "num_heads is 0; it must be an integer of at least 1"),
    (dict(head_dim=8.0), "head_dim is 8.0"),
    (dict(num_groups=3), "num_groups is 3; it must divide num_heads, 4"),
    (dict(is_mimo=False), "rank is 2; without MIMO it must be 1"),
    (dict(state_size=15), "state_size is 15; MIMO rotates halves, so it must be even"),
    (dict(num_angles=9), "num_angles is 9; at most state_size // 2 = 8 fit"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Mamba3Layout(**SIZES | change)


@pytest.mark.parametrize("change, message", [
    (dict(D=torch.ones(3)), r"D has shape \(3,\), where \(4,\) is meant"),
    (dict(mimo_z=None), r"mimo_z has shape None, where \(4, 2, 8\) is meant"),
    (dict(out_norm=torch.ones(8)), r"out_norm has shape \(8,\), where \(32,\) is meant"),
    (dict(dt_bias=torch.ones(4, dtype=torch.int64)), "dt_bias has dtype torch.int64, where a floating dtype is meant"),
    (dict(A_activation="relu"), "A_activation is 'relu'; it must be 'heavy_tail' or 'softplus'"),
    (dict(A_floor=0.0), "A_floor is 0.0; it must be above 0"),
    (dict(norm_eps=float("nan")), "norm_eps is nan; it must be at least 0"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_wrong_weights_are_refused(change, message):
    weights = random_layers.random_weights(Mamba3Layout(**SIZES), 0)
    arguments = dict(zip(weights.TENSORS, weights.tensors())) | change
    with pytest.raises(ValueError, match=message):
        Mamba3Weights(weights.layout, **arguments)


def test_siso_takes_no_mimo_weights():
    weights = random_layers.random_weights(random_layers.VARIANTS["siso"].layout, 0)
    arguments = dict(zip(weights.TENSORS, weights.tensors())) | dict(mimo_x=torch.ones(4, 1, 8))
    with pytest.raises(ValueError, match="mimo_x"):
        Mamba3Weights(weights.layout, **arguments)


def test_weights_are_cast_once_or_not_at_all():
    weights = random_layers.random_weights(random_layers.MIMO_187M, 0, torch.bfloat16)
    wide = weights.to(torch.float32)
    assert all(tensor is None or tensor.dtype == torch.float32 for tensor in wide.tensors())
    assert wide.to(torch.float32) is wide


@pytest.mark.parametrize("heads, groups", [(slice(2, 3), 1), (slice(2, 4), 1), (slice(0, 4), 2)], ids=str)
def test_some_heads_of_a_layer_are_a_layer(heads, groups):
    variant = random_layers.Variant(Mamba3Layout(4, 8, 16, 2, 4, 2, True), out_norm=True)
    weights, part = variant.weights(torch.float64), variant.weights(torch.float64).of_heads(heads)
    assert (part.layout.num_heads, part.layout.num_groups) == (heads.stop - heads.start, groups)
    assert torch.equal(part.B_bias, weights.B_bias[heads])
    assert torch.equal(part.out_norm.view(-1, 8), weights.out_norm.view(-1, 8)[heads])
