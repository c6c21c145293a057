"""Which tokenizer a checkpoint gets: the one the user names, else its own, else the one it was trained with.

The official checkpoints come without tokenizer files. They were trained with Llama-3.1's, whose repository asks for a
licence to be accepted first, so the default is an open copy of it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import try_to_load_from_cache
from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import list_filtered_repo_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig

DEFAULT_TOKENIZER = "NousResearch/Meta-Llama-3.1-8B"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_WHAT_TO_PASS = "Pass --tokenizer NAME_OR_PATH, or --skip-tokenizer-init to give and get token ids only."

logger = init_logger("vllm.plugins.mamba3")


def set_default_tokenizer(model_config: "ModelConfig") -> None:
    """Gives the model the default tokenizer if the user named none and the checkpoint has none.

    Raises:
        ValueError: the default can't be loaded, or has more tokens than the model; says what to pass instead.
    """
    if model_config.skip_tokenizer_init or model_config.tokenizer != model_config.model:
        return
    if has_tokenizer(model_config.model, model_config.revision, getattr(model_config, "hf_token", None)):
        return
    model_config.tokenizer = DEFAULT_TOKENIZER
    model_config.tokenizer_revision = None  # the revision was the checkpoint's
    tokens = _tokens_of_default(model_config)
    vocab_size = model_config.hf_config.vocab_size
    if tokens > vocab_size:
        raise ValueError(
            f"{model_config.model} has no tokenizer, and the default, {DEFAULT_TOKENIZER}, is not its: that has "
            f"{tokens} tokens, the model's vocab_size is {vocab_size}. {_WHAT_TO_PASS}"
        )
    logger.info("%s has no tokenizer; using %s", model_config.model, DEFAULT_TOKENIZER)


def has_tokenizer(model: str, revision: str | None, token: bool | str | None = None) -> bool:
    """Whether a directory or a Hub repository has tokenizer files. Offline, what is in the cache counts."""
    path = Path(model)
    if path.exists():
        return any((path / name).is_file() for name in TOKENIZER_FILES)
    if any(isinstance(try_to_load_from_cache(model, name, revision=revision), str) for name in TOKENIZER_FILES):
        return True
    in_repository = list_filtered_repo_files(model, list(TOKENIZER_FILES), revision, token=token)
    return any(name in TOKENIZER_FILES for name in in_repository)  # not those of a folder in it


def _tokens_of_default(model_config: "ModelConfig") -> int:
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        # As vLLM loads it, and in its cache: the engine doesn't load it again.
        return len(cached_tokenizer_from_config(model_config))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{model_config.model} has no tokenizer, and the default, {DEFAULT_TOKENIZER}, can't be loaded "
            f"({type(error).__name__}: {reason}). {_WHAT_TO_PASS}"
        ) from error
