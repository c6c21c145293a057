"""vLLM engines inside the test's own process: they start in seconds, and a test can reach their state pages."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import torch

NAN_BYTE = -1  # a float of any width made of bytes 0xff is a NaN


@contextlib.contextmanager
def engine(checkpoint: Path, **settings) -> Iterator:
    """An `LLM` for the checkpoint, with every byte of every state page set to NaN_BYTE before its first request."""
    from vllm import LLM

    defaults = dict(max_model_len=512, max_num_batched_tokens=48, max_num_seqs=8, skip_tokenizer_init=True, seed=0)
    llm = LLM(model=str(checkpoint), **(defaults | settings))
    try:
        fill_pages_with_nan(llm)
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def pages(llm) -> list[torch.Tensor]:
    """The state pages, one tensor a layer with the block as first dimension."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.kv_caches


def fill_pages_with_nan(llm) -> None:
    for layer in pages(llm):
        layer.view(torch.int8).fill_(NAN_BYTE)


def null_block_is_untouched(llm) -> bool:
    return all(bool((layer[0].view(torch.int8) == NAN_BYTE).all()) for layer in pages(llm))


def generate(llm, prompts: list[list[int]], max_tokens: int, together: bool = True, logprobs: int | None = 5):
    """Greedy completions of token ids, as vLLM's CompletionOutputs: all in one call, or each in a call of its own."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=logprobs, detokenize=False, ignore_eos=True)
    calls = [prompts] if together else [[prompt] for prompt in prompts]
    outputs = [llm.generate([{"prompt_token_ids": p} for p in call], params, use_tqdm=False) for call in calls]
    return [request.outputs[0] for call in outputs for request in call]
