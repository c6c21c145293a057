"""The same request alone: an eager engine with nothing switched on, in a process of its own, asked one at a time.

    with Alone(checkpoint) as alone:
        tokens, logprobs = alone.ask({"prompt": [5, 7], "max_tokens": 4})

As a program: reads requests from standard input, a JSON object a line, and writes the answers to the file descriptor
that it was given, so that what vLLM prints does not come between.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LOGPROBS = 5  # as many best tokens are told at each position


class Alone:
    """Starts with the first question, and ends with the context. Answers are remembered."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        self._checkpoint, self._log, self._process, self._known = checkpoint, log, None, {}

    def __enter__(self) -> "Alone":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._answers.close()
            self._process.wait(60)

    def ask(self, request: dict[str, Any]) -> tuple[list[int], list[dict[int, float]]]:
        """The tokens, and at each position the log-probabilities of the best and of the chosen one, by token.

        request: prompt (token ids) and what `sampling_params` takes.
        """
        question = json.dumps(request, sort_keys=True)
        if question not in self._known:
            if self._process is None:
                self._start()
            print(question, file=self._process.stdin, flush=True)
            answer = self._answers.readline()
            if not answer:
                raise RuntimeError(f"the engine that answers alone has ended:\n{self._log.read_text()[-5000:]}")
            tokens, logprobs = json.loads(answer)
            self._known[question] = tokens, [{int(token): value for token, value in row.items()} for row in logprobs]
        return self._known[question]

    def _start(self) -> None:
        read, write = os.pipe()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self._checkpoint), str(write)], stdin=subprocess.PIPE, text=True,
                stdout=log, stderr=subprocess.STDOUT, pass_fds=[write],
                env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        os.close(write)
        self._answers = os.fdopen(read)


def sampling_params(max_tokens: int, penalty: float = 1.0, seed: int | None = None):
    """Greedy without a seed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(max_tokens=max_tokens, temperature=0 if seed is None else 1, seed=seed, logprobs=LOGPROBS,
                          repetition_penalty=penalty, detokenize=False, ignore_eos=True,
                          output_kind=RequestOutputKind.FINAL_ONLY)


def told(completion) -> tuple[list[int], list[dict[int, float]]]:
    """What `Alone.ask` answers, of vLLM's CompletionOutput."""
    logprobs = [{token: entry.logprob for token, entry in row.items()} for row in completion.logprobs]
    return list(completion.token_ids), logprobs


def main() -> None:
    import engines

    with open(int(sys.argv[2]), "w") as answers, engines.engine(Path(sys.argv[1]), dtype="float32", enforce_eager=True,
                                                                max_num_batched_tokens=512) as llm:
        for line in sys.stdin:
            request = json.loads(line)
            prompt = {"prompt_token_ids": request.pop("prompt")}
            (output,) = llm.generate([prompt], sampling_params(**request), use_tqdm=False)
            print(json.dumps(told(output.outputs[0])), file=answers, flush=True)


if __name__ == "__main__":
    main()
