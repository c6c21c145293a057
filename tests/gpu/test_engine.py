"""LLM.generate on a GPU, at the shapes of the official 187m checkpoints with random values, against the reference."""

import random

import engines
import pytest
from hub_cache import OFFICIAL_CONFIGS
from independent_model import IndependentModel
from random_checkpoints import write_checkpoint

LENGTHS = (1, 1, 2, 47, 48, 49, 64, 65, 100, 300)  # the token budget of a step is 48
MAX_TOKENS = 6


@pytest.fixture(scope="module", params=["siso", "mimo"])
def case(request, tmp_path_factory):
    """A checkpoint, what the reference says of it, and prompts."""
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, OFFICIAL_CONFIGS[f"state-spaces/mamba3-{request.param}-187m"])
    draw = random.Random(0)
    prompts = [[draw.randrange(128256) for _ in range(length)] for length in LENGTHS]
    yield folder, IndependentModel(folder, device="cuda"), prompts
    (folder / "pytorch_model.bin").unlink()


def check(case, runner, monkeypatch, **settings):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    checkpoint, model, prompts = case
    settings = dict(dtype="float32", num_gpu_blocks_override=16, gpu_memory_utilization=0.3) | settings
    with engines.engine(checkpoint, **settings) as llm:
        engines.compare(model, prompts, engines.generate(llm, prompts, MAX_TOKENS), 1e-4)
        engines.compare(model, prompts, engines.generate(llm, prompts, MAX_TOKENS, together=False), 1e-4)
        assert engines.null_block_is_untouched(llm)


@pytest.mark.parametrize("runner", ["1", "0"], ids=["runner V2", "runner V1"])
def test_eager_engine_gives_the_references_tokens(case, runner, monkeypatch):
    check(case, runner, monkeypatch, enforce_eager=True)


@pytest.mark.parametrize("runner", ["1", "0"], ids=["runner V2", "runner V1"])
def test_engine_with_cuda_graphs_gives_the_references_tokens(case, runner, monkeypatch):
    check(case, runner, monkeypatch)
