"""From the tensors of a checkpoint to the parameters of the model, one tensor at a time.

The names and shapes are mamba_ssm's. A checkpoint must hold exactly the tensors its config.json promises.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from vllm_mamba3.checkpoint.config import Mamba3Config

# Parameters of the mixer that hold what mamba_ssm keeps as the weight of a norm module.
NORM_WEIGHTS = {
    "mixer.B_norm.weight": "mixer.B_norm",
    "mixer.C_norm.weight": "mixer.C_norm",
    "mixer.norm.weight": "mixer.out_norm",
}
TIED = ("backbone.embedding.weight", "lm_head.weight")
STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_NAMES_TOLD = 8


def checkpoint_tensors(config: Mamba3Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint of this config, `lm_head.weight` included.

    Source: mamba_ssm's MambaLMHeadModel and Mamba3; the official 187m checkpoints have just these.
    """
    hidden, heads, state, rank = config.hidden_size, config.num_heads, config.state_size, config.mimo_rank
    inner = heads * config.head_dim
    key = rank * config.n_groups * state
    layer = {
        "norm.weight": (hidden,),
        "mixer.in_proj.weight": (2 * inner + 2 * key + 3 * heads + config.num_rope_angles, hidden),
        "mixer.dt_bias": (heads,),
        "mixer.B_bias": (heads, rank, state),
        "mixer.C_bias": (heads, rank, state),
        "mixer.B_norm.weight": (state,),
        "mixer.C_norm.weight": (state,),
        "mixer.D": (heads,),
        "mixer.out_proj.weight": (hidden, inner),
    }
    if config.is_mimo:
        layer |= {f"mixer.mimo_{name}": (heads, rank, config.head_dim) for name in "xzo"}
    if config.is_outproj_norm:
        layer["mixer.norm.weight"] = (inner,)
    if config.intermediate_size:
        layer |= {
            "norm2.weight": (hidden,),
            "mlp.fc1.weight": (2 * config.intermediate_size, hidden),
            "mlp.fc2.weight": (hidden, config.intermediate_size),
        }
    vocabulary = (config.padded_vocab_size, hidden)
    tensors = {"backbone.embedding.weight": vocabulary, "lm_head.weight": vocabulary, "backbone.norm_f.weight": (hidden,)}
    for index in range(config.num_hidden_layers):
        tensors |= {f"backbone.layers.{index}.{name}": shape for name, shape in layer.items()}
    return tensors


def load(model: nn.Module, config: Mamba3Config, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy a checkpoint's tensors into the parameters of `model`; returns the names of the parameters filled.

    Raises: ValueError that names a tensor which is missing, surplus, there twice, misshapen (with both shapes), of a
    dtype that is not bfloat16, float16 or float32, or another than the embedding it is tied to.
    """
    expected = checkpoint_tensors(config)
    parameters, loaded, seen, tied = dict(model.named_parameters()), set(), set(), []
    for name, tensor in tensors:
        if name not in expected:
            raise ValueError(f"the checkpoint holds {name}, of shape {tuple(tensor.shape)}, which a model of its "
                             f"config.json does not have{_reason(name, config)}")
        if name in seen:
            raise ValueError(f"the checkpoint holds {name} twice")
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"the checkpoint's {name} has shape {tuple(tensor.shape)}, and its config.json means "
                             f"{expected[name]}")
        if tensor.dtype not in STORED_DTYPES:
            raise ValueError(f"the checkpoint's {name} is of {tensor.dtype}; bfloat16, float16 or float32 is meant")
        seen.add(name)
        if config.tie_word_embeddings and name in TIED:
            tied.append(tensor)
            if len(tied) == 2 and not torch.equal(*tied):
                raise ValueError(f"the checkpoint's {' and '.join(TIED)} differ, and its config.json has tie_embeddings")
        # The head of a tied model is the embedding; a parameter of its own only while vLLM reloads weights.
        if name in parameters or name != "lm_head.weight":
            loaded.add(_fill(parameters, name, tensor, config))
    missing = [name for name in expected if name not in seen]
    if config.tie_word_embeddings and missing == ["lm_head.weight"]:
        missing.clear()
        if "lm_head.weight" in parameters:
            loaded.add(_fill(parameters, "lm_head.weight", tied[0], config))
    if missing:
        told = ", ".join(f"{name} {expected[name]}" for name in missing[:MOST_NAMES_TOLD])
        more = f" and {len(missing) - MOST_NAMES_TOLD} more" if len(missing) > MOST_NAMES_TOLD else ""
        raise ValueError(f"the checkpoint lacks {len(missing)} of the {len(expected)} tensors its config.json means: "
                         f"{told}{more}")
    return loaded


def _fill(parameters: dict[str, nn.Parameter], name: str, tensor: torch.Tensor, config: Mamba3Config) -> str:
    """Copy one tensor into its parameter, and return the parameter's name."""
    for stored, ours in NORM_WEIGHTS.items():
        if name.endswith(stored):
            name = name.removesuffix(stored) + ours
    parameter = parameters[name]
    loader: Callable = getattr(parameter, "weight_loader", default_weight_loader)
    if name.endswith("mlp.fc1.weight"):
        value, gate = tensor.chunk(2)  # mamba_ssm stores the value first, vLLM's activation takes the gate first
        loader(parameter, gate, 0)
        loader(parameter, value, 1)
    elif name in ("backbone.embedding.weight", "lm_head.weight"):
        loader(parameter, tensor[: config.vocab_size])  # the rest of the rows are no tokens
    else:
        loader(parameter, tensor)
    return name


def _reason(name: str, config: Mamba3Config) -> str:
    """Why a tensor that other Mamba-3 models have is surplus here."""
    if ".mimo_" in name and not config.is_mimo:
        return " (is_mimo is false)"
    if name.endswith("mixer.norm.weight") and not config.is_outproj_norm:
        return " (is_outproj_norm is false)"
    if (".mlp." in name or ".norm2." in name) and not config.intermediate_size:
        return " (d_intermediate is 0)"
    return ""
