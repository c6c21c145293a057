"""Checkpoints of mamba_ssm's format with random weights of the scale training leaves."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from vllm_mamba3.checkpoint.config import Mamba3Config
from vllm_mamba3.checkpoint.weights import checkpoint_tensors

SSM = {"layer": "Mamba3", "d_state": 16, "headdim": 8, "rope_fraction": 0.5, "is_mimo": False}
SMALL = {"d_model": 32, "n_layer": 2, "d_intermediate": 100, "vocab_size": 97, "pad_vocab_size_multiple": 16}


def config_dict(ssm: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """A small config.json of mamba_ssm's schema, with these changes."""
    return SMALL | top | {"ssm_cfg": SSM | (ssm or {})}


def random_tensors(config: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random values under the names and shapes of a checkpoint of this config, each of the scale of its part."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in checkpoint_tensors(Mamba3Config.from_mamba_ssm(config)).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("dt_bias"):
            dt = torch.exp(torch.rand(shape, generator=generator) * math.log(100) + math.log(1e-3))
            values = dt + torch.log(-torch.expm1(-dt))
        elif "norm" in name or name.endswith((".D", "_bias")) or ".mimo_" in name:
            values = 1 + 0.3 * values
        elif name.endswith("embedding.weight") or name == "lm_head.weight":
            values = values * 3 * shape[-1] ** -0.5  # of a normed hidden state these make logits of 3 or so
        else:
            values = values * shape[-1] ** -0.5 * 1.5
        tensors[name] = values.to(dtype)
    if config.get("tie_embeddings", True):
        tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    return tensors


def write_checkpoint(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """config.json and pytorch_model.bin, as mamba_ssm's save_pretrained writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    torch.save(random_tensors(config, dtype, seed), folder / "pytorch_model.bin")
    return folder
