"""Whatever the scheduler does to a request, its tokens are those that it would have got alone.

Requests that share prefixes arrive, are aborted, preempted, cut into chunks, found in the prefix cache, given drafts;
in pools so small that they wait for one another. Longer, and other ones each time:

    pytest tests/engine/test_schedules.py --hypothesis-profile=long
"""

import engines
import pytest
from alone import Alone
from hypothesis import given, settings
from random_checkpoints import config_dict, write_checkpoint
from schedules import check, schedules

MODELS = {
    "siso": config_dict(),
    "mimo": config_dict({"is_mimo": True, "mimo_rank": 2}),
}
TIGHT = dict(max_num_batched_tokens=24, max_num_seqs=4, enforce_eager=True, disable_log_stats=False)
DRAFTS = dict(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)
# A state is a block; with prefix caching two for each that runs, and more as it grows.
MODES = {
    "chunked": dict(num_gpu_blocks_override=4, scheduling_policy="priority"),
    "prefix caching": dict(num_gpu_blocks_override=9, enable_prefix_caching=True, block_size=16,
                           prefix_cache_retention_interval=16),
    "speculation": dict(num_gpu_blocks_override=13),
}
NUM_DRAFTS = {"siso": 5, "mimo": 2}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = write_checkpoint(folder / "checkpoint", MODELS[request.param])
    with Alone(checkpoint, folder / "alone.log") as alone:
        yield checkpoint, alone, NUM_DRAFTS[request.param]


@pytest.mark.parametrize("mode", MODES)
def test_every_request_gets_what_it_would_get_alone(model, mode):
    checkpoint, alone, num_drafts = model
    settings_of_mode = TIGHT | MODES[mode]
    if mode == "speculation":
        settings_of_mode["speculative_config"] = DRAFTS | {"num_speculative_tokens": num_drafts}
    with engines.engine(checkpoint, dtype="float32", **settings_of_mode) as llm:

        @settings()
        @given(schedules())
        def play(schedule):
            check(llm, alone, schedule)

        play()
        counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        print({name: value for name, value in counted.items() if value})
        if "caching" in mode:
            assert counted["vllm:prefix_cache_hits"] > 0
        if "speculation" in mode:
            assert counted["vllm:spec_decode_num_accepted_tokens"] > 0
        assert counted["vllm:num_preemptions"] > 0
