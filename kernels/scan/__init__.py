"""The door for prefill: many tokens for each of many sequences."""

from importlib import import_module

import torch

from vllm_mamba3.kernels.checks import can_be_read, check_call, choose, expect, expect_tensor, require_triton
from vllm_mamba3.kernels.layout import Mamba3States, Mamba3Weights
from vllm_mamba3.kernels.operators import define_operator, weights_as_arguments

# Each is the function <name>_scan of the module of that name, imported when it is first asked for.
IMPLEMENTATIONS = ("torch", "triton")


def default_implementation(device: torch.device | str) -> str:
    """The implementation of the scan for a device: torch, until the Triton scan has been run on a GPU."""
    return "torch"


def check_available(implementation: str, device: torch.device | str) -> None:
    """Raise ValueError if an implementation does not run on the device, or what it needs is not there."""
    if implementation == "triton":
        require_triton("scan", device)


def mamba3_scan(projected: torch.Tensor, weights: Mamba3Weights, states: Mamba3States, slots: torch.Tensor,
                cu_seqlens: torch.Tensor, has_initial_state: torch.Tensor, out: torch.Tensor,
                num_computed_tokens: torch.Tensor | None = None, implementation: str | None = None) -> None:
    """Take each sequence all its tokens further, between in_proj and out_proj; states and out are written in place.

    No gradient goes through it; `vllm_mamba3.kernels.chunked_scan` is the differentiable function. A row that is not
    finite may spoil its own sequence's output, also of earlier rows, and never another sequence's.

    Args:
        projected: (T, d_in_proj), 2-D: the fused projection's rows, the sequences packed one after another.
        weights, states, slots: as for `mamba3_step`, with one slot a sequence. Sequences that are empty or have a slot
            <= 0 are padding: they touch no state, and their output is zero.
        cu_seqlens: (S + 1,) int32 that starts with 0, never decreases and ends with T: sequence s has the rows
            cu_seqlens[s] to cu_seqlens[s + 1].
        has_initial_state: (S,) bool; where False the sequence starts here, and what its slot held is not read.
        out: (T, H·P), in the dtype of projected.
        num_computed_tokens: (S,) int32, the tokens of each sequence before these. From a sequence's first token on it
            is cut into chunks of equal length, also when it comes in pieces. None: from the first of these; so it is
            with torch always.
        implementation: one of `IMPLEMENTATIONS`; None for the device's.

    Raises: ValueError that says what came and what is meant.
    """
    expect_tensor("mamba3_scan", "projected", projected)
    implementation = implementation or default_implementation(projected.device)
    check_call("mamba3_scan", projected, weights, states, slots, has_initial_state, out)
    expect("mamba3_scan", "has_initial_state", has_initial_state, tuple(slots.shape), (torch.bool,))
    expect("mamba3_scan", "cu_seqlens", cu_seqlens, (slots.shape[0] + 1,), (torch.int32,), projected.device)
    if num_computed_tokens is not None:
        expect("mamba3_scan", "num_computed_tokens", num_computed_tokens, tuple(slots.shape), (torch.int32,),
               projected.device)
        if can_be_read(num_computed_tokens) and (num_computed_tokens < 0).any():
            raise ValueError("mamba3_scan expects num_computed_tokens of at least 0, and got "
                             f"{num_computed_tokens.tolist()}")
    choose("mamba3_scan", implementation, IMPLEMENTATIONS)
    if can_be_read(cu_seqlens):
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != projected.shape[0] or ends != sorted(ends):
            raise ValueError(f"mamba3_scan expects cu_seqlens to rise from 0 to the {projected.shape[0]} rows of "
                             f"projected, and got {ends}")
    if projected.shape[0]:
        _operator(projected, *weights_as_arguments(weights), *states, slots, cu_seqlens, has_initial_state, out,
                  num_computed_tokens, implementation)


def _run(projected, weights, states, slots, cu_seqlens, has_initial_state, out, num_computed_tokens, implementation):
    module = import_module(f"{__name__}.{implementation}_scan")
    module.check_supported(projected, weights, states, out)
    scan = getattr(module, f"{implementation}_scan")
    scan(projected, weights, states, slots, cu_seqlens, has_initial_state, out, num_computed_tokens)


_operator = define_operator(
    "scan", "Tensor slots, Tensor cu_seqlens, Tensor has_initial_state, Tensor(out!) out, "
    "Tensor? num_computed_tokens, str implementation", _run
)
