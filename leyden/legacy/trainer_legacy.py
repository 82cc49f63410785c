"""`TrainerLegacy`: the methods and names of a Trainer of Agent Lightning 0.1 and 0.2, beside `fit` and `dev`.

`fit_v0` is a run of the trainer whose algorithm (`leyden.algorithm.served_tasks`) fetches tasks from a server, so every
strategy, hook and monitor works with it.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, cast

from leyden._lib.frames import users_stacklevel
from leyden._lib.host.orphans import kill_orphans
from leyden._lib.options import NamedOptions
from leyden._lib.tracebacks import short_errors
from leyden.adapter import TraceAdapter
from leyden.agent import LitAgent
from leyden.errors import ConfigError
from leyden.execution import ExecutionStrategy
from leyden.legacy import AgentLightningClient, LegacyAgent, LegacyAgentRunner
from leyden.legacy.task_client import as_client
from leyden.legacy.types import warn_deprecated
from leyden.tracing import Tracer
from leyden.training.runs import RunSummary

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from leyden.algorithm import Algorithm, Dataset

    Source = str | AgentLightningClient | Dataset[Any] | None
    """A server's URL, a client of it, or a data set."""


class TrainerLegacy(NamedOptions, ABC):
    """The methods and names of Agent Lightning 0.1's Trainer. Each `Trainer` has them."""

    algorithm: Algorithm | None
    adapter: TraceAdapter[Any]
    strategy: ExecutionStrategy
    tracer: Tracer
    _dev: bool
    _client: AgentLightningClient | None = None

    @property
    @abstractmethod
    def n_runners(self) -> int: ...

    @property
    @abstractmethod
    def max_rollouts(self) -> int | None: ...

    @abstractmethod
    def fit(
        self, agent: LitAgent[Any], train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> RunSummary: ...

    @abstractmethod
    def _fit_served(self, client: AgentLightningClient, agent: LitAgent[Any]) -> RunSummary: ...

    @property
    def n_workers(self) -> int:
        """The old name of `n_runners`."""
        return self.n_runners

    @property
    def max_tasks(self) -> int | None:
        """The old name of `max_rollouts`."""
        return self.max_rollouts

    @property
    def triplet_exporter(self) -> TraceAdapter[Any]:
        """The old name of `adapter`."""
        return self.adapter

    @property
    def daemon(self) -> bool:
        """Whether runners end with the program. True unless the strategy says otherwise."""
        return getattr(self.strategy, "daemon", True)

    @short_errors
    def fit_v0(
        self,
        agent: LitAgent[Any],
        train_data: Source,
        *,
        val_data: Source = None,
        dev_data: Source = None,
        dev_backend: str | AgentLightningClient | None = None,
    ) -> RunSummary:
        """Run the agent on the tasks of a server of Agent Lightning 0.1, or train it on data.

        With a server's URL or a client, each runner has one task at a time. The run ends after `max_rollouts` tasks for
        each runner, or with Ctrl-C. With data, this calls `fit`.

        val_data: of no use with a server, whose tasks say themselves whether they are validation; a warning says so.
        dev_data: replaces `train_data` if the trainer has `dev=True`.
        dev_backend: the older name of `dev_data`.
        Raise ConfigError for a server together with an algorithm, which would get no rollouts, and for data without an
        algorithm.
        """
        warn_deprecated("Trainer.fit_v0", "trainer.fit(agent, train_dataset), or runners on a LightningStoreServer")
        if dev_backend is not None:
            if dev_data is not None:
                raise ConfigError("dev_data and dev_backend are the same option; give dev_data only")
            dev_data = dev_backend
        if self._dev and dev_data is None:
            raise ConfigError(
                "fit_v0 of a trainer with dev=True needs dev_data: a client (DevTaskLoader), a URL or data"
            )
        source = dev_data if self._dev else train_data
        if (client := as_client(source)) is None:
            data, val = (None if isinstance(each, str | AgentLightningClient) else each for each in (source, val_data))
            return self.fit(agent, data, val)
        if self.algorithm is not None:
            raise ConfigError(
                f"the tasks come from {client.endpoint}, so {type(self.algorithm).__name__} would get no rollouts; leave "
                "algorithm out here, or give fit() the data"
            )
        if val_data is not None:
            logger.warning("val_data is used by nothing: the tasks come from %s, with their modes", client.endpoint)
        self.init(client)
        try:
            return self._fit_served(client, LegacyAgent(agent))
        finally:
            self.teardown()

    def init(self, backend: str | AgentLightningClient) -> None:
        """Make the client of a server, which `client` returns, and prepare the tracer. A second call keeps the first
        client. Raise ConfigError for text that is no URL.
        """
        if self._client is None:
            self._client = as_client(backend)
            if self._client is None:
                raise ConfigError(f"backend is {backend!r}; give a server's URL, or an AgentLightningClient")
        self.tracer.init()

    def teardown(self) -> None:
        """Release the tracer and the client. Safe to repeat."""
        self.tracer.teardown()
        self._client = None

    def client(self) -> AgentLightningClient:
        """Return the client that `init` made. Raise ConfigError before `init` and after `teardown`."""
        if self._client is None:
            raise ConfigError("the trainer has no client; call trainer.init(url) first")
        return self._client

    @contextlib.contextmanager
    def init_worker_context(self, agent: LitAgent[Any], worker_id: int = 0) -> Generator[LegacyAgentRunner]:
        """Yield a worker that runs the agent, in this process, on the tasks of the client that `init` made."""
        worker = LegacyAgentRunner(agent, self.client(), self.tracer, self.adapter, worker_id, self.max_rollouts)
        agent.set_trainer(self)
        worker.init_worker(worker_id)
        try:
            yield worker
        finally:
            worker.teardown_worker(worker_id)

    def run_worker(self, agent: LitAgent[Any], worker_id: int = 0) -> int:
        """Run one worker in this process until it has done `max_rollouts` tasks. Return how many it did.

        Call `init` before. Several programs that do this share a server's tasks.
        """
        with self.init_worker_context(agent, worker_id) as worker:
            return worker.iter()

    @staticmethod
    def kill_orphaned_processes() -> int:
        """End processes that agents left on this machine when their run was killed. Return how many.

        Leyden's runners end with their program, so only processes that agents started can be left. Processes of runs
        under way are not touched.
        """
        return kill_orphans()


def is_url(data: object) -> bool:
    return isinstance(data, str) and data.startswith(("http://", "https://"))


def renamed(given: dict[str, tuple[Any, str, Any]]) -> dict[str, Any]:
    """Return the values of renamed options by their new names. Give a DeprecationWarning for each old name that is
    used.

    given: for each old name its value, the new name and the new name's value, which counts if both are given.
    """
    values: dict[str, Any] = {}
    for old, (old_value, new, new_value) in given.items():
        if old_value is not None:
            warnings.warn(
                f"Trainer({old}=...) has a new name: write {new}=", DeprecationWarning, stacklevel=users_stacklevel()
            )
        values[new] = cast(Any, old_value if new_value is None else new_value)
    return values
