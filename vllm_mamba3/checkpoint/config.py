"""The numbers of a Mamba-3 checkpoint, in one vocabulary whatever the schema of its config.json.

mamba_ssm's schema is read here (`Mamba3Config.from_mamba_ssm`); its names and defaults are those of mamba_ssm's
`MambaConfig` and `Mamba3`. A value that mamba_ssm would silently ignore or change is an error instead: it would give
another model than the one its author meant.
"""

import difflib
import math
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

ARCHITECTURE = "Mamba3ForCausalLM"
A_ACTIVATIONS = ("heavy_tail", "softplus")
ROPE_FRACTIONS = (0.5, 1.0)
MLP_MULTIPLE = 128  # mamba_ssm's gated MLP rounds its width up to a multiple of this
MIXER_LAYER = "Mamba3"  # how mamba_ssm spells ssm_cfg.layer


class Setting(NamedTuple):
    """One number of the model: our name, where mamba_ssm's schema keeps it, mamba_ssm's default, what it may be."""

    name: str
    key: str  # "ssm_cfg.x" is the key x inside ssm_cfg
    default: Any
    kind: str  # a key of _KINDS


SETTINGS = (
    Setting("hidden_size", "d_model", 2560, "size"),
    Setting("num_hidden_layers", "n_layer", 64, "size"),
    Setting("intermediate_size", "d_intermediate", 0, "size or 0"),
    Setting("vocab_size", "vocab_size", 50277, "size"),
    Setting("pad_vocab_size_multiple", "pad_vocab_size_multiple", 8, "size"),
    Setting("tie_word_embeddings", "tie_embeddings", True, "bool"),
    Setting("residual_in_fp32", "residual_in_fp32", True, "bool"),
    Setting("state_size", "ssm_cfg.d_state", 128, "size"),
    Setting("expand", "ssm_cfg.expand", 2, "positive"),
    Setting("head_dim", "ssm_cfg.headdim", 64, "size"),
    Setting("n_groups", "ssm_cfg.ngroups", 1, "size"),
    Setting("rope_fraction", "ssm_cfg.rope_fraction", 0.5, "positive"),
    Setting("A_floor", "ssm_cfg.A_floor", 1e-4, "positive"),
    Setting("is_outproj_norm", "ssm_cfg.is_outproj_norm", False, "bool"),
    Setting("is_mimo", "ssm_cfg.is_mimo", False, "bool"),
    Setting("mimo_rank", "ssm_cfg.mimo_rank", 4, "size"),
    Setting("chunk_size", "ssm_cfg.chunk_size", 64, "size"),
)
# Keys of mamba_ssm's schema that change nothing about what a trained model computes.
TRAINING_KEYS = {
    "fused_add_norm": "bool",
    "initializer_cfg": "dict",
    "ssm_cfg.dt_min": "positive",
    "ssm_cfg.dt_max": "positive",
    "ssm_cfg.dt_init_floor": "positive",
    "ssm_cfg.dropout": "positive or 0",
}
# Keys of the Transformers library that say nothing about the shape of the model; null is the same as absent.
METADATA_KEYS = {
    "architectures": "any",
    "transformers_version": "any",
    "_name_or_path": "any",
    "torch_dtype": "dtype",
    "dtype": "dtype",
    "max_position_embeddings": "size",
    "bos_token_id": "token id",
    "eos_token_id": "token id",
    "pad_token_id": "token id",
}
# Keys that decide something and are checked one by one in `_check_structure`.
STRUCTURE_KEYS = ("ssm_cfg", "ssm_cfg.layer", "attn_layer_idx", "attn_cfg", "rms_norm")
# What a config object may carry beside the settings: vLLM and the Transformers library set and read these.
_OTHER_ATTRIBUTES = {"A_activation", "layer_norm_epsilon", "model_type", "quantization_config", *METADATA_KEYS}
_DERIVED = {
    "num_heads": "expand, hidden_size and head_dim",
    "num_rope_angles": "state_size and rope_fraction",
    "padded_vocab_size": "vocab_size and pad_vocab_size_multiple",
}
_OUR_NAME = {key: setting.name for setting in SETTINGS for key in (setting.key, setting.key.removeprefix("ssm_cfg."))}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf  # NaN is not


def _is_token_id(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, list) and all(map(_is_int, value)))


_KINDS = {
    "size": ("an integer of at least 1", lambda value: _is_int(value) and value >= 1),
    "size or 0": ("an integer of at least 0", lambda value: _is_int(value) and value >= 0),
    "positive": ("a finite number above 0", lambda value: _is_number(value) and value > 0),
    "positive or 0": ("a finite number of at least 0", lambda value: _is_number(value) and value >= 0),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "dict": ("an object or null", lambda value: value is None or isinstance(value, dict)),
    "list": ("a list or null", lambda value: value is None or isinstance(value, list)),
    "token id": ("an integer, a list of integers or null", _is_token_id),
    "dtype": ('"float32", "float16" or "bfloat16"', lambda value: value in ("float32", "float16", "bfloat16")),
    "any": ("", lambda value: True),
}


def _check_kind(key: str, value: Any, kind: str) -> None:
    expected, accepts = _KINDS[kind]
    if not accepts(value):
        raise ValueError(f"Mamba-3 config: {key} is {value!r}; expected {expected}.")


def _did_you_mean(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    return f"Did you mean {close[0]}? " if close else ""


class Mamba3Config(PreTrainedConfig):
    """A Mamba-3 language model. Sizes are counts of elements.

    intermediate_size is the MLP's width after rounding up to a multiple of 128, 0 without an MLP; vocab_size is
    unpadded; mimo_rank is 1 whenever is_mimo is false; A_activation says how the raw decay rate is made positive.

    Raises:
        ValueError: a setting is unknown, of the wrong type, or does not fit the others.
    """

    model_type = "mamba3"

    hidden_size: int = 2560
    num_hidden_layers: int = 64
    intermediate_size: int = 0
    vocab_size: int = 50277
    pad_vocab_size_multiple: int = 8
    tie_word_embeddings: bool = True
    residual_in_fp32: bool = True
    state_size: int = 128
    expand: int | float = 2
    head_dim: int = 64
    n_groups: int = 1
    rope_fraction: float = 0.5
    A_floor: float = 1e-4
    A_activation: str = "heavy_tail"
    is_outproj_norm: bool = False
    is_mimo: bool = False
    mimo_rank: int = 1
    chunk_size: int = 64
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.architectures is None:
            self.architectures = [ARCHITECTURE]
        self.validate()

    def __setattr__(self, key: str, value: Any) -> None:
        if key in _DERIVED:
            raise ValueError(
                f"Mamba-3 config: {key} follows from {_DERIVED[key]}, it can't be set (to {value!r}); set those."
            )
        super().__setattr__(key, value)

    @property
    def num_heads(self) -> int:
        return int(self.expand * self.hidden_size) // self.head_dim

    @property
    def num_rope_angles(self) -> int:
        """Pairs of the state that rotate; one angle each."""
        return int(self.state_size * self.rope_fraction) // 2

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the stored embedding."""
        multiple = self.pad_vocab_size_multiple
        return math.ceil(self.vocab_size / multiple) * multiple

    @classmethod
    def from_mamba_ssm(cls, file: dict[str, Any], **kwargs: Any) -> "Mamba3Config":
        """Reads a config.json of mamba_ssm's schema; keyword arguments go to the constructor (name_or_path).

        Raises:
            ValueError: names the key as the file has it, its value, and what would be right.
        """
        values = _flatten(file)
        _check_structure(values)
        settings = {}
        for setting in SETTINGS:
            value = values.get(setting.key, setting.default)
            _check_kind(setting.key, value, setting.kind)
            settings[setting.name] = value
        _check_together(settings, {setting.name: setting.key for setting in SETTINGS})
        if not settings["is_mimo"]:
            settings["mimo_rank"] = 1  # mamba_ssm ignores the file's rank then
        settings["intermediate_size"] = math.ceil(settings["intermediate_size"] / MLP_MULTIPLE) * MLP_MULTIPLE
        # The file's `architectures`, if any, names a class of another library.
        handed_on = METADATA_KEYS.keys() - {"architectures", "_name_or_path"}
        metadata = {key: values[key] for key in handed_on if values.get(key) is not None}
        return cls(**settings, **metadata, **kwargs)

    def validate(self) -> None:
        """Checks every setting again, e.g. after vLLM has applied hf_overrides to the object.

        Raises:
            ValueError: names the setting, its value, and what would be right.
        """
        self._check_names()
        settings = {setting.name: getattr(self, setting.name) for setting in SETTINGS}
        for setting in SETTINGS:
            _check_kind(setting.name, settings[setting.name], setting.kind)
        _check_together(settings, {name: name for name in settings})
        if self.intermediate_size % MLP_MULTIPLE:
            raise ValueError(
                f"Mamba-3 config: intermediate_size is {self.intermediate_size}; expected 0 or a multiple of "
                f"{MLP_MULTIPLE}, the width after rounding up."
            )
        if not self.is_mimo and self.mimo_rank != 1:
            raise ValueError(f"Mamba-3 config: mimo_rank is {self.mimo_rank}; expected 1 while is_mimo is false.")
        if self.A_activation not in A_ACTIVATIONS:
            choices = " or ".join(f'"{name}"' for name in A_ACTIVATIONS)
            raise ValueError(f"Mamba-3 config: A_activation is {self.A_activation!r}; expected {choices}.")
        _check_kind("layer_norm_epsilon", self.layer_norm_epsilon, "positive")
        for key in ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, key, None) is not None:
                _check_kind(key, getattr(self, key), METADATA_KEYS[key])
        if self.model_type != type(self).model_type:
            raise ValueError(f'Mamba-3 config: model_type is {self.model_type!r}; expected "mamba3".')

    def _check_names(self) -> None:
        """An attribute that nobody reads is a setting that its author thinks is in force."""
        known = [setting.name for setting in SETTINGS] + sorted(_OTHER_ATTRIBUTES)
        for key in vars(self):
            if key in known or key.startswith("_") or key in PreTrainedConfig.__dataclass_fields__:
                continue
            if key == "ssm_cfg":
                hint = "Give what is inside it one by one, under the names below. "
            elif key in _OUR_NAME:
                hint = f"mamba_ssm's {key} is {_OUR_NAME[key]} here. "
            else:
                hint = _did_you_mean(key, known)
            raise ValueError(
                f"Mamba-3 config: there is no setting {key} (set to {getattr(self, key)!r}). {hint}"
                f"Settings: {', '.join([setting.name for setting in SETTINGS] + ['A_activation'])}."
            )


def _flatten(file: dict[str, Any]) -> dict[str, Any]:
    """The file's values by key, those of ssm_cfg as "ssm_cfg.x". Unknown keys and misplaced ones are errors."""
    _check_kind("ssm_cfg", file.get("ssm_cfg"), "dict")
    values = dict(file)
    values.update({f"ssm_cfg.{key}": value for key, value in (file.get("ssm_cfg") or {}).items()})
    known = [*(setting.key for setting in SETTINGS), *TRAINING_KEYS, *METADATA_KEYS, *STRUCTURE_KEYS]
    for key, value in values.items():
        if key in known:
            continue
        other_place = key.removeprefix("ssm_cfg.") if key.startswith("ssm_cfg.") else f"ssm_cfg.{key}"
        if key.removeprefix("ssm_cfg.") == "A_activation":
            hint = f"mamba_ssm has no such key: pass it to vLLM as hf_overrides={{'A_activation': {value!r}}}. "
        elif other_place in known:
            hint = f"It belongs at {other_place}. "
        else:
            hint = _did_you_mean(key, known)
        where = "ssm_cfg." if key.startswith("ssm_cfg.") else ""
        there = [k for k in known if k.startswith("ssm_cfg.") == bool(where) and k not in METADATA_KEYS]
        raise ValueError(
            f"Mamba-3 config: unknown key {key} (set to {value!r}). {hint}Known keys there: {', '.join(there)}."
        )
    return values


def _check_structure(values: dict[str, Any]) -> None:
    """The keys that choose what the model is made of."""
    layer = values.get("ssm_cfg.layer")
    if layer != MIXER_LAYER:
        raise ValueError(f'Mamba-3 config: ssm_cfg.layer is {layer!r}; expected "{MIXER_LAYER}", spelled like this.')
    for key, kind in {**TRAINING_KEYS, **METADATA_KEYS, "attn_layer_idx": "list", "attn_cfg": "dict"}.items():
        if values.get(key) is not None or (key in values and key not in METADATA_KEYS):
            _check_kind(key, values[key], kind)
    if values.get("attn_layer_idx"):
        raise ValueError(
            f"Mamba-3 config: attn_layer_idx is {values['attn_layer_idx']!r}; attention layers are not supported yet, "
            "expected an empty list."
        )
    _check_kind("rms_norm", values.get("rms_norm", True), "bool")
    if not values.get("rms_norm", True):
        raise ValueError("Mamba-3 config: rms_norm is False; expected true, LayerNorm blocks are not supported.")


def _check_together(settings: dict[str, Any], label: dict[str, str]) -> None:
    """What must hold between settings, each of the right kind already. `label` gives the names to use in errors."""
    inner = settings["expand"] * settings["hidden_size"]
    product = f"{label['expand']} * {label['hidden_size']} = {settings['expand']} * {settings['hidden_size']}"
    if not float(inner).is_integer():
        raise ValueError(f"Mamba-3 config: {product} = {inner}; expected a whole number.")
    inner, head_dim, groups = int(inner), settings["head_dim"], settings["n_groups"]
    if inner % head_dim:
        raise ValueError(
            f"Mamba-3 config: {label['head_dim']} is {head_dim}; expected a divisor of {product} = {inner}."
        )
    heads = inner // head_dim
    if heads % groups:
        raise ValueError(
            f"Mamba-3 config: {label['n_groups']} is {groups}; expected a divisor of the {heads} heads "
            f"({product}, over {label['head_dim']} = {head_dim})."
        )
    fraction, state_size = settings["rope_fraction"], settings["state_size"]
    if fraction not in ROPE_FRACTIONS:
        raise ValueError(f"Mamba-3 config: {label['rope_fraction']} is {fraction}; expected 0.5 or 1.0.")
    rotated = int(state_size * fraction)
    if rotated < 2 or rotated % 2:
        raise ValueError(
            f"Mamba-3 config: {label['state_size']} is {state_size} and {label['rope_fraction']} {fraction}, so "
            f"{rotated} of a state's entries rotate; expected an even number of at least 2, they rotate in pairs."
        )
    if settings["is_mimo"] and state_size % 2:
        raise ValueError(
            f"Mamba-3 config: {label['state_size']} is {state_size}; expected an even number with "
            f"{label['is_mimo']}, whose rotation pairs the two halves of the state."
        )
