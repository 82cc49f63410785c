"""`cs`: the algorithm and a store server in one process, each runner in another, on this machine or on many.

The same script runs everywhere: an option, or the environment variable LEYDEN_CURRENT_ROLE, gives each process its
role.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal, cast, get_args

from leyden._lib.aio import Latch, first_done
from leyden._lib.host.listening import check_token, netloc, reachable
from leyden._lib.logs import notice
from leyden._lib.options import check_flag, check_number, check_port
from leyden.errors import ConfigError, StoreError
from leyden.execution.env_variables import managed_store as managed_by_environment
from leyden.execution.env_variables import named_variable, variable
from leyden.execution.execution_strategy import AlgorithmBundle, Elsewhere, RunnerBundle, RunsAgain
from leyden.execution.process_strategy import ProcessExecutionStrategy
from leyden.execution.supervised import serve
from leyden.store.base import LightningStore
from leyden.store.client import TOKEN_VARIABLE, LightningStoreClient
from leyden.store.server import LightningStoreServer

logger = logging.getLogger(__name__)

Role = Literal["both", "algorithm", "runner"]
_PORT = 4747
"""The port of the store server, where processes that were started apart find it."""


class ClientServerExecutionStrategy(ProcessExecutionStrategy):
    """Runners in processes that reach the store over HTTP.

    role: `both`: algorithm and runners are started here. `algorithm`: only the algorithm, with the store server.
        `runner`: only runners, which work for an algorithm that was started elsewhere until it has ended, or its store
        has been away for `patience_seconds`, or until they are stopped. None takes LEYDEN_CURRENT_ROLE (or
        AGL_CURRENT_ROLE), else `both`.
    server_host: the host on which the store is served, and at which runners connect to it; None takes
        LEYDEN_SERVER_HOST (AGL_SERVER_HOST), else 127.0.0.1.
    server_port: the store server's port; None takes LEYDEN_SERVER_PORT (AGL_SERVER_PORT); else any free port for
        `both`, and 4747 for the other roles.
    host: another name for `server_host`.
    token: the secret that runners must send; None takes LEYDEN_STORE_TOKEN. A store that is served to other machines
        needs one.
    protocol: `http` is the only one.
    managed_store: False if the given store is one that processes share by themselves (a database server), so that none
        is started here; None takes LEYDEN_MANAGED_STORE (AGL_MANAGED_STORE), else True.
    patience_seconds: how long role `runner` waits for the store, at the beginning and whenever it is unavailable.
    daemon: whether the processes are daemonic, so that their agents cannot use `multiprocessing`.
    options: further options of ProcessExecutionStrategy.

    A gateway that the trainer makes for the role `algorithm` listens on the store's host, on the next port (4748).
    """

    def __init__(
        self,
        n_runners: int = 1,
        *,
        role: Role | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        host: str | None = None,
        token: str | None = None,
        protocol: Literal["http"] = "http",
        managed_store: bool | None = None,
        patience_seconds: float = 60.0,
        daemon: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(n_runners, daemon=daemon, **options)
        if protocol != "http":
            raise ConfigError(f"protocol is {protocol!r}; possible: 'http'")
        if host is not None and server_host is not None and host != server_host:
            raise ConfigError(f"host={host!r} and server_host={server_host!r} mean the same; give one of them")
        check_number("patience_seconds", patience_seconds, at_least=0)
        for name, given in {"host": host, "server_host": server_host}.items():
            if not isinstance(given, str | None):
                raise ConfigError(f"{name} is {given!r}; it must be a string, or None")
        if managed_store is not None:
            check_flag("managed_store", managed_store)
        self.patience_seconds = patience_seconds
        origin, named = ("role", role) if role else named_variable("CURRENT_ROLE") or ("role", "both")
        if named not in get_args(Role):
            raise ConfigError(f"{origin} is {named!r}; possible: {', '.join(map(repr, get_args(Role)))}")
        self.role = cast(Role, named)
        self.runs_algorithm = self.role != "runner"
        self.server_host = server_host or host or variable("SERVER_HOST") or "127.0.0.1"
        self.server_port = _port() if server_port is None else server_port
        if self.server_port is None and self.role != "both":
            self.server_port = _PORT
        check_port("server_port", self.server_port)
        check_token("token", token, host="127.0.0.1")  # the server checks its own address when it starts
        self._token = token or os.environ.get(TOKEN_VARIABLE) or None
        self.managed_store = managed_by_environment() if managed_store is None else managed_store

    def remote_store(self) -> LightningStore | None:
        """Return a client of the algorithm's store for the role `runner`, else None. With `managed_store=False` the
        store is the one given to the trainer, so None.
        """
        if self.role != "runner" or not self.managed_store:
            return None
        url = f"http://{netloc(reachable(self.server_host), self.server_port or _PORT)}"
        return LightningStoreClient(url, token=self._token, retry_seconds=self.patience_seconds)

    def share(self, store: LightningStore) -> AbstractAsyncContextManager[Any]:
        return self._serve(store, claims_from=None)

    def elsewhere(self) -> Elsewhere | None:
        if self.role == "both":
            return None
        return Elsewhere(self.server_host, (self.server_port or _PORT) + 1, self._token)

    @asynccontextmanager
    async def _serve(self, store: LightningStore, *, claims_from: Latch | None) -> AsyncGenerator[Any]:
        """Yield what runners open: a server of the store, or the store itself if other processes can open it by its
        URL.

        claims_from: the server lets runners claim once this is open; None: at once.
        Raise ConfigError if `managed_store=False` forbids a server that the store needs.
        """
        if not self.managed_store and not store.capabilities["zero_copy"]:
            raise ConfigError(
                f"managed_store=False, but {store.url} belongs to this process; give the URL of a store that others reach too "
                "(postgresql://..., or http://... of `leyden store`), or leave managed_store out"
            )
        token = self._token or (secrets.token_urlsafe(32) if self.role == "both" else None)
        remedy = "strategy 'cs': server_port=..., or LEYDEN_SERVER_PORT"
        async with serve(
            store, self.server_host, self.server_port or 0, token=token, remedy=remedy, claims_from=claims_from
        ) as shared:
            if self.role == "algorithm" and isinstance(shared, LightningStoreServer):
                notice(
                    logger,
                    "the store is served at %s; waiting for runners: start them with LEYDEN_CURRENT_ROLE=runner",
                    shared.endpoint,
                )
            yield shared

    async def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore, *, ready: Latch | None = None
    ) -> None:
        """Run the side or sides that `role` names.

        "both": the algorithm here and the runners in processes. "algorithm": the algorithm and a server of its store.
        "runner": runners on that store, until the algorithm has ended or its store has gone.
        """
        if self.role == "both":
            await super().execute(algorithm, runner, store, ready=ready)
        elif self.role == "algorithm":
            async with self._serve(store, claims_from=ready) as server:
                await self._run_algorithm(algorithm, store, server)
        else:
            await store.statistics()  # raises StoreError if the store does not answer
            if isinstance(store, LightningStoreClient):
                notice(logger, "connected to %s; waiting for rollouts that the algorithm there enqueues", store.url)
                client = store

                async def until_end(store: LightningStore, event: Latch) -> None:
                    """Return when the algorithm's process has ended the run, or when `event` is set."""
                    if ready is not None:
                        ready.set()
                    async with first_done(client.wait_for_end(), event.wait_async()) as (ended, _):
                        if ended.done():
                            ended.result()
                            logger.info("the algorithm has ended, and with it the work")

                algorithm = until_end
            try:
                await super().execute(algorithm, runner, store, ready=ready)
            except StoreError as error:
                logger.info("the algorithm's store has gone, and with it the work: %s", error)

    async def _run_algorithm(self, algorithm: AlgorithmBundle, store: LightningStore, server: Any) -> None:
        """Run the algorithm alone, for runners that other processes run. When it ends, notify these runners, and give
        them `drain_seconds` to report the rollouts under way.
        """
        again = False
        try:
            await algorithm(store, Latch())
        except RunsAgain:
            again = True
            raise
        finally:
            if isinstance(server, LightningStoreServer) and not again:
                deadline = time.monotonic() + self.drain_seconds
                await server.announce_end(within_seconds=self.drain_seconds)
                while (seconds := deadline - time.monotonic()) > 0:
                    running = await store.query_rollouts(status_in=["preparing", "running"])
                    if not running:
                        break
                    await store.wait_for_any_rollout(rollout_ids=[each.rollout_id for each in running], timeout=seconds)


def _port() -> int | None:
    """Return the environment's port, or None. Raise ConfigError for anything else than a port."""
    if (found := named_variable("SERVER_PORT")) is None:
        return None
    name, given = found
    if not (given.isascii() and given.isdigit()) or not 0 <= int(given) < 2**16:
        raise ConfigError(f"{name} is {given!r}; it must be a port, a number from 0 to 65535")
    return int(given)
