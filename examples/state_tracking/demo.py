"""Serve a shipped checkpoint with `vllm serve` and ask it what it was never trained on.

    python examples/state_tracking/demo.py [siso|mimo] [--strings N]

Prints some questions with the model's answers, and last the share of right answers over N held-out strings of each
task, four times as long as the longest it was trained on.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from openai import OpenAI

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import tasks  # noqa: E402

SHOWN = 3  # questions printed for each task
START_TIMEOUT = 600  # seconds
HOST = "127.0.0.1"


@contextlib.contextmanager
def serve(checkpoint: Path) -> Iterator[str]:
    """`vllm serve` on a free port; yields its URL once it answers, and ends it afterwards."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).parent / "vllm", "serve", checkpoint, "--host", HOST, "--port", str(port)]
    # On a CPU a state cache of 1 GiB is plenty here; a GPU does not read it. Nothing is to be looked up on the network.
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | os.environ
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                  env=environment)
        try:
            url, until = f"http://{HOST}:{port}", time.monotonic() + START_TIMEOUT
            while not answers(f"{url}/health"):
                if server.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    sys.exit(f"{log.read()[-8000:]}\nvllm serve {checkpoint} did not start; its last lines are above")
                time.sleep(1)
            yield url
        finally:
            server.terminate()
            server.wait()


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", choices=("siso", "mimo"), default="siso")
    parser.add_argument("--strings", type=int, default=500, metavar="N", help="strings of each task (default: 500)")
    arguments = parser.parse_args()
    checkpoint, length = HERE / arguments.model, 4 * tasks.TRAINED_LENGTH
    print(f"vllm serve {os.path.relpath(checkpoint)} (trained on strings of up to {tasks.TRAINED_LENGTH} digits)",
          flush=True)
    accuracy = {}
    with serve(checkpoint) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        for task in tasks.MODULUS:
            strings = tasks.held_out_strings(task, length, arguments.strings)
            questions = [tasks.prompt(task, digits) for digits in strings]
            # The answer's digit, and the end of the text, at which vLLM stops by itself.
            completion = client.completions.create(model=str(checkpoint), prompt=questions, max_tokens=8, temperature=0)
            told = [choice.text.strip() for choice in sorted(completion.choices, key=lambda choice: choice.index)]
            right = [str(tasks.answer(task, digits)) for digits in strings]
            for question, mine, true in list(zip(questions, told, right))[:SHOWN]:
                print(f"{question} {mine}    ({'right' if mine == true else f'wrong, it is {true}'})")
            accuracy[task] = sum(map(str.__eq__, told, right)) / len(right)
    print(f"{arguments.strings} held-out strings of {length} digits for each task")
    print("accuracy " + " ".join(f"{task}={share:.4f}" for task, share in accuracy.items()))


if __name__ == "__main__":
    main()
