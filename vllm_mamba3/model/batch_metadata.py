"""Which rows of a batch decode and which prefill, in which slots, and which of them start from nothing.

vLLM's builder for Mamba-2 splits the batch and finds the slots; the runners know it, and what derives from it, by its
class. Three things are added for Mamba-3: a row that decodes may be a sequence's first; a batch in which no query is
longer than a decode's is all decode, since vLLM replays a decode graph for it by its shape alone; and how many of the
tokens of its last step a sequence has kept is found here, since vLLM's runner V1 tells it of hybrid models only.
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
    """What the mixer reads: state_indices_tensor_d (S, 1 + drafts) and has_initial_states_d (S,) of the rows that
    decode, which come first, with drafts also query_start_loc_d (S + 1,) and num_accepted_tokens (S,); and state_indices_tensor_p, query_start_loc_p, has_initial_states_p and num_computed_tokens_p
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
        # Of each sequence, by its first slot: how many of its tokens came before those of its last step.
        self.computed_before: torch.Tensor | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False,
              **kwargs: Any) -> Mamba3AttentionMetadata:
        batch, prefilling = common_attn_metadata, common_attn_metadata.is_prefilling  # on the CPU
        if batch.max_query_len <= 1 + self.num_spec_tokens and prefilling is not None and prefilling.any():
            batch = batch.replace(is_prefilling=torch.zeros_like(prefilling))
        if self.use_spec_decode:
            kwargs["num_accepted_tokens"] = self.kept_tokens(batch)
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
        if self.use_spec_decode:
            self.note_step(batch, metadata.num_decodes)
        return metadata

    def kept_tokens(self, batch: CommonAttentionMetadata) -> torch.Tensor:
        """(requests,) int32: by how many tokens each sequence has advanced in its last step, which tells in which of
        its slots its state lies. Of a sequence without a state it says nothing."""
        if self.computed_before is None:
            layer = self.compilation_config.static_forward_context[self.layer_names[0]]
            self.computed_before = torch.zeros(len(layer.kv_cache[0]), dtype=torch.int32, device=self.device)
        before = self.computed_before[batch.block_table_tensor[:, 0].clamp(min=0)]
        return (batch.compute_num_computed_tokens() - before).clamp(1, 1 + self.num_spec_tokens)

    def note_step(self, batch: CommonAttentionMetadata, num_decodes: int) -> None:
        """For the next step's `kept_tokens`: a decode leaves a state behind each token, a prefill behind its last."""
        before = batch.seq_lens - 1
        before[:num_decodes] = batch.compute_num_computed_tokens()[:num_decodes]
        self.computed_before[batch.block_table_tensor[:, 0].clamp(min=0)] = before


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
