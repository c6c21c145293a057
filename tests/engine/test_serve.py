"""`vllm serve state-spaces/mamba3-…-187m` with no flag but an address, offline: the official config.json and shapes,
random bfloat16 values, asked through the OpenAI client.

One server for each of the two checkpoints; the last test that uses one stops it.
"""

import json
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import vllm
from golden import FOLDER as GOLDEN
from hub_cache import OFFICIAL_CONFIGS, environment, fill
from independent_model import IndependentModel
from openai import OpenAI
from random_checkpoints import config_dict
from server import Server

import vllm_mamba3
from vllm_mamba3.checkpoint.config import Mamba3Config
from vllm_mamba3.checkpoint.weights import checkpoint_tensors

PROMPTS = ["x", "Hello world", "The quick brown fox jumps over the lazy dog. " * 4, "2 + 2 = ", "Ωmega", "\n"]
MAX_TOKENS = 12
# The best logits are bfloat16 numbers between 8 and 16 here, so a sixteenth apart, and a batch of another size is added
# up in another order: single log-probabilities differ by several such steps. This bounds the root of their mean square;
# a wrong state would be off by 1 and more.
ROUNDING = 0.25
DETAILED = {"logprobs": 20, "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True}}


@pytest.fixture(scope="module", params=OFFICIAL_CONFIGS, ids=["siso", "mimo"])
def served(request, tmp_path_factory):
    """A running server, with its model's name, its checkpoint's folder and `ask`, greedy completions of it."""
    home, log = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("log") / "server.log"
    # Room for the states of as many sequences as vLLM takes at once on a CPU, not for a share of the whole machine.
    variables = environment(home) | {"VLLM_CPU_KVCACHE_SPACE": "2"}
    try:
        folder = fill(home, request.param)
        with Server(request.param, log=log, environment=variables) as server:
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

            def ask(prompt: str | list[int], max_tokens: int = MAX_TOKENS, **more: Any):
                return client.completions.create(
                    model=request.param, prompt=prompt, max_tokens=max_tokens, temperature=0, **more
                )

            yield SimpleNamespace(model=request.param, folder=folder, server=server, client=client, ask=ask)
    finally:
        shutil.rmtree(home)


@pytest.fixture(scope="module")
def alone(served):
    """The answers to PROMPTS, one request after another, with the log-probabilities of the best twenty tokens."""
    return [served.ask(prompt, **DETAILED) for prompt in PROMPTS]


@pytest.mark.parametrize("model", OFFICIAL_CONFIGS, ids=["siso", "mimo"])
def test_the_stand_ins_are_the_official_checkpoints(model):
    file = GOLDEN / f"{model.rpartition('/')[2]}.shapes.json"
    if not file.exists():
        pytest.skip(f"{file} is not there: the official shapes to compare with are not part of this repository")
    official = json.loads(file.read_text())
    assert OFFICIAL_CONFIGS[model] == official["config"]
    tensors = checkpoint_tensors(Mamba3Config.from_mamba_ssm(OFFICIAL_CONFIGS[model]))
    head = tensors.pop("lm_head.weight")  # the tied embedding once more: stored, and no parameter of its own
    assert head == tensors["backbone.embedding.weight"]
    assert tensors == {name: tuple(shape) for name, shape in official["parameters"].items()}


def test_models_names_the_checkpoint(served):
    (model,) = served.client.models.list().data
    assert model.id == served.model
    assert model.max_model_len == 2048  # the context they were trained at


def test_answers_are_those_of_the_reference(served, alone):
    """A bfloat16 engine is no further from the float32 reference than twice what bfloat16 costs the reference.

    Over the log-probabilities of the twenty best tokens at the first positions of an answer: the random weights make
    much of each rounding, so single values may be off by one and more, in either.
    """
    answer, length = alone[1].choices[0], 6  # the reference takes its time
    prompt, tokens = answer.prompt_token_ids, answer.token_ids[:length]
    exact = IndependentModel(served.folder).logprobs_after(prompt, tokens)
    rounded = IndependentModel(served.folder, torch.bfloat16).logprobs_after(prompt, tokens)
    told = answer.logprobs.top_logprobs[:length]
    ids = torch.tensor([[int(name.removeprefix("token_id:")) for name in best] for best in told])
    assert ids.shape == (length, 20)
    engine = torch.tensor([list(best.values()) for best in told])
    exact, eager = exact.gather(1, ids), rounded.gather(1, ids)
    error, bound = ((values - exact).square().mean().sqrt().item() for values in (engine, eager))
    assert error <= 2 * bound, f"RMS error of the engine {error:.3f}, of an eager evaluation {bound:.3f}"


def test_the_same_request_has_the_same_answer(served, alone):
    again = [served.ask(prompt, **DETAILED) for prompt in PROMPTS[:3]]
    assert [answer.choices[0].token_ids for answer in again] == [answer.choices[0].token_ids for answer in alone[:3]]
    assert [answer.choices[0].logprobs for answer in again] == [answer.choices[0].logprobs for answer in alone[:3]]


def test_requests_at_once_have_the_answers_of_each_alone(served, alone):
    """The same log-probabilities, to rounding, as long as the tokens are the same: where two nearly tie, they may part."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        together = list(threads.map(lambda prompt: served.ask(prompt, **DETAILED), PROMPTS))
    differences = []
    for one, other in zip((answer.choices[0].logprobs for answer in alone),
                          (answer.choices[0].logprobs for answer in together)):
        for row, (token, other_token) in enumerate(zip(one.tokens, other.tokens, strict=True)):
            told, other_told = one.top_logprobs[row], other.top_logprobs[row]
            differences += [told[name] - other_told[name] for name in told.keys() & other_told.keys()]
            if token != other_token:
                break
    assert len(differences) > len(PROMPTS)
    assert torch.tensor(differences).square().mean().sqrt() < ROUNDING


def test_a_stream_adds_up_to_the_answer(served, alone):
    chunks = list(served.ask(PROMPTS[1], stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == alone[1].choices[0].text
    assert sum(bool(chunk.choices and chunk.choices[0].text) for chunk in chunks) > MAX_TOKENS // 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == MAX_TOKENS


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_max_tokens(served, alone, max_tokens):
    answer = served.ask(PROMPTS[0], max_tokens, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == alone[0].choices[0].token_ids[:max_tokens]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == max_tokens


def test_stop(served, alone):
    whole = alone[1].choices[0].text
    stop = whole.split()[2]  # each token is a word here
    answer = served.ask(PROMPTS[1], stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.stop_reason == stop
    assert answer.text == whole[: whole.index(stop)]


def test_usage_counts_the_tokens(served, alone):
    for prompt, answer in zip(PROMPTS, alone):
        prompt_tokens = 1 + len(prompt.encode())  # the tokenizer reads bytes, after a token that begins
        assert answer.usage.prompt_tokens == len(answer.choices[0].prompt_token_ids) == prompt_tokens
        assert answer.usage.completion_tokens == len(answer.choices[0].token_ids) == MAX_TOKENS
        assert answer.usage.total_tokens == prompt_tokens + MAX_TOKENS
    assert served.ask([5, 7, 128255], 1).usage.prompt_tokens == 3


@pytest.mark.parametrize(
    "change, code, told",
    [
        ({"max_tokens": -1}, 400, "max_tokens must be at least 1"),
        ({"temperature": -1}, 400, "temperature must be non-negative"),
        ({"prompt": [7] * 2049}, 400, "maximum context length is 2048 tokens"),
        ({"prompt": "x" * 4000}, 400, "maximum context length is 2048 tokens"),
        ({"prompt": [128256]}, 400, "128256 is out of vocabulary"),
        ({"prompt": [-1]}, 400, "greater than or equal to 0"),
        ({"prompt": ""}, 400, "prompt"),
        ({"model": "another"}, 404, "`another` does not exist"),
        (None, 400, "JSON"),
    ],
    ids=["max_tokens", "temperature", "long ids", "long text", "id too large", "id negative", "empty", "model", "json"],
)
def test_a_bad_request_is_told_why_and_the_server_goes_on(served, alone, change, code, told):
    request = {"model": served.model, "prompt": PROMPTS[0], "max_tokens": 2, "temperature": 0}
    body = b'{"model": ' if change is None else json.dumps(request | change)
    url = f"{served.server.url}/v1/completions"
    refused = httpx.post(url, content=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert refused.status_code == code
    assert told in refused.json()["error"]["message"]
    assert alone[0].choices[0].text.startswith(served.ask(PROMPTS[0], 2).choices[0].text)


def test_each_process_has_said_once_who_serves_and_it_stops_cleanly(served):
    log = served.server.log.read_text()  # before the end, when vLLM's front end may miss its engine a little too early
    assert "Traceback" not in log, served.server.tail()
    ours = [line for line in log.splitlines() if f"vllm-mamba3 {vllm_mamba3.__version__}" in line]
    assert all(" INFO " in line and f"vLLM {vllm.__version__}" in line for line in ours), ours
    processes = re.findall(r"^\(\S+ pid=(\d+)\)", log, re.MULTILINE)
    assert Counter(re.search(r"pid=(\d+)", line).group(1) for line in ours) == dict.fromkeys(processes, 1), ours
    assert served.server.stop() == 0


def test_a_setting_that_can_not_work_ends_the_command(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_dict()))  # refused before it looks for weights
    arguments = ["--skip-tokenizer-init", "--tensor-parallel-size", "2"]
    with pytest.raises(RuntimeError) as failure:
        with Server(str(folder), *arguments, log=tmp_path / "server.log"):
            pass
    assert "vllm serve ended with code 1." in str(failure.value)
    assert "Mamba-3 models do not support tensor parallelism yet" in str(failure.value)
    assert "set --tensor-parallel-size 1" in str(failure.value)
