"""Prefix caching: what was computed once is found again, at block borders, and the tokens stay those of the reference."""

import random

import engines
import pytest
from independent_model import IndependentModel
from random_checkpoints import config_dict, write_checkpoint

BLOCK = 16
TOKENS = 20
MODELS = {"siso": config_dict(), "mimo": config_dict({"is_mimo": True, "mimo_rank": 4})}


def draw(count, seed):
    drawn = random.Random(seed)
    return [drawn.randrange(97) for _ in range(count)]


@pytest.fixture(scope="module", params=MODELS)
def engine(request, tmp_path_factory):
    checkpoint = write_checkpoint(tmp_path_factory.mktemp(request.param), MODELS[request.param])
    # By default vLLM keeps the states at the ends of prompts alone, and where prompts part.
    with engines.engine(checkpoint, dtype="float32", enforce_eager=True, enable_prefix_caching=True, block_size=BLOCK,
                        prefix_cache_retention_interval=BLOCK, num_gpu_blocks_override=64,
                        disable_log_stats=False) as llm:
        yield llm, IndependentModel(checkpoint)


@pytest.fixture
def ask(engine):
    """ask(prompts): their completions, each compared with the reference's, and how many tokens of each were found."""
    llm, model = engine
    assert llm.llm_engine.reset_prefix_cache()
    engines.fill_pages_with_nan(llm)

    def of(*prompts):
        before = hits(llm)
        completions = engines.generate(llm, list(prompts), TOKENS)
        engines.compare(model, list(prompts), completions, 1e-4)
        return [list(completion.token_ids) for completion in completions], hits(llm) - before

    return of


def hits(llm):
    return next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")


def test_a_resend_finds_all_but_its_last_block(ask):
    prompt = draw(100, 1)
    first, found = ask(prompt)
    assert found == 0
    assert ask(prompt) == (first, 96)


def test_a_shared_prefix_is_found_by_others(ask):
    prefix = draw(5 * BLOCK, 2)
    ask(prefix + draw(9, 3))
    _, found = ask(*(prefix + draw(length, length) for length in (1, 7, 40)))
    assert found == 3 * len(prefix)


def test_the_second_turn_of_a_conversation_finds_the_first(ask):
    prompt = draw(50, 4)
    (answer,), _ = ask(prompt)
    _, found = ask(prompt + answer + draw(10, 5))
    # The blocks of the answer too: what decoding left at a border is as good as what a prompt left. Its last token was
    # never put in.
    assert found == (len(prompt) + TOKENS - 1) // BLOCK * BLOCK


def test_what_another_prompt_left_is_not_found(ask):
    prompt = draw(64, 6)
    ask(prompt)
    assert ask([(prompt[0] + 1) % 97, *prompt[1:]])[1] == 0


def test_after_an_abort_only_what_was_written_is_found(engine, ask):
    """And it is right."""
    llm, prompt = engine[0], draw(200, 7)
    from alone import sampling_params

    llm.llm_engine.add_request("aborted", {"prompt_token_ids": prompt}, sampling_params(TOKENS))
    for _ in range(2):  # of a budget of 48 tokens
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["aborted"])
    llm.llm_engine.step()
    _, found = ask(prompt)
    assert 0 < found <= 2 * 48
