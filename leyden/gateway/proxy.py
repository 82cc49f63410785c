"""`LLMProxy`: the gateway's options, and the start and stop of its server.

The server runs in an event loop of a daemon thread, so a busy agent or algorithm never holds up a model call. The
routes are in `gateway_app`; what happens to a call is in `relay`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import json
import logging
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args

import aiohttp

from leyden._lib.attempt_key import NO_TOKEN, PREFIX, attempt_key
from leyden._lib.components import KeepsArguments, arguments_of
from leyden._lib.host.asgi import AsgiServer, ConnectionLimits
from leyden._lib.host.http import MAX_BODY_BYTES, SiteGuard
from leyden._lib.host.listening import check_token, is_loopback, listen, loop_factory, netloc, reachable
from leyden._lib.options import NamedOptions, check_choice, check_flag, check_number, check_port
from leyden.dialects import WrongType, check_types
from leyden.dialects.sampling import FIELD_TYPES as SAMPLING_TYPES
from leyden.errors import ConfigError, GatewayError
from leyden.gateway.attempts import Attempts
from leyden.gateway.control import Control
from leyden.gateway.gate import Gate
from leyden.gateway.gateway_app import GatewayApp
from leyden.gateway.limits import AttemptLimits
from leyden.gateway.litellm_transport import LitellmTransport
from leyden.gateway.prices import Prices
from leyden.gateway.recorder import Failures, Recorder
from leyden.gateway.relay import Relay, RelayOptions
from leyden.gateway.remote import ControlSecret, RemoteRecorder, control_key_of
from leyden.gateway.spool import SPANS, Spool
from leyden.gateway.transport import HttpTransport, Transport
from leyden.gateway.upstream import UpstreamModel, upstream_models
from leyden.gateway.upstream_metrics import UpstreamMetrics, UpstreamStatus
from leyden.store.base import LightningStore
from leyden.store.server import LightningStoreServer
from leyden.types import LLM, NamedResources, ProxyLLM, RolloutMode

if TYPE_CHECKING:
    from leyden.gateway.hosted import Reservation, Settings

logger = logging.getLogger(__name__)

ModelList = Sequence[UpstreamModel | LLM | Mapping[str, Any]]

_STOP_GRACE_SECONDS = 1.0
"""Seconds that calls under way may take after `stop`."""
_CLIENT_KEEP_ALIVE_SECONDS = 75
"""The seconds for which the gateway keeps a client's idle connection.

It is longer than clients keep theirs (OpenAI's: 5 s). If both ends waited equally long, the gateway could close a
connection on which a client is just sending.
"""
_UPSTREAM_KEEP_ALIVE_SECONDS = 3.0
"""The seconds for which the gateway keeps an idle connection to a server.

It is shorter than servers keep theirs (uvicorn and vLLM: 5 s), so that a server never closes a connection on which the
gateway is just sending.
"""
_CONNECT_SECONDS = 10.0
"""The seconds that a connection to a server may take to open."""
_MODES: tuple[str, ...] = get_args(RolloutMode)


class LLMProxy(NamedOptions, KeepsArguments):
    """A server of OpenAI's and Anthropic's APIs that passes calls on to models and records them.

    Call `start` before use and `stop` after it, or use `async with`. Both may be repeated, and a restart keeps the
    address. All methods may be called from any thread and any event loop, but `start` and `stop` only from one at a
    time.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        model_list: ModelList | None = None,
        store: LightningStore | LightningStoreServer | None = None,
        timeout_seconds: float = 600.0,
        launch_mode: Literal["thread", "engine"] = "thread",
        deterministic_seed: int | None = None,
        token: str | None = None,
        live_key: str | None = None,
        unrecorded: bool = False,
        access_host: str | None = None,
        keep_alive_seconds: float = 15.0,
        upstream_retries: int = 2,
        pause_wait_seconds: float = 300.0,
        attempt_limits: AttemptLimits | None = None,
        prices: Prices | str | Path | Mapping[str, Any] | None = None,
        sampling_overrides: Mapping[str, Mapping[str, Any]] | None = None,
        dropped_tools: Sequence[str] = (),
        durable: bool = False,
        spool: str | Path | None = None,
        spool_bytes: int = 256 * 2**20,
        max_body_bytes: int = MAX_BODY_BYTES,
        connection_limits: ConnectionLimits | None = None,
    ) -> None:
        """Set the options. The gateway opens its port in `start`.

        port: None takes a free port.
        host: the address to bind.
        model_list: the models to serve, each an `UpstreamModel`, an `LLM`, or a mapping with the fields of
            `UpstreamModel`. Agent Lightning's entries with `litellm_params` are accepted, too. A model that is named
            several times has several servers; an attempt stays with one while it is healthy.
        store: where calls are recorded. A `LightningStoreServer` stands for the store that it serves.
        timeout_seconds: the longest time for one response, from the request to a stream's last byte. An agent that
            reads slowly uses it up, too.
        launch_mode: "thread" runs the gateway in a thread of this process. "engine" lets a run that trains an
            `IsolatedBackend` start it in the engine's process, where it calls the engine without HTTP. Any other run
            uses a thread.
        deterministic_seed: add a `seed` to each request that has none. The seed depends on this number, the rollout's
            `metadata["leyden.sampling_key"]` (or its id), how many of its attempts have failed, and the number of the
            call. `PolicyGradient` sets the key to mode, step and index, so that two runs with one seed sample the same.
        token: the API key that clients must send. Required unless `host` is a loopback address.
        live_key: a secret shared with serving sessions (`leyden.serving.OnlineSession`), which sign live rollouts with
            it. Their calls are admitted before the store knows them. None: no live rollouts.
        unrecorded: answer calls that name no attempt, too, and record nothing of them. By default they get 404, so that
            no call of a rollout is missed.
        access_host: the address under which agents reach this machine. None: `host`. If `host` stands for all addresses
            (0.0.0.0), runners then look for the gateway on the machine of the store.
        keep_alive_seconds: after this much silence a stream gets a comment. Clients skip comments, and networks then do
            not take the connection for dead.
        upstream_retries: how often a call is sent again before the first byte of a response, with growing pauses. It is
            repeated if a server cannot be reached, and sent to another server of the model after 429, 502, 503 or 504.
        pause_wait_seconds: how long a call waits while the gateway is paused. Then it gets 429 with Retry-After.
        attempt_limits: the most that one attempt may spend. A call beyond that gets 429, and the client is told not to
            retry.
        prices: the prices of models that have none of their own: a file (`prices.yaml`), its content, or `Prices`. Each
            call is recorded with its cost.
        sampling_overrides: by mode (`train`, `val`, `test`, `live`), fields that replace those of every request of such
            rollouts, named as in the agents' API: {"val": {"temperature": 0}}.
        dropped_tools: types or names of hosted tools, such as "web_search", to leave out of calls that are translated.
            The record of a call names the tools that were left out. Other hosted tools are refused.
        durable: write each call to the store before the last byte of its response, and answer 503 if that fails.
            Otherwise calls are written afterwards, and a crash of this process loses the last ones: hundredths of a
            second, or a second and more on a busy machine.
        spool: a file for records that wait while the store is unavailable. They are delivered once each, in order, also
            by the next gateway with this file. None: a temporary file, which is lost if this process ends before the
            store is back. A durable gateway keeps no spool and answers 503.
        spool_bytes: the largest size of that file. Records beyond it are lost, and `flush` raises.
        max_body_bytes: the largest request. A larger one is refused with 413.
        connection_limits: how long an agent may take to send a request or to fetch a response. None: the defaults of
            `ConnectionLimits`.
        Raise ConfigError for an option that cannot be used.
        """
        check_choice("launch_mode", launch_mode, ("thread", "engine"))
        self.launch_mode = launch_mode
        check_port("port", port)
        check_number("timeout_seconds", timeout_seconds, above=0)
        check_number("deterministic_seed", deterministic_seed, whole=True, or_none="the agents' seeds")
        check_number("keep_alive_seconds", keep_alive_seconds, above=0)
        check_number("upstream_retries", upstream_retries, at_least=0, whole=True)
        check_number("pause_wait_seconds", pause_wait_seconds, above=0)
        check_token("token", token, host=host)
        if token is not None and token.startswith(PREFIX):
            raise ConfigError(
                f"token begins with {PREFIX!r}, as the keys of attempts do: give the gateway a token of its own"
            )
        self._host = host
        self._access_host = access_host or host
        self._port = port
        self._limits = attempt_limits or AttemptLimits()
        self._prices = Prices() if prices is None else Prices.of(prices)
        self._on_spent: Callable[[float | None], None] = lambda cost: None
        self._models = self._checked(model_list or ())
        overrides = {mode: dict(fields) for mode, fields in (sampling_overrides or {}).items()}
        if unknown := sorted(set(overrides) - set(_MODES)):
            raise ConfigError(f"sampling_overrides: no mode {unknown[0]!r}; possible: {', '.join(map(repr, _MODES))}")
        for mode, fields in overrides.items():
            try:
                json.dumps(fields, allow_nan=False)
                check_types(fields, SAMPLING_TYPES)
            except WrongType as error:
                raise ConfigError(f"sampling_overrides of mode {mode!r}: {error}") from error
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"sampling_overrides of mode {mode!r} are not JSON, which requests are: {error}"
                ) from error
        self._pause_wait_seconds = pause_wait_seconds
        self._relay_options = RelayOptions(
            deterministic_seed=deterministic_seed,
            timeout_seconds=timeout_seconds,
            keep_alive_seconds=keep_alive_seconds,
            upstream_retries=upstream_retries,
            limits=self._limits,
            sampling_overrides=overrides,
            dropped_tools=_tool_names(dropped_tools),
            durable=durable,
            on_spent=lambda cost: self._on_spent(cost),
        )
        check_number("spool_bytes", spool_bytes, at_least=0, whole=True)
        self._spool_path, self._spool_bytes = None if spool is None else Path(spool), spool_bytes
        check_number("max_body_bytes", max_body_bytes, at_least=1, whole=True)
        self.max_body_bytes = max_body_bytes
        self._connection_limits = connection_limits
        self._store = None if store is None else _checked_store(store)
        if live_key is not None and not live_key:
            raise ConfigError("live_key is empty; give a secret, or leave it out")
        self._token = token
        self._live_key = live_key
        check_flag("unrecorded", unrecorded)
        self._unrecorded = unrecorded
        self._control_key = secrets.token_urlsafe(32)
        """The secret that runners in other processes send when they end an attempt."""
        self._control_secret: ControlSecret | None = None
        self._policy_versions: dict[str, int] = {}
        """The version of the weights by model name. Any thread writes it, one item at a time."""
        self._failures: Failures = {}
        self._running: RunningGateway | None = None
        self._reservation: Reservation | None = None
        self._transports: Mapping[str, Transport] = {}
        """Transports for servers that are called without HTTP, by endpoint."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop())

    def __reduce__(self) -> tuple[Callable[..., RemoteRecorder], tuple[Any, ...]]:
        """Pickle the gateway as a `RemoteRecorder`, with which another process reports its attempts to this gateway."""
        return RemoteRecorder, (self._root, self._control_key)

    # ---- options ---------------------------------------------------------------------------------

    def set_store(self, store: LightningStore | LightningStoreServer) -> None:
        """Record calls in this store, or in the store of this server.

        Raise GatewayError while the gateway is running.
        """
        if self._running is not None:
            raise GatewayError(f"the gateway on {self.endpoint} is running; stop it before giving it another store")
        self._store = _checked_store(store)

    def get_store(self) -> LightningStore | None:
        """Return the store in which calls are recorded; None if none was set."""
        return self._store

    @property
    def served_models(self) -> list[UpstreamModel]:
        """The servers of all models that are served now."""
        return [server for servers in self._models.values() for server in servers]

    def update_model_list(self, model_list: ModelList) -> None:
        """Serve these models from the next call on, without a restart.

        Raise ConfigError for a model that cannot be used; the gateway then keeps its old list.
        """
        self._models = self._checked(model_list)
        if self._running is not None:
            self._running.keep(self.served_models)

    @property
    def prices(self) -> Prices:
        """The prices of models that have none of their own."""
        return self._prices

    def set_prices(self, prices: Prices) -> None:
        """Price the models that have no price, from the next call on.

        Raise ConfigError if the gateway has other prices.
        """
        if self._prices not in (Prices(), prices):
            raise ConfigError("the LLMProxy has prices of its own; give prices= to it or to the Trainer, not to both")
        self._prices = prices
        self.update_model_list(self.served_models)

    def watch_spending(self, notify: Callable[[float | None], None] | None) -> None:
        """Call `notify`, in the gateway's thread, with the cost of each call that may be billed, None if it is unknown.

        A gateway in another process does not call it.
        """
        self._on_spent = notify or (lambda cost: None)

    def serve_engine(self, *servers: LLM) -> None:
        """Serve a model of the run's own engine from the next call on, at one server or several, in addition to models
        of other names.
        """
        names = {server.model for server in servers}
        others = [model for model in self.served_models if model.model_name not in names]
        own = [UpstreamModel(each.model, each.endpoint, api_key=each.api_key, part_of_run=True) for each in servers]
        self.update_model_list([*others, *own])

    def set_policy_version(self, model_name: str, version: int | None) -> None:
        """Set the version of a model's weights, for servers that do not report it themselves.

        Each call is recorded with the version at its start (`leyden.policy_version`). If the version changes during the
        call, the new one is recorded, too (`leyden.policy_version.at_end`). Tokens get the version at the start, the
        oldest that any of them can have. Versions of tokens that a server reports itself take precedence.
        version: None if the model has no version.
        Raise ConfigError for a model that the gateway does not serve.
        """
        check_number("version", version, at_least=0, whole=True, or_none="no version")
        if model_name not in self._models:
            possible = ", ".join(map(repr, self._models)) or "none: give model_list="
            raise ConfigError(f"set_policy_version: no model {model_name!r}; the gateway serves {possible}")
        if version is None:
            self._policy_versions.pop(model_name, None)
        else:
            self._policy_versions[model_name] = version
        if self._running is not None:
            self._running.set_policy_version(model_name, version)

    def _checked(self, model_list: ModelList) -> dict[str, tuple[UpstreamModel, ...]]:
        """Return the models by name. Raise ConfigError if a limit on cost needs a price that a model does not have."""
        models = {
            name: tuple(server.priced(self._prices) for server in servers)
            for name, servers in upstream_models(model_list).items()
        }
        if self._limits.cost is not None:
            for server in (server for servers in models.values() for server in servers):
                if server.price_per_million is None:
                    raise ConfigError(
                        f"attempt_limits: cost={self._limits.cost:g} needs a price of {server.model_name!r}; "
                        "give it one in prices=, or in its UpstreamModel's price_per_million"
                    )
        return models

    def share_control(self, secret: str | None) -> None:
        """Let runners that know `secret` end attempts, even if they were started elsewhere (with `FoundGateways` as
        their recorder).

        secret: None: the gateway's token takes its place, which such runners find in their resources. Without a token
            either, a random secret lies in a file that only this user can read, while the gateway's port is open.
        Raise GatewayError if that file cannot be written.
        """
        if self._control_secret is not None:
            self._control_secret.withdraw()
        self._control_secret = None if secret or self._token else ControlSecret()
        shared = secret or self._token or (self._control_secret and self._control_secret.text)
        self._control_key = control_key_of(shared or "")
        if self._control_secret is not None and self._running is not None:
            self._control_secret.publish(self._listening_port())

    @property
    def host(self) -> str:
        """The address that the gateway is bound to."""
        return self._host

    @property
    def endpoint(self) -> str:
        """The base URL of the gateway itself, without an attempt, under which agents reach it.

        Raise GatewayError before `start` if no `port` was given.
        """
        return f"http://{netloc(self._access_host, self._listening_port())}/v1"

    def _listening_port(self) -> int:
        if self._port is None:
            raise GatewayError("the gateway has no address yet: start it first, or give it a port=")
        return self._port

    @property
    def _reported_as(self) -> str:
        return netloc(self._access_host, self._listening_port())

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: dict[str, Any] | None = None,
    ) -> ProxyLLM | LLM:
        """Return the gateway as a resource for agents.

        Without ids this is a `ProxyLLM`, which serves any attempt. With both ids it is the `LLM` of that attempt.
        `model` may be left out if the gateway serves only one.
        Raise ConfigError for a model that is not served, and for one id without the other.
        """
        models = list(self._models)
        name = models[0] if model is None and len(models) == 1 else model
        if name not in self._models:
            possible = ", ".join(map(repr, models)) or "none: give model_list="
            raise ConfigError(f"as_resource: model is {model!r}; the gateway serves {possible}")
        resource = ProxyLLM(
            endpoint=self.endpoint,
            model=name,
            api_key=self._token or NO_TOKEN,  # OpenAI's client insists on some key
            sampling_parameters={**self._models[name][0].sampling_parameters, **(sampling_parameters or {})},
        )
        if rollout_id is None and attempt_id is None:
            return resource
        return resource.with_attempted_rollout(cast(str, rollout_id), cast(str, attempt_id))

    def models_digest(self) -> str:
        """Return a digest that changes when equal requests may get other responses.

        It covers each served model's name, address, name at its server and parameters, the sampling overrides and the
        dropped tools. Keys are left out.
        """
        served = [server.content for server in self.served_models]
        options = self._relay_options
        content = [served, options.sampling_overrides, *options.dropped_tools]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]

    def make_key(self, rollout_id: str, attempt_id: str) -> str:
        """Return the API key of one attempt, for programs whose base URL cannot carry the ids.

        The key is `sk-leyden-<rollout>.<attempt>.<hmac>`. It is made with the gateway's token and stays valid as long
        as the token does. Its holder can call in this attempt only.
        """
        return attempt_key(self._token, rollout_id, attempt_id)

    # ---- attempts --------------------------------------------------------------------------------

    def begin_attempt(self, rollout_id: str, attempt_id: str, resources: NamedResources) -> None:
        """Do nothing: the gateway learns of an attempt by its first call."""

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Refuse all later calls of this attempt with 410, and cancel those under way. Safe to repeat."""
        if self._running is not None:
            self._running.end_attempt(rollout_id, attempt_id)

    async def flush(self, rollout_id: str, attempt_id: str) -> None:
        """Wait until every call of this attempt is in the store.

        Call `end_attempt` first; otherwise this waits for the calls under way.
        Raise StoreError if the store stays unavailable for 30 seconds (the calls stay queued; flush again), or once if
        a call is lost for good.
        """
        if self._running is not None:
            await self._running.flush(rollout_id, attempt_id)
        elif failure := self._failures.pop((rollout_id, attempt_id), None):
            raise failure

    def upstreams(self) -> list[UpstreamStatus]:
        """Return the status of each server that had a request since `start`."""
        return [] if self._running is None else self._running.upstreams()

    # ---- updates of the weights ------------------------------------------------------------------

    async def pause(self) -> None:
        """Hold up new calls until `resume`. Calls that a model is answering continue.

        Raise GatewayError if the gateway is not running.
        """
        await self._command_gate("pause")

    async def drain(self) -> None:
        """Hold up new calls, and wait until those at the models are answered.

        Raise GatewayError if the gateway is not running.
        """
        await self._command_gate("drain")

    async def resume(self) -> None:
        """Let the waiting calls continue. Raise GatewayError if the gateway is not running."""
        await self._command_gate("resume")

    async def _command_gate(self, command: str) -> None:
        if self._running is None:
            raise GatewayError("the gateway is not running, so it holds no calls: start it first")
        await self._running.gate(command)

    # ---- the server ------------------------------------------------------------------------------

    def is_running(self) -> bool:
        """Return whether the gateway has been started and its server still runs."""
        return self._running is not None and self._running.is_alive()

    async def start(self) -> None:
        """Open the port and take calls. Calling it again does nothing.

        Raise ConfigError without a store, GatewayError if the port cannot be opened.
        """
        if self.is_running():
            return
        store, listener = self._given_store(), self._listen()
        ready: concurrent.futures.Future[RunningGateway] = concurrent.futures.Future()
        stopped: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            """Serve until `stopped` is set, in an event loop of this thread. A failure to start goes to `ready`."""
            try:
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    runner.run(self._serve(store, listener, ready, stopped))
            except BaseException as error:
                logger.exception("the gateway on %s ended", self.endpoint)
                if not ready.done():
                    ready.set_exception(GatewayError(f"the gateway could not start on {self.endpoint}: {error}"))
            finally:
                listener.close()
                stopped.set_result(None)

        threading.Thread(target=run, name="leyden-gateway", daemon=True).start()
        self._running = await asyncio.wrap_future(ready)

    async def stop(self) -> None:
        """Refuse further calls, end those under way, write every record and close the port.

        Calling it again does nothing.
        """
        await self.leave()
        if self._control_secret is not None:
            self._control_secret.withdraw()
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            await reservation.close()

    async def restart(self) -> None:
        """Stop the gateway, and start it again on the same address."""
        await self.stop()
        await self.start()

    # ---- in the process of an engine (`leyden.gateway.hosted`) -----------------------------------

    async def reserve(self) -> None:
        """Open the port for a gateway that another process will run (`run_by`). `stop` closes it.

        Calls wait on the open port until that process serves them, or until `start` runs the gateway in this process
        after all. Raise ConfigError without a store, GatewayError if the port cannot be opened.
        """
        from leyden.gateway.hosted import Reservation

        store = self._given_store()
        self._reservation = Reservation(self._listen(), store)
        await self._reservation.open()

    @property
    def is_reserved(self) -> bool:
        """Whether another process runs the gateway, or will run it."""
        return self._reservation is not None

    def for_process(self) -> tuple[Settings, socket.socket]:
        """Return the first argument of `hosted.serve` and the listening socket, for the process that will run the
        gateway. Call `reserve` first.
        """
        from leyden.gateway.hosted import Settings

        assert self._reservation is not None, "call reserve() first"
        kept_here = ("port", "store", "model_list")
        options = {name: value for name, value in arguments_of(self).items() if name not in kept_here}
        settings = Settings(
            self._reservation.shared_store, options, self.served_models, dict(self._policy_versions), self._control_key
        )
        return settings, self._reservation.listener

    def run_by(self, end: Callable[[], Awaitable[None]]) -> None:
        """Treat the gateway as running in another process from now on, and control it there.

        end: ends that process. `stop` and `leave` call it.
        """
        from leyden.gateway.hosted import HostedGateway

        self._running = HostedGateway(self._root, self._control_key, end)

    async def leave(self) -> None:
        """Stop the gateway, but keep a reserved port for the next process that runs it."""
        running, self._running = self._running, None
        if running is not None:
            await running.end()

    @property
    def _root(self) -> str:
        """The gateway's address for this machine's processes, without a path."""
        return f"http://{netloc(reachable(self._access_host), self._listening_port())}"

    def _given_store(self) -> LightningStore:
        if self._store is None:
            raise ConfigError(
                "the gateway has no store to record calls in; give store= or call set_store() before start()"
            )
        return self._store

    def _listen(self) -> socket.socket:
        """Return a duplicate of the reserved socket, or a new one, and keep its port. Raise GatewayError if taken."""
        if self._reservation is not None:
            return self._reservation.listener.dup()
        try:
            listener = listen(self._host, self._port or 0)
        except OSError as error:
            raise GatewayError(
                f"the gateway cannot listen on {self._host}, port {self._port}: {error.strerror or error}; "
                "give LLMProxy another port=, or port=None for a free one"
            ) from error
        self._port = listener.getsockname()[1]
        if self._control_secret is not None:
            try:
                self._control_secret.publish(self._listening_port())
            except GatewayError:
                listener.close()
                raise
        return listener

    @asynccontextmanager
    async def _listening_apps(
        self, app: GatewayApp, listener: socket.socket
    ) -> AsyncGenerator[list[tuple[Any, socket.socket]]]:
        """Yield the applications to serve, each with its listening socket. A gateway in several processes overrides
        this, because it serves two.
        """
        yield [(app, listener)]

    def _new_gate(self) -> Gate:
        return Gate(self._pause_wait_seconds)

    async def _serve(
        self,
        store: LightningStore,
        listener: socket.socket,
        ready: concurrent.futures.Future[RunningGateway],
        stopped: concurrent.futures.Future[None],
    ) -> None:
        """Run the gateway in the running loop until it is stopped.

        ready: gets the running gateway once its port takes calls.
        stopped: handed to that gateway, whose `end` waits for it; the caller resolves it.
        """
        attempts = Attempts(store)
        gate = self._new_gate()
        async with _upstream_session(self._relay_options.timeout_seconds) as session, AsyncExitStack() as stack:
            spool = None
            if not self._relay_options.durable:
                spool = stack.enter_context(closing(Spool(self._spool_path, max_bytes=self._spool_bytes, items=SPANS)))
            recorder = Recorder(store, self._failures, spool)
            if recorder.dead_letters is not None:
                stack.enter_context(closing(recorder.dead_letters))
            http, through_litellm = HttpTransport(session), LitellmTransport(self._relay_options.timeout_seconds)

            def transport(model: UpstreamModel) -> Transport:
                through_http = http if model.litellm_params is None else through_litellm
                return self._transports.get(model.endpoint, through_http)

            relay = Relay(
                models=lambda: self._models,
                transport=transport,
                recorder=recorder,
                gate=gate,
                options=self._relay_options,
                policy_version=self._policy_versions.get,
            )
            control = Control(
                gate,
                models=lambda: self._models,
                policy_versions=self._policy_versions,
                records_pending=lambda: recorder.pending,
                update_models=self.update_model_list,
                set_policy_version=self.set_policy_version,
                upstreams=lambda: relay.upstream_metrics.statuses(),
            )
            servers: list[AsgiServer] = []
            app = GatewayApp(
                attempts=attempts,
                recorder=recorder,
                relay=relay,
                control=control,
                model_names=lambda: list(self._models),
                token=self._token,
                live_key=self._live_key,
                unrecorded=self._unrecorded,
                control_key=lambda: self._control_key,
                guard=SiteGuard(local_only=self._token is None and is_loopback(self._host), also=[self._access_host]),
                max_body_bytes=self.max_body_bytes,
                connections=lambda: sum(server.connections for server in servers),
            )
            for door, at in await stack.enter_async_context(self._listening_apps(app, listener)):
                servers.append(
                    AsgiServer(door, keep_alive_seconds=_CLIENT_KEEP_ALIVE_SECONDS, limits=self._connection_limits)
                )
                await servers[-1].start(at)
            writing = asyncio.create_task(recorder.run())
            reporting = asyncio.create_task(
                relay.upstream_metrics.report(
                    store, self._reported_as, lambda: sum(server.connections for server in servers)
                )
            )
            following = asyncio.create_task(attempts.follow_news(app.end_attempt))
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            ready.set_result(
                _GatewayHere(
                    recorder=recorder,
                    attempts=attempts,
                    app=app,
                    control=control,
                    upstream_metrics=relay.upstream_metrics,
                    loop=loop,
                    thread=threading.current_thread(),
                    stopped=stopped,
                    stop=lambda: loop.call_soon_threadsafe(stop.set),
                )
            )
            await stop.wait()
            reporting.cancel()
            following.cancel()
            await asyncio.gather(
                *(server.stop(grace_seconds=_STOP_GRACE_SECONDS, cancel=app.cancel_calls) for server in servers)
            )
            recorder.close()
            await writing
            await through_litellm.close()


class RunningGateway(ABC):
    """A started gateway, in this process or in another. `LLMProxy` describes the methods of the same names. All may be
    called from any thread.
    """

    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    def keep(self, servers: Sequence[UpstreamModel]) -> None:
        """Serve these models from the next call on."""

    @abstractmethod
    def set_policy_version(self, model_name: str, version: int | None) -> None: ...

    @abstractmethod
    def end_attempt(self, rollout_id: str, attempt_id: str) -> None: ...

    @abstractmethod
    async def flush(self, rollout_id: str, attempt_id: str) -> None: ...

    @abstractmethod
    def upstreams(self) -> list[UpstreamStatus]: ...

    @abstractmethod
    async def gate(self, command: str) -> None:
        """Carry out the command "pause", "drain" or "resume"."""

    @abstractmethod
    async def end(self) -> None:
        """Refuse further calls, and return when every record is written."""

    def close(self) -> None:
        """Request the end, without waiting for it."""


@dataclass(frozen=True, slots=True)
class _GatewayHere(RunningGateway):
    """A gateway in an event loop of this process, and the parts that it consists of."""

    recorder: Recorder
    attempts: Attempts
    app: GatewayApp
    control: Control
    upstream_metrics: UpstreamMetrics
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    stopped: concurrent.futures.Future[None]
    stop: Callable[[], object]

    def is_alive(self) -> bool:
        return self.thread.is_alive()

    def keep(self, servers: Sequence[UpstreamModel]) -> None:
        with contextlib.suppress(RuntimeError):  # stopped this very moment
            self.loop.call_soon_threadsafe(self.upstream_metrics.keep, list(servers))

    def set_policy_version(self, model_name: str, version: int | None) -> None:
        """Do nothing: calls read the versions of `LLMProxy` itself."""

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        self.attempts.end(rollout_id, attempt_id)
        if self.app.remembers or not self.recorder.settled((rollout_id, attempt_id)):
            with contextlib.suppress(RuntimeError):  # stopped this very moment: it gives up every call
                self.loop.call_soon_threadsafe(self.app.end_attempt, rollout_id, attempt_id)

    async def flush(self, rollout_id: str, attempt_id: str) -> None:
        key = (rollout_id, attempt_id)
        if not self.recorder.settled(key):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.recorder.flush(key), self.loop))

    def upstreams(self) -> list[UpstreamStatus]:
        return self.upstream_metrics.statuses()

    async def gate(self, command: str) -> None:
        act = self.control.handle(command, "POST", b"")
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(act, self.loop))

    async def end(self) -> None:
        self.stop()
        await asyncio.wrap_future(self.stopped)
        self.thread.join()

    def close(self) -> None:
        self.stop()


def _tool_names(names: Sequence[str]) -> list[str]:
    if isinstance(names, str) or not all(isinstance(cast(object, name), str) and name for name in names):
        raise ConfigError(f"dropped_tools is {names!r}; give a list of names or types of tools, such as ['web_search']")
    return list(names)


def _checked_store(store: Any) -> LightningStore:
    """Return the store; of a server in this process, the store that it serves, so that records bypass HTTP. Raise
    ConfigError for anything else.
    """
    store = store.store if isinstance(store, LightningStoreServer) else store
    if not isinstance(store, LightningStore):
        raise ConfigError(
            f"LLMProxy's store is a {type(store).__name__}; give a LightningStore (leyden.open_store makes one), or a LightningStoreServer"
        )
    return store


def _upstream_session(timeout_seconds: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_UPSTREAM_KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=_CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
