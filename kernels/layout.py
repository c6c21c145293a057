"""What a Mamba-3 layer's tensors look like: the fused projection's columns, the four states, the layer's weights.

Symbols are explained once, in the glossary of `reference.py`.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch

Activation = Literal["heavy_tail", "softplus"]


@dataclass(frozen=True)
class Mamba3Layout:
    """Sizes of one layer, from which every width and shape follows.

    Raises ValueError, naming the size, for a combination that no Mamba-3 layer can have.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    num_angles: int
    rank: int = 1
    is_mimo: bool = False  # MIMO rotates halves (i, i + N/2), SISO neighbours (2i, 2i + 1)

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "is_mimo" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} is {value!r}; it must be an integer of at least 1")
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_groups is {self.num_groups}; it must divide num_heads, {self.num_heads}")
        if self.rank > 1 and not self.is_mimo:
            raise ValueError(f"rank is {self.rank}; without MIMO it must be 1")
        if self.is_mimo and self.state_size % 2:
            raise ValueError(f"state_size is {self.state_size}; MIMO rotates halves, so it must be even")
        if 2 * self.num_angles > self.state_size:
            raise ValueError(f"num_angles is {self.num_angles}; at most state_size // 2 = {self.state_size // 2} fit")

    @property
    def inner_size(self) -> int:
        """Width of x, z and of the layer's output before out_proj: H·P."""
        return self.num_heads * self.head_dim

    @property
    def projection_widths(self) -> tuple[int, ...]:
        """Columns of the fused projection, in its order: z, x, B, C, dd_dt, dd_A, trap, angle."""
        key = self.rank * self.num_groups * self.state_size
        return (self.inner_size, self.inner_size, key, key, *3 * (self.num_heads,), self.num_angles)

    @property
    def projection_size(self) -> int:
        """d_in_proj, the columns of the fused projection together."""
        return sum(self.projection_widths)

    @property
    def state_shapes(self) -> "Mamba3States[tuple[int, ...]]":
        """Shapes of one sequence's four states."""
        heads, state = self.num_heads, self.state_size
        return Mamba3States(
            angle=(heads, self.num_angles),
            ssm=(heads, self.head_dim, state),
            k=(self.rank, heads, state),
            v=(heads, self.head_dim),
        )


class Mamba3States(NamedTuple):
    """The four states that go from token to token; a pool of them has the slot as first dimension of each.

    angle (H, n) and ssm (H, P, N) are float32 (float64 in float64 evaluations), k (R, H, N) and v (H, P) of the model's
    dtype; ssm may be kept in 16 bits. The wider states come first because vLLM lays the states of a slot one after
    another in this order, and each must start at a multiple of its element size.
    """

    angle: torch.Tensor
    ssm: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @staticmethod
    def dtypes(model_dtype: torch.dtype, ssm_dtype: torch.dtype | None = None) -> "Mamba3States[torch.dtype]":
        """dtypes of the four states of a model that runs in `model_dtype`; ssm in `ssm_dtype`, if one is named."""
        wide = compute_dtype(model_dtype)
        return Mamba3States(angle=wide, ssm=ssm_dtype or wide, k=model_dtype, v=model_dtype)


def ssm_dtypes(model_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What the ssm state of such a model may be kept in, the default first."""
    if model_dtype == torch.float64:
        return (torch.float64,)
    return (torch.float32, torch.bfloat16, torch.float16)


def compute_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """What the mathematics between the projections runs in: float32, or float64 for a float64 model."""
    return torch.float64 if model_dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Mamba3Weights:
    """The weights of one layer between in_proj and out_proj; made once, after loading.

    Shapes: dt_bias (H,), D (H,), B_bias and C_bias (H, R, N), B_norm and C_norm (N,); for MIMO also mimo_x, mimo_z and
    mimo_o (H, R, P); with is_outproj_norm also out_norm (H·P,). All are of a floating dtype, on one
    device. `A_floor` bounds the decay rate, A <= -A_floor; `A_activation` maps dd_A to it.

    Raises ValueError for a missing, surplus or misshapen tensor, or one that is not of a floating dtype.
    """

    layout: Mamba3Layout
    dt_bias: torch.Tensor
    B_bias: torch.Tensor
    C_bias: torch.Tensor
    B_norm: torch.Tensor
    C_norm: torch.Tensor
    D: torch.Tensor
    mimo_x: torch.Tensor | None = None
    mimo_z: torch.Tensor | None = None
    mimo_o: torch.Tensor | None = None
    out_norm: torch.Tensor | None = None
    A_floor: float = 1e-4
    A_activation: Activation = "heavy_tail"
    norm_eps: float = 1e-5

    def __post_init__(self):
        size = self.layout
        bias = (size.num_heads, size.rank, size.state_size)
        mimo = (size.num_heads, size.rank, size.head_dim) if size.is_mimo else None
        expected = dict(dt_bias=(size.num_heads,), D=(size.num_heads,), B_bias=bias, C_bias=bias,
                        B_norm=(size.state_size,), C_norm=(size.state_size,), mimo_x=mimo, mimo_z=mimo, mimo_o=mimo)
        if self.out_norm is not None:
            expected["out_norm"] = (size.inner_size,)
        for name, shape in expected.items():
            tensor = getattr(self, name)
            found = None if tensor is None else tuple(tensor.shape)
            if found != shape:
                raise ValueError(f"{name} has shape {found}, where {shape} is meant")
            if tensor is not None and not tensor.is_floating_point():
                raise ValueError(f"{name} has dtype {tensor.dtype}, where a floating dtype is meant")
        if self.A_activation not in ("heavy_tail", "softplus"):
            raise ValueError(f"A_activation is {self.A_activation!r}; it must be 'heavy_tail' or 'softplus'")
        if not self.A_floor > 0:
            raise ValueError(f"A_floor is {self.A_floor!r}; it must be above 0")
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps is {self.norm_eps!r}; it must be at least 0")

    TENSORS = ("dt_bias", "B_bias", "C_bias", "B_norm", "C_norm", "D", "mimo_x", "mimo_z", "mimo_o", "out_norm")

    def tensors(self) -> list[torch.Tensor | None]:
        """The tensors in the order of `TENSORS`."""
        return [getattr(self, name) for name in self.TENSORS]

    def to(self, dtype: torch.dtype) -> "Mamba3Weights":
        """The same weights with every tensor in `dtype`; itself where they already are."""
        if self.dt_bias.dtype == dtype and all(t is None or t.dtype == dtype for t in self.tensors()):
            return self
        tensors = zip(self.TENSORS, self.tensors())
        cast = {name: None if tensor is None else tensor.to(dtype) for name, tensor in tensors}
        return Mamba3Weights(self.layout, **cast, A_floor=self.A_floor, A_activation=self.A_activation,
                             norm_eps=self.norm_eps)

    def of_heads(self, heads: slice) -> "Mamba3Weights":
        """The layer of some of the heads alone, which are whole groups or lie in one; views of these tensors."""
        size, count = self.layout, heads.stop - heads.start
        groups = max(1, count * size.num_groups // size.num_heads)
        cut = {name: None if tensor is None else tensor[heads] for name, tensor in zip(self.TENSORS, self.tensors())}
        cut |= dict(B_norm=self.B_norm, C_norm=self.C_norm)
        if self.out_norm is not None:
            cut["out_norm"] = self.out_norm[heads.start * size.head_dim : heads.stop * size.head_dim]
        return replace(self, layout=replace(size, num_heads=count, num_groups=groups), **cut)
