"""Everything that is registered with vLLM. Called in each of vLLM's processes, before it has looked at any model.

An exception raised here would end every vLLM command, for other models too: what goes wrong is told when somebody
loads a Mamba-3 checkpoint, by the config parser, the first of our parts that vLLM meets.
"""

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from vllm.logger import init_logger

from vllm_mamba3 import __version__

SUPPORTED_VLLM = ">=0.32,<0.34"
MODEL_CLASS = "vllm_mamba3.model.language_model:Mamba3ForCausalLM"  # imported by vLLM when it needs it
BACKEND_NAME = "MAMBA3"
BACKEND_CLASS = "vllm_mamba3.model.batch_metadata.Mamba3AttentionBackend"
MIXER_OP = "vllm::mamba3_mixer"

logger = init_logger("vllm.plugins.mamba3")  # below "vllm", whose handler prints it; "vllm_mamba3" has none


def register_all() -> None:
    """Registers Mamba-3 with vLLM. A second call changes nothing; no call raises."""
    refusal = unsupported_version(vllm.__version__)
    if refusal is None:
        try:
            for register in REGISTRATIONS.values():
                register()
        except Exception as error:
            logger.exception("vllm-mamba3 %s could not register with vLLM %s", __version__, vllm.__version__)
            refusal = (
                f"vllm-mamba3 {__version__} could not register with vLLM {vllm.__version__} "
                f"({type(error).__name__}: {error}), so it can't serve Mamba-3 models."
            )
    try:
        first_time = _register_config_parser(refusal)
    except Exception as error:
        logger.warning("vllm-mamba3 %s is not registered. %s (%r)", __version__, refusal or "", error)
        return
    if first_time and refusal is None:
        logger.info("vllm-mamba3 %s registered with vLLM %s", __version__, vllm.__version__)
    elif first_time:
        logger.warning(refusal)


def unsupported_version(found: str) -> str | None:
    """Why this version of vLLM can't serve Mamba-3 models, or None if it can. Previews of 0.34 are not 0.33."""
    try:
        supported = SpecifierSet(SUPPORTED_VLLM).contains(Version(found), prereleases=True)
    except InvalidVersion:
        supported = False
    if supported:
        return None
    return (
        f"vllm-mamba3 {__version__} serves Mamba-3 models with vLLM {SUPPORTED_VLLM} only, and this is vLLM {found}: "
        "install a vLLM of that range, or a vllm-mamba3 for this one."
    )


def _register_model() -> None:
    # From this module: the name is not yet in `vllm` in the process that inspects models.
    from vllm.model_executor.models import ModelRegistry

    from vllm_mamba3.checkpoint.config import ARCHITECTURE

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL_CLASS)


def _register_engine_config() -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from vllm_mamba3.checkpoint.config import ARCHITECTURE
    from vllm_mamba3.engine_config import Mamba3EngineConfig

    MODELS_CONFIG_MAP[ARCHITECTURE] = Mamba3EngineConfig


def _register_attention_backend() -> None:
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    if BACKEND_NAME not in MambaAttentionBackendEnum.__members__:  # it raises the second time
        MambaAttentionBackendEnum.register(BACKEND_NAME, BACKEND_CLASS)


def _register_splitting_op() -> None:
    # Piecewise CUDA graphs split at these; read when an engine is configured.
    from vllm.config.compilation import CompilationConfig

    if MIXER_OP not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(MIXER_OP)


def _register_config_parser(refusal: str | None) -> bool:
    """Puts our parser in front of vLLM's, once; returns whether it was the first time."""
    from vllm.transformers_utils import config as vllm_config

    from vllm_mamba3.checkpoint.config_parser import Mamba3ConfigParser, in_front_of

    parsers = vllm_config._CONFIG_FORMAT_TO_CONFIG_PARSER
    if issubclass(parsers["hf"], Mamba3ConfigParser):
        return False
    # Not through register_config_parser, which does just this and warns, in every process of every model.
    parsers["hf"] = in_front_of(parsers["hf"], refusal)
    return True


# What vLLM is told, in this order; the config parser comes last, with the reason if one of these failed.
REGISTRATIONS = {
    "model class": _register_model,
    "engine config": _register_engine_config,
    "attention backend": _register_attention_backend,
    "splitting op": _register_splitting_op,
}
