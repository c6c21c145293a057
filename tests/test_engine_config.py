"""What the engine is told: overrides checked, settings that can't work refused, vLLM's own for Mamba models kept."""

import inspect
from types import SimpleNamespace

import pytest
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.config.mamba import MambaConfig
from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

from vllm_mamba3.checkpoint.config import Mamba3Config
from vllm_mamba3.engine_config import REFUSED, Mamba3EngineConfig


def engine(**changes) -> SimpleNamespace:
    """A VllmConfig as far as a hook for models reads it, vLLM's defaults in it; changes by dotted path."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=2048, quantization=None, runner_type="generate", architecture="m"),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        cache_config=CacheConfig(enable_prefix_caching=False),
        parallel_config=ParallelConfig(),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        offload_config=OffloadConfig(),
        mamba_config=MambaConfig(),
    )
    if any(path.startswith("speculative_config.") for path in changes):
        config.speculative_config = SimpleNamespace(method="ngram")
    for path, value in changes.items():
        *parents, name = path.split(".")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return config


def model(**changes) -> SimpleNamespace:
    config = Mamba3Config(hidden_size=64, head_dim=16)
    config.update(changes)
    return SimpleNamespace(model="m", tokenizer="m", skip_tokenizer_init=True, hf_config=config)


@pytest.mark.parametrize("ssm_dtype", ["auto", "float32"])  # vLLM itself sets float32 on some CPUs
def test_the_defaults_are_accepted_and_a_state_is_one_block(ssm_dtype):
    config = engine(**{"cache_config.mamba_ssm_cache_dtype": ssm_dtype})
    Mamba3EngineConfig.verify_and_update_config(config)
    assert config.cache_config.mamba_block_size == 2048
    assert config.cache_config.mamba_cache_mode == "none"
    assert config.cache_config.mamba_ssm_cache_dtype == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_ssm_state_of_16_bits_is_kept_as_asked(dtype):
    config = engine(**{"cache_config.mamba_ssm_cache_dtype": dtype})
    Mamba3EngineConfig.verify_and_update_config(config)
    assert config.cache_config.mamba_ssm_cache_dtype == dtype


def test_stochastic_rounding_is_for_triton(monkeypatch):
    """That it is for float16 vLLM says itself."""
    rounding = {"mamba_config.enable_stochastic_rounding": True, "cache_config.mamba_ssm_cache_dtype": "float16"}
    monkeypatch.setattr("vllm_mamba3.engine_config.chosen_implementation", lambda operation: "torch")
    with pytest.raises(ValueError, match="torch does not round stochastically"):
        Mamba3EngineConfig.verify_and_update_config(engine(**rounding))
    monkeypatch.setattr("vllm_mamba3.engine_config.chosen_implementation", lambda operation: "triton")
    Mamba3EngineConfig.verify_and_update_config(engine(**rounding))


def test_data_parallel_replicas_are_accepted():
    Mamba3EngineConfig.verify_and_update_config(engine(**{"parallel_config.data_parallel_size": 2}))


CASES = [
    ("offload_config.uva.cpu_offload_gb", 4.0, "--cpu-offload-gb"),
    ("offload_config.prefetch.offload_group_size", 8, "--offload-group-size"),
    ("model_config.runner_type", "pooling", "--runner generate"),
    ("model_config.quantization", "fp8", "--quantization"),
    ("parallel_config.tensor_parallel_size", 2, "--tensor-parallel-size 1"),
    ("parallel_config.pipeline_parallel_size", 2, "--pipeline-parallel-size 1"),
    ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size 1"),
    ("parallel_config.prefill_context_parallel_size", 2, "--prefill-context-parallel-size 1"),
    ("speculative_config.method", "eagle", "--speculative-config to ngram"),
    ("lora_config", object(), "--enable-lora"),
    ("kv_transfer_config", object(), "--kv-transfer-config"),
    ("cache_config.kv_offloading_size", 4.0, "--kv-offloading-size"),
    ("cache_config.mamba_cache_mode", "all", "--mamba-cache-mode"),
    ("cache_config.use_replayssm", True, "--use-replayssm"),
    ("cache_config.cache_dtype", "fp8", "--kv-cache-dtype auto"),
    ("cache_config.mamba_cache_dtype", "bfloat16", "--mamba-cache-dtype auto"),
    ("mamba_config.stochastic_rounding_philox_rounds", 10, "--mamba-cache-philox-rounds"),
]


@pytest.mark.parametrize("path, value, remedy", CASES, ids=[f"{path}={value}" for path, value, _ in CASES])
def test_what_can_not_work_is_refused_with_the_setting_to_change(path, value, remedy):
    with pytest.raises(ValueError) as caught:
        Mamba3EngineConfig.verify_and_update_config(engine(**{path: value}))
    assert path in str(caught.value)
    assert remedy in str(caught.value)
    if isinstance(value, (str, int)):
        assert repr(value) in str(caught.value)


def test_drafts_from_the_prompt_are_accepted():
    config = engine(**{"speculative_config.method": "ngram"})
    Mamba3EngineConfig.verify_and_update_config(config)
    assert config.cache_config.mamba_cache_mode == "none"


def test_prefix_caching_is_accepted_and_a_state_is_kept_at_block_borders():
    config = engine(**{"cache_config.enable_prefix_caching": True})
    config.cache_config.block_size = 32
    Mamba3EngineConfig.verify_and_update_config(config)
    assert (config.cache_config.mamba_cache_mode, config.cache_config.mamba_block_size) == ("align", 32)


def test_drafts_and_prefix_caching_are_refused_together():
    with pytest.raises(ValueError, match="leave out --speculative-config or set --no-enable-prefix-caching"):
        Mamba3EngineConfig.verify_and_update_config(
            engine(**{"speculative_config.method": "ngram", "cache_config.enable_prefix_caching": True}))


@pytest.mark.parametrize("change", [("enable_dbo", True), ("ubatch_size", 2)], ids=["dbo", "ubatch"])
def test_microbatches_are_refused(change):
    with pytest.raises(ValueError, match="--enable-dbo and --ubatch-size"):
        Mamba3EngineConfig.verify_and_update_config(engine(**{f"parallel_config.{change[0]}": change[1]}))


@pytest.mark.parametrize("path", [setting.path for setting in REFUSED])
def test_the_installed_vllm_has_the_setting(path):
    owners = {
        "cache_config": CacheConfig,
        "model_config": ModelConfig,
        "parallel_config": ParallelConfig,
        "mamba_config": MambaConfig,
        "speculative_config": SpeculativeConfig,
        "offload_config.uva": UVAOffloadConfig,
        "offload_config.prefetch": PrefetchOffloadConfig,
    }
    owner, _, name = path.rpartition(".")
    source = inspect.getsource(owners.get(owner, VllmConfig))  # some are set in __post_init__ only
    assert any(f"{how}{name}" in source for how in ("\n    ", "self.", "def "))


def test_a_good_override():
    Mamba3EngineConfig.verify_and_update_model_config(model(A_activation="softplus"))


@pytest.mark.parametrize("changes", [{"A_activation": "relu"}, {"A_flor": 1.0}], ids=["value", "name"])
def test_an_override_that_would_do_nothing_or_harm(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        Mamba3EngineConfig.verify_and_update_model_config(model(**changes))


def test_another_kind_of_config():
    config = SimpleNamespace(model="m", tokenizer="m", skip_tokenizer_init=True, hf_config=SimpleNamespace())
    with pytest.raises(ValueError, match="was read as SimpleNamespace"):
        Mamba3EngineConfig.verify_and_update_model_config(config)
