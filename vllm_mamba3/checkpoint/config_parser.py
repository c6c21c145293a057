"""Recognises the config.json of a Mamba-3 checkpoint, and leaves every other to vLLM.

vLLM picks a parser by format, "hf" for any config.json, and that one refuses a file without `model_type`, as mamba_ssm
writes them, before the model registry or hf_overrides have a say. So ours takes its place in front of it.
"""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedConfig
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from vllm_mamba3.checkpoint.config import Mamba3Config

CONFIG_FILE = "config.json"


class Mamba3ConfigParser:
    """The part of the parser that is ours. `in_front_of` puts it before the one that vLLM has."""

    refusal: str | None = None

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict, PreTrainedConfig]:
        """Same arguments and result as vLLM's parser.

        Raises:
            ValueError: the config is Mamba-3's, and wrong, or not to be served by this vLLM.
        """
        file = read_config_file(model, revision, kwargs)
        if not is_mamba3(file):
            return super().parse(model, trust_remote_code, revision=revision, code_revision=code_revision, **kwargs)
        if self.refusal is not None:
            raise ValueError(self.refusal)
        # hf_overrides stay in kwargs unread: vLLM applies them to the result, and the engine config validates again.
        return file, Mamba3Config.from_mamba_ssm(file, name_or_path=str(model))


def in_front_of(parser: type[ConfigParserBase], refusal: str | None) -> type[ConfigParserBase]:
    """A parser that takes what is Mamba-3's (or refuses it with `refusal`) and hands all else to `parser`."""
    return type("Mamba3ConfigParser", (Mamba3ConfigParser, parser), {"refusal": refusal, "__module__": __name__})


def is_mamba3(file: Any) -> bool:
    """Whether this is a config of mamba_ssm's schema whose mixer is a Mamba-3, even if misspelled."""
    if not isinstance(file, dict) or file.get("model_type") is not None or not isinstance(file.get("ssm_cfg"), dict):
        return False  # another schema
    layer = file["ssm_cfg"].get("layer")
    return isinstance(layer, str) and re.sub(r"[^a-z0-9]", "", layer.lower()).startswith("mamba3")


def read_config_file(model: str | Path, revision: str | None, kwargs: dict[str, Any]) -> Any:
    """The parsed config.json of a directory or of a Hub repository, or None.

    A file that can't be read is vLLM's to report, in its own words, so nothing is raised for it.
    """
    try:
        path = Path(model)
        if path.exists():
            return json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        cached = try_to_load_from_cache(str(model), CONFIG_FILE, cache_dir=kwargs.get("cache_dir"), revision=revision)
        if isinstance(cached, str):
            return json.loads(Path(cached).read_text(encoding="utf-8"))
        # Not in the cache yet: fetched once, in the way that vLLM's parser does next, which then finds it there.
        token, cache_dir = kwargs.get("token"), kwargs.get("cache_dir")
        return PreTrainedConfig.get_config_dict(model, revision=revision, token=token, cache_dir=cache_dir)[0]
    except Exception:
        return None
