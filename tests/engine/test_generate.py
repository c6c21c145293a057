"""LLM.generate against a forward written with the reference alone: the same tokens, and their log-probabilities."""

import random

import engines
import pytest
import torch
from independent_model import IndependentModel
from random_checkpoints import config_dict, write_checkpoint

LENGTHS = (1, 1, 2, 47, 48, 49, 64, 65, 100, 300)  # the token budget of a step is 48
MAX_TOKENS = 6

# Every choice that a config leaves: between them they cover it.
MODELS = {
    "siso": config_dict(),
    "siso, no mlp, untied, heads in groups of 2": config_dict(
        {"ngroups": 4}, d_intermediate=0, tie_embeddings=False, pad_vocab_size_multiple=1
    ),
    "siso, output norm, full rotation, a group a head, odd sizes": config_dict(
        {"is_outproj_norm": True, "rope_fraction": 1.0, "ngroups": 9, "headdim": 6, "d_state": 22}, d_model=27
    ),
    "siso, three heads and three angles": config_dict(
        {"headdim": 7, "d_state": 6, "rope_fraction": 1.0, "expand": 1}, d_model=21
    ),
    "siso, residual as the model": config_dict(residual_in_fp32=False, fused_add_norm=False),
    "mimo": config_dict({"is_mimo": True, "mimo_rank": 4, "chunk_size": 16}, fused_add_norm=False),
    "mimo, output norm, 2 groups, no mlp, untied": config_dict(
        {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True, "ngroups": 2}, d_intermediate=0, tie_embeddings=False
    ),
    "mimo, rank 3, full rotation, odd head size": config_dict(
        {"is_mimo": True, "mimo_rank": 3, "rope_fraction": 1.0, "headdim": 5, "d_state": 20}, d_model=20
    ),
    "mimo, rank 1": config_dict({"is_mimo": True, "mimo_rank": 1}),
}


def prompts_of(config, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(config["vocab_size"]) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("name", MODELS)
def test_float32_model_gives_the_references_tokens(name, tmp_path):
    config = MODELS[name]
    checkpoint = write_checkpoint(tmp_path, config)
    prompts, model = prompts_of(config), IndependentModel(checkpoint)
    # 16 pages for 10 prompts at once and 10 in a row: pages change hands, and some are left to nobody
    with engines.engine(checkpoint, dtype="float32", num_gpu_blocks_override=16) as llm:
        engines.compare(model, prompts, engines.generate(llm, prompts, MAX_TOKENS), 1e-4)
        engines.compare(model, prompts, engines.generate(llm, prompts, MAX_TOKENS, together=False), 1e-4)
        assert engines.null_block_is_untouched(llm)


def test_softplus_through_hf_overrides(tmp_path):
    config = config_dict()
    checkpoint = write_checkpoint(tmp_path, config)
    prompts = prompts_of(config)
    with engines.engine(checkpoint, dtype="float32", hf_overrides={"A_activation": "softplus"}) as llm:
        completions = engines.generate(llm, prompts, MAX_TOKENS)
    engines.compare(IndependentModel(checkpoint, A_activation="softplus"), prompts, completions, 1e-4)
    with pytest.raises(AssertionError):
        engines.compare(IndependentModel(checkpoint), prompts, completions, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ssm", [{}, {"is_mimo": True, "mimo_rank": 4}], ids=["siso", "mimo"])
def test_16_bit_model_is_as_near_the_reference_as_an_eager_one(ssm, dtype, tmp_path):
    """In the root of the mean square over all log-probabilities told: at most twice as far from float32."""
    config = config_dict(ssm)
    checkpoint = write_checkpoint(tmp_path, config, dtype=dtype)
    prompts, model, eager = prompts_of(config), IndependentModel(checkpoint), IndependentModel(checkpoint, dtype)
    with engines.engine(checkpoint, dtype=str(dtype).removeprefix("torch."), num_gpu_blocks_override=16) as llm:
        for together in (False, True):
            completions = engines.generate(llm, prompts, MAX_TOKENS, together)
            error = engines.differences(model, prompts, completions).square().mean().sqrt()
            from_eager = [
                (eager.logprobs_after(prompt, list(c.token_ids)) - model.logprobs_after(prompt, list(c.token_ids)))
                for prompt, c in zip(prompts, completions)
            ]
            allowed = 2 * torch.cat(from_eager).square().mean().sqrt()
            print(f"error {error:.1e}, allowed {allowed:.1e}")
            assert error < allowed
        assert engines.null_block_is_untouched(llm)
