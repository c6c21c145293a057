"""What both Triton implementations refuse, of what the doors take."""

import torch
import triton

from vllm_mamba3.kernels.layout import Mamba3States, Mamba3Weights


def check_triton_call(operation: str, kernel, projected: torch.Tensor, weights: Mamba3Weights, pools: Mamba3States,
                      out: torch.Tensor) -> None:
    """Raise ValueError for dtypes, strides and devices that the kernels do not take. `kernel` is one of them."""
    if projected.dtype == torch.float64:
        raise ValueError(f"{operation} computes in float32 with implementation 'triton', and got projected in float64; "
                         "use 'torch'")
    for name, tensor in (("projected", projected), ("out", out)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{operation} expects the columns of {name} side by side with implementation 'triton', "
                             f"and got strides {tensor.stride()}")
    for name, pool in zip(Mamba3States._fields, pools):
        if pool.shape[0] and not pool[0].is_contiguous():
            raise ValueError(f"{operation} expects each slot of the {name} pool to be contiguous with implementation "
                             f"'triton', and got strides {pool.stride()}")
    for name, tensor in zip(weights.TENSORS, weights.tensors()):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{operation} expects {name} to be contiguous with implementation 'triton', and got "
                             f"strides {tensor.stride()}")
    if projected.device.type != "cuda" and isinstance(kernel, triton.JITFunction):  # else it is interpreted
        raise ValueError(f"{operation} expects tensors on a CUDA or ROCm device with implementation 'triton', and got "
                         f"them on {projected.device}; use 'torch'")
