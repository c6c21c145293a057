"""The config parser: takes what is Mamba-3's, and hands every other model to vLLM's as if it weren't there."""

import json

import huggingface_hub.constants
import pytest
from vllm.transformers_utils import config as vllm_config
from vllm.transformers_utils.config import HFConfigParser
from vllm_mamba3.checkpoint.config import Mamba3Config
from vllm_mamba3.checkpoint.config_parser import in_front_of, is_mamba3

MAMBA3 = {"d_model": 64, "n_layer": 2, "vocab_size": 100, "ssm_cfg": {"layer": "Mamba3", "headdim": 16, "d_state": 16}}
MAMBA2 = {**MAMBA3, "ssm_cfg": {"layer": "Mamba2"}}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
}


class Recorder(HFConfigParser):
    """Stands for vLLM's parser: keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def parse(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return {}, None


@pytest.fixture
def offline_cache(tmp_path, monkeypatch):
    """An empty cache of the Hugging Face Hub, and no network. Called with a repository's {revision: config}."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def fill(repository: str, configs: dict[str, dict]) -> None:
        root = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
        for number, (revision, config) in enumerate(configs.items()):
            commit = f"{number:040x}"
            for folder in ("refs", f"snapshots/{commit}"):
                (root / folder).mkdir(parents=True, exist_ok=True)
            (root / "refs" / revision).write_text(commit)
            (root / "snapshots" / commit / "config.json").write_text(json.dumps(config))

    return fill


def write(folder, config) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def test_a_directory(tmp_path):
    file, config = in_front_of(HFConfigParser, None)().parse(write(tmp_path, MAMBA3), False)
    assert file == MAMBA3
    assert isinstance(config, Mamba3Config)
    assert (config.hidden_size, config.num_heads, config.name_or_path) == (64, 8, str(tmp_path))


def test_a_repository_in_an_offline_cache_and_its_revisions(offline_cache):
    offline_cache("someone/mamba3", {"main": MAMBA3, "wide": {**MAMBA3, "d_model": 128}})
    parser = in_front_of(HFConfigParser, None)()
    assert parser.parse("someone/mamba3", False, hf_overrides=None, token=None)[1].hidden_size == 64
    assert parser.parse("someone/mamba3", False, revision="wide")[1].hidden_size == 128
    assert parser.parse("someone/mamba3", False, revision=f"{1:040x}")[1].hidden_size == 128


@pytest.mark.parametrize(
    "config, ours",
    [
        (MAMBA3, True),
        ({"ssm_cfg": {"layer": "mamba-3"}}, True),
        ({"ssm_cfg": {"layer": "Mamba_3 "}}, True),
        (MAMBA2, False),
        ({**MAMBA3, "ssm_cfg": {}}, False),
        ({**MAMBA3, "ssm_cfg": None}, False),
        ({**MAMBA3, "ssm_cfg": ["Mamba3"]}, False),
        ({**MAMBA3, "ssm_cfg": {"layer": 3}}, False),
        ({**MAMBA3, "model_type": "mamba3"}, False),
        (LLAMA, False),
        (["Mamba3"], False),
        (None, False),
    ],
    ids=["right", "hyphen", "space", "mamba2", "no layer", "null", "list", "number", "typed", "llama", "array", "none"],
)
def test_what_is_ours(config, ours):
    assert is_mamba3(config) is ours


def test_a_misspelled_layer_is_our_error(tmp_path):
    model = write(tmp_path, {"ssm_cfg": {"layer": "mamba-3"}})
    with pytest.raises(ValueError, match="""ssm_cfg.layer is 'mamba-3'; expected "Mamba3\""""):
        in_front_of(HFConfigParser, None)().parse(model, False)


@pytest.mark.parametrize(
    "config",
    [LLAMA, MAMBA2, {**MAMBA3, "model_type": "mamba3"}, "{not json", "", "[]", "null", None],
    ids=["llama", "mamba2", "typed", "broken", "empty", "array", "null", "no file"],
)
def test_all_else_goes_on_with_the_same_arguments(tmp_path, config):
    if config is not None:
        write(tmp_path, config)
    parser = in_front_of(Recorder, "refused")()
    overrides, token = {"vocab_size": 3}, object()
    answer = parser.parse(
        tmp_path, True, revision="r", code_revision="c", hf_overrides=overrides, token=token, local_files_only=True
    )
    assert answer == ({}, None)
    [(args, kwargs)] = parser.calls
    assert args == (tmp_path, True)
    assert list(kwargs) == ["revision", "code_revision", "hf_overrides", "token", "local_files_only"]
    assert (kwargs["revision"], kwargs["code_revision"], kwargs["local_files_only"]) == ("r", "c", True)
    assert kwargs["hf_overrides"] is overrides and kwargs["token"] is token


def test_a_repository_that_can_not_be_reached_goes_on(offline_cache):
    parser = in_front_of(Recorder, None)()
    parser.parse("nobody/nothing", False)
    parser.parse("not a repository's name", False)
    assert len(parser.calls) == 2


def test_a_llama_config_is_parsed_as_without_us(tmp_path):
    model = write(tmp_path, LLAMA)
    theirs_file, theirs = HFConfigParser().parse(model, False, hf_overrides={"vocab_size": 256})
    file, config = in_front_of(HFConfigParser, None)().parse(model, False, hf_overrides={"vocab_size": 256})
    assert file == theirs_file
    assert type(config) is type(theirs)
    assert config.to_json_string() == theirs.to_json_string()


def test_refused(tmp_path):
    parser = in_front_of(HFConfigParser, "this vLLM is too old")()
    with pytest.raises(ValueError, match="this vLLM is too old"):
        parser.parse(write(tmp_path, MAMBA3), False)


@pytest.mark.parametrize(
    "overrides",
    [
        {"hf_overrides_kw": {"A_activation": "softplus"}},
        {"hf_overrides_fn": lambda config: config.update({"A_activation": "softplus"}) or config},
    ],
    ids=["dict", "callable"],
)
def test_through_vllm_with_overrides(offline_cache, monkeypatch, overrides):
    monkeypatch.setitem(vllm_config._CONFIG_FORMAT_TO_CONFIG_PARSER, "hf", in_front_of(HFConfigParser, None))
    offline_cache("someone/mamba3-overridden", {"main": MAMBA3})
    config = vllm_config.get_config("someone/mamba3-overridden", trust_remote_code=False, **overrides)
    config.validate()
    assert (config.A_activation, config.architectures) == ("softplus", ["Mamba3ForCausalLM"])
