"""The protocols of a runner, its hooks and its recorders."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from leyden._lib.aio import Latch
from leyden._lib.options import NamedOptions
from leyden.agent import LitAgent
from leyden.execution.runner.calls import Debugger
from leyden.store.base import LightningStore
from leyden.tracing import Tracer
from leyden.types import AttemptedRollout, NamedResources, Rollout, RolloutMode, Span, TaskInput

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class AttemptRecorder(Protocol):
    """Record an attempt's model calls without the agent's help, as the gateway does."""

    def begin_attempt(self, rollout_id: str, attempt_id: str, resources: NamedResources) -> None:
        """Announce that the agent is about to be called with these resources."""
        ...

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Refuse later calls of the attempt, because it is over."""
        ...

    async def flush(self, rollout_id: str, attempt_id: str) -> None:
        """Return when everything recorded for the attempt is in the store. Raise the error that prevented it."""
        ...


class Hook:
    """Called at four points of every attempt; override the methods of interest. An exception of a hook is logged and
    goes no further.
    """

    async def on_rollout_start(self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: AttemptedRollout) -> None:
        """Called before the attempt begins."""

    async def on_trace_start(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """Called inside the trace, before the agent."""

    async def on_trace_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """Called inside the trace, after the agent returned or failed."""

    async def on_rollout_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], rollout: AttemptedRollout, spans: Sequence[Span]
    ) -> None:
        """Called after the trace and before the attempt is reported.

        spans: the spans that the agent's process recorded.
        """


class ParallelWorkerBase:
    """The life cycle of an object that runs in workers.

    `init` is called once, then `init_worker` in each worker; at the end `teardown_worker` in each, then `teardown`
    once.
    """

    worker_id: int | None = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Prepare all workers. Called once, before any worker."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Prepare a worker, in its process, before it works."""
        self.worker_id = worker_id

    def teardown_worker(self, worker_id: int) -> None:
        """Clean up a worker, in its process, whenever it has ended its work."""

    def teardown(self) -> None:
        """Clean up after all workers. Called once, even after an error."""


class Runner(NamedOptions, ParallelWorkerBase, ABC, Generic[T]):
    """Claim rollouts from a store and run one agent on them. `T`: the type of the agent's tasks."""

    concurrency: int = 1
    """The most rollouts that the runner works on at a time."""
    max_at_first: int | None = None
    """How many rollouts `iter` may have in flight at first. Each rollout that ends raises the limit by one, up to
    `concurrency`. None: `concurrency` from the start.

    An execution strategy sets it after a process with several rollouts has died, because one of them may have killed
    it."""

    debugger: Debugger | None = None
    """How to call sync agents under a debugger. Rollouts then run one at a time without time limits, and Ctrl-C or the
    debugger's "quit" ends the run. None: no debugger.
    """

    @abstractmethod
    def init(
        self, agent: LitAgent[T], *, hooks: Sequence[Hook] = (), recorders: Sequence[AttemptRecorder] = ()
    ) -> None:
        """Bind the agent.

        hooks: called around each attempt and its trace.
        recorders: notified of each attempt's begin and end.
        """

    @abstractmethod
    def init_worker(self, worker_id: int, store: LightningStore, *, worker_name: str | None = None) -> None:
        """Bind the store, and the name under which the store knows this worker.

        worker_name: unique among all workers of the store; by default `Worker-{worker_id}`, preceded by host and
            process if the store is shared with other processes.
        """

    @abstractmethod
    async def iter(self, event: Latch | None = None) -> None:
        """Claim and run rollouts until `event` is set (or `max_rollouts` are done), then finish the rollouts under way.

        A failing agent never ends the loop. A store that cannot be reached does: its error is raised.
        """

    @abstractmethod
    async def step(
        self,
        input: TaskInput,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: Latch | None = None,
    ) -> Rollout:
        """Run the agent on one task, now, and return the stored rollout. Raise the agent's error.

        resources: stored as a new version for this rollout; None: the store's latest ones.
        event: set to stop the step; `LitAgentRunner` ignores it.
        """

    def run_context(
        self,
        *,
        agent: LitAgent[T],
        store: LightningStore,
        hooks: Sequence[Hook] | None = None,
        recorders: Sequence[AttemptRecorder] = (),
        worker_id: int | None = None,
    ) -> RunContext[Self]:
        """Return a block, for `with` or `async with`, in which this runner can `step` or `iter`.

        The block calls `init` and `init_worker`, and tears both down at its end. It is made for scripts and tests.
        worker_id: 0 by default.
        """

        @contextmanager
        def ready() -> Generator[Self]:
            """Make the runner ready, and tear it down at the end of the block."""
            number = worker_id or 0
            self.init(agent, hooks=hooks or (), recorders=recorders)
            with torn_down(self.teardown):
                self.init_worker(number, store)
                with torn_down(lambda: self.teardown_worker(number)):
                    yield self

        return RunContext(ready())


@contextmanager
def torn_down(teardown: Callable[[], None]) -> Generator[None]:
    """Call `teardown` at the end of the block. If the block has raised, an error of `teardown` is only logged, so that
    it does not hide the block's.
    """
    try:
        yield
    except BaseException:
        try:
            teardown()
        except Exception:
            logger.exception("the teardown after an error failed too")
        raise
    teardown()


class RunContext(Generic[R]):
    """The block that `Runner.run_context` returns. `with` and `async with` do the same."""

    def __init__(self, block: AbstractContextManager[R, bool | None]) -> None:
        self._block = block

    def __enter__(self) -> R:
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._block.__exit__(kind, error, traceback)

    async def __aenter__(self) -> R:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self.__exit__(kind, error, traceback)
