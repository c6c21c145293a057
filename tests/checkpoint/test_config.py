"""Mamba3Config: mamba_ssm's schema read, its mistakes named, one vocabulary that stays consistent."""

import copy
import pickle

import pytest
from vllm_mamba3.checkpoint.config import Mamba3Config


def official(mimo: bool = False, ssm: dict | None = None, **changes) -> dict:
    """The config.json of state-spaces/mamba3-{siso,mimo}-187m with some values changed; a None removes the key."""
    mixer = {
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
        "chunk_size": 16 if mimo else 64,
        "is_mimo": mimo,
        "is_outproj_norm": False,
    }
    if mimo:
        mixer["mimo_rank"] = 4
    file = {
        "d_model": 768,
        "d_intermediate": 1264 if mimo else 1536,
        "n_layer": 12,
        "vocab_size": 128256,
        "ssm_cfg": {**mixer, **(ssm or {})},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": not mimo,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }
    return {**file, **changes}


def test_official_siso():
    config = Mamba3Config.from_mamba_ssm(official())
    assert config.architectures == ["Mamba3ForCausalLM"]
    assert config.model_type == "mamba3"
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (768, 12, 1536)
    assert (config.num_heads, config.head_dim, config.state_size, config.n_groups) == (24, 64, 128, 1)
    assert (config.is_mimo, config.mimo_rank, config.num_rope_angles) == (False, 1, 32)
    assert (config.vocab_size, config.padded_vocab_size, config.tie_word_embeddings) == (128256, 128256, True)
    assert (config.A_floor, config.A_activation, config.is_outproj_norm) == (1e-4, "heavy_tail", False)
    assert (config.chunk_size, config.residual_in_fp32, config.layer_norm_epsilon) == (64, True, 1e-5)


def test_official_mimo_and_its_mlp_width_rounded_up():
    config = Mamba3Config.from_mamba_ssm(official(mimo=True))
    assert (config.is_mimo, config.mimo_rank, config.chunk_size) == (True, 4, 16)
    assert config.intermediate_size == 1280


def test_absent_keys_have_the_defaults_of_mamba_ssm():
    config = Mamba3Config.from_mamba_ssm({"ssm_cfg": {"layer": "Mamba3"}})
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (2560, 64, 0)
    assert (config.vocab_size, config.pad_vocab_size_multiple, config.padded_vocab_size) == (50277, 8, 50280)
    assert (config.num_heads, config.state_size, config.rope_fraction, config.chunk_size) == (80, 128, 0.5, 64)
    assert (config.tie_word_embeddings, config.residual_in_fp32) == (True, True)
    assert Mamba3Config.from_mamba_ssm({"ssm_cfg": {"layer": "Mamba3", "is_mimo": True}}).mimo_rank == 4


def test_rank_of_a_siso_model_is_one_whatever_the_file_says():
    assert Mamba3Config.from_mamba_ssm(official(ssm={"mimo_rank": 4})).mimo_rank == 1


def test_what_vllm_looks_for_and_must_not_find():
    config = Mamba3Config.from_mamba_ssm(official())
    assert not hasattr(config, "num_attention_heads")  # it would be given attention heads
    assert not hasattr(config, "max_position_embeddings")  # it would be the most that a user can ask for
    assert config.dtype is None


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"max_position_embeddings": 4096}, {"max_position_embeddings": 4096}),
        ({"torch_dtype": "bfloat16", "transformers_version": "5.0"}, {"transformers_version": "5.0"}),
        ({"eos_token_id": [1, 2], "pad_token_id": None, "bos_token_id": 0}, {"eos_token_id": [1, 2]}),
        ({"architectures": ["MambaLMHeadModel"], "_name_or_path": "x"}, {"architectures": ["Mamba3ForCausalLM"]}),
        ({"attn_layer_idx": None, "attn_cfg": None, "initializer_cfg": None}, {}),
        ({"attn_cfg": {"num_heads": 4}, "d_intermediate": 0}, {"intermediate_size": 0}),
        ({"ssm": {"dropout": 0.0, "rope_fraction": 1}}, {"num_rope_angles": 64}),
        ({"d_model": 96, "ssm": {"expand": 1.5, "headdim": 16}}, {"num_heads": 9}),
        ({"vocab_size": 100, "pad_vocab_size_multiple": 16}, {"vocab_size": 100, "padded_vocab_size": 112}),
        ({"ssm": {"d_state": 5, "headdim": 48}}, {"num_rope_angles": 1}),
    ],
    ids=["length", "dtype", "token ids", "foreign names", "nulls", "no mlp", "full rotation", "expand", "vocab", "odd"],
)
def test_accepted(changes, expected):
    config = Mamba3Config.from_mamba_ssm(official(**changes))
    assert {name: getattr(config, name) for name in expected} == expected


MIXER_ERRORS = [
    ("layer", "mamba3", '"Mamba3"'),
    ("layer", "Mamba-3", '"Mamba3"'),
    ("layer", None, '"Mamba3"'),
    ("d_stat", 128, "Did you mean ssm_cfg.d_state"),
    ("d_conv", 4, "Known keys"),
    ("n_layer", 4, "belongs at n_layer"),
    ("A_activation", "softplus", "hf_overrides={'A_activation': 'softplus'}"),
    ("d_state", "128", "an integer of at least 1"),
    ("d_state", 128.0, "an integer of at least 1"),
    ("d_state", True, "an integer of at least 1"),
    ("d_state", None, "an integer of at least 1"),
    ("d_state", -128, "an integer of at least 1"),
    ("d_state", 6, "even number of at least 2"),  # half of it rotates: 3 entries
    ("d_state", 2, "even number of at least 2"),
    ("headdim", 60, "divisor of ssm_cfg.expand * d_model = 2 * 768 = 1536"),
    ("headdim", 0, "an integer of at least 1"),
    ("expand", 0, "a finite number above 0"),
    ("expand", float("nan"), "a finite number above 0"),
    ("expand", float("inf"), "a finite number above 0"),
    ("expand", 1.3333, "a whole number"),
    ("ngroups", 5, "a divisor of the 24 heads"),
    ("ngroups", 0, "an integer of at least 1"),
    ("rope_fraction", 0.25, "0.5 or 1.0"),
    ("rope_fraction", "0.5", "a finite number above 0"),
    ("A_floor", 0.0, "a finite number above 0"),
    ("A_floor", -1e-4, "a finite number above 0"),
    ("mimo_rank", 0, "an integer of at least 1"),
    ("is_mimo", 1, "true or false"),
    ("is_outproj_norm", "false", "true or false"),
    ("chunk_size", 0, "an integer of at least 1"),
    ("dt_min", "small", "a finite number above 0"),
    ("dropout", -0.1, "a finite number of at least 0"),
]


@pytest.mark.parametrize("key, value, right", MIXER_ERRORS, ids=[f"{key}={value}" for key, value, _ in MIXER_ERRORS])
@pytest.mark.parametrize("mimo", [False, True], ids=["siso", "mimo"])
def test_errors_in_ssm_cfg_name_the_key_the_value_and_what_is_right(mimo, key, value, right):
    with pytest.raises(ValueError) as caught:
        Mamba3Config.from_mamba_ssm(official(mimo, ssm={key: value}))
    message = str(caught.value)
    assert f"ssm_cfg.{key}" in message
    assert repr(value) in message
    assert right in message


TOP_LEVEL_ERRORS = [
    ("d_model", 0, "an integer of at least 1"),
    ("d_model", 768.5, "an integer of at least 1"),
    ("d_intermediate", -1, "an integer of at least 0"),
    ("n_layer", False, "an integer of at least 1"),
    ("vocab_size", "128256", "an integer of at least 1"),
    ("pad_vocab_size_multiple", 0, "an integer of at least 1"),
    ("tie_embeddings", 1, "true or false"),
    ("residual_in_fp32", None, "true or false"),
    ("rms_norm", False, "LayerNorm"),
    ("rms_norm", "true", "true or false"),
    ("fused_add_norm", "true", "true or false"),
    ("attn_layer_idx", [3], "attention layers are not supported yet"),
    ("attn_layer_idx", 3, "a list or null"),
    ("attn_cfg", [], "an object or null"),
    ("ssm_cfg", [], "an object or null"),
    ("d_modle", 768, "Did you mean d_model"),
    ("hidden_size", 768, "Known keys"),
    ("headdim", 64, "belongs at ssm_cfg.headdim"),
    ("max_position_embeddings", -1, "an integer of at least 1"),
    ("eos_token_id", "</s>", "an integer, a list of integers or null"),
    ("torch_dtype", "bf16", '"bfloat16"'),
]


@pytest.mark.parametrize("key, value, right", TOP_LEVEL_ERRORS, ids=[f"{k}={v}" for k, v, _ in TOP_LEVEL_ERRORS])
def test_errors_at_top_level_name_the_key_the_value_and_what_is_right(key, value, right):
    with pytest.raises(ValueError) as caught:
        Mamba3Config.from_mamba_ssm(official(**{key: value}))
    message = str(caught.value)
    assert key in message
    assert repr(value) in message
    assert right in message


def test_a_mimo_state_has_two_halves():
    with pytest.raises(ValueError, match="ssm_cfg.d_state is 5; expected an even number with ssm_cfg.is_mimo"):
        Mamba3Config.from_mamba_ssm(official(mimo=True, ssm={"d_state": 5}))


@pytest.mark.parametrize("mimo", [False, True], ids=["siso", "mimo"])
def test_survives_copying_and_sending(mimo):
    config = Mamba3Config.from_mamba_ssm(official(mimo, max_position_embeddings=4096, torch_dtype="bfloat16"))
    config.update({"A_activation": "softplus"})
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    again = Mamba3Config.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert (again.A_activation, again.num_heads) == ("softplus", 24)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ({"A_activation": "softplus"}, {"A_activation": "softplus"}),
        ({"num_hidden_layers": 2}, {"num_hidden_layers": 2}),
        ({"head_dim": 32}, {"num_heads": 48}),
        ({"vocab_size": 100}, {"padded_vocab_size": 112}),
        ({"rope_fraction": 1.0}, {"num_rope_angles": 64}),
        ({"max_position_embeddings": 8192, "architectures": ["Mamba3ForCausalLM"]}, {"max_position_embeddings": 8192}),
    ],
    ids=lambda case: "-".join(case),
)
def test_overrides_that_hold_and_what_follows_from_them(overrides, expected):
    config = Mamba3Config.from_mamba_ssm(official())
    config.update(overrides)  # as vLLM applies a dict of hf_overrides
    config.validate()
    assert {name: getattr(config, name) for name in expected} == expected


OVERRIDE_ERRORS = [
    ("A_activation", "relu", '"heavy_tail" or "softplus"'),
    ("A_activation", None, '"heavy_tail" or "softplus"'),
    ("A_flor", 1e-3, "Did you mean A_floor"),
    ("n_layer", 2, "num_hidden_layers here"),
    ("d_state", 64, "state_size here"),
    ("ssm_cfg", {"A_floor": 1e-3}, "one by one"),
    ("num_heads", 12, "expand, hidden_size and head_dim"),
    ("num_rope_angles", 12, "state_size and rope_fraction"),
    ("padded_vocab_size", 12, "pad_vocab_size_multiple"),
    ("intermediate_size", 1264, "multiple of 128"),
    ("mimo_rank", 4, "1 while is_mimo is false"),
    ("head_dim", 60, "divisor of expand * hidden_size"),
    ("state_size", "128", "an integer of at least 1"),
    ("num_attention_heads", 8, "Settings:"),
    ("model_type", "llama", '"mamba3"'),
    ("layer_norm_epsilon", 0, "a finite number above 0"),
    ("max_position_embeddings", 0, "an integer of at least 1"),
]


@pytest.mark.parametrize("key, value, right", OVERRIDE_ERRORS, ids=[f"{k}={v}" for k, v, _ in OVERRIDE_ERRORS])
def test_overrides_that_nobody_would_read_or_that_can_not_be_are_errors(key, value, right):
    config = Mamba3Config.from_mamba_ssm(official())
    with pytest.raises(ValueError) as caught:
        config.update({key: value})
        config.validate()
    message = str(caught.value)
    assert key in message
    assert repr(value) in message
    assert right in message


def test_a_constructor_takes_no_unknown_setting_either():
    with pytest.raises(ValueError, match="no setting n_heads"):
        Mamba3Config(n_heads=4)
