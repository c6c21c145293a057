"""What the scheduler may do to requests, drawn by hypothesis and played on an engine within the process, step by step."""

from dataclasses import dataclass
from typing import Any

import engines
import torch
from alone import Alone, sampling_params, told
from hypothesis import strategies as st

VOCABULARY = 97
MOST_STEPS = 3000  # no schedule takes as many
TOLERANCE = 1e-4  # of log-probabilities; where two tokens are nearer than this, either may be chosen


@dataclass(frozen=True)
class Request:
    """prompt: token ids, made of a prefix that others share and a tail of its own. arrival, abort: steps."""

    prefix: int
    prefix_length: int
    tail_length: int
    period: int  # after so many tokens the tail repeats itself, which the proposer of drafts looks for
    max_tokens: int
    arrival: int
    abort: int | None = None
    priority: int = 0
    penalty: float = 1.0
    seed: int | None = None  # greedy without

    @property
    def prompt(self) -> list[int]:
        prefix = [(self.prefix * 31 + i * i * 7 + i) % VOCABULARY for i in range(self.prefix_length)]
        tail = [(self.tail_length * 13 + i % self.period * 5 + self.prefix) % VOCABULARY
                for i in range(self.tail_length)]
        return prefix + tail

    def alone(self) -> dict[str, Any]:
        return dict(prompt=self.prompt) | self.sampling()

    def sampling(self) -> dict[str, Any]:
        return dict(max_tokens=self.max_tokens, penalty=self.penalty, seed=self.seed)


@dataclass(frozen=True)
class Schedule:
    """resets: steps before which the prefix cache is reset, and whether that preempts what runs."""

    requests: tuple[Request, ...]
    resets: tuple[tuple[int, bool], ...] = ()


def schedules() -> st.SearchStrategy[Schedule]:
    steps = st.integers(0, 40)
    # On a CPU vLLM 0.32 ends at a request with a seed whose prompt is cut into chunks ("CPU Generator does not use
    # offset").
    seeds = st.one_of(st.none(), st.integers(0, 9)) if torch.cuda.is_available() else st.none()
    request = st.builds(
        Request,
        prefix=st.integers(0, 1),
        prefix_length=st.sampled_from([0, 0, 3, 16, 33, 48, 49, 80, 300]),
        tail_length=st.one_of(st.integers(1, 3), st.integers(1, 60)),
        period=st.integers(1, 12),
        max_tokens=st.integers(1, 24),
        arrival=steps,
        abort=st.one_of(st.none(), st.none(), steps),
        priority=st.integers(0, 2),
        penalty=st.sampled_from([1.0, 1.0, 1.5]),
        seed=seeds,
    )
    return st.builds(Schedule, st.lists(request, min_size=1, max_size=8).map(tuple),
                     st.lists(st.tuples(steps, st.booleans()), max_size=3).map(tuple))


def play(llm, schedule: Schedule) -> dict[int, Any]:
    """The completions of the requests that finished, by their place in the schedule. Pages start as NaN; afterwards
    none is taken, and the null block is as it was."""
    engine, finished, waiting = llm.llm_engine, {}, dict(enumerate(schedule.requests))
    assert engine.reset_prefix_cache()
    engines.fill_pages_with_nan(llm)
    by_priority = engine.vllm_config.scheduler_config.policy == "priority"
    try:
        for step in range(MOST_STEPS):
            for number, request in list(waiting.items()):
                if request.arrival <= step:
                    engine.add_request(str(number), {"prompt_token_ids": request.prompt},
                                       sampling_params(**request.sampling()),
                                       priority=request.priority if by_priority else 0)
                    del waiting[number]
            engine.abort_request([str(number) for number, request in enumerate(schedule.requests)
                                  if request.abort == step and number not in waiting])
            for when, preempts in schedule.resets:
                if when == step:
                    engine.reset_prefix_cache(reset_running_requests=preempts)
            for output in engine.step():
                if output.finished:
                    finished[int(output.request_id)] = output.outputs[0]
            if not waiting and not engine.has_unfinished_requests():
                break
        assert not engine.has_unfinished_requests(), "requests are left over"
    finally:
        engine.abort_request([str(number) for number in range(len(schedule.requests))])
        while engine.has_unfinished_requests():
            engine.step()
        engine.step()  # which tells the runner of those that ended
    assert engines.null_block_is_untouched(llm)
    assert engines.free_blocks(llm) == engines.all_blocks(llm) - 1
    return finished


def check(llm, alone: Alone, schedule: Schedule) -> None:
    """Every request finishes, but for those that were aborted, with what it would have got alone."""
    finished = play(llm, schedule)
    for number, request in enumerate(schedule.requests):
        if number not in finished or finished[number].finish_reason == "abort":
            assert request.abort is not None, (number, request)
            continue
        tokens, logprobs = told(finished[number])
        expected_tokens, expected = alone.ask(request.alone())
        assert len(tokens) == len(expected_tokens) == request.max_tokens
        for position, (row, expected_row) in enumerate(zip(logprobs, expected)):
            if tokens[position] != expected_tokens[position]:
                assert near(expected_row, tokens[position], expected_tokens[position]), (
                    number, position, request, tokens, expected_tokens)
                break  # from here on they are different requests
            assert near_everywhere(row, expected_row), (number, position, request, row, expected_row)


def near(row: dict[int, float], token: int, other: int) -> bool:
    return token in row and abs(row[token] - row[other]) < TOLERANCE


def near_everywhere(row: dict[int, float], expected: dict[int, float]) -> bool:
    both = row.keys() & expected.keys()
    return len(both) >= min(len(row), len(expected)) - 1 and all(abs(row[t] - expected[t]) < TOLERANCE for t in both)
