"""The door for decode: one token, or a few, for each of many sequences."""

from importlib import import_module

import torch

from vllm_mamba3.kernels.checks import can_be_read, check_call, choose, expect, expect_tensor, require_gpu, require_triton
from vllm_mamba3.kernels.layout import Mamba3States, Mamba3Weights
from vllm_mamba3.kernels.operators import define_operator, weights_as_arguments

# Each is the function <name>_step of the module of that name, imported when it is first asked for: Triton and mamba_ssm
# need not be there. Its module's `check_supported` refuses what it cannot do.
IMPLEMENTATIONS = ("torch", "triton", "mamba_ssm")


def default_implementation(device: torch.device | str) -> str:
    """The implementation of the step for a device: Triton on CUDA and ROCm devices, else torch."""
    return "triton" if torch.device(device).type == "cuda" else "torch"


def check_available(implementation: str, device: torch.device | str) -> None:
    """Raise ValueError if an implementation does not run on the device, or what it needs is not there; then with the
    line that installs it."""
    if implementation == "triton":
        require_triton("step", device)
    elif implementation == "mamba_ssm":
        require_gpu("step", implementation, device)
        import_module(f"{__name__}.mamba_ssm_step").check_available()


def mamba3_step(projected: torch.Tensor, weights: Mamba3Weights, states: Mamba3States, slots: torch.Tensor,
                out: torch.Tensor, has_initial_state: torch.Tensor | None = None, *,
                cu_seqlens: torch.Tensor | None = None, num_accepted_tokens: torch.Tensor | None = None,
                rounding_seed: torch.Tensor | None = None, implementation: str | None = None) -> None:
    """Take each sequence one token further, between in_proj and out_proj; states and out are written in place.

    No gradient goes through it.

    For speculative decoding, several tokens a sequence and a slot for the state after each: slots (S, K), cu_seqlens
    and num_accepted_tokens. The state before the first token is that of the last token accepted, in
    slots[s, num_accepted_tokens[s] - 1]; the state after token t goes into slots[s, t], which may be the same slot. A
    token with a slot <= 0 ends its sequence there, as padding.

    Args:
        projected: (S, d_in_proj), 2-D: the fused projection's rows, one a sequence; bfloat16, float16, float32 or 64.
            With several tokens (rows, d_in_proj), the sequences packed one after another.
        weights: the layer's, on the same device.
        states: the four pools, each (slots, *shape of the state) with any slot stride; see `Mamba3States`.
        slots: (S,) or (S, K) int32, the pool row of each sequence. Sequences with a slot <= 0 are padding: they touch
            no state, and their output is zero. No slot above 0 may come twice.
        out: (S, H·P), in the dtype of projected; with several tokens (rows, H·P).
        has_initial_state: (S,) bool; where False the sequence starts with this token, and what its slot held before
            is not read. None: all go on.
        cu_seqlens: (S + 1,) int32: sequence s has the rows cu_seqlens[s] to cu_seqlens[s + 1], at most K. Rows beyond
            the last are neither read nor written.
        num_accepted_tokens: (S,) int32, from 1 to K.
        rounding_seed: (1,) int64: an ssm state of 16 bits is rounded up or down at random, by this seed and the row.
            None: to the nearest. In triton only.
        implementation: one of `IMPLEMENTATIONS`; None for the device's.

    Raises: ValueError that says what came and what is meant; for a 3-D (batch, 1, d_in_proj) tensor above all.
    """
    several = cu_seqlens is not None
    for name, tensor in (("projected", projected), ("slots", slots)):
        expect_tensor("mamba3_step", name, tensor)
    implementation = implementation or default_implementation(projected.device)
    choose("mamba3_step", implementation, IMPLEMENTATIONS)
    if slots.dim() == 2 and not several:
        raise ValueError("mamba3_step takes slots (sequences, tokens) together with cu_seqlens and "
                         f"num_accepted_tokens, and got slots of shape {tuple(slots.shape)} and no cu_seqlens")
    check_call("mamba3_step", projected, weights, states, slots.flatten() if several else slots,
               None if several else has_initial_state, out)
    if several:
        _check_several(projected, slots, has_initial_state, cu_seqlens, num_accepted_tokens)
    else:
        expect("mamba3_step", "slots", slots, (projected.shape[0],), (torch.int32,))
        if num_accepted_tokens is not None:
            raise ValueError("mamba3_step takes num_accepted_tokens together with cu_seqlens, and got no cu_seqlens")
    if rounding_seed is not None:
        expect("mamba3_step", "rounding_seed", rounding_seed, (1,), (torch.int64,), projected.device)
        if states.ssm.dtype.itemsize != 2:
            raise ValueError("mamba3_step takes a rounding_seed for an ssm state of 16 bits, and got one in "
                             f"{str(states.ssm.dtype).removeprefix('torch.')}")
    if projected.shape[0] and slots.shape[0]:
        _operator(projected, *weights_as_arguments(weights), *states, slots, has_initial_state, out, cu_seqlens,
                  num_accepted_tokens, rounding_seed, implementation)


def _check_several(projected, slots, has_initial_state, cu_seqlens, num_accepted_tokens):
    if slots.dim() != 2:
        raise ValueError("mamba3_step expects slots to be a 2-D tensor (sequences, tokens) when it gets cu_seqlens, "
                         f"and got shape {tuple(slots.shape)}")
    sequences, tokens = slots.shape
    device = projected.device
    expect("mamba3_step", "cu_seqlens", cu_seqlens, (sequences + 1,), (torch.int32,), device)
    expect("mamba3_step", "num_accepted_tokens", num_accepted_tokens, (sequences,), (torch.int32,), device)
    if has_initial_state is not None:
        expect("mamba3_step", "has_initial_state", has_initial_state, (sequences,), (torch.bool,), device)
    if can_be_read(cu_seqlens):
        ends = cu_seqlens.tolist()
        lengths = [end - start for start, end in zip(ends, ends[1:])]
        if ends[0] != 0 or ends[-1] > projected.shape[0] or any(not 0 <= length <= tokens for length in lengths):
            raise ValueError(f"mamba3_step expects cu_seqlens to rise from 0 in steps of at most {tokens}, the slots "
                             f"of a sequence, to at most the {projected.shape[0]} rows of projected, and got {ends}")
        accepted = num_accepted_tokens.tolist()
        if any(not 1 <= count <= tokens for count in accepted):
            raise ValueError(f"mamba3_step expects num_accepted_tokens from 1 to {tokens}, and got {accepted}")


def _run(projected, weights, states, slots, has_initial_state, out, cu_seqlens, num_accepted_tokens, rounding_seed,
         implementation):
    module = import_module(f"{__name__}.{implementation}_step")
    module.check_supported(projected, weights, states, out, cu_seqlens is not None, rounding_seed is not None)
    step = getattr(module, f"{implementation}_step")
    step(projected, weights, states, slots, has_initial_state, out, cu_seqlens, num_accepted_tokens, rounding_seed)


_operator = define_operator(
    "step", "Tensor slots, Tensor? has_initial_state, Tensor(out!) out, Tensor? cu_seqlens, "
    "Tensor? num_accepted_tokens, Tensor? rounding_seed, str implementation", _run
)
