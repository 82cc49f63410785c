"""A real vLLM, started as a user would start it, on the CPU.

It knows the command line, the routes for health and metrics, and how to end everything it started; it knows no test.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Self

from tests.vllm.tiny import MAX_LENGTH

MODEL = "policy"
START_SECONDS = 300.0
"""35 s on two idle cores, 85 s on busy ones."""
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
}


class VllmServer:
    """`python -m vllm.entrypoints.openai.api_server` for a model's folder, in a process group of its own."""

    def __init__(self, model: Path, log: Path) -> None:
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        # The `vllm` script is not used: it asks for a distribution of that name, and this one is vllm-cpu.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_LENGTH)]
        command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        command += ["--disable-uvicorn-access-log"]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        """As an OpenAI client takes it."""
        return f"{self.url}/v1"

    def metric(self, name: str) -> float:
        """A figure of vLLM's `/metrics`, summed over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            values = re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", response.read().decode(), re.MULTILINE)
        assert values, f"vLLM has no metric {name}"
        return sum(map(float, values))

    def tail(self, n_lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-n_lines:])

    def stop(self) -> None:
        """End the whole group: the engine is a process of its own."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def _wait_until_healthy(self) -> None:
        ends = time.monotonic() + START_SECONDS
        while time.monotonic() < ends:
            if self._process.poll() is not None:
                raise AssertionError(f"vLLM ended with {self._process.returncode} as it started:\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:  # it does not listen yet
                time.sleep(0.1)
        raise AssertionError(f"vLLM was not ready within {START_SECONDS:g} s:\n{self.tail()}")
