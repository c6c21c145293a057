"""The gated MLP of a block: fc2(value · silu(gate)), where fc1 gives both."""

import torch
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMLP(nn.Module):
    """Takes and returns (tokens, hidden_size). `fc1` holds the gate's rows before the value's, as `SiluAndMul` wants."""

    def __init__(self, hidden_size: int, intermediate_size: int, prefix: str) -> None:
        super().__init__()
        self.fc1 = MergedColumnParallelLinear(hidden_size, 2 * [intermediate_size], bias=False, prefix=f"{prefix}.fc1")
        self.fc2 = RowParallelLinear(intermediate_size, hidden_size, bias=False, prefix=f"{prefix}.fc2")
        self.activation = SiluAndMul()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate_and_value, _ = self.fc1(hidden_states)
        out, _ = self.fc2(self.activation(gate_and_value))
        return out
