# pyright: reportIncompatibleMethodOverride=false
"""The interfaces of Agent Lightning that programs implement: its store, its runner, its strategy, its hook, its
algorithm, its events.

Each base class has the methods that a program may override, with their parameters, and raises NotImplementedError for
one that a subclass lacks when it is called. `own_store.py` and `running.py` let the rest of Leyden work with what
programs implement.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import threading
from abc import ABCMeta
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, Protocol, TypeVar

from leyden import algorithm as native_algorithm
from leyden import execution as native_execution
from leyden import store as native_store
from leyden._lib.aio import Latch
from leyden.agent import LitAgent
from leyden.execution import runner as native_runner
from leyden.execution.runner import AttemptRecorder
from leyden.execution.runner.runner import RunContext, torn_down
from leyden.execution.shared_memory import on_the_loop_of
from leyden.types import UNSET, AttemptedRollout

T = TypeVar("T")

_POLL_SECONDS = 0.02
"""Seconds between two checks of a stop signal that cannot be awaited."""


class LightningStore(metaclass=ABCMeta):  # noqa: B024 -- a program may make one and call what it has written
    """The base of a store of one's own. Leyden's stores are instances of it, too."""

    @property
    def capabilities(self) -> Any:
        """What callers may rely on; nothing by default."""
        return {"thread_safe": False, "async_safe": False, "zero_copy": False, "otlp_traces": False}

    async def statistics(self) -> Any:
        """Return the name of the class, and counts if a subclass has them."""
        return {"name": type(self).__name__}

    def otlp_traces_endpoint(self) -> str:
        raise NotImplementedError

    async def start_rollout(
        self,
        input: Any,
        mode: Any = None,
        resources_id: str | None = None,
        config: Any = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        raise NotImplementedError

    async def enqueue_rollout(
        self,
        input: Any,
        mode: Any = None,
        resources_id: str | None = None,
        config: Any = None,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        raise NotImplementedError

    async def enqueue_many_rollouts(self, rollouts: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        raise NotImplementedError

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        raise NotImplementedError

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        raise NotImplementedError

    async def add_many_spans(self, spans: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError

    async def add_span(self, span: Any) -> Any:
        raise NotImplementedError

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: Any, sequence_id: int | None = None
    ) -> Any:
        raise NotImplementedError

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[Any] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: Any = "and",
        sort_by: str | None = None,
        sort_order: Any = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[Any] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> Sequence[Any]:
        raise NotImplementedError

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: Any = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Sequence[Any]:
        raise NotImplementedError

    async def get_rollout_by_id(self, rollout_id: str) -> Any:
        raise NotImplementedError

    async def get_latest_attempt(self, rollout_id: str) -> Any:
        raise NotImplementedError

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: Any = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Sequence[Any]:
        raise NotImplementedError

    async def get_resources_by_id(self, resources_id: str) -> Any:
        raise NotImplementedError

    async def get_latest_resources(self) -> Any:
        raise NotImplementedError

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        raise NotImplementedError

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        raise NotImplementedError

    async def wait_for_rollouts(self, *, rollout_ids: list[str], timeout: float | None = None) -> Sequence[Any]:
        raise NotImplementedError

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: Any = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: Any = "asc",
    ) -> Sequence[Any]:
        raise NotImplementedError

    async def add_resources(self, resources: Any) -> Any:
        raise NotImplementedError

    async def update_resources(self, resources_id: str, resources: Any) -> Any:
        raise NotImplementedError

    async def update_rollout(
        self,
        rollout_id: str,
        input: Any = UNSET,
        mode: Any = UNSET,
        resources_id: Any = UNSET,
        status: Any = UNSET,
        config: Any = UNSET,
        metadata: Any = UNSET,
    ) -> Any:
        raise NotImplementedError

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: Any = UNSET,
        worker_id: Any = UNSET,
        last_heartbeat_time: Any = UNSET,
        metadata: Any = UNSET,
    ) -> Any:
        raise NotImplementedError

    async def query_workers(
        self,
        *,
        status_in: Sequence[Any] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: Any = "and",
        sort_by: str | None = None,
        sort_order: Any = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> Sequence[Any]:
        raise NotImplementedError

    async def get_worker_by_id(self, worker_id: str) -> Any:
        raise NotImplementedError

    async def update_worker(self, worker_id: str, heartbeat_stats: Any = UNSET) -> Any:
        raise NotImplementedError


LightningStore.register(native_store.LightningStore)
LightningStore.register(native_store.LightningStoreServer)

METHODS = frozenset(
    name for name, value in vars(LightningStore).items() if inspect.isfunction(value) and not name.startswith("_")
)
"""The methods of the store's interface."""


def implements(kind: type, name: str, *bases: type) -> bool:
    """Return whether a program has written this method: neither Leyden nor one of `bases` has."""
    for owner in kind.__mro__:
        if name in vars(owner):
            return owner not in bases and owner.__module__.partition(".")[0] not in ("leyden", "leyden_compat")
    return False


class ExecutionEvent(Protocol):
    """A stop signal, as `threading.Event` has it."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class _Event:
    """A stop signal around an event of `threading` or `multiprocessing`."""

    __slots__ = ("_evt",)

    def __init__(self, event: Any) -> None:
        self._evt = event

    def set(self) -> None:
        self._evt.set()

    def clear(self) -> None:
        self._evt.clear()

    def is_set(self) -> bool:
        return self._evt.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the stop, or for `timeout` seconds. Return whether to stop."""
        return self._evt.wait(timeout)


class ThreadingEvent(_Event):
    """A stop signal for the threads of one process."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(threading.Event())


class MultiprocessingEvent(_Event):
    """A stop signal for processes."""

    __slots__ = ()

    def __init__(self, *, ctx: Any = None) -> None:
        super().__init__((ctx or multiprocessing).Event())


@asynccontextmanager
async def as_latch(event: Any) -> AsyncGenerator[Latch | None]:
    """Yield a stop signal that can be awaited, and that is set when `event` is."""
    if event is None or hasattr(event, "wait_async"):
        yield event
        return
    latch = Latch()

    async def follow() -> None:
        while not event.is_set():  # noqa: ASYNC110 -- an event of threads or processes cannot be awaited
            await asyncio.sleep(_POLL_SECONDS)
        latch.set()

    if event.is_set():
        latch.set()
    following = asyncio.create_task(follow())
    try:
        yield latch
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


class ParallelWorkerBase(native_runner.ParallelWorkerBase):
    """The life cycle of an object that works in several processes."""

    def __init__(self) -> None:
        self.worker_id: int | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing. Override it."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Override it."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Override it."""


class Hook(native_runner.Hook, ParallelWorkerBase):
    """Called at four points of each attempt."""


class Runner(native_runner.Runner[T], ParallelWorkerBase, Generic[T]):
    """The base of a runner of one's own."""

    concurrency = 1

    def init(self, agent: LitAgent[T], **kwargs: Any) -> None:
        raise NotImplementedError

    def init_worker(self, worker_id: int, store: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a runner has no run(); await iter() or step()")

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    async def iter(self, *, event: ExecutionEvent | None = None) -> None:
        raise NotImplementedError

    async def step(
        self, input: T, *, resources: Any = None, mode: Any = None, event: ExecutionEvent | None = None
    ) -> Any:
        raise NotImplementedError

    def run_context(
        self,
        *,
        agent: LitAgent[T],
        store: Any,
        hooks: Sequence[Any] | None = None,
        recorders: Sequence[AttemptRecorder] = (),
        worker_id: int | None = None,
    ) -> Any:
        """Return a block in which this runner can `step` or `iter`. `with` and `async with` do the same."""

        @contextmanager
        def ready() -> Generator[Any]:
            number = worker_id or 0
            self.init(agent=agent, hooks=hooks, **({"recorders": recorders} if recorders else {}))
            with torn_down(self.teardown):
                self.init_worker(worker_id=number, store=store)
                with torn_down(lambda: self.teardown_worker(number)):
                    yield self

        return RunContext(ready())


class ExecutionStrategy(native_execution.ExecutionStrategy):
    """The base of a strategy of one's own, whose `execute` blocks until the work is done."""

    n_runners = 1

    def execute(self, algorithm: Any, runner: Any, store: Any) -> Any:
        raise NotImplementedError


class Algorithm(native_algorithm.Algorithm):
    """The base of an algorithm of one's own."""

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Any:
        raise NotImplementedError

    def get_store(self) -> Any:
        """Return the store, which for a store of the program's own is that store itself."""
        return users_store(super().get_store())


class FastAlgorithm(Algorithm, native_algorithm.FastAlgorithm):
    """The base of algorithms that `Trainer.dev` takes."""


class FunctionalAlgorithm(Algorithm, native_algorithm.FunctionalAlgorithm):
    """A function as an algorithm."""

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Any:
        """Call the function, and return its result."""
        return native_algorithm.FunctionalAlgorithm.run(self, train_dataset, val_dataset)

    def __init__(self, algorithm_func: Callable[..., Any]) -> None:
        native_algorithm.FunctionalAlgorithm.__init__(self, algorithm_func)


def algo(func: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make an algorithm of a sync or async function, which gets the arguments that it names."""
    return FunctionalAlgorithm(func)


def users_store(store: Any) -> Any:
    """Return the store as the program knows it: its own store instead of Leyden's adapter."""
    own = getattr(store, "for_the_program", None)
    return store if own is None else on_the_loop_of(store, own)
