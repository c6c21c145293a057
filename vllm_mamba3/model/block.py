"""One block: add, norm, mixer; add, norm, MLP. The additions make the residual stream, in float32 where asked for."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_mamba3.checkpoint.config import Mamba3Config
from vllm_mamba3.model.mixer import Mamba3Mixer
from vllm_mamba3.model.mlp import GatedMLP


class AddNorm(RMSNorm):
    """Adds a layer's output to the residual stream and normalises the sum for the next layer.

    With residual_in_fp32 the stream and the norm are in float32 whatever the model's dtype; vLLM's fused kernel keeps
    both of a sum's parts in one dtype and can serve only the other case.
    """

    def __init__(self, config: Mamba3Config) -> None:
        super().__init__(config.hidden_size, config.layer_norm_epsilon,
                         dtype=torch.float32 if config.residual_in_fp32 else None)
        self.in_fp32 = config.residual_in_fp32

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.in_fp32:
            residual = hidden_states.float() if residual is None else residual + hidden_states
            return super().forward(residual).to(hidden_states.dtype), residual
        if residual is None:
            return super().forward(hidden_states), hidden_states
        return super().forward(hidden_states, residual)


class Mamba3Block(nn.Module):
    """Takes the last block's output and the residual stream, both (tokens, hidden_size), and returns the same."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.norm = AddNorm(config)
        self.mixer = Mamba3Mixer(vllm_config, prefix=f"{prefix}.mixer")
        self.mlp = None
        if config.intermediate_size:
            self.norm2 = AddNorm(config)
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, prefix=f"{prefix}.mlp")

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = self.norm(hidden_states, residual)
        hidden_states = self.mixer(hidden_states)
        if self.mlp is not None:
            hidden_states, residual = self.norm2(hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual
