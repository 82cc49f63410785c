"""`LightningStore`: the durable store and its queue, as a protocol with its contracts.

The protocol knows no database and no network. Contracts that hold for every method:

- Unknown ids raise (`UnknownRollout`, `UnknownAttempt`, `UnknownResources`, `UnknownWorker`,
  `UnknownRun`, `UnknownRelease`); an empty result means empty.
- Caller-supplied ids are 1 to 200 printable characters; anything else raises ConfigError.
- Returned objects are the caller's own copies.
- NaN and infinite numbers raise ConfigError, because JSON cannot carry them to another process.
- Final statuses are final. An attempt that has ended, or was superseded, can still add spans to its
  own record and can change nothing else.
- A method that has returned has committed: the result survives the death of any process. Memory is
  the exception, which survives nothing.
- Each method says whether it is safe to retry. If the caller makes the id, a repeat adds no second
  row.
- Every method may be called from any thread and any event loop.

To write a store: implement the abstract methods and pass `tests/contracts/store/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, Self

from typing_extensions import TypedDict

from leyden._lib.options import NamedOptions
from leyden.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    AuditRecord,
    EnqueueRolloutRequest,
    Feedback,
    FeedbackKind,
    FilterLogic,
    Label,
    LabelMove,
    LiveRollout,
    Measure,
    MetricPoint,
    NamedResources,
    News,
    PaginatedResult,
    Range,
    Release,
    ResourcesUpdate,
    Retention,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    RolloutSummary,
    RunRecord,
    RunStatus,
    Sample,
    SortOrder,
    Span,
    SpanKind,
    SpanPage,
    Spending,
    TaskInput,
    Unset,
    UpdateAttemptRequest,
    Worker,
    WorkerStatus,
    current_run_id,
)


class StoreCapabilities(TypedDict):
    """The capabilities of a store, for callers that depend on them."""

    thread_safe: bool
    """Whether any thread may call it."""
    async_safe: bool
    """Whether any event loop may call it."""
    zero_copy: bool
    """Whether other processes, also on other machines, can share the store by its URL."""
    swept: bool
    """Whether the store is swept already, as a server's is. Otherwise the process that opened it runs a `Sweeper`."""
    otlp_traces: bool
    """Whether the store's address takes OpenTelemetry's traces (OTLP over HTTP)."""
    durable: bool
    """Whether the store survives the end of the process."""


class StoreStatistics(TypedDict):
    """The number of rows in a store, by kind."""

    name: str
    time: float
    """Unix seconds by the store's clock, which dates heartbeats and attempts."""
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    rollouts_by_status: dict[str, int]
    uptime_seconds: float


class LightningStore(NamedOptions, ABC):
    """Rollouts, attempts, spans, resources, workers and runs, shared by algorithm, runners and gateway."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The store's address, without a password: `memory://`, `sqlite:///absolute/path`, `postgresql://...` or
        `http://...`. Errors name it.
        """

    @property
    @abstractmethod
    def capabilities(self) -> StoreCapabilities:
        """The capabilities of this store: where it may be used, whether it is durable and swept."""

    @abstractmethod
    async def statistics(self) -> StoreStatistics:
        """Return the numbers of rollouts, attempts, spans, resources and workers.

        The cost grows with the rollouts under way and the workers, not with the history or the queue.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish the accepted calls, then release the file and its lock.

        Later calls raise StoreClosed. Safe to repeat.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- the queue -------------------------------------------------------------------------------

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
        priority: int = 0,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        run_id: str | Unset | None = UNSET,
        group_id: str | None = None,
        arm: str | None = None,
    ) -> AttemptedRollout:
        """Add a rollout that is claimed already: status `preparing`, attempt 1.

        mode: `train`, `val`, `test` or None; it chooses the agent's method.
        resources_id: None means the latest resources, if any.
        config: time limits, number of attempts and retries; None for the defaults, one attempt.
        worker_id: the worker that runs the attempt.
        priority: the place in the queue if the rollout is requeued; higher is claimed first.
        rollout_id, attempt_id: chosen by the caller; None: the store makes them.
        run_id: the run that the rollout belongs to; left out, the run whose algorithm makes this call
            (`current_run_id`), if any; None for no run.
        group_id: chosen by the caller, for rollouts of one task that are compared with each other.
        arm: chosen by the caller, for the sides of an experiment (`control`, `canary`).
        Raise UnknownResources or UnknownRun for an id that is not in the store, ConfigError if `rollout_id` is taken.
        Safe to retry with both ids: a rollout that has the attempt already is returned as it is.
        """

    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        priority: int = 0,
        rollout_id: str | None = None,
        pin: str | None = None,
        run_id: str | Unset | None = UNSET,
        group_id: str | None = None,
        arm: str | None = None,
    ) -> Rollout:
        """Put a new rollout in the queue (`queuing`, no attempt), and return it.

        The parameters are the fields of `EnqueueRolloutRequest`. A `rollout_id` that is stored already is not enqueued
        again: the stored rollout is returned, whatever its status.

        resources_id: None means the latest resources at this moment, if any.
        priority: higher is claimed first (`OVERTAKES` limits by how much).
        run_id: left out, the run whose algorithm makes this call (`current_run_id`), if any; None for no run.
        Raise UnknownResources or UnknownRun. Safe to retry with a `rollout_id`.
        """
        request = EnqueueRolloutRequest(
            input=input,
            mode=mode,
            resources_id=resources_id,
            config=config,
            metadata=metadata,
            priority=priority,
            rollout_id=rollout_id,
            pin=pin,
            run_id=current_run_id.get() if isinstance(run_id, Unset) else run_id,
            group_id=group_id,
            arm=arm,
        )
        return (await self.enqueue_many_rollouts([request]))[0]

    @abstractmethod
    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Enqueue rollouts in the order given, in one transaction: all or none.

        A `resources_id` of None means the latest at this moment, if any. A `rollout_id` that is stored already is not
        enqueued again: the stored rollout is returned, whatever its status. A request's `pin` holds in either case.
        Raise UnknownResources or UnknownRun, naming the first unknown id. Safe to retry if the caller made the ids.
        """

    async def dequeue_rollout(
        self, worker_id: str | None = None, *, timeout_seconds: float = 0.0, claim_id: str | None = None
    ) -> AttemptedRollout | None:
        """Claim one rollout and return it with its new attempt; None if the queue is empty.

        worker_id: the worker that claims; it becomes `busy`, or `idle` if the queue is empty.
        timeout_seconds: how long to wait for a rollout.
        claim_id: a fresh id from the caller for each claim. With it the call is safe to retry; without it, a lost reply
            leaves the rollout claimed until its timeout.
        """
        claimed = await self.dequeue_many_rollouts(
            limit=1, worker_id=worker_id, timeout_seconds=timeout_seconds, claim_id=claim_id
        )
        return claimed[0] if claimed else None

    @abstractmethod
    async def dequeue_many_rollouts(
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        timeout_seconds: float = 0.0,
        claim_id: str | None = None,
    ) -> Sequence[AttemptedRollout]:
        """Claim up to `limit` rollouts, each with a new attempt. Rollout and attempt become `preparing`.

        Order: by priority, then age. A rollout whose priority is one higher goes before at most `OVERTAKES` older
        rollouts, so that none starves.

        limit: 0 or less returns an empty list.
        worker_id: the worker that claims; it becomes `busy`, or `idle` if nothing is claimed.
        timeout_seconds: how long to wait, by event, for the first rollout; then all that are available are returned. A
            claim that is cancelled while it waits has claimed nothing.
        claim_id: a fresh id from the caller for each claim. With it the call is safe to retry: rollouts claimed under
            it are returned again, in their present state. Without it, a lost reply leaves a rollout claimed until its
            timeout.
        """

    @abstractmethod
    async def undo_claim(self, claim_id: str, *, unless_repeated: bool = False) -> None:
        """Give back the rollouts that were claimed under `claim_id`, for a claim whose reply was lost.

        Their attempts are deleted, and the rollouts return to their old place in the queue. An attempt that has begun
        since (by a span or an update) stays. Safe to retry.

        unless_repeated: keep rollouts that were requested again under this id, because the second reply may have
            arrived. For callers that know only of one lost reply.
        """

    @abstractmethod
    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, attempt_id: str | None = None
    ) -> AttemptedRollout:
        """Start another attempt by hand, whatever `max_attempts` says, and return it with its rollout, which becomes
        `preparing`.

        worker_id: the worker that runs the attempt.
        Raise UnknownRollout, or IllegalTransition if the rollout is finished.
        Safe to retry with an `attempt_id`: an attempt that is stored already is returned as it is.
        """

    # ---- spans -----------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span | None:
        """Add one span and return it with its sequence id; None if it is stored already.

        The span is a heartbeat of its attempt. Raise UnknownRollout or UnknownAttempt. Safe to retry.
        """
        added = await self.add_many_spans([span])
        return added[0] if added else None

    @abstractmethod
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Add spans of any attempts in one transaction, and return the new ones.

        A `sequence_id` of 0 is replaced by the attempt's next one; any other raises the counter to at least itself. A
        span whose `(rollout_id, attempt_id, span_id)` is stored already is left out of the result. Each span is a
        heartbeat: `preparing` and `unresponsive` attempts become `running`, and so does their rollout if the attempt is
        its latest.
        Raise UnknownRollout or UnknownAttempt, naming the first, and add nothing then. Safe to retry.
        """

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Draw and return the attempt's next sequence id, from 1.

        A repeated call draws another one. Raise UnknownRollout or UnknownAttempt.
        """
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    @abstractmethod
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """Return a fresh sequence id for each pair, in order; strictly increasing within an attempt, from 1.

        Raise UnknownRollout or UnknownAttempt. A repeated call draws new ids: gaps are allowed, repeats are not.
        """

    @abstractmethod
    async def query_spans(
        self,
        rollout_id: str | None = None,
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
        kind: SpanKind | None = None,
        started_from: float | None = None,
        started_before: float | None = None,
        attributes: Mapping[str, str | bool | int | float] | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
    ) -> PaginatedResult[Span]:
        """Return a page of spans, tokens included: of a rollout, of one of its attempts, or of all.

        rollout_id, attempt_id: None for all. "latest" is the latest attempt, which has no spans before the rollout is
            claimed.
        started_from, started_before: Unix seconds, the latter exclusive.
        attributes: each must be equal and of the same kind (string, boolean or number): 1 matches 1.0, and neither True
            nor "1". Across all rollouts it must be indexed (`index_span_attribute`).
        filter_logic: joins the filters from `trace_id` to `kind`. The others always hold.
        limit: -1 for all.
        sort_by: across all rollouts "sequence_id" means the order of arrival, because sequence ids compare within an
            attempt only.

        A search of all rollouts by time, by name (joined by "and") or by attribute reads only the spans that match the
        most selective of these; any other search of all rollouts reads all. Raise UnknownRollout, UnknownAttempt, and
        ConfigError for a bad `sort_by`, `limit` (0 or below -1) or `offset` (negative), for an `attempt_id` without
        `rollout_id`, for a list as an attribute's value, and for an attribute without an index across all rollouts.
        """

    @abstractmethod
    async def query_spans_of(self, rollout_ids: Sequence[str]) -> dict[str, list[Span]]:
        """Return the spans of each rollout's latest attempt, in the order of their sequence ids, by rollout id. One
        call reads the spans of a whole batch.

        A rollout without an attempt has an empty list. Raise UnknownRollout.
        """

    @abstractmethod
    async def index_span_attribute(self, key: str) -> None:
        """Index an attribute, so that `query_spans(attributes={key: ...})` finds spans of all rollouts, present and
        future.

        The store remembers the index. Each span that has the attribute takes one more row. Indexing reads every present
        span, in steps between which other calls write, and a search by the attribute raises ConfigError until it is
        done. Safe to repeat: an interrupted call continues where it stopped.
        """

    @abstractmethod
    async def poll_new_spans(
        self,
        *,
        after: str | Literal["latest"] | Unset | None = UNSET,
        rollout_ids: Sequence[str] | None = None,
        limit: int = 1000,
        timeout_seconds: float = 0.0,
    ) -> SpanPage:
        """Return up to `limit` spans in order of arrival, and the cursor `after` of the next page.

        after: a cursor returned before; None to begin at the first span; "latest" to skip all spans that exist now.
            Left out: the spans that are new to this store object, which remembers the cursor of its last page and
            begins at the first span. All threads and tasks that share the object share that cursor, and each span is
            returned to one of them. The cursor is in memory only: another object, another client of a server or a
            restarted process begins at the first span again. To continue after a restart, keep `page.after` and pass
            it.
        rollout_ids: only spans of these (unknown ones may come later); with it `after` must be given. Waits, by event,
        up to `timeout_seconds` for the first span. For a cursor each span is returned once, also across restarts and
        from any writer. Spans that retention has removed are left out. Raise ConfigError for a cursor that this store
        did not make. Safe to retry with `after`; without it, a page that was returned is not returned again.
        """

    async def watch_spans(
        self, *, after: str | Literal["latest"] | None = "latest", rollout_ids: Sequence[str] | None = None
    ) -> AsyncGenerator[Span]:
        """Yield spans as they arrive, for ever. End it with `break` or `aclose`.

        after: a cursor of `poll_new_spans`; "latest" to begin with the next new span, None with the first span of the
            store.
        rollout_ids: only spans of these rollouts; None for all.
        """
        while True:
            page = await self.poll_new_spans(after=after, rollout_ids=rollout_ids, timeout_seconds=30.0)
            after = page.after
            for span in page.spans:
                yield span

    # ---- rollouts and attempts -------------------------------------------------------------------

    @abstractmethod
    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        mode_in: Sequence[RolloutMode] | None = None,
        run_id: str | None = None,
        group_id: str | None = None,
        replay_from: str | None = None,
        arm_in: Sequence[str] | None = None,
        resources_id: str | None = None,
        resources_version: int | None = None,
        failure_in: Sequence[str] | None = None,
        between: Mapping[Measure, Range] | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Rollout]:
        """Return the rollouts that match, by default in the order in which they were enqueued.

        A rollout with an attempt is an `AttemptedRollout` with its latest one.

        run_id, group_id: only rollouts of this run or group. They always hold, as does `replay_from`; `filter_logic`
            joins the other filters.
        replay_from: only rollouts that repeat this one: its replays and forks (`ReplayFrom.rollout_id`).
        failure_in: kinds of failure (`Attempt.failure` of the latest attempt); failed rollouts only.
        between: ranges of reward, tokens, cost or seconds, each `[start, before)` with None for an open end:
            `{"reward": (0.5, None)}`. Only finished rollouts have such values, those of their latest attempt: the
            primary reward, tokens of prompts and responses, the cost of its model calls, its duration.

        `sort_by` is one of rollout_id, start_time, end_time, status, mode, resources_id, failure, reward, tokens, cost,
        seconds. Rollouts without a value come last.
        A filter or an order by failure or by a measure reads an index of finished rollouts, of the run alone if one is
        given.
        In the default order, by rollout_id, start_time or end_time, with no filter but `status_in`, the cost grows with
        `limit` and `offset`, not with the store. Sorting waiting rollouts by start_time reads the whole queue. In the
        default order, with `run_id`, `group_id` or `replay_from` alone, the cost grows with `limit` and `offset`; with
        other filters and orders beside them, with the rollouts of that run, that group, or that repeat that rollout.
        Any other filter or order reads more rollouts.
        The page's total is exact without a filter and with `status_in` alone; see `PaginatedResult.exact`. Raise
        UnknownRun, ConfigError for a bad sort or page. No rollout has an unknown `group_id`, and none repeats an
        unknown `replay_from`.
        """

    @abstractmethod
    async def summarise_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        mode_in: Sequence[RolloutMode] | None = None,
        run_id: str | None = None,
        arm_in: Sequence[str] | None = None,
        resources_id: str | None = None,
        resources_version: int | None = None,
        failure_in: Sequence[str] | None = None,
        between: Mapping[Measure, Range] | None = None,
        filter_logic: FilterLogic = "and",
        measures: Sequence[Measure] = ("reward",),
        bins: int = 20,
    ) -> RolloutSummary:
        """Count the finished rollouts that match, by status and by failure, and summarise measures.

        Each of `measures` (reward, tokens, cost, seconds) has a count, a mean, a least and a greatest value and a
        histogram of `bins` bins of equal width. The filters are those of `query_rollouts`. The store counts in its
        database and reads no span: about 35 ms of CPU for 100,000 rollouts and one measure. Raise UnknownRun,
        ConfigError for an unknown measure and for `bins` outside 1 to 1,000.
        """

    @abstractmethod
    async def sum_spending(self, run_id: str) -> Spending:
        """Sum the tokens and the costs of all model calls that were recorded for a run.

        All attempts count: failed, repeated and unfinished ones, those of rollouts that retention has removed, and the
        algorithm's own calls. About 70 ms of CPU for 100,000 rollouts. Raise UnknownRun.
        """

    @abstractmethod
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout:
        """Return one rollout, with its latest attempt if it has one. Raise UnknownRollout."""

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
        """Return the attempts of a rollout.

        Raise UnknownRollout, or ConfigError for a bad sort or page.
        """

    @abstractmethod
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return the newest attempt; None if there is none yet. Raise UnknownRollout."""

    @abstractmethod
    async def get_attempt_by_id(self, rollout_id: str, attempt_id: str) -> Attempt:
        """Return one attempt. Raise UnknownRollout or UnknownAttempt."""

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
        *,
        priority: int | Unset = UNSET,
    ) -> Rollout:
        """Change the given fields of a rollout, and return it.

        A final status sets `end_time`. `requeuing` puts the rollout in the queue again, at its old place. `preparing`
        and `running` need an attempt that has not ended.

        Raise UnknownRollout or UnknownResources, and IllegalTransition if the present status forbids the new one. Safe
        to retry except for `requeuing`: a repeat would take the rollout from the worker that claimed it in between.
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
        """Change the given fields of an attempt, and update its rollout's status in the same transaction
        (`types.lifecycle.rollout_after_attempt`).

        A final status sets `end_time` and makes the worker idle. `metadata` is merged into the stored metadata.
        `failed` with `metadata["reason_kind"] = "interrupted"` is for an attempt that failed through no fault of its
        own: its rollout goes back to the queue, whatever its config says, and the attempt does not count against
        `max_attempts`. Raise UnknownRollout, UnknownAttempt, IllegalTransition (an ended attempt keeps its status).
        Safe to retry.
        """

    @abstractmethod
    async def update_many_attempts(self, updates: Sequence[UpdateAttemptRequest]) -> Sequence[Attempt]:
        """Change several attempts in one transaction, all or none, and return them in the order given.

        Raise UnknownRollout, UnknownAttempt, IllegalTransition for a change of an ended attempt's status, and
        ConfigError if two updates name one attempt. Safe to retry.
        """

    @abstractmethod
    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        """Wait, by event, until every rollout is finished or `timeout` seconds have passed, and return the finished
        ones in the order given.

        timeout: None waits for ever; 0 does not wait.
        Raise UnknownRollout at once. Safe to retry.
        """

    @abstractmethod
    async def wait_for_any_rollout(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> Sequence[Rollout]:
        """Wait, by event, until at least one of the rollouts is finished or `timeout` seconds have passed, and return
        all that are finished by then, in the order given.

        timeout: None waits for ever; 0 does not wait.
        Raise UnknownRollout at once. Safe to retry.
        """

    @abstractmethod
    async def sweep(self, now: float | None = None) -> Sequence[Attempt]:
        """End the attempts whose time is over (`timeout`), mark the silent ones (`unresponsive`), and update their
        rollouts. Return the attempts that changed.

        The store's owner calls it on a schedule (`Sweeper`); no read does it.

        now: the time to compare with, in Unix seconds, for tests; None: the store's clock.
        """

    @abstractmethod
    async def next_deadline(self) -> float | None:
        """Return when the next `sweep` is due, in Unix seconds; None if no deadline is pending."""

    @abstractmethod
    async def release_claims(self, *, worker_ids: Sequence[str] | None = None) -> Sequence[str]:
        """Requeue rollouts with an unfinished attempt and return their ids. For the owner of a run that died.

        worker_ids: only attempts of these workers; None: all attempts, for a store that serves no other run. The
        attempts end as `failed` with `metadata["reason_kind"] = "interrupted"`, and do not count against
        `max_attempts`.
        """

    @abstractmethod
    async def get_news(
        self, *, after: str | None = None, spans: bool = False, labels: bool = False, timeout_seconds: float = 0.0
    ) -> News:
        """Return hints about what was committed since `after`, for a process that waits on behalf of many tasks.

        after: the cursor in the last result; None returns at once an empty result with a cursor.
        spans: whether new spans are news.
        labels: wait for changes of labels and releases, and for nothing else.
        timeout_seconds: how long to wait for the first news.
        News may be spurious, but none is missing: `gap` is set if too much has happened to list.
        """

    # ---- what is kept ----------------------------------------------------------------------------

    @abstractmethod
    async def pin(self, name: str, rollout_ids: Sequence[str]) -> None:
        """Keep exactly these rollouts under `name`, whatever retention says, instead of those that were pinned under
        that name before.

        A rollout stays as long as any name pins it; an empty list unpins all of this name. Raise UnknownRollout,
        without a change. Safe to retry.
        """

    @abstractmethod
    async def prune(self, retention: Retention, *, limit: int = 200) -> int:
        """Delete up to `limit` rollouts that `retention` does not keep, the oldest first, and return their number.

        Their attempts and spans are deleted too, and so are versions of resources that only they can have used. Reading
        a deleted rollout raises UnknownRollout. Unfinished and pinned rollouts stay, and so do the newest rollout and
        the one with the newest span. The store's owner calls it on a schedule (`Sweeper`), in steps short enough not to
        delay other calls. Raise ConfigError for a `limit` below 1. Safe to retry.
        """

    # ---- resources -------------------------------------------------------------------------------

    @abstractmethod
    async def add_resources(
        self,
        resources: NamedResources,
        *,
        resources_id: str | None = None,
        parent: tuple[str, int] | None = None,
        author: str | None = None,
    ) -> ResourcesUpdate:
        """Write resources under a new id, as version 1, and return them. They become the latest.

        parent: the id and version that they were made from.
        author: who wrote them, such as a run's id.
        An id that is there with equal content is returned as it is, so the call is safe to retry with an id. Raise
        ConfigError for an id with other content, UnknownResources for an unknown parent.
        """

    @abstractmethod
    async def update_resources(
        self,
        resources_id: str,
        resources: NamedResources,
        *,
        parent: tuple[str, int] | None = None,
        author: str | None = None,
    ) -> ResourcesUpdate:
        """Write and return the next version under an id, or the first one of a new id. It becomes the latest.

        parent: the id and version that it was made from; None means the newest version under this id.
        author: who wrote it, such as a run's id.
        If the latest resources of all have this id and this content, they are returned as they are, so the call is safe
        to retry. Raise UnknownResources for an unknown parent.
        """

    @abstractmethod
    async def get_resources_by_id(self, resources_id: str, *, version: int | None = None) -> ResourcesUpdate:
        """Return one version under an id, by default the newest.

        An address `gateway://NAME` in it is replaced by the current one (`set_endpoint`), here and wherever resources
        are read.
        Raise UnknownResources for an id or a version that is not in the store.
        """

    @abstractmethod
    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the resources written last, or None if there are none.

        They need not be released: see `get_labelled_resources("production")`.
        """

    @abstractmethod
    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        all_versions: bool = False,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Return the newest version of each id that matches, in the order in which they were written.

        all_versions: return all versions of these ids.
        `sort_by` is one of resources_id, version, create_time, update_time. Raise ConfigError for a bad sort or page.
        """

    @abstractmethod
    async def set_label(
        self,
        label: str,
        resources_id: str,
        version: int,
        *,
        expected: tuple[str, int] | Unset | None = UNSET,
        who: str | None = None,
        why: str | None = None,
    ) -> None:
        """Put a label, such as `production`, on one version of resources, and take it off the version that had it.

        expected: the id and version that the label must be on now, None for a label that must be new. Left out, the
            label moves wherever it is. Of several callers that expect the same version, one moves the label.
        who, why: for the audit log (`query_audit`), which is written in the same transaction. Retention keeps a version
            that has a label.
        Raise LabelMoved if the label is elsewhere, VersionFrozen for a frozen version, UnknownResources for a version
        that is not in the store, ConfigError for a label without 1 to 200 printable characters. Safe to retry: a label
        that is already on the new version stays there.
        """

    @abstractmethod
    async def get_labelled_resources(self, label: str) -> ResourcesUpdate | None:
        """Return the version that a label is on, or None if there is no such label."""

    @abstractmethod
    async def get_labels(self) -> Sequence[Label]:
        """Return every label with the version that it is on, by name."""

    @abstractmethod
    async def remove_label(
        self,
        label: str,
        *,
        expected: tuple[str, int] | Unset | None = UNSET,
        who: str | None = None,
        why: str | None = None,
    ) -> None:
        """Remove a label, if it is there.

        expected: the id and version that the label must be on now; left out, any.
        who, why: for the audit log (`query_audit`).
        Raise LabelMoved if the label is elsewhere. Safe to retry.
        """

    @abstractmethod
    async def move_labels(
        self,
        moves: Sequence[LabelMove],
        *,
        freeze: Sequence[tuple[str, int]] = (),
        who: str | None = None,
        why: str | None = None,
        release_id: str | None = None,
    ) -> None:
        """Move several labels, then freeze versions, in one transaction: all or nothing.

        moves: each with the version that the label must be on now.
        freeze: ids and versions to freeze.
        who, why, release_id: for the audit log.
        Raise LabelMoved if a label is elsewhere, VersionFrozen for a frozen version, UnknownResources for one that is
        not in the store, ConfigError for a bad label and for freezing a version with a label. Safe to retry: completed
        changes stay as they are.
        """

    @abstractmethod
    async def freeze_resources(
        self,
        resources_id: str,
        version: int,
        *,
        frozen: bool = True,
        who: str | None = None,
        why: str | None = None,
        release_id: str | None = None,
    ) -> None:
        """Freeze a version, so that no label can be put on it; `frozen=False` allows labels again.

        Content stays readable, and rollouts that name the version run. Raise ConfigError if a label is on the version,
        UnknownResources for a version that is not in the store. Safe to retry.
        """

    @abstractmethod
    async def query_audit(
        self,
        *,
        label: str | None = None,
        resources_id: str | None = None,
        release_id: str | None = None,
        sort_order: SortOrder = "desc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[AuditRecord]:
        """Return changes of labels, freezes and releases with who, when and why, by default the last one first.

        Nothing is ever removed. Raise ConfigError for a bad page.
        """

    # ---- releases and feedback -------------------------------------------------------------------

    @abstractmethod
    async def create_release(
        self,
        release_id: str,
        canary_version: tuple[str, int],
        *,
        state: str,
        from_version: tuple[str, int] | None = None,
        details: dict[str, Any] | None = None,
        deadline: float | None = None,
        labels: Sequence[LabelMove] = (),
        who: str | None = None,
        why: str | None = None,
    ) -> Release:
        """Add a release of a version, in its first state, and move labels in the same transaction.

        from_version: the version in production now.
        details: JSON that a resumed process needs.
        deadline: Unix seconds; the store does not act on it.
        An id that is stored with the same `canary_version` is returned as it is, so the call is safe to retry. Raise
        ConfigError for an id with another version, UnknownResources, and for the labels what `move_labels` raises.
        """

    @abstractmethod
    async def advance_release(
        self,
        release_id: str,
        *,
        expected_state: str,
        state: str,
        details: dict[str, Any] | None = None,
        deadline: float | Unset | None = UNSET,
        labels: Sequence[LabelMove] = (),
        freeze: Sequence[tuple[str, int]] = (),
        who: str | None = None,
        why: str | None = None,
    ) -> Release:
        """Advance a release from one state to the next, with moves of labels and freezes, in one transaction.

        state: equal to `expected_state` to change details and deadline alone.
        details: merged into the stored ones.
        Of several callers that expect the same state, one succeeds. Raise ReleaseAdvanced if the release is in a third
        state, UnknownRelease, and what `move_labels` raises; nothing is changed then. Safe to retry: a release that is
        already in `state` is returned as it is.
        """

    @abstractmethod
    async def get_release(self, release_id: str) -> Release:
        """Return one release. Raise UnknownRelease."""

    @abstractmethod
    async def query_releases(
        self,
        *,
        state_in: Sequence[str] | None = None,
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "create_time",
        sort_order: SortOrder = "desc",
    ) -> PaginatedResult[Release]:
        """Return the releases in one of these states, by default the last one first.

        `sort_by` is create_time or update_time. Raise ConfigError for a bad sort or page.
        """

    @abstractmethod
    async def record_live_rollouts(self, rollouts: Sequence[LiveRollout]) -> None:
        """Record rollouts of mode `live` that were served already, in one transaction.

        A new rollout is added with its attempt, its arm and the number of its version of resources, which need not be
        in the store. A stored rollout gets the input and the metadata that it lacks. A `status` ends the rollout,
        unless it has ended already. Session and gateway may therefore both report a rollout, in any order.

        The rollout's times are those of its arrival in the store. `metadata["served_at"]` of the rollout and
        `metadata["served_seconds"]` of its attempt say when it was served, and for how long. Raise ConfigError for an
        id that another rollout has. Safe to retry.
        """

    @abstractmethod
    async def add_many_feedback(self, feedback: Sequence[Feedback]) -> Sequence[Feedback]:
        """Add feedback about rollouts, in one transaction, and return it as it is stored.

        The store sets each one's order of arrival, its time, and the resources' version and the arm of its rollout. It
        knows version and arm of a live rollout even after retention has deleted the rollout. For a rollout that the
        store never had, give `resources_id` and `version` in the feedback; they are stored as given.

        Feedback whose `feedback_id` is stored already is returned as it is stored, so the call is safe to retry. Raise
        UnknownRollout for an unknown rollout, ConfigError for a value that does not fit its kind (NaN, for example) and
        for a `feedback_id` that belongs to other feedback; nothing is added then.
        """

    @abstractmethod
    async def query_feedback(
        self,
        *,
        rollout_id: str | None = None,
        resources_id: str | None = None,
        version: int | None = None,
        arm: str | None = None,
        source: str | None = None,
        kind: FeedbackKind | None = None,
        received_from: float | None = None,
        received_before: float | None = None,
        after: int | None = None,
        counted: bool = False,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Feedback]:
        """Return the feedback that matches every filter, in the order of arrival.

        after: only feedback with a higher `sequence_id`; later feedback always has a higher one.
        counted: only feedback that counts: the last of each rollout, source and kind.
        Raise ConfigError for a bad range or page.
        """

    @abstractmethod
    async def set_endpoint(self, name: str, base_url: str, *, api_key: str | None = None) -> None:
        """Set the address at which the models behind a name listen from now on.

        A `ProxyLLM` or `LLM` whose endpoint is `gateway://NAME` gets this base URL and key each time it is read.
        Resources therefore keep their content and version when a gateway restarts at another address, and an attempt
        uses the address that is current when it starts.

        base_url: as `LLM.endpoint` has it, ending in `/v1`.
        api_key: the key for that address; None for none.
        Raise ConfigError for a name without 1 to 200 printable characters. Safe to retry.
        """

    # ---- workers ---------------------------------------------------------------------------------

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
        """Return the workers that match the filters, which `filter_logic` joins.

        Raise ConfigError for a bad sort or page.
        """

    @abstractmethod
    async def get_worker_by_id(self, worker_id: str) -> Worker:
        """Return one worker. Raise UnknownWorker."""

    @abstractmethod
    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
        """Record a heartbeat of a worker, and return the worker. An unknown worker is added.

        heartbeat_stats: JSON about the worker, which replaces the stored one; left out, it stays.
        Safe to retry.
        """

    @abstractmethod
    async def pause_worker(self, worker_id: str, paused: bool = True) -> Worker:
        """Ask a worker to claim no more rollouts, or (`paused=False`) to claim again. The worker learns this from the
        reply to its next heartbeat.

        The store itself still serves a claim of a paused worker. Raise UnknownWorker. Safe to retry.
        """

    # ---- samples ---------------------------------------------------------------------------------

    @abstractmethod
    async def add_many_samples(self, samples: Sequence[Sample]) -> None:
        """Add samples to their time series, in one transaction.

        A series has one value at one time: a stored value stays as it is, so a repeat adds nothing. Samples older than
        seven days are deleted, and so are the oldest if there are more than a million. Each call deletes at least as
        many of these as it adds.
        Raise ConfigError for a name or a worker that is no id, and for a number that is not finite. Safe to retry.
        """

    @abstractmethod
    async def query_samples(
        self,
        *,
        name: str | None = None,
        worker_id: str | None = None,
        measured_from: float | None = None,
        measured_before: float | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Sample]:
        """Return the samples in `[measured_from, measured_before)` in the order of time, of one name, one worker or
        all.

        Times are Unix seconds; a missing end is open. The cost grows with the samples of that name (or of all names) in
        that time. Raise ConfigError for a bad range, order or page.
        """

    # ---- runs and their metrics ------------------------------------------------------------------

    @abstractmethod
    async def start_run(self, run: RunRecord) -> RunRecord:
        """Add a run, or resume the stored run with this id, and return it as it is stored.

        Either way the stored run is `running`, with a heartbeat of now, no `end_time` and no `cause`; the given
        record's values of these are ignored. A resumed run gets the given name and config, and keeps its `start_time`.
        Raise ConfigError for an id, a name or a kind without 1 to 200 printable characters, for another kind than the
        stored run's, and for a config that is not JSON. Safe to retry.
        """

    @abstractmethod
    async def update_run(
        self,
        run_id: str,
        *,
        status: RunStatus | Unset = UNSET,
        cause: str | Unset | None = UNSET,
        config: dict[str, Any] | Unset = UNSET,
    ) -> RunRecord:
        """Change the given fields, and return the run. Each call is a heartbeat.

        A final status sets `end_time`. A run that has ended keeps its status until `start_run` resumes it; its cause
        and its config can still change.
        Raise UnknownRun, IllegalTransition if the status would change after a final one, or ConfigError if the config
        is not JSON. Safe to retry.
        """

    @abstractmethod
    async def get_run_by_id(self, run_id: str) -> RunRecord:
        """Return one run. Raise UnknownRun."""

    @abstractmethod
    async def query_runs(
        self,
        *,
        run_id_in: Sequence[str] | None = None,
        status_in: Sequence[RunStatus] | None = None,
        kind_in: Sequence[str] | None = None,
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "start_time",
        sort_order: SortOrder = "desc",
    ) -> PaginatedResult[RunRecord]:
        """Return the runs that match every filter, by default the one that started last first.

        `sort_by` is one of run_id, name, kind, status, start_time, end_time, last_heartbeat_time, or None for the order
        in which they were added. Runs without a value come last. A run whose process was killed is still `running`,
        with an old `last_heartbeat_time`. Retention deletes no run. Raise ConfigError for a bad sort or page.
        """

    @abstractmethod
    async def add_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Add metrics of a run, in one transaction.

        A point replaces an earlier one with the same stage, iteration and name; of several such points in one call, the
        last counts. An ended run can still get metrics. Raise UnknownRun, and ConfigError for a stage or a name without
        1 to 200 printable characters, for an iteration below 0 and for a number that is not finite (use None instead);
        nothing is added then. Safe to retry.
        """

    @abstractmethod
    async def query_metrics(
        self,
        run_id: str,
        *,
        names: Sequence[str] | None = None,
        stage: str | None = None,
        iteration_from: int | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[MetricPoint]:
        """Return a run's metrics by iteration, then stage, then name.

        names, stage: only these.
        iteration_from: only this iteration and later ones; earlier ones are not read.
        Raise UnknownRun, ConfigError for a bad page.
        """

    @abstractmethod
    async def cut_metrics(self, run_id: str, *, after_iteration: int) -> None:
        """Delete a run's metrics of iterations after `after_iteration`. A run that resumes from a checkpoint repeats
        these.

        Raise UnknownRun. Safe to retry.
        """
