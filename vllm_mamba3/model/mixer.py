"""The Mamba-3 layer in vLLM: project, take the batch's sequences further through the door of `kernels`, project back."""

import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_mamba3.implementations import chosen_implementation
from vllm_mamba3.kernels import Mamba3States, Mamba3Weights, mamba3_scan, mamba3_step
from vllm_mamba3.model.batch_metadata import Mamba3AttentionMetadata
from vllm_mamba3.model.state_cache import layout_of, scratch_states, state_dtypes, state_shapes, with_aligned_page


class Mamba3Mixer(nn.Module, MambaBase):
    """Takes and returns (tokens, hidden_size). The tokens' sequences and states come from vLLM's forward context."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.prefix = prefix
        self.layout = size = layout_of(config)
        self._state_shapes, self._state_dtypes = state_shapes(config), state_dtypes(vllm_config)
        self.step, self.scan = chosen_implementation("step"), chosen_implementation("scan")
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.num_drafts = vllm_config.num_speculative_tokens
        self.rounds_stochastically = vllm_config.mamba_config.enable_stochastic_rounding

        self.in_proj = ColumnParallelLinear(config.hidden_size, size.projection_size, bias=False,
                                            prefix=f"{prefix}.in_proj")
        self.out_proj = RowParallelLinear(size.inner_size, config.hidden_size, bias=False, prefix=f"{prefix}.out_proj")
        heads, state, bias = size.num_heads, size.state_size, (size.num_heads, size.rank, size.state_size)
        shapes = dict(dt_bias=(heads,), B_bias=bias, C_bias=bias, B_norm=(state,), C_norm=(state,), D=(heads,))
        if size.is_mimo:
            shapes |= {name: (heads, size.rank, size.head_dim) for name in ("mimo_x", "mimo_z", "mimo_o")}
        if config.is_outproj_norm:
            shapes["out_norm"] = (size.inner_size,)
        for name, shape in shapes.items():  # float32 whatever the model's dtype, as the official layer keeps them
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False))
        # The parameters' own memory: what is loaded into them later is seen here.
        self.weights = Mamba3Weights(size, **{name: getattr(self, name).data for name in shapes},
                                     A_floor=config.A_floor, A_activation=config.A_activation)

        self.kv_cache = tuple(torch.tensor([]) for _ in self._state_shapes)
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"there are two layers of the name {prefix}")
        layers[prefix] = self

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        projected, _ = self.in_proj(hidden_states)
        out = projected.new_empty(projected.shape[0], self.layout.inner_size)
        torch.ops.vllm.mamba3_mixer(projected, out, _encode_layer_name(self.prefix))
        hidden_states, _ = self.out_proj(out)
        return hidden_states

    def run(self, projected: torch.Tensor, out: torch.Tensor) -> None:
        """From the rows of in_proj to those of out_proj; takes the states of the batch's sequences further."""
        batches = get_forward_context().attn_metadata
        if batches is None:
            self.run_without_sequences(projected, out)
            return
        batch: Mamba3AttentionMetadata = batches[self.prefix]
        states = Mamba3States(*self.kv_cache)
        if batch.num_decodes:
            # As many slots as the graph has sequences: those that are none are 0.
            slots, several = batch.state_indices_tensor_d, {}
            if slots.shape[1] > 1:
                several = dict(cu_seqlens=batch.query_start_loc_d, num_accepted_tokens=batch.num_accepted_tokens)
                rows = slice(batch.num_decode_tokens if batch.num_prefills else None)
            else:
                slots, rows = slots[:, 0], slice(len(slots))
            self.run_step(projected[rows], states, slots, batch.has_initial_states_d, out[rows], **several)
        if batch.num_prefills:
            rows = slice(batch.num_decode_tokens, batch.num_decode_tokens + batch.num_prefill_tokens)
            mamba3_scan(projected[rows], self.weights, states, batch.state_indices_tensor_p, batch.query_start_loc_p,
                        batch.has_initial_states_p, out[rows], batch.num_computed_tokens_p, implementation=self.scan)

    def run_step(self, projected: torch.Tensor, states: Mamba3States, slots: torch.Tensor,
                 has_initial_state: torch.Tensor, out: torch.Tensor, **several: torch.Tensor) -> None:
        seed = None
        if self.rounds_stochastically:
            seed = torch.randint(2**63 - 1, (1,), device=projected.device)
        mamba3_step(projected, self.weights, states, slots, out, has_initial_state, rounding_seed=seed,
                    implementation=self.step, **several)

    def run_without_sequences(self, projected: torch.Tensor, out: torch.Tensor) -> None:
        """vLLM's run at start-up that measures memory, before there is a state cache.

        A step and a scan of padding compile the very kernels that are launched later, so that no request waits for
        them; and the scan takes all the memory that it will ever take.
        """
        out.zero_()
        row, no_slot = slice(0, 1), torch.zeros(1, dtype=torch.int32, device=projected.device)
        states = scratch_states(self._state_shapes, self._state_dtypes, projected.device)
        slots, several = no_slot, {}
        if self.num_drafts:
            slots = no_slot[:, None].expand(1, 1 + self.num_drafts)
            several = dict(cu_seqlens=torch.arange(2, device=no_slot.device).int(), num_accepted_tokens=no_slot + 1)
        self.run_step(projected[row], states, slots, no_slot.bool(), out[row], **several)
        if self.scan == "triton":
            no_slots = no_slot.expand(min(self.max_num_seqs, len(projected)))
            for first in range(8):  # prefills may start at any row, which lies anywhere between multiples of 16 bytes
                rows = slice(first, None)
                ends = torch.full((len(no_slots) + 1,), len(projected[rows]), device=projected.device).int()
                ends[0] = 0
                mamba3_scan(projected[rows], self.weights, states, no_slots, ends, no_slots.bool(), out[rows],
                            no_slots, self.scan)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.MAMBA3  # ours, by registration

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self._state_shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self._state_dtypes

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        return with_aligned_page(super().get_kv_cache_spec(vllm_config))


@eager_break_during_capture
def mamba3_mixer(projected: torch.Tensor, out: torch.Tensor, layer_name: LayerNameType) -> None:
    """`Mamba3Mixer.run` as an operator, which compilation does not look into and piecewise graphs split at."""
    layer: Mamba3Mixer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    layer.run(projected, out)


def _mamba3_mixer_fake(projected: torch.Tensor, out: torch.Tensor, layer_name: LayerNameType) -> None:
    return


direct_register_custom_op(
    op_name="mamba3_mixer", op_func=mamba3_mixer, mutates_args=["out"], fake_impl=_mamba3_mixer_fake
)
