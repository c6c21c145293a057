"""What vLLM's engine is told about a Mamba-3 model, and what it is asked for and can't have yet.

A setting that would fail at the first request, or give other tokens, is refused at start-up.
"""

from typing import TYPE_CHECKING, NamedTuple

import vllm
from vllm.logger import init_logger
from vllm.model_executor.models.config import MambaModelConfig

from vllm_mamba3 import __version__
from vllm_mamba3.checkpoint.config import Mamba3Config
from vllm_mamba3.checkpoint.tokenizer import set_default_tokenizer
from vllm_mamba3.implementations import chosen_implementation

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.plugins.mamba3")


class Refused(NamedTuple):
    """A setting with only some of its values supported: where it is, what the user calls it, what to do."""

    path: str  # from VllmConfig
    allowed: tuple
    name: str
    remedy: str


# In this order, so that a setting comes before those that vLLM derives from it.
REFUSED = (
    Refused("model_config.runner_type", ("generate",), "pooling", "set --runner generate"),
    Refused("parallel_config.tensor_parallel_size", (1,), "tensor parallelism", "set --tensor-parallel-size 1"),
    Refused("parallel_config.pipeline_parallel_size", (1,), "pipeline parallelism", "set --pipeline-parallel-size 1"),
    Refused(
        path="parallel_config.decode_context_parallel_size",
        allowed=(1,),
        name="decode context parallelism",
        remedy="set --decode-context-parallel-size 1",
    ),
    Refused(
        path="parallel_config.prefill_context_parallel_size",
        allowed=(1,),
        name="prefill context parallelism",
        remedy="set --prefill-context-parallel-size 1",
    ),
    Refused("parallel_config.use_ubatching", (False,), "microbatches", "leave out --enable-dbo and --ubatch-size"),
    Refused(
        path="speculative_config.method",
        allowed=(None, "ngram"),
        name="this method of speculative decoding",
        remedy="set the method of --speculative-config to ngram, or leave it out",
    ),
    Refused("lora_config", (None,), "LoRA", "leave out --enable-lora"),
    Refused("model_config.quantization", (None,), "quantization", "leave out --quantization, use an unquantized model"),
    Refused("offload_config.uva.cpu_offload_gb", (0,), "weight offloading", "leave out --cpu-offload-gb"),
    Refused(
        path="offload_config.prefetch.offload_group_size",
        allowed=(0,),
        name="weight offloading",
        remedy="leave out --offload-group-size",
    ),
    Refused("cache_config.kv_offloading_size", (None,), "KV offloading", "leave out --kv-offloading-size"),
    Refused("kv_transfer_config", (None,), "a KV connector", "leave out --kv-transfer-config"),
    Refused("cache_config.mamba_cache_mode", ("none", "align"), "a Mamba cache mode", "leave out --mamba-cache-mode"),
    Refused("cache_config.use_replayssm", (False,), "ReplaySSM", "leave out --use-replayssm"),
    Refused(  # of the cache of attention layers: without any, it would change nothing
        path="cache_config.cache_dtype",
        allowed=("auto", "bfloat16", "float16"),
        name="a KV cache dtype",
        remedy="set --kv-cache-dtype auto",
    ),
    # k and v are what the model computes, in its dtype; the angle is float32.
    Refused("cache_config.mamba_cache_dtype", ("auto",), "another state dtype", "set --mamba-cache-dtype auto"),
    Refused(
        path="mamba_config.stochastic_rounding_philox_rounds",
        allowed=(0,),
        name="a number of Philox rounds",
        remedy="leave out --mamba-cache-philox-rounds",
    ),
)


class Mamba3EngineConfig(MambaModelConfig):
    """vLLM calls these two once each when it puts its configuration together."""

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        """Checks the checkpoint's config as hf_overrides left it, and chooses the tokenizer.

        Raises:
            ValueError: an override is unknown or impossible, or there is no tokenizer to be had.
        """
        config = model_config.hf_config
        if not isinstance(config, Mamba3Config):
            raise ValueError(
                f"{model_config.model}: a Mamba-3 checkpoint of mamba_ssm's schema was expected, and its config.json "
                f"was read as {type(config).__name__}."
            )
        config.validate()
        # The line that registering logs is lost in the process that has not set up its logging by then.
        logger.info("Mamba-3 model by vllm-mamba3 %s, with vLLM %s", __version__, vllm.__version__)
        set_default_tokenizer(model_config)

    @classmethod
    def verify_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Refuses what can't work; then vLLM's own settings for Mamba models (one state block a sequence).

        Raises:
            ValueError: names the setting, its value, and what to change.
        """
        for setting in REFUSED:
            value = _read(vllm_config, setting.path)
            if value not in setting.allowed:
                shown = repr(value) if isinstance(value, (bool, int, str)) else "set"
                raise ValueError(
                    f"Mamba-3 models do not support {setting.name} yet ({setting.path} is {shown}): {setting.remedy}."
                )
        cache_config = vllm_config.cache_config
        if vllm_config.speculative_config and cache_config.enable_prefix_caching:
            # vLLM's runner V1 copies the state of a draft's last token into the next block, accepted or not.
            raise ValueError("Mamba-3 models do not support speculative decoding together with prefix caching yet: "
                             "leave out --speculative-config or set --no-enable-prefix-caching.")
        if cache_config.mamba_ssm_cache_dtype == "auto":  # 16 bits lose accuracy token by token
            cache_config.mamba_ssm_cache_dtype = "float32"
        step, _ = chosen_implementation("step"), chosen_implementation("scan")
        if vllm_config.mamba_config.enable_stochastic_rounding and step != "triton":
            raise ValueError(f"The step implementation {step} does not round stochastically: leave out "
                             "VLLM_MAMBA3_STEP or --enable-mamba-cache-stochastic-rounding.")
        super().verify_and_update_config(vllm_config)


def _read(vllm_config: "VllmConfig", path: str):
    """The setting's value; None where what it belongs to is not set."""
    value = vllm_config
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value
