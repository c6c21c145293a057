"""Registration: in a process of its own, twice, chosen by VLLM_PLUGINS; never an exception, whatever vLLM is there."""

import json
import os
import subprocess
import sys

import pytest
import vllm
import vllm_mamba3
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group
from vllm.transformers_utils import config as vllm_config
from vllm.transformers_utils.config import HFConfigParser
from vllm_mamba3 import __version__, plugin

MAMBA3 = {"ssm_cfg": {"layer": "Mamba3"}}

# What a process of vLLM knows of us after loading its plugins, and after registering once more.
LOOK = """
import json, logging, sys
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())
import vllm
logging.getLogger("vllm").addHandler(Keep())
logging.getLogger("vllm").setLevel(logging.INFO)
from vllm.plugins import load_general_plugins
load_general_plugins()
import torch, vllm_mamba3
from vllm.config.compilation import CompilationConfig
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.transformers_utils.config import get_config_parser
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
def look():
    backend = MambaAttentionBackendEnum.__members__.get("MAMBA3")
    hook = MODELS_CONFIG_MAP.get("Mamba3ForCausalLM")
    return {
        "model": "Mamba3ForCausalLM" in ModelRegistry.get_supported_archs(),
        "hook": hook and hook.__name__,
        "backend": backend and backend.value,
        "ops": CompilationConfig._attention_ops.count("vllm::mamba3_mixer"),
        "parsers": [c.__name__ for c in type(get_config_parser("hf")).__mro__].count("Mamba3ConfigParser"),
        "lines": sum("vllm-mamba3" in line for line in records),
    }
first = look()
vllm_mamba3.register()
ours = sorted(m for m in sys.modules if m.startswith(("vllm_mamba3.kernels", "vllm_mamba3.model.")))
print(json.dumps({"first": first, "second": look(), "lines": records, "loaded": ours,
                  "cuda": torch.cuda.is_initialized()}))
"""
ALL = {
    "model": True,
    "hook": "Mamba3EngineConfig",
    "backend": "vllm_mamba3.model.batch_metadata.Mamba3AttentionBackend",
    "ops": 1,
    "parsers": 2,  # the class made for this vLLM, and the mixin of the same name
    "lines": 1,
}


def test_everything_once_in_a_fresh_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        cwd=tmp_path,  # not the repository's root, whose kernels/ would pass for the package of that name
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "mamba3"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.strip().split("\n")[-1])
    assert seen["first"] == ALL
    assert seen["second"] == ALL
    assert f"vllm-mamba3 {__version__} registered with vLLM {vllm.__version__}" in seen["lines"]
    assert seen["loaded"] == []  # neither model nor kernels, and so no Triton by us
    assert seen["cuda"] is False


@pytest.mark.parametrize(
    "chosen, ours", [(None, True), ("mamba3", True), ("a,mamba3", True), ("another", False), ("", False)]
)
def test_vllm_finds_the_plugin_unless_told_not_to(monkeypatch, chosen, ours):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
    found = load_plugins_by_group(DEFAULT_PLUGINS_GROUP)
    assert (found.get("mamba3") is vllm_mamba3.register) is ours
    assert ("mamba3" in found) is ours


@pytest.fixture
def parsers(monkeypatch):
    """vLLM's parsers as without us, put back afterwards."""
    monkeypatch.setitem(vllm_config._CONFIG_FORMAT_TO_CONFIG_PARSER, "hf", HFConfigParser)
    return vllm_config._CONFIG_FORMAT_TO_CONFIG_PARSER


@pytest.mark.parametrize(
    "version", ["0.31.1", "0.32.0rc1", "0.34.0", "0.34.0.dev12+gabc", "0.34.0rc1", "1.0.0", "dev", ""]
)
def test_an_unsupported_vllm_refuses_mamba3_and_nothing_else(monkeypatch, parsers, tmp_path, version):
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(plugin, "REGISTRATIONS", {"must not be called": lambda: 1 / 0})
    plugin.register_all()
    plugin.register_all()
    (tmp_path / "config.json").write_text(json.dumps(MAMBA3))
    with pytest.raises(ValueError) as caught:
        parsers["hf"]().parse(tmp_path, False)
    assert ">=0.32,<0.34" in str(caught.value)
    assert f"this is vLLM {version}" in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 7}))
    assert parsers["hf"]().parse(tmp_path, False)[1].vocab_size == 7


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.0", "0.33.1.dev3+gabc", "0.33.1rc1", "0.33.0+cu130"])
def test_supported_versions(version):
    assert plugin.unsupported_version(version) is None


def test_a_hook_that_is_not_there_is_told_when_a_mamba3_model_is_loaded(monkeypatch, parsers, tmp_path):
    def missing():
        raise ImportError("cannot import name 'MODELS_CONFIG_MAP'")

    monkeypatch.setattr(plugin, "REGISTRATIONS", {"engine config": missing})
    plugin.register_all()
    (tmp_path / "config.json").write_text(json.dumps(MAMBA3))
    with pytest.raises(ValueError, match="could not register .* cannot import name 'MODELS_CONFIG_MAP'"):
        parsers["hf"]().parse(tmp_path, False)


@pytest.mark.parametrize("version", ["0.33.0", "0.40.0"], ids=["supported", "unsupported"])
def test_without_vllms_table_of_parsers_nothing_is_raised(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(plugin, "REGISTRATIONS", {})
    monkeypatch.delattr(vllm_config, "_CONFIG_FORMAT_TO_CONFIG_PARSER")
    plugin.register_all()
