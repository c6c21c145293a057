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
def turn(source, target, count: tl.constexpr):
    """Turns as the integers that angles are added up as."""
    i = tl.arange(0, count)
    tl.store(target + i, triton_math.turn(tl.load(source + i)))


@triton.jit
def cos_sin_of_turn(source, cos, sin, count: tl.constexpr):
    i = tl.arange(0, count)
    at_i = triton_math.cos_sin_of_turn(tl.load(source + i))
    tl.store(cos + i, at_i[0])
    tl.store(sin + i, at_i[1])


@triton.jit
def round_stochastically(source, bits, target, count: tl.constexpr):
    i = tl.arange(0, count)
    rounded = triton_math.round_stochastically(tl.load(source + i), target.dtype.element_ty, tl.load(bits + i))
    tl.store(target + i, rounded)
