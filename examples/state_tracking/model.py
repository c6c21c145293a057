"""A Mamba-3 language model in plain PyTorch, on top of `vllm_mamba3.kernels`; trains, and reads and writes checkpoints.

Parameters carry mamba_ssm's names, so the state dict is the checkpoint. Weights are kept in float32 while training, and
used as rounded to bfloat16, which is how they are stored: gradients pass through the rounding as if it were not there.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from vllm_mamba3.kernels import Mamba3Layout, Mamba3Weights
from vllm_mamba3.kernels.scan.torch_scan import scan_inputs
from vllm_mamba3.kernels.torch_math import prepare, rms_norm

EPS = 1e-5
STORED = torch.bfloat16


def stored(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The parameter as a checkpoint holds it, for use in `dtype`."""
    return parameter.to(STORED).to(dtype)


class Norm(nn.Module):
    """RMSNorm: computed in float32, returned in the model's dtype."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rms_norm(x, stored(self.weight, x.dtype), EPS).to(dtype)


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, stored(self.weight, x.dtype))


class Mixed(NamedTuple):
    """What a mixer makes of T tokens: its output (T, d_model), and how much each head's state fades, -A·dt (T, H)."""

    out: torch.Tensor
    fading: torch.Tensor


class Mixer(nn.Module):
    """Projects, runs the recurrence through the differentiable scan, projects back."""

    def __init__(self, d_model: int, ssm_cfg: dict):
        super().__init__()
        state, rank = ssm_cfg["d_state"], ssm_cfg["mimo_rank"] if ssm_cfg["is_mimo"] else 1
        inner = ssm_cfg["expand"] * d_model
        self.layout = Mamba3Layout(
            num_heads=inner // ssm_cfg["headdim"],
            head_dim=ssm_cfg["headdim"],
            state_size=state,
            num_groups=ssm_cfg["ngroups"],
            num_angles=int(state * ssm_cfg["rope_fraction"]) // 2,
            rank=rank,
            is_mimo=ssm_cfg["is_mimo"],
        )
        self.A_floor = ssm_cfg["A_floor"]
        heads, head_dim = self.layout.num_heads, self.layout.head_dim
        self.in_proj = Linear(d_model, self.layout.projection_size)
        low, high = math.log(ssm_cfg["dt_min"]), math.log(ssm_cfg["dt_max"])
        dt = torch.exp(low + (high - low) * torch.rand(heads)).clamp(min=ssm_cfg["dt_init_floor"])
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(dt)))  # softplus of it is dt
        self.B_bias = nn.Parameter(torch.ones(heads, rank, state))
        self.C_bias = nn.Parameter(torch.ones(heads, rank, state))
        self.B_norm = Norm(state)
        self.C_norm = Norm(state)
        self.D = nn.Parameter(torch.ones(heads))
        if self.layout.is_mimo:
            self.mimo_x = nn.Parameter(torch.full((heads, rank, head_dim), 1 / rank))
            self.mimo_z = nn.Parameter(torch.ones(heads, rank, head_dim))
            self.mimo_o = nn.Parameter(torch.full((heads, rank, head_dim), 1 / rank))
        self.out_proj = Linear(inner, d_model)

    def weights(self) -> Mamba3Weights:
        """The parameters between the projections, float32 at run time as everywhere."""
        names = ["dt_bias", "B_bias", "C_bias", "D"]
        if self.layout.is_mimo:
            names += ["mimo_x", "mimo_z", "mimo_o"]
        return Mamba3Weights(
            self.layout,
            **{name: stored(getattr(self, name), torch.float32) for name in names},
            B_norm=stored(self.B_norm.weight, torch.float32),
            C_norm=stored(self.C_norm.weight, torch.float32),
            A_floor=self.A_floor,
        )

    def forward(self, x: torch.Tensor, lengths: Sequence[int]) -> Mixed:
        projected, weights = self.in_proj(x), self.weights()
        inputs = prepare(projected, weights)
        y, _ = scan_inputs(inputs, weights, lengths, None, projected.dtype)
        return Mixed(self.out_proj(y), -inputs.A_dt)


class GatedMLP(nn.Module):
    def __init__(self, d_model: int, d_intermediate: int):
        super().__init__()
        self.fc1 = Linear(d_model, 2 * d_intermediate)
        self.fc2 = Linear(d_intermediate, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(value * F.silu(gate))


class Block(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.norm = Norm(config["d_model"])
        self.mixer = Mixer(config["d_model"], config["ssm_cfg"])
        self.norm2 = Norm(config["d_model"])
        self.mlp = GatedMLP(config["d_model"], config["d_intermediate"])

    def forward(self, residual: torch.Tensor, lengths: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Mixed]:
        mixed = self.mixer(self.norm(residual, dtype), lengths)
        residual = residual + mixed.out
        return residual + self.mlp(self.norm2(residual, dtype)), mixed


class LanguageModel(nn.Module):
    """`config` is in mamba_ssm's schema; d_intermediate must be a multiple of 128, to which mamba_ssm would round it."""

    def __init__(self, config: dict):
        super().__init__()
        self.config = config
        multiple = config["pad_vocab_size_multiple"]
        vocabulary = -(-config["vocab_size"] // multiple) * multiple
        self.backbone = nn.Module()
        self.backbone.embedding = nn.Embedding(vocabulary, config["d_model"])
        self.backbone.layers = nn.ModuleList([Block(config) for _ in range(config["n_layer"])])
        self.backbone.norm_f = Norm(config["d_model"])
        self.lm_head = Linear(config["d_model"], vocabulary)
        self.lm_head.weight = self.backbone.embedding.weight
        self._initialise()

    def _initialise(self) -> None:
        """What mamba_ssm does on top of PyTorch's defaults: small embeddings, smaller outputs of deeper residuals."""
        with torch.no_grad():
            self.backbone.embedding.weight.normal_(std=0.02)
            for layer in self.backbone.layers:
                for output in (layer.mixer.out_proj, layer.mlp.fc2):
                    output.weight /= math.sqrt(2 * len(self.backbone.layers))

    def forward(self, tokens: torch.Tensor, lengths: Sequence[int], dtype: torch.dtype = torch.float32,
                mixed: list[Mixed] | None = None) -> torch.Tensor:
        """Logits (T, vocabulary) in float32 of packed sequences.

        Args:
            tokens: (T,), one sequence after another.
            lengths: of the sequences; their sum is T.
            dtype: of activations and matrix products; the recurrence and the residual stream stay in float32.
            mixed: where given, what each layer's mixer does is appended to it, for the trainer to look at.
        """
        residual = F.embedding(tokens, stored(self.backbone.embedding.weight, dtype)).float()
        for layer in self.backbone.layers:
            residual, of_layer = layer(residual, lengths, dtype)
            if mixed is not None:
                mixed.append(of_layer)
        return self.lm_head(self.backbone.norm_f(residual, dtype)).float()


def save(model: LanguageModel, folder: Path) -> None:
    """Write config.json and pytorch_model.bin as mamba_ssm does; the tied head is stored beside the embedding."""
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    torch.save({name: tensor.to(STORED) for name, tensor in model.state_dict().items()}, folder / "pytorch_model.bin")


def load(folder: Path) -> LanguageModel:
    model = LanguageModel(json.loads((folder / "config.json").read_text()))
    model.load_state_dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
    return model
