"""Which tokenizer a checkpoint gets: the user's, its own, or the default."""

from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm_mamba3.checkpoint import tokenizer as chooser
from vllm_mamba3.checkpoint.tokenizer import DEFAULT_TOKENIZER, has_tokenizer, set_default_tokenizer

TOKENS = 8


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # vLLM tries twice


@pytest.fixture
def default(tmp_path, monkeypatch):
    """A tokenizer of eight tokens in the place of the default; its path."""
    path = str(tmp_path / "default")
    words = {f"w{number}": number for number in range(TOKENS)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    tokenizer.save_pretrained(path)
    monkeypatch.setattr(chooser, "DEFAULT_TOKENIZER", path)
    return path


def model_config(model, **changes) -> SimpleNamespace:
    """As vLLM has it by then: without --tokenizer the tokenizer is the model."""
    fields = {
        "model": str(model),
        "tokenizer": str(model),
        "revision": "r1",
        "tokenizer_revision": "r1",
        "tokenizer_mode": "auto",
        "skip_tokenizer_init": False,
        "runner_type": "generate",
        "trust_remote_code": False,
        "hf_config": SimpleNamespace(vocab_size=TOKENS),
    }
    return SimpleNamespace(**{**fields, **changes})


def checkpoint(tmp_path, *files):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("pytorch_model.bin", *files):
        (folder / name).touch()
    return folder


def test_the_documented_default():
    assert DEFAULT_TOKENIZER == "NousResearch/Meta-Llama-3.1-8B"


def test_the_default_for_a_checkpoint_without(tmp_path, default):
    config = model_config(checkpoint(tmp_path))
    set_default_tokenizer(config)
    assert (config.tokenizer, config.tokenizer_revision) == (default, None)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_the_checkpoints_own(tmp_path, default, name):
    config = model_config(checkpoint(tmp_path, name))
    set_default_tokenizer(config)
    assert (config.tokenizer, config.tokenizer_revision) == (config.model, "r1")


def test_the_users(tmp_path, default):
    config = model_config(checkpoint(tmp_path), tokenizer="someone/else", tokenizer_revision="r2")
    set_default_tokenizer(config)
    assert (config.tokenizer, config.tokenizer_revision) == ("someone/else", "r2")


def test_none_is_none(tmp_path):
    config = model_config(checkpoint(tmp_path), skip_tokenizer_init=True)
    set_default_tokenizer(config)
    assert config.tokenizer == config.model


def test_a_default_that_can_not_be_loaded(tmp_path):
    config = model_config(checkpoint(tmp_path))
    with pytest.raises(ValueError) as caught:
        set_default_tokenizer(config)
    remedies = ("--tokenizer NAME_OR_PATH", "--skip-tokenizer-init")
    for part in (config.model, DEFAULT_TOKENIZER, "can't be loaded", *remedies):
        assert part in str(caught.value)


def test_a_default_with_more_tokens_than_the_model(tmp_path, default):
    config = model_config(checkpoint(tmp_path), hf_config=SimpleNamespace(vocab_size=TOKENS - 1))
    with pytest.raises(ValueError, match="has 8 tokens, the model's vocab_size is 7. Pass --tokenizer"):
        set_default_tokenizer(config)


def test_a_repository_in_the_cache(tmp_path):
    root = tmp_path / "hub" / "models--someone--mamba3"
    for revision, commit, name in (("main", "0" * 40, "config.json"), ("with", "1" * 40, "tokenizer.json")):
        for folder in ("refs", f"snapshots/{commit}"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "refs" / revision).write_text(commit)
        (root / "snapshots" / commit / name).touch()
    assert not has_tokenizer("someone/mamba3", None)
    assert has_tokenizer("someone/mamba3", "with")
