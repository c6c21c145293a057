"""vLLM engines inside the test's own process: they start in seconds, and a test can reach their state pages."""

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

NAN_BYTE = -1  # a float of any width made of bytes 0xff is a NaN


@contextlib.contextmanager
def engine(checkpoint: Path, **settings) -> Iterator:
    """An `LLM` for the checkpoint, with every byte of every state page set to NaN_BYTE before its first request."""
    from vllm import LLM
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled

    set_cudagraph_capturing_enabled(True)  # the last engine of this process left it off for good
    _give_llvmlite_no_dict()
    defaults = dict(max_model_len=512, max_num_batched_tokens=48, max_num_seqs=8, skip_tokenizer_init=True, seed=0)
    llm = LLM(model=str(checkpoint), **(defaults | settings))
    try:
        fill_pages_with_nan(llm)
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def _give_llvmlite_no_dict() -> None:
    """vLLM 0.32 on a CPU looks through the `__dict__` of whatever any module holds, and numba, which an engine with
    drafts loads, holds a library that answers to every name: the next engine of the process would not start."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None or hasattr(type(ffi.lib), "without_dict"):
        return
    kind, get = type(ffi.lib), type(ffi.lib).__getattr__

    def getattr_without_dict(library, name):
        if name == "__dict__":
            raise AttributeError(name)
        return get(library, name)

    kind.__getattr__, kind.without_dict = getattr_without_dict, True


def states(llm) -> list[tuple[torch.Tensor, ...]]:
    """The four state pools of each layer."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context.values()
    return [layer.kv_cache for layer in layers]


def pages(llm) -> list[torch.Tensor]:
    """The bytes of the state pages of each layer: (blocks, page) int8."""
    views = []
    for pools in states(llm):
        first, *_, last = pools
        page = first.stride(0) * first.itemsize
        assert last.stride(0) * last.itemsize == page
        whole = torch.empty(0, dtype=torch.int8, device=first.device).set_(first.untyped_storage())
        views.append(whole.as_strided((first.shape[0], page), (page, 1), first.storage_offset() * first.itemsize))
    return views


def fill_pages_with_nan(llm) -> None:
    for layer in pages(llm):
        layer.fill_(NAN_BYTE)


def null_block_is_untouched(llm) -> bool:
    return all(bool((layer[0] == NAN_BYTE).all()) for layer in pages(llm))


def generate(llm, prompts: list[list[int]], max_tokens: int, together: bool = True, logprobs: int | None = 5):
    """Greedy completions of token ids, as vLLM's CompletionOutputs: all in one call, or each in a call of its own."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=logprobs, detokenize=False, ignore_eos=True)
    calls = [prompts] if together else [[prompt] for prompt in prompts]
    outputs = [llm.generate([{"prompt_token_ids": p} for p in call], params, use_tqdm=False) for call in calls]
    return [request.outputs[0] for call in outputs for request in call]


def compare(model, prompts: list[list[int]], completions, tolerance: float) -> None:
    """Each token must be the independent model's greedy choice after those before it, at the same log-probabilities."""
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = list(completion.token_ids)
        assert tokens == model.logprobs_after(prompt, tokens).argmax(-1).tolist()
    largest = differences(model, prompts, completions).abs().max().item()
    print(f"largest difference of log-probabilities: {largest:.1e}")
    assert largest < tolerance


def differences(model, prompts: list[list[int]], completions) -> torch.Tensor:
    """Of all log-probabilities that the completions tell, from the independent model's for the same tokens."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = model.logprobs_after(prompt, list(completion.token_ids))
        for position, told in enumerate(completion.logprobs):
            found += [entry.logprob - expected[position, token].item() for token, entry in told.items()]
    return torch.tensor(found)


def _block_pool(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def all_blocks(llm) -> int:
    return _block_pool(llm).num_gpu_blocks


def free_blocks(llm) -> int:
    return _block_pool(llm).get_num_free_blocks()
