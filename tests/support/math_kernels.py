"""Kernels that apply a function of `kernels/triton_math.py` to a vector."""

import triton
import triton.language as tl

from vllm_mamba3.kernels import triton_math


@triton.jit
def apply(source, target, count: tl.constexpr, function: tl.constexpr):
    i = tl.arange(0, count)
    x = tl.load(source + i)
    if function == "exp":
        y = triton_math.exp(x)
    elif function == "softplus":
        y = triton_math.softplus(x)
    elif function == "sigmoid":
        y = triton_math.sigmoid(x)
    elif function == "silu":
        y = triton_math.silu(x)
    elif function == "tanh":
        y = triton_math.tanh(x)
    elif function == "wrap_angle":
        y = triton_math.wrap_angle(x)
    elif function == "cos":
        y, _ = triton_math.cos_sin(x)
    else:
        _, y = triton_math.cos_sin(x)
    tl.store(target + i, y)


@triton.jit
def round_stochastically(source, bits, target, count: tl.constexpr):
    i = tl.arange(0, count)
    rounded = triton_math.round_stochastically(tl.load(source + i), target.dtype.element_ty, tl.load(bits + i))
    tl.store(target + i, rounded)
