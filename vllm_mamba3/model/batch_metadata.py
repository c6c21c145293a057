"""Which rows of a batch decode and which prefill, in which slots, and which of them start from nothing.

vLLM's builder for Mamba-2 splits the batch and finds the slots; the runners know it, and what derives from it, by its
class. Two things are added for Mamba-3: a row that decodes may be a sequence's first, and a batch in which every query
is one token long is all decode, since vLLM replays a decode graph for it by its shape alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata, Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec


@dataclass
class Mamba3AttentionMetadata(Mamba2AttentionMetadata):
    """What the mixer reads: state_indices_tensor_d (S, 1) and has_initial_states_d (S,) of the rows that decode,
    which come first, and state_indices_tensor_p, query_start_loc_p, has_initial_states_p and num_computed_tokens_p
    (S,) int32 of those that prefill."""

    has_initial_states_d: torch.Tensor | None = None
    num_computed_tokens_p: torch.Tensor | None = None


class Mamba3AttentionMetadataBuilder(Mamba2AttentionMetadataBuilder):
    metadata_cls = Mamba3AttentionMetadata
    needs_causal_conv1d_metadata = False

    def __init__(self, kv_cache_spec: MambaSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # At one address for good: CUDA graphs read it.
        rows = vllm_config.scheduler_config.max_num_seqs
        self.has_initial_states_d = torch.ones(rows, dtype=torch.bool, device=device)
        self.all_have_states = True  # all of these flags are set, as in every step that only decodes

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False,
              **kwargs: Any) -> Mamba3AttentionMetadata:
        batch, prefilling = common_attn_metadata, common_attn_metadata.is_prefilling  # on the CPU
        if batch.max_query_len == 1 and prefilling is not None and prefilling.any():
            batch = batch.replace(is_prefilling=torch.zeros_like(prefilling))
        # Past Mamba-2's own build, which lays out chunks that the scan here does not use.
        metadata = BaseMambaAttentionMetadataBuilder.build(self, common_prefix_len, batch, fast_build, **kwargs)
        if metadata.num_decodes:
            flags = self.has_initial_states_d[: metadata.state_indices_tensor_d.shape[0]]
            if prefilling is None or prefilling[: metadata.num_decodes].any():
                flags.copy_((batch.compute_num_computed_tokens() > 0)[: len(flags)], non_blocking=True)
                self.all_have_states = False
            elif not self.all_have_states:
                self.has_initial_states_d.fill_(True)
                self.all_have_states = True
            metadata.has_initial_states_d = flags
        if metadata.num_prefills:
            end = metadata.num_reqs
            metadata.num_computed_tokens_p = batch.compute_num_computed_tokens()[end - metadata.num_prefills : end]
        return metadata


class Mamba3AttentionBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "MAMBA3"

    @staticmethod
    def get_builder_cls() -> type[Mamba3AttentionMetadataBuilder]:
        return Mamba3AttentionMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True
