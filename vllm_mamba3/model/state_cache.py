"""The four states of a Mamba-3 layer as vLLM's mamba state cache: one page a sequence and layer, states one after
another in the order of `Mamba3States`."""

from dataclasses import replace
from math import prod

import torch
from vllm.config import VllmConfig
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_mamba3.checkpoint.config import Mamba3Config
from vllm_mamba3.kernels import Mamba3Layout, Mamba3States

# A slot's stride in the pools is the page. In whole multiples of 16 elements, of any state, the Triton kernels can tell
# that every row of a slot starts where 16 bytes can be loaded at once.
PAGE_ALIGNMENT = 64


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
    """dtypes of the states in the cache's order: angle in float32, ssm as --mamba-ssm-cache-dtype says, k and v in the
    model's."""
    name = vllm_config.cache_config.mamba_ssm_cache_dtype
    dtypes = Mamba3States.dtypes(vllm_config.model_config.dtype, STR_DTYPE_TO_TORCH_DTYPE[name])
    end = 0
    for shape, dtype in zip(state_shapes(vllm_config.model_config.hf_config), dtypes):
        if end % dtype.itemsize:  # an odd number of elements of 16 bits, with 32 bits behind them
            raise ValueError(f"With an ssm state in {name} the states of this model can't lie one after another in "
                             f"memory: set --mamba-ssm-cache-dtype float32.")
        end += prod(shape) * dtype.itemsize
    return tuple(dtypes)


def scratch_states(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...],
                   device: torch.device) -> Mamba3States:
    """State pools of one slot, in a page of their own laid out as those of the cache."""
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes)]
    page = torch.zeros(1, round_up(sum(sizes), PAGE_ALIGNMENT), dtype=torch.uint8, device=device)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return Mamba3States(*(
        page[:, start : start + size].view(dtype).unflatten(1, shape)
        for start, size, shape, dtype in zip(starts, sizes, shapes, dtypes)
    ))


def with_aligned_page(spec: MambaSpec) -> MambaSpec:
    """The cache's description with a page that every state's dtype divides."""
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes))
    return replace(spec, page_size_padded=round_up(max(size, spec.page_size_padded or 0), PAGE_ALIGNMENT))
