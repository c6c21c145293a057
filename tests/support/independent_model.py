"""A Mamba-3 language model written with the reference recurrence alone: what the engine's tokens are compared with.

It shares nothing with `vllm_mamba3`: it reads config.json and pytorch_model.bin by itself.
"""

import json
from pathlib import Path

import torch
from torch.nn import functional as F

from vllm_mamba3.kernels.layout import Mamba3Layout, Mamba3Weights
from vllm_mamba3.kernels.reference import reference


class IndependentModel:
    """Logits of every position of a prompt; in float32 unless told otherwise."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, A_activation: str = "heavy_tail",
                 device: str = "cpu"):
        self.config = json.loads((folder / "config.json").read_text())
        tensors = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location=device)
        self.tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self.dtype, self.A_activation, self.device = dtype, A_activation, device
        self.known = {}  # what was asked before: the same prompts come alone and in batches
        ssm = self.config["ssm_cfg"]
        heads = int(ssm.get("expand", 2) * self.config["d_model"]) // ssm["headdim"]
        mimo = ssm.get("is_mimo", False)
        rotated = int(ssm["d_state"] * ssm.get("rope_fraction", 0.5))
        self.layout = Mamba3Layout(heads, ssm["headdim"], ssm["d_state"], ssm.get("ngroups", 1), rotated // 2,
                                   ssm.get("mimo_rank", 4) if mimo else 1, mimo)

    def weights(self, layer: int) -> Mamba3Weights:
        def get(name):
            return self.tensors.get(f"backbone.layers.{layer}.mixer.{name}")

        return Mamba3Weights(
            self.layout, get("dt_bias"), get("B_bias"), get("C_bias"), get("B_norm.weight"), get("C_norm.weight"),
            get("D"), get("mimo_x"), get("mimo_z"), get("mimo_o"), get("norm.weight"),
            A_floor=self.config["ssm_cfg"].get("A_floor", 1e-4), A_activation=self.A_activation,
        )

    def norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.tensors[name], 1e-5)

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """(positions, vocab_size): what follows each position."""
        residual = F.embedding(torch.tensor(token_ids, device=self.device), self.tensors["backbone.embedding.weight"])
        for layer in range(self.config["n_layer"]):
            prefix = f"backbone.layers.{layer}"
            projected = self.norm(residual, f"{prefix}.norm.weight") @ self.tensors[f"{prefix}.mixer.in_proj.weight"].T
            out, _ = reference(projected, self.weights(layer), dtype=self.dtype)
            residual = residual + out @ self.tensors[f"{prefix}.mixer.out_proj.weight"].T
            if self.config.get("d_intermediate", 0):
                hidden = self.norm(residual, f"{prefix}.norm2.weight") @ self.tensors[f"{prefix}.mlp.fc1.weight"].T
                value, gate = hidden.chunk(2, -1)
                residual = residual + (value * F.silu(gate)) @ self.tensors[f"{prefix}.mlp.fc2.weight"].T
        head = "backbone.embedding.weight" if self.config.get("tie_embeddings", True) else "lm_head.weight"
        logits = self.norm(residual, "backbone.norm_f.weight") @ self.tensors[head].T
        return logits[:, : self.config["vocab_size"]]

    def logprobs_after(self, prompt: list[int], continuation: list[int]) -> torch.Tensor:
        """What each token of the continuation was chosen from: (len(continuation), vocab_size), on the CPU."""
        tokens = (*prompt, *continuation)
        if tokens not in self.known:
            logits = self.logits(list(tokens))[len(prompt) - 1 : -1]
            self.known[tokens] = logits.float().log_softmax(-1).cpu()
        return self.known[tokens]
