"""The four states of a Mamba-3 layer as vLLM's mamba state cache: one page a sequence and layer, states one after
another in the order of `Mamba3States`."""

from dataclasses import replace
from itertools import accumulate
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
    dtypes = tuple(Mamba3States.dtypes(vllm_config.model_config.dtype, STR_DTYPE_TO_TORCH_DTYPE[name]))
    ends = state_ends(state_shapes(vllm_config.model_config.hf_config), dtypes)
    if any(end % dtype.itemsize for end, dtype in zip(ends, dtypes[1:])):
        # an odd number of elements of 16 bits, with 32 bits behind them
        raise ValueError(f"With an ssm state in {name} the states of this model can't lie one after another in "
                         f"memory: set --mamba-ssm-cache-dtype float32.")
    return dtypes


def state_ends(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> list[int]:
    """Where each state ends in its page, in bytes; the next one starts there."""
    return list(accumulate(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes)))


def scratch_states(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...],
                   device: torch.device) -> Mamba3States:
    """State pools of one slot, in a page of their own laid out as those of the cache."""
    ends = state_ends(shapes, dtypes)
    page = torch.zeros(1, round_up(ends[-1], PAGE_ALIGNMENT), dtype=torch.uint8, device=device)
    return Mamba3States(*(
        page[:, start:end].view(dtype).unflatten(1, shape)
        for start, end, shape, dtype in zip([0, *ends], ends, shapes, dtypes)
    ))


def with_aligned_page(spec: MambaSpec) -> MambaSpec:
    """The cache's description with a page that every state's dtype divides."""
    end = state_ends(spec.shapes, spec.dtypes)[-1]
    return replace(spec, page_size_padded=round_up(max(end, spec.page_size_padded or 0), PAGE_ALIGNMENT))
