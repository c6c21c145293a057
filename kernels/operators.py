"""Both operations as `torch.library` operators, so that torch.compile and CUDA graphs take them as they are.

An operator's arguments are tensors and numbers: the layer's weights go in as a list of tensors, six sizes and three
numbers, and come out as the same `Mamba3Weights` on the other side.
"""

from collections.abc import Callable

import torch

from vllm_mamba3.kernels.layout import Mamba3Layout, Mamba3States, Mamba3Weights

WEIGHTS = "Tensor?[] weights, int[] layout, float A_floor, str A_activation, float norm_eps"
STATES = ", ".join(f"Tensor({name}!) {name}" for name in Mamba3States._fields)
_library = torch.library.Library("vllm_mamba3", "DEF")


def define_operator(name: str, arguments: str, run: Callable) -> Callable:
    """Define `torch.ops.vllm_mamba3.<name>`: projected, the weights, the states, and `arguments`, of which it calls
    run(projected, weights, states, *arguments). It returns nothing; what it writes is declared in the schema."""
    _library.define(f"{name}(Tensor projected, {WEIGHTS}, {STATES}, {arguments}) -> ()")

    @torch.no_grad()  # parameters may require a gradient; the pools must not drag a graph from step to step
    def implementation(projected, tensors, layout, A_floor, A_activation, norm_eps, angle, ssm, k, v, *rest):
        weights = Mamba3Weights(Mamba3Layout(*layout[:-1], bool(layout[-1])), *tensors, A_floor=A_floor,
                                A_activation=A_activation, norm_eps=norm_eps)
        run(projected, weights, Mamba3States(angle, ssm, k, v), *rest)

    _library.impl(name, implementation, "CPU")
    _library.impl(name, implementation, "CUDA")  # ROCm devices too
    torch.library.register_fake(f"vllm_mamba3::{name}", lambda *arguments: None, lib=_library)
    return getattr(torch.ops.vllm_mamba3, name).default


def weights_as_arguments(weights: Mamba3Weights) -> tuple:
    """The arguments of `WEIGHTS`."""
    size = weights.layout
    layout = [size.num_heads, size.head_dim, size.state_size, size.num_groups, size.num_angles, size.rank, size.is_mimo]
    return weights.tensors(), layout, weights.A_floor, weights.A_activation, weights.norm_eps
