"""The embedded backend in a process of its own, so that its Python and its torch share nothing with the agents'.

The parent starts `leyden.engine.serve`, drives it through `leyden.engine.control` over loopback HTTP, and reports when
it dies. It needs no torch itself. State and model folders are paths on the file system that both share.
"""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import leyden
from leyden.engine.base import (
    EngineStatistics,
    ForwardBackwardResult,
    OptimParams,
    OptimStepResult,
    PolicyBackend,
    PolicyLoss,
    Sample,
    SamplingParams,
)
from leyden.engine.control import PREFIX, read_answer, read_samples, write_prompts, write_sequences
from leyden.engine.embedded import EmbeddedBackend
from leyden.errors import ConfigError, EngineError
from leyden.options import check_names
from leyden.types import LLM, TrainingSequence
from leyden.utils.logs import relay_line

logger = logging.getLogger("leyden.engine")

_OPTIONS = [name for name in inspect.signature(EmbeddedBackend).parameters if name != "control_key"]
"""The options of an EmbeddedBackend that a user sets; the control key is chosen for each child."""


class IsolatedBackend(PolicyBackend):
    """An `EmbeddedBackend` in a child process. The child ends when this process does, however that happens."""

    def __init__(self, model: str | Path, *, model_name: str = "policy", **options: Any) -> None:
        """
        model: a folder or a hub name; an object cannot go to another process.
        options: those of `EmbeddedBackend`, JSON values only.
        """
        for name, value in (("model", model), ("tokenizer", options.get("tokenizer"))):
            if not (isinstance(value, str | Path) or (value is None and name == "tokenizer")):
                raise ConfigError(
                    f"{name} is a {type(value).__name__}, which cannot go to another process; "
                    f"save it to a folder and pass the path, or use EmbeddedBackend"
                )
        check_names(type(self).__name__, options, _OPTIONS)
        EmbeddedBackend(model, model_name=model_name, **options)  # wrong options are refused here, not by a child
        self.model_name = model_name
        self._options: dict[str, Any] = {"model": _name(model), "model_name": model_name, **options}
        if options.get("tokenizer") is not None:
            self._options["tokenizer"] = _name(options["tokenizer"])
        self._host: str = options.get("host", "127.0.0.1")
        self._api_key: str | None = options.get("api_key")
        self._lock = threading.Lock()
        """Held while starting."""
        self._child: _Child | None = None
        self._policy_version = 0

    @property
    def policy_version(self) -> int:
        return self._policy_version

    async def start(self) -> None:
        await asyncio.to_thread(self._start)

    async def stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await asyncio.to_thread(child.stop)

    def endpoint(self) -> LLM:
        child = self._started()
        host = f"[{self._host}]" if ":" in self._host else self._host
        return LLM(endpoint=f"http://{host}:{child.port}/v1", model=self.model_name, api_key=self._api_key)

    async def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Sample]:
        return read_samples(await self._call("sample", {"prompts": write_prompts(prompts), "params": asdict(params)}))

    async def forward_backward(self, sequences: Sequence[TrainingSequence], loss: PolicyLoss) -> ForwardBackwardResult:
        payload = {"sequences": write_sequences(sequences), "loss": asdict(loss)}
        return ForwardBackwardResult(**await self._call("forward_backward", payload))

    async def optim_step(self, params: OptimParams) -> OptimStepResult:
        result = OptimStepResult(**await self._call("optim_step", {"params": asdict(params)}))
        self._policy_version = result.policy_version
        return result

    async def save_state(self, path: Path) -> None:
        await self._call("save_state", {"path": _name(path)})

    async def load_state(self, path: Path) -> None:
        self._policy_version = await self._call("load_state", {"path": _name(path)})

    async def save_pretrained(self, path: Path) -> None:
        await self._call("save_pretrained", {"path": _name(path)})

    async def statistics(self) -> EngineStatistics:
        return EngineStatistics(**await self._call("statistics", {}))

    def _started(self) -> _Child:
        if self._child is None:
            raise EngineError("the engine is not running; call start() first, or use 'async with'")
        return self._child

    def _start(self) -> None:
        with self._lock:
            if self._child is not None:
                return
            self._policy_version = 0
            child = self._child = _Child(self._options)
            try:
                child.start()
            except BaseException:
                self._child = None
                child.stop()
                raise

    async def _call(self, method: str, payload: dict[str, Any]) -> Any:
        child = self._started()
        return read_answer(await asyncio.to_thread(child.call, method, payload))


class _Child:
    """The process, its pipes and the control connection."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._control_key = secrets.token_urlsafe(32)
        self._last_lines: deque[str] = deque(maxlen=30)
        """Of its standard error."""
        self._stopping = False
        self.port = 0
        threads: int | None = options.get("threads", 1)
        # In a session of its own: Ctrl-C in the terminal reaches the parent alone, which stops the child in good order.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "leyden.engine.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(threads),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_errors, name="leyden-engine-log", daemon=True)
        self._reader.start()

    def start(self) -> None:
        """Send the options, wait until it serves. Raises what stopped it from starting."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        config = {"parent": os.getpid(), "control_key": self._control_key, "options": self._options}
        try:
            line = json.dumps(config)
        except TypeError as error:
            raise ConfigError(f"an option of the engine is not a JSON value: {error}") from error
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError(self._obituary()) from error
        answer = self._process.stdout.readline()
        if not answer:
            raise EngineError(self._obituary())
        self.port = read_answer(answer)["port"]

    def call(self, method: str, payload: dict[str, Any]) -> bytes:
        """One control call, blocking. Raises EngineError with the child's last words when it has died."""
        host: str = self._options.get("host", "127.0.0.1")
        connection = http.client.HTTPConnection(host, self.port)
        headers = {"Authorization": f"Bearer {self._control_key}", "Content-Type": "application/json"}
        try:
            connection.request("POST", PREFIX + method, json.dumps(payload).encode(), headers)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            if self._stopping:
                raise EngineError(f"the engine was stopped during {method}") from error
            raise EngineError(self._obituary()) from error
        finally:
            connection.close()
        if response.status != 200:
            raise EngineError(
                f"the engine process answered {method} with {response.status}: {body.decode(errors='replace')}"
            )
        return body

    def stop(self) -> None:
        """End the process and wait for it."""
        self._stopping = True
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join()
        process.stdout.close()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for raw in lines:
                line = raw.decode(errors="replace").rstrip()
                self._last_lines.append(line)
                relay_line(logger, "engine process", line)
        code = self._process.wait()
        if not self._stopping:
            logger.error("%s", self._how_it_ended(code))

    def _obituary(self) -> str:
        """How the process ended, with the last lines of its standard error."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return f"the engine process (pid {self._process.pid}) does not answer, but lives"
        self._reader.join(timeout=5)
        return self._how_it_ended(code)

    def _how_it_ended(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = "\n".join(self._last_lines) or "(none)"
        return f"the engine process (pid {self._process.pid}) {how}; the last lines of its standard error:\n{last}"


def _environment(threads: int | None) -> dict[str, str]:
    environment = dict(os.environ)
    root = str(Path(leyden.__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment["TOKENIZERS_PARALLELISM"] = "false"
    if threads is not None:
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(threads)
        environment["OMP_WAIT_POLICY"] = "PASSIVE"  # a spinning thread takes a core from the agents
    return environment


def _name(source: str | Path) -> str:
    """A path as the child can open it, whatever its working directory; a hub name as it is."""
    is_path = isinstance(source, Path) or Path(source).exists()
    return str(Path(source).absolute()) if is_path else str(source)
