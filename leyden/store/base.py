"""`LightningStore`: the durable truth and the queue, as a protocol with its contracts.

The protocol knows no database and no network. Contracts that hold for every method:

- Unknown ids raise (`UnknownRollout`, `UnknownAttempt`, `UnknownResources`, `UnknownWorker`); an empty answer means empty.
- Returned objects are the caller's own copies.
- Final statuses are final. An attempt that is over, or was superseded, can still add spans to its own record and can change nothing else.
- An answer means committed: it survives the death of any process (a file store; memory survives nothing).
- Whether a call may be repeated is said on it ("Safe to retry"). Where the caller makes the id, a repeat is not a second row.
- Every method may be called from any thread and any event loop.

To write a store: implement the abstract methods and pass `tests/contracts/store.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Self

from typing_extensions import TypedDict

from leyden.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    FilterLogic,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    SortOrder,
    Span,
    TaskInput,
    Unset,
    Worker,
    WorkerStatus,
)

__all__ = ["LightningStore", "StoreCapabilities", "StoreStatistics"]


class StoreCapabilities(TypedDict):
    """What a store can do."""

    thread_safe: bool
    async_safe: bool
    zero_copy: bool
    """Whether other processes can share it by its URL."""
    otlp_traces: bool
    durable: bool
    """Whether it survives the end of the process."""


class StoreStatistics(TypedDict):
    """How much is in a store."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    rollouts_by_status: dict[str, int]
    uptime_seconds: float


class LightningStore(ABC):
    """Rollouts, attempts, spans, resources and workers: one truth for algorithm, runners and gateway."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it is: `memory://` or `sqlite:///absolute/path`; errors name it."""

    @property
    @abstractmethod
    def capabilities(self) -> StoreCapabilities:
        """What this store can do."""

    @abstractmethod
    async def statistics(self) -> StoreStatistics:
        """Counts of everything. Cheap: it does not grow with history by more than an index scan."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what was accepted, then release the file and its lock. Later calls raise StoreClosed. Safe to repeat."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- the queue ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        *,
        rollout_id: str | None = None,
    ) -> AttemptedRollout:
        """A new rollout, already claimed: status `preparing`, attempt 1. `resources_id` None means the latest there are, if any.

        Raises UnknownResources for a `resources_id` that is not in the store, ConfigError if `rollout_id` is taken.
        Not safe to retry without `rollout_id`; with it, a repeat raises and nothing is doubled.
        """

    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        rollout_id: str | None = None,
    ) -> Rollout:
        """A new rollout in the queue (`queuing`, no attempt). One line of `enqueue_many_rollouts`, with its contract."""
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata, rollout_id=rollout_id
        )
        return (await self.enqueue_many_rollouts([request]))[0]

    @abstractmethod
    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """New rollouts in the queue, in the order given, in one transaction: all or none.

        `resources_id` None means the latest at this moment, if any. A `rollout_id` that is already there is not enqueued again: the
        stored rollout is returned as it is (whatever its status), so the call is safe to retry where the caller made the ids.
        Raises UnknownResources, naming the first unknown id.
        """

    async def dequeue_rollout(
        self, worker_id: str | None = None, *, timeout_seconds: float = 0.0
    ) -> AttemptedRollout | None:
        """Claim one rollout; None when there is none. See `dequeue_many_rollouts`."""
        claimed = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id, timeout_seconds=timeout_seconds)
        return claimed[0] if claimed else None

    @abstractmethod
    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout_seconds: float = 0.0
    ) -> Sequence[AttemptedRollout]:
        """Claim up to `limit` rollouts, oldest first: each gets a new attempt (`preparing`) and becomes `preparing`.

        Waits up to `timeout_seconds` for the first one, by event; then returns what is there. `limit` <= 0 answers an empty list.
        A claim that is cancelled while it waits has claimed nothing. With `worker_id`, the worker becomes `busy`, or `idle` when
        nothing came.
        Not safe to retry blindly: a lost answer is a claimed rollout, which its timeout brings back.
        """

    @abstractmethod
    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Another attempt by hand, whatever `max_attempts` says; the rollout becomes `preparing`.

        Raises UnknownRollout, IllegalTransition for a finished rollout.
        """

    # ---- spans ---------------------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span | None:
        """Add one span. None: it was there already. See `add_many_spans`."""
        added = await self.add_many_spans([span])
        return added[0] if added else None

    @abstractmethod
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Add spans of any attempts, in one transaction, and answer those that were new.

        A `sequence_id` of 0 is replaced by the attempt's next one; any other raises the counter to at least itself. A span whose
        `(rollout_id, attempt_id, span_id)` is there already is left out of the answer. Each span is a heartbeat: `preparing` and
        `unresponsive` attempts become `running`, and so does their rollout if the attempt is its latest.
        Raises UnknownRollout or UnknownAttempt, naming the first, and adds nothing then. Safe to retry.
        """

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Draw the attempt's next sequence id. See `get_many_span_sequence_ids`."""
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    @abstractmethod
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """One fresh sequence id for each pair, in order; strictly increasing within an attempt, from 1.

        Raises UnknownRollout or UnknownAttempt. A repeat draws new ones: gaps are allowed, repeats are not.
        """

    @abstractmethod
    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
    ) -> PaginatedResult[Span]:
        """Spans of a rollout, of one attempt or of all (`attempt_id` None), tokens included.

        `filter_logic` joins the filters from `trace_id` on; the ids of rollout and attempt always hold.
        Raises UnknownRollout, UnknownAttempt, ConfigError for a bad `sort_by`, `limit` (0 or below -1) or `offset` (negative).
        """

    @abstractmethod
    async def query_spans_of(self, rollout_ids: Sequence[str]) -> dict[str, list[Span]]:
        """The spans of each rollout's latest attempt, by sequence id; the bulk form that algorithms use.

        A rollout without an attempt has an empty list. Raises UnknownRollout.
        """

    # ---- rollouts and attempts ---------------------------------------------------------------------------------------

    @abstractmethod
    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        mode_in: Sequence[RolloutMode] | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Rollout]:
        """Rollouts that match; each that has an attempt is an `AttemptedRollout` with its latest one. Default order: as enqueued.

        `sort_by` is one of rollout_id, start_time, end_time, status, mode, resources_id. Raises ConfigError for a bad sort or page.
        """

    @abstractmethod
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout:
        """One rollout, with its latest attempt where there is one. Raises UnknownRollout."""

    @abstractmethod
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """The attempts of a rollout. Raises UnknownRollout, ConfigError for a bad sort or page."""

    @abstractmethod
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """The newest attempt; None when there is none yet. Raises UnknownRollout."""

    @abstractmethod
    async def get_attempt_by_id(self, rollout_id: str, attempt_id: str) -> Attempt:
        """One attempt. Raises UnknownRollout, UnknownAttempt."""

    @abstractmethod
    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> Rollout:
        """Change what is given. A final status sets `end_time`; `requeuing` puts it in the queue again, at its old place.

        Raises UnknownRollout, UnknownResources, IllegalTransition. Safe to retry.
        """

    @abstractmethod
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> Attempt:
        """Change what is given, and let the rollout follow (`types.lifecycle.rollout_after_attempt`) in the same transaction.

        A final status sets `end_time` and frees the worker. `metadata` is merged into what is there.
        Raises UnknownRollout, UnknownAttempt, IllegalTransition (an ended attempt stays as it ended). Safe to retry.
        """

    @abstractmethod
    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        """Wait, by event, until every rollout is finished or `timeout` seconds have passed (None: for ever; 0: look once).

        Answers those that are finished, in the order given. Raises UnknownRollout at once. Safe to retry.
        """

    @abstractmethod
    async def wait_for_any_rollout(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> Sequence[Rollout]:
        """Like `wait_for_rollouts`, but answers as soon as at least one of them is finished, with all that are by then."""

    @abstractmethod
    async def sweep(self, now: float | None = None) -> Sequence[Attempt]:
        """End the attempts whose time is over (`timeout`), mark the silent ones (`unresponsive`), let their rollouts follow.

        Answers the attempts that changed. Called on a schedule by whoever owns the store, never by a read. `now`: Unix seconds, for tests.
        """

    @abstractmethod
    async def next_deadline(self) -> float | None:
        """When the next `sweep` has something to do, in Unix seconds; None: nothing that is known of now."""

    @abstractmethod
    async def release_claims(self) -> Sequence[str]:
        """Put every rollout with an unfinished attempt back in the queue and answer their ids; for the owner of a run that died.

        The attempts end as `failed` with `metadata["reason_kind"] = "interrupted"`, and do not count against `max_attempts`.
        """

    # ---- resources -----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def add_resources(self, resources: NamedResources, *, resources_id: str | None = None) -> ResourcesUpdate:
        """Write resources under a new id (version 1); they become the latest.

        With an id that is there and equal content: answers what is there.
        """

    @abstractmethod
    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        """Write the next version under an id (the first one if it is new); it becomes the latest."""

    @abstractmethod
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate:
        """The newest version under an id. Raises UnknownResources."""

    @abstractmethod
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The resources written last; None when there are none."""

    @abstractmethod
    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """The newest version of each id that matches, in the order written. Raises ConfigError for a bad sort or page."""

    # ---- workers -------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Workers that match. Raises ConfigError for a bad sort or page."""

    @abstractmethod
    async def get_worker_by_id(self, worker_id: str) -> Worker:
        """One worker. Raises UnknownWorker."""

    @abstractmethod
    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        """A heartbeat; an unknown worker is created. Safe to retry."""
