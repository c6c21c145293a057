"""The real `vllm serve`, as a user starts it, on a free port of 127.0.0.1."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil

HOST = "127.0.0.1"
START_TIMEOUT = 300  # seconds; half a minute on an idle machine, most of it imports
STOP_TIMEOUT = 60
TAIL = 6000  # characters of the log that an error shows


def vllm_command() -> Path:
    """The console script of the environment that runs this."""
    return Path(sys.executable).parent / "vllm"


class Server:
    """Starts when entered, answers /health by then, and leaves no process behind.

        with Server("state-spaces/mamba3-siso-187m", log=Path("server.log")) as server:
            OpenAI(base_url=f"{server.url}/v1", api_key="none")

    Args:
        model: a folder, or a name on the Hugging Face Hub.
        arguments: further ones of `vllm serve`.
        log: where everything goes that its processes print.
        environment: variables to set besides this process's own.
        command: the `vllm` to run, if not that of this environment.
        folder: the working directory, if not this process's.

    Raises: RuntimeError with the end of the log, if it ends or has not answered in START_TIMEOUT seconds.
    """

    def __init__(self, model: str, *arguments: str, log: Path, environment: Mapping[str, str] | None = None,
                 command: Path | None = None, folder: Path | None = None) -> None:
        self.model, self.log = model, log
        self.port = _free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._command = [str(command or vllm_command()), "serve", model, "--host", HOST, "--port", str(self.port),
                         *arguments]
        # vLLM's own default, which a test of an engine within its process has changed for that process.
        defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self._environment = os.environ | defaults | (environment or {})
        self._folder = folder
        self.process: subprocess.Popen | None = None
        self._code: int | None = None

    def __enter__(self) -> "Server":
        with self.log.open("w") as log:
            # A session of its own: a Ctrl-C at the terminal stays ours to pass on, and its group can be ended whole.
            self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=subprocess.STDOUT, env=self._environment, cwd=self._folder,
                                            start_new_session=True)
        try:
            self._wait_until_healthy()
        except BaseException:
            self._kill(self._family())
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> int:
        """SIGTERM, as a service manager sends it, and the exit code. A second call only repeats the code.

        Raises: RuntimeError, after killing them, if a process outlives the server or the server STOP_TIMEOUT seconds.
        """
        if self._code is None:
            self._code = self._end()
        return self._code

    def tail(self) -> str:
        return f"The end of {self.log}:\n{self.log.read_text(errors='replace')[-TAIL:]}"

    def _wait_until_healthy(self) -> None:
        until = time.monotonic() + START_TIMEOUT
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"vllm serve ended with code {self.process.returncode}.\n{self.tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            except httpx.TransportError:
                pass  # nobody listens yet
            time.sleep(0.25)
        raise RuntimeError(f"vllm serve did not answer in {START_TIMEOUT} s.\n{self.tail()}")

    def _end(self) -> int:
        family = self._family()
        if self.process.poll() is not None:  # it has ended by itself, and may have left some of its group
            self._kill(family)
            return self.process.returncode
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._kill(family)
            raise RuntimeError(f"vllm serve did not stop in {STOP_TIMEOUT} s.\n{self.tail()}") from None
        orphans = [process for process in psutil.wait_procs(family, timeout=5)[1] if _runs(process)]
        if orphans:
            told = ", ".join(str(orphan) for orphan in orphans)
            self._kill(orphans)
            raise RuntimeError(f"vllm serve left processes behind: {told}\n{self.tail()}")
        return code

    def _family(self) -> list[psutil.Process]:
        """The processes below the server; only it knows them, and only while it runs."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _kill(self, family: list[psutil.Process]) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        for process in family:  # those that left the group
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self.process.wait()


def _runs(process: psutil.Process) -> bool:
    try:  # in a container without an init process, what has ended and lost its parent stays listed
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
