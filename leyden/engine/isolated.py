"""`IsolatedBackend`: the embedded backend in a child process, so that its Python and its torch do not compete with the
agents for this process's interpreter.

The parent starts `leyden.engine.serve`, drives it through `leyden.engine.control` over loopback HTTP, and reports when
it dies. The parent needs no torch. State and model folders are paths on the file system that both processes share.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import inspect
import json
import logging
import os
import pickle
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import leyden
from leyden._lib.host.child import Command
from leyden._lib.host.listening import netloc
from leyden._lib.logs import relay_line
from leyden._lib.options import check_names
from leyden.engine.control import PREFIX, importable_loss, read_answer, remote
from leyden.engine.embedded import EmbeddedBackend
from leyden.engine.policy_backend import (
    EngineCapabilities,
    ForwardBackwardResult,
    LoRA,
    OptimParams,
    OptimStepResult,
    PolicyBackend,
    started,
)
from leyden.engine.threads import Threads
from leyden.errors import ChildDied, ConfigError, EngineError
from leyden.objectives.losses import Loss
from leyden.types import LLM, TrainingSequence

logger = logging.getLogger("leyden.engine")

_VISITOR_SECONDS = 10.0
"""The seconds that a visitor may take to end."""
_OPTIONS = [name for name in inspect.signature(EmbeddedBackend).parameters if name not in ("control_key", "companion")]
"""The options of an EmbeddedBackend that a user sets; the others are chosen for each child."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """A server to run in the engine's process, beside the endpoint: there it is the backend's companion."""

    function: str
    """`module:function` of an asynchronous context manager (`embedded.Companion`). The engine's process calls it with
    the argument, the descriptor of the listening socket, the endpoint and the endpoint's base URL."""
    argument: Any
    """Any value that can be pickled."""
    listener: socket.socket
    """The socket on which the server accepts connections. It stays open here, so that callers wait while the process is
    away."""


class IsolatedBackend(PolicyBackend):
    """An `EmbeddedBackend` in a child process. The child ends when this process does, also if that is killed."""

    further_options: ClassVar = (EmbeddedBackend, _OPTIONS)

    def __init__(self, model: str | Path, *, model_name: str = "policy", **options: Any) -> None:
        """model: a folder or a hub name; an object cannot be sent to another process.
        options: options of `EmbeddedBackend`, which must be JSON values.
        Raise ConfigError for an option that `EmbeddedBackend` refuses.
        """
        for name, value in (("model", model), ("tokenizer", options.get("tokenizer"))):
            if not (isinstance(value, str | Path) or (value is None and name == "tokenizer")):
                raise ConfigError(
                    f"{name} is a {type(value).__name__}, which cannot go to another process; "
                    f"save it to a folder and pass the path, or use EmbeddedBackend"
                )
        check_names(type(self).__name__, options, _OPTIONS)
        self._twin = EmbeddedBackend(model, model_name=model_name, **options)
        """The child's backend, not started. It raises ConfigError here and not in the child."""
        self.model_name = model_name
        self._options: dict[str, Any] = {"model": reachable(model), "model_name": model_name, **options}
        if options.get("tokenizer") is not None:
            self._options["tokenizer"] = reachable(options["tokenizer"])
        if isinstance(lora := options.get("lora"), LoRA):
            self._options["lora"] = {**asdict(lora), "adapter": lora.adapter and reachable(lora.adapter)}
        self._host: str = options.get("host", "127.0.0.1")
        self._api_key: str | None = options.get("api_key")
        self._lock = threading.Lock()
        """Held while starting."""
        self._child: _EngineProcess | None = None
        self._policy_version = 0
        self._visitor: Visitor | None = None
        self._losses: dict[str, str] = {}
        """The losses that the next child imports when it starts: the module by the name."""

    def check_loss(self, loss: Loss) -> None:
        super().check_loss(loss)
        name, module = importable_loss(loss)
        self._losses[name] = module

    def host(self, visitor: Visitor | None) -> None:
        """Run a server in the engine's process from the next `start` on; None: no server."""
        self._visitor = visitor

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._twin.capabilities

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
        address = netloc(self._host, started(self._child).port)
        return LLM(endpoint=f"http://{address}/v1", model=self.model_name, api_key=self._api_key)

    sample = remote(PolicyBackend.sample)
    forward = remote(PolicyBackend.forward)
    save_state = remote(PolicyBackend.save_state)
    snapshot_state = remote(PolicyBackend.snapshot_state)
    state_written = remote(PolicyBackend.state_written)
    save_pretrained = remote(PolicyBackend.save_pretrained)
    save_adapter = remote(PolicyBackend.save_adapter)
    device = remote(PolicyBackend.device)
    share_weights = remote(PolicyBackend.share_weights)
    statistics = remote(PolicyBackend.statistics)
    _forward_backward = remote(PolicyBackend.forward_backward)
    _optim_step = remote(PolicyBackend.optim_step)
    _load_state = remote(PolicyBackend.load_state)
    _published_version = remote(PolicyBackend.publish_weights)

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, *, temperature: float = 1.0
    ) -> ForwardBackwardResult:
        self.check_loss(loss)
        return await self._forward_backward(sequences, loss, temperature=temperature)

    async def optim_step(self, params: OptimParams) -> OptimStepResult:
        result = await self._optim_step(params)
        self._policy_version = result.policy_version
        return result

    async def publish_weights(self) -> int:
        started(self._child)
        return self._policy_version  # the child has published each step

    async def load_state(self, path: Path, *, as_version: int | None = None) -> None:
        await self._load_state(path, as_version=as_version)
        self._policy_version = await self._published_version()

    def _start(self) -> None:
        """Start the engine's process unless it is running, and wait until it is ready. On failure, stop it."""
        with self._lock:
            if self._child is not None:
                return
            self._policy_version = 0
            child = self._child = _EngineProcess(self._options, self._visitor, self._losses)
            try:
                child.start()
            except BaseException:
                self._child = None
                child.stop()
                raise

    async def post(self, method: str, arguments: bytes) -> bytes:
        """Call a method of the engine in its process, and return the body of the answer."""
        return await asyncio.to_thread(started(self._child).call, method, arguments)


class _EngineProcess:
    """`leyden.engine.serve` in its own process, and the control connection to it."""

    def __init__(self, options: dict[str, Any], visitor: Visitor | None, losses: dict[str, str]) -> None:
        self._options, self._visitor, self._losses = options, visitor, losses
        self._host: str = options.get("host", "127.0.0.1")
        self._control_key = secrets.token_urlsafe(32)
        self._stopping = False
        self.port = 0
        self._command = Command(
            [sys.executable, "-P", "-m", "leyden.engine.serve"],
            name="engine process",
            relay=lambda line: relay_line(logger, "engine process", line),
            environment=_environment(options.get("threads", "auto")),
            on_death=lambda obituary: logger.error("%s", obituary),
            inherits=() if visitor is None else (visitor.listener.fileno(),),
        )

    def start(self) -> None:
        """Send the options, and wait until the process serves. Raise the error that prevented its start."""
        config: dict[str, Any] = {
            "parent": os.getpid(),
            "path": [str(Path(each).absolute()) for each in sys.path],  # "" is the working directory
            "losses": self._losses,
            "control_key": self._control_key,
            "options": self._options,
        }
        if (visitor := self._visitor) is not None:
            argument = base64.b64encode(pickle.dumps(visitor.argument)).decode()
            config["visitor"] = [visitor.function, argument, visitor.listener.fileno()]
        try:
            line = json.dumps(config)
        except TypeError as error:
            raise ConfigError(f"an option of the engine is not a JSON value: {error}") from error
        try:
            self._command.write_line(line)
            answer = self._command.read_line()
        except ChildDied as error:
            raise EngineError(str(error)) from error
        self.port = read_answer(answer)["port"]

    def call(self, method: str, arguments: bytes) -> bytes:
        """Make a control call, and return the body of the answer. Blocks the calling thread.

        Raise EngineError if the process has died, with its last lines of output.
        """
        connection = http.client.HTTPConnection(self._host, self.port)
        headers = {"Authorization": f"Bearer {self._control_key}", "Content-Type": "application/json"}
        try:
            connection.request("POST", PREFIX + method, arguments, headers)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            if self._stopping:
                raise EngineError(f"the engine was stopped during {method}") from error
            raise EngineError(self._command.obituary()) from error
        finally:
            connection.close()
        if response.status != 200:
            raise EngineError(
                f"the engine process answered {method} with {response.status}: {body.decode(errors='replace')}"
            )
        return body

    def stop(self) -> None:
        self._stopping = True
        self._command.close(grace_seconds=3 if self._visitor is None else _VISITOR_SECONDS)


def _environment(threads: Threads) -> dict[str, str]:
    """Return the environment variables of the engine's process.

    threads: the number of torch's threads; "auto": the process chooses it when it knows the model; None: torch's
        default.
    """
    environment = dict(os.environ)
    root = str(Path(leyden.__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # torch then asks for large pages: a step of a model with a large vocabulary takes a seventh less time.
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if threads is not None:
        if threads != "auto":  # else the child decides, when it knows the model
            environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(threads)
        environment["OMP_WAIT_POLICY"] = "PASSIVE"  # a spinning thread takes a core from the agents
    return environment


def reachable(source: str | Path) -> str:
    """Return a path that a child can open from any working directory, or a hub name unchanged."""
    is_path = isinstance(source, Path) or Path(source).exists()
    return str(Path(source).absolute()) if is_path else str(source)
