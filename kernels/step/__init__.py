"""The door for decode: one token for each of many sequences."""

import torch

from vllm_mamba3.kernels.checks import check_call, choose, expect
from vllm_mamba3.kernels.layout import Mamba3States, Mamba3Weights
from vllm_mamba3.kernels.operators import define_operator, weights_as_arguments
from vllm_mamba3.kernels.step.torch_step import torch_step as step_in_torch

IMPLEMENTATIONS = {"torch": step_in_torch}


def mamba3_step(projected: torch.Tensor, weights: Mamba3Weights, states: Mamba3States, slots: torch.Tensor,
                out: torch.Tensor, has_initial_state: torch.Tensor | None = None,
                implementation: str = "torch") -> None:
    """Take each sequence one token further, between in_proj and out_proj; states and out are written in place.

    No gradient goes through it.

    Args:
        projected: (S, d_in_proj), 2-D: the fused projection's rows, one a sequence; bfloat16, float16, float32 or 64.
        weights: the layer's, on the same device.
        states: the four pools, each (slots, *shape of the state) with any slot stride; see `Mamba3States`.
        slots: (S,) int32, the pool row of each sequence. Rows with a slot <= 0 are padding: they touch no state, and
            their output is zero. No slot above 0 may come twice.
        out: (S, H·P), in the dtype of projected.
        has_initial_state: (S,) bool; where False the sequence starts with this token, and what its slot held before
            is not read. None: all go on.
        implementation: one of `IMPLEMENTATIONS`.

    Raises: ValueError that says what came and what is meant; for a 3-D (batch, 1, d_in_proj) tensor above all.
    """
    check_call("mamba3_step", projected, weights, states, slots, has_initial_state, out)
    expect("mamba3_step", "slots", slots, (projected.shape[0],), (torch.int32,))
    choose("mamba3_step", implementation, IMPLEMENTATIONS)
    if projected.shape[0]:
        _operator(projected, *weights_as_arguments(weights), *states, slots, has_initial_state, out, implementation)


def _run(projected, weights, states, slots, has_initial_state, out, implementation):
    IMPLEMENTATIONS[implementation](projected, weights, states, slots, has_initial_state, out)


_operator = define_operator(
    "step", "Tensor slots, Tensor? has_initial_state, Tensor(out!) out, str implementation", _run
)
