"""What both doors refuse, and how they say it. Every error is a ValueError: what was expected, and what came."""

from collections.abc import Iterable
from importlib import import_module

import torch

from vllm_mamba3.kernels.layout import Mamba3States, Mamba3Weights, ssm_dtypes

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_call(operation: str, projected: torch.Tensor, weights: Mamba3Weights, states: Mamba3States,
               slots: torch.Tensor, has_initial_state: torch.Tensor | None, out: torch.Tensor) -> None:
    """Refuse what neither operation takes."""
    for name, tensor in (("projected", projected), ("slots", slots)):
        expect_tensor(operation, name, tensor)
    if not isinstance(weights, Mamba3Weights):
        raise ValueError(f"{operation} takes weights as Mamba3Weights, and got {type(weights).__name__}")
    size = weights.layout
    if projected.dim() != 2:
        raise ValueError(
            f"{operation} takes the fused projection as a 2-D tensor (rows, d_in_proj = {size.projection_size}), and "
            f"got a {projected.dim()}-D tensor of shape {tuple(projected.shape)}; {_advice(operation)}"
        )
    rows = projected.shape[0]
    expect(operation, "projected", projected, (rows, size.projection_size), MODEL_DTYPES)
    expect(operation, "out", out, (rows, size.inner_size), (projected.dtype,), projected.device)
    _expect_apart(operation, "out", out)
    if not isinstance(states, Mamba3States):
        raise ValueError(f"{operation} takes the state pools as Mamba3States ({', '.join(Mamba3States._fields)}), and "
                         f"got {type(states).__name__}")
    expect_tensor(operation, "the angle pool", states.angle)
    num_slots = states.angle.shape[0] if states.angle.dim() else 0
    for name, pool, shape, dtype in zip(Mamba3States._fields, states, size.state_shapes,
                                        Mamba3States.dtypes(projected.dtype)):
        allowed = ssm_dtypes(projected.dtype) if name == "ssm" else (dtype,)
        expect(operation, f"the {name} pool", pool, (num_slots, *shape), allowed, projected.device)
        _expect_apart(operation, f"the {name} pool", pool)
    sequences = slots.shape[0] if slots.dim() == 1 else -1
    expect(operation, "slots", slots, (sequences,), (torch.int32,), projected.device)
    if has_initial_state is not None:
        expect(operation, "has_initial_state", has_initial_state, (sequences,), (torch.bool,), projected.device)
    for name, tensor in zip(weights.TENSORS, weights.tensors()):
        if tensor is not None and tensor.device != projected.device:
            raise ValueError(f"{operation} expects the weights on {projected.device}, where projected is, and got "
                             f"{name} on {tensor.device}")
    if can_be_read(slots):
        used = [slot for slot in slots.tolist() if slot > 0]
        if used and max(used) >= num_slots:
            raise ValueError(f"{operation} got slot {max(used)}, and the pools have {num_slots} slots")
        if len(set(used)) < len(used):
            twice = next(slot for slot in used if used.count(slot) > 1)
            raise ValueError(f"{operation} expects a slot of its own for each sequence, and got slot {twice} twice")


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be checked: not on a GPU, which would have to be waited for, nor while tracing."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def expect(operation: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...],
           device: torch.device | None = None) -> None:
    """Refuse a tensor of another shape (-1: any 1-D length), dtype or device."""
    expect_tensor(operation, name, tensor)
    if tuple(tensor.shape) != shape:
        meant = "be a 1-D tensor" if -1 in shape else f"have shape {shape}"
        raise ValueError(f"{operation} expects {name} to {meant}, and got shape {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        meant = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{operation} expects {name} in {meant}, and got {str(tensor.dtype).removeprefix('torch.')}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{operation} expects {name} on {device}, where projected is, and got it on {tensor.device}")


def expect_tensor(operation: str, name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{operation} expects {name} to be a tensor, and got {tensor!r}")


def _expect_apart(operation: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is written, if elements of it lie in the same place."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())):
        raise ValueError(f"{operation} writes to {name}, and got it expanded, with strides {tensor.stride()}: pass a "
                         "tensor with memory of its own for each element")


def require_gpu(operation: str, implementation: str, device: torch.device | str) -> None:
    if torch.device(device).type != "cuda":
        raise ValueError(f"the {operation} implementation {implementation!r} runs on CUDA and ROCm devices, and the "
                         f"device is {device}: use 'torch'")


def require_triton(operation: str, device: torch.device | str) -> None:
    """Raise ValueError if the Triton implementation of step or scan can't run on a device, or Triton is not there."""
    require_gpu(operation, "triton", device)
    try:
        import_module("triton")
    except ImportError as error:
        raise ValueError(f"the {operation} implementation 'triton' can't import Triton: {error}. Install it with: "
                         "pip install triton") from error


def choose(operation: str, implementation: str, implementations: Iterable[str]) -> None:
    """Refuse an implementation that does not exist."""
    if implementation not in implementations:
        raise ValueError(f"{operation} has no implementation {implementation!r}; it has {', '.join(implementations)}")


def _advice(operation: str) -> str:
    if operation == "mamba3_step":
        return "a step is one token a sequence: pass x[:, 0] rather than x of shape (batch, 1, d_in_proj)"
    return "pack the sequences one after another and say where they start in cu_seqlens"
