"""The four states of a Mamba-3 layer as vLLM's mamba state cache: one page a sequence and layer, states one after
another in the order of `Mamba3States`."""

from dataclasses import replace
from math import prod

import torch
from vllm.config import VllmConfig
from vllm.utils.math_utils import round_up
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_mamba3.checkpoint.config import Mamba3Config
from vllm_mamba3.kernels import Mamba3Layout, Mamba3States

# A slot's stride in the pools is the page, so a page must be a whole number of every state's elements; vLLM's own
# copies of pages want 8 bytes.
PAGE_ALIGNMENT = 8


def layout_of(config: Mamba3Config) -> Mamba3Layout:
    """The sizes of one layer of a model of this config."""
    return Mamba3Layout(
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        state_size=config.state_size,
        num_groups=config.n_groups,
        num_angles=config.num_rope_angles,
        rank=config.mimo_rank,
        is_mimo=config.is_mimo,
    )


def state_shapes(config: Mamba3Config) -> tuple[tuple[int, ...], ...]:
    """Shapes of one sequence's states in one layer, in the cache's order."""
    return tuple(layout_of(config).state_shapes)


def state_dtypes(vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
    """dtypes of the states in the cache's order: angle and ssm in float32, k and v in the model's."""
    return tuple(Mamba3States.dtypes(vllm_config.model_config.dtype))


def with_aligned_page(spec: MambaSpec) -> MambaSpec:
    """The cache's description with a page that every state's dtype divides."""
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes))
    return replace(spec, page_size_padded=round_up(max(size, spec.page_size_padded or 0), PAGE_ALIGNMENT))
