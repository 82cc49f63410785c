# pyright: reportIncompatibleMethodOverride=false
"""The gateway, the strategies and the settings of servers, with Agent Lightning's arguments."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from leyden import execution as native
from leyden.errors import ConfigError
from leyden.execution.client_server import ClientServerExecutionStrategy as NativeClientServer
from leyden.execution.process_strategy import InterProcessExecutionStrategy as NativeInterProcess
from leyden.gateway import LLMProxy as NativeProxy
from leyden.gateway.gateway_app import GatewayApp
from leyden.trainer.blocking import run_blocking
from leyden.types import LLM
from leyden_compat.agentlightning.interfaces import ExecutionStrategy, users_store
from leyden_compat.agentlightning.litellm import ShowsTokenIds
from leyden_compat.agentlightning.own_store import as_native
from leyden_compat.agentlightning.resources import ProxyLLM

LaunchMode = Literal["asyncio", "thread", "mp"]


class ModelConfig(TypedDict):
    """A model of the gateway: the name that agents use, and LiteLLM's parameters, such as its name there and its
    address.
    """

    model_name: str
    litellm_params: dict[str, Any]


@dataclass
class PythonServerLauncherArgs:
    """Options of a server. Leyden's servers use `port`, `host` and `access_host` alone."""

    port: int | None = None
    host: str | None = None
    access_host: str | None = None
    launch_mode: LaunchMode = "asyncio"
    n_workers: int = 1
    healthcheck_url: str | None = None
    log_level: int = 20
    access_log: bool = False
    startup_timeout: float = 60.0
    kill_unhealthy_server: bool = True
    thread_join_timeout: float = 10.0
    process_join_timeout: float = 10.0
    timeout_keep_alive: int = 30


class LLMProxy(NativeProxy):
    """The gateway, under Agent Lightning's name and with its arguments. It does not use LiteLLM.

    launch_mode, num_workers: of no effect; the gateway runs in its own thread.
    callbacks: a list without "return_token_ids" leaves token ids out of responses. Otherwise of no effect:
        log-probabilities and spans need no callback.
    litellm_config: only its `model_list` is read.
    durable: True unless given, because programs read a call's spans as soon as it has returned.
    num_retries: as `upstream_retries`; 0 leaves the gateway's own number.
    middlewares: refused, because the gateway is no FastAPI app.
    """

    def __init__(
        self,
        port: int | None = None,
        model_list: Sequence[Any] | None = None,
        store: Any = None,
        host: str | None = None,
        litellm_config: dict[str, Any] | None = None,
        num_retries: int = 0,
        num_workers: int = 1,
        launch_mode: LaunchMode = "mp",
        launcher_args: PythonServerLauncherArgs | None = None,
        middlewares: Sequence[Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        own = [middleware for middleware in middlewares or () if not isinstance(middleware, str)]
        if own:
            raise ConfigError(
                f"middlewares={own}: the gateway has none; start leyden.LLMProxy behind a proxy of yours, or use its options"
            )
        if launcher_args is not None:
            if port is not None or host is not None:
                raise ValueError(f"port={port!r} and host={host!r} beside launcher_args: give launcher_args alone")
            port, host = launcher_args.port, launcher_args.host
            options.setdefault("access_host", launcher_args.access_host)
        options.setdefault("durable", True)
        self.callbacks, self.middlewares, self.litellm_config = callbacks, middlewares, litellm_config
        self._shows_token_ids = callbacks is None or "return_token_ids" in callbacks
        self.model_list: list[Any] = list(model_list or (litellm_config or {}).get("model_list") or ())
        super().__init__(
            port=port,
            model_list=self.model_list,
            store=as_native(store),
            host=host or "127.0.0.1",
            upstream_retries=num_retries or 2,
            **options,
        )

    @asynccontextmanager
    async def _listening_apps(
        self, app: GatewayApp, listener: socket.socket
    ) -> AsyncGenerator[list[tuple[Any, socket.socket]]]:
        shows = self._shows_token_ids and any(model.record_tokens for model in self.served_models)
        async with super()._listening_apps(app, listener) as doors:
            yield [(ShowsTokenIds(door) if shows else door, at) for door, at in doors]

    @property
    def store(self) -> Any:
        """The store that records go to, or None."""
        return self.get_store()

    def get_store(self) -> Any:
        """Return the store that records go to, or None."""
        return users_store(super().get_store())

    def set_store(self, store: Any) -> None:
        """Set the store that records go to, which may be one of the program's own."""
        super().set_store(as_native(store))

    def update_model_list(self, model_list: Sequence[Any]) -> None:
        """Replace the models that the gateway serves."""
        super().update_model_list(model_list)
        self.model_list = list(model_list)

    def initialize(self) -> None:
        """Do nothing: the gateway is ready when it is made."""

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: dict[str, Any] | None = None,
    ) -> LLM:
        """Return the gateway as a resource; with both ids, the model for that attempt."""
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError(f"rollout_id={rollout_id!r} and attempt_id={attempt_id!r}: give both, or neither")
        llm = super().as_resource(model=model, sampling_parameters=sampling_parameters)
        proxy = ProxyLLM(**{name: getattr(llm, name) for name in type(llm).model_fields})
        return proxy if rollout_id is None else proxy.with_attempted_rollout(rollout_id, attempt_id)


_active_proxy: LLMProxy | None = None


def set_active_llm_proxy(proxy: LLMProxy) -> None:
    """Set the gateway that `get_active_llm_proxy` returns."""
    global _active_proxy
    _active_proxy = proxy


def get_active_llm_proxy() -> LLMProxy:
    """Return the gateway that `set_active_llm_proxy` was given. Raise ValueError if none was."""
    if _active_proxy is None:
        raise ValueError("no gateway was set; call set_active_llm_proxy(proxy)")
    return _active_proxy


class _ByHand(ExecutionStrategy):
    """A mixin for Leyden's strategies: a program may call `execute` itself, which then blocks until the work is
    done.
    """

    def execute(self, algorithm: Any, runner: Any, store: Any, **options: Any) -> Any:
        """Run the bundles. A Trainer of Leyden, which gives `ready`, awaits this call; without `ready` it blocks."""
        strategy: Any = super(ExecutionStrategy, self)
        if "ready" in options:
            return strategy.execute(algorithm, runner, store, **options)

        async def work() -> None:
            await strategy.execute(algorithm, PlainRunnerBundle(runner, self.n_runners), as_native(store))

        return run_blocking(work())


@dataclass(frozen=True)
class PlainRunnerBundle:
    """A runner bundle of a program, `async def runner(store, worker_id, event)`, as Leyden's strategies expect it."""

    runner: Callable[..., Any]
    n_runners: int
    concurrency: int | None = None

    @property
    def worker_names(self) -> Sequence[str]:
        """The workers' names in the store, by worker id."""
        return [f"Worker-{worker_id}" for worker_id in range(self.n_runners)]

    async def __call__(self, store: Any, worker_id: int, event: Any, *, at_most: int | None = None) -> None:
        """Run one worker of the program."""
        await self.runner(users_store(store), worker_id, event)

    def init(self) -> None:
        """Do nothing: the program's bundle prepares itself."""

    def teardown(self) -> None:
        """Do nothing: the program's bundle tears itself down."""


class SharedMemoryExecutionStrategy(_ByHand, native.SharedMemoryExecutionStrategy):
    """Runs algorithm and runners in one process.

    join_timeout, graceful_delay: how long runners may take to finish.
    poll_interval: of no effect.
    """

    alias = "shm"

    def __init__(
        self,
        n_runners: int = 1,
        main_thread: Literal["algorithm", "runner"] = "algorithm",
        join_timeout: float = 15.0,
        graceful_delay: float = 5.0,
        poll_interval: float = 0.05,
        managed_store: bool | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("drain_seconds", min(graceful_delay, join_timeout))
        native.SharedMemoryExecutionStrategy.__init__(
            self, n_runners, main_thread=main_thread, managed_store=managed_store, **options
        )
        self.join_timeout, self.graceful_delay, self.poll_interval = join_timeout, graceful_delay, poll_interval


class InterProcessExecutionStrategy(_ByHand, NativeInterProcess):
    """Runners in processes on this machine, which reach the store over a Unix socket."""

    alias = "ipc"


class ClientServerExecutionStrategy(_ByHand, NativeClientServer):
    """A process for each runner.

    graceful_timeout: how long runners may take to finish.
    main_process, terminate_timeout, allowed_exit_codes: of no effect. The algorithm is in the main process, and the
        exit code of a process that the run has ended is never an error.
    """

    alias = "cs"

    def __init__(
        self,
        role: Literal["algorithm", "runner", "both"] | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        graceful_timeout: float = 10.0,
        terminate_timeout: float = 10.0,
        main_process: Literal["algorithm", "runner"] = "algorithm",
        managed_store: bool | None = None,
        allowed_exit_codes: Iterable[int] = (0, -15),
        **options: Any,
    ) -> None:
        if main_process not in ("algorithm", "runner"):
            raise ValueError("main_process must be 'algorithm' or 'runner'")
        if main_process == "runner" and n_runners != 1:
            raise ValueError("main_process='runner' requires n_runners to be 1")
        options.setdefault("drain_seconds", graceful_timeout)
        NativeClientServer.__init__(
            self,
            n_runners,
            role=role,
            server_host=server_host,
            server_port=server_port,
            managed_store=managed_store,
            **options,
        )
        self.graceful_timeout, self.terminate_timeout = graceful_timeout, terminate_timeout
        self.main_process, self.allowed_exit_codes = main_process, tuple(allowed_exit_codes)
