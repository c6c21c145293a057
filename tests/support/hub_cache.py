"""A Hugging Face cache with stand-ins for the official checkpoints: their config.json and shapes, random values.

For a process that must find `state-spaces/mamba3-siso-187m` and the default tokenizer by name, without a network.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from random_checkpoints import write_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from vllm_mamba3.checkpoint.tokenizer import DEFAULT_TOKENIZER

_SSM = {
    "layer": "Mamba3",
    "d_state": 128,
    "expand": 2,
    "headdim": 64,
    "ngroups": 1,
    "rope_fraction": 0.5,
    "dt_min": 0.001,
    "dt_max": 0.1,
    "dt_init_floor": 0.0001,
    "A_floor": 0.0001,
}
_REST = {
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}
# The official files, value for value.
OFFICIAL_CONFIGS: dict[str, dict[str, Any]] = {
    "state-spaces/mamba3-siso-187m": {
        "d_model": 768,
        "d_intermediate": 1536,
        "n_layer": 12,
        "vocab_size": 128256,
        "ssm_cfg": _SSM | {"chunk_size": 64, "is_mimo": False, "is_outproj_norm": False},
        **_REST,
        "fused_add_norm": True,
    },
    "state-spaces/mamba3-mimo-187m": {
        "d_model": 768,
        "d_intermediate": 1264,
        "n_layer": 12,
        "vocab_size": 128256,
        "ssm_cfg": _SSM | {"chunk_size": 16, "is_mimo": True, "mimo_rank": 4, "is_outproj_norm": False},
        **_REST,
        "fused_add_norm": False,
    },
}

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"  # as Llama-3.1's tokenizer calls them
REVISION = "0123456789abcdef0123456789abcdef01234567"


def fill(home: Path, model: str) -> Path:
    """Puts one of OFFICIAL_CONFIGS and the default tokenizer into the cache at `home`; returns the model's folder."""
    vocab_size = OFFICIAL_CONFIGS[model]["vocab_size"]
    tokenizer = write_tokenizer(home / "new" / "tokenizer", vocab_size)
    # The repository of the default tokenizer holds a whole model; vLLM looks for this file of it, at length.
    (tokenizer / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    add_repository(home, DEFAULT_TOKENIZER, tokenizer)
    checkpoint = write_checkpoint(home / "new" / "model", OFFICIAL_CONFIGS[model], torch.bfloat16)
    return add_repository(home, model, checkpoint)


def environment(home: Path) -> dict[str, str]:
    """What a process needs to see this cache and no network."""
    return {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"}


def add_repository(home: Path, name: str, files: Path) -> Path:
    """Moves the files of a folder into the cache, laid out as huggingface_hub does it; returns the snapshot."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot, blobs, refs = repository / "snapshots" / REVISION, repository / "blobs", repository / "refs"
    for folder in (snapshot, blobs, refs):
        folder.mkdir(parents=True)
    (refs / "main").write_text(REVISION)
    for path in files.iterdir():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        path.rename(blobs / digest)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", digest))
    return snapshot


def write_tokenizer(folder: Path, vocab_size: int) -> Path:
    """A tokenizer of exactly this many entries, at least 258, where every id has a text of its own.

    It reads bytes, ids 0 to 255, after BEGIN, as Llama's does. The ids from 256 on are words that only a model writes
    ("w256" and so on, each with a space before it), and the last two are BEGIN and END.
    """
    entries = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    space = "Ġ"  # how byte-level vocabularies spell one
    entries |= {f"{space}w{number}": number for number in range(len(entries), vocab_size - 2)}
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, vocab_size - 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, model_max_length=131072
    ).save_pretrained(folder)
    return folder
