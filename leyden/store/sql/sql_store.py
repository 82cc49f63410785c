"""Implement `LightningStore` over a SQL driver: map each method to a function of the body, and implement the three
operations behind the methods that wait.

The module knows no database and no thread. To add a method, extend the protocol in `store/base.py`, write a function in
`body/`, and add a line to the class.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, cast

from leyden.errors import ConfigError, StoreError
from leyden.store.base import LightningStore, StoreCapabilities, StoreStatistics
from leyden.store.notify import Signals
from leyden.store.sql import rows
from leyden.store.sql.body import (
    attempts,
    feedback,
    labels,
    listing,
    live,
    outcomes,
    releases,
    restoring,
    rollouts,
    runs,
    samples,
    search,
    span_index,
    spans,
    statistics,
)
from leyden.store.sql.body import resource_versions as resources
from leyden.store.sql.body import retention as pruning
from leyden.store.sql.body import span_stream as stream
from leyden.store.sql.body import worker_rows as workers
from leyden.store.sql.body.restoring import Restored
from leyden.store.sql.body.rollout_filter import RolloutFilter
from leyden.store.sql.driver import Driver
from leyden.store.waiting import WaitingStore
from leyden.types import UNSET, AttemptedRollout, Retention, Rollout, SpanPage, Unset, current_run_id

F = TypeVar("F", bound=Callable[..., Any])


def _reads(method: F, operation: Callable[..., Any], *, then: Callable[[Any], Any] | None = None) -> F:
    """Return the protocol's `method`, implemented as a read of the body's `operation`. A test compares their arguments.

    then: makes the result from the rows that were read, after the transaction, so that no other operation waits for it.
    """

    @wraps(method, updated=())
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._driver.read(operation, args, kwargs)

    @wraps(method, updated=())
    async def read_then(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert then is not None
        return then(await read(self, *args, **kwargs))

    return cast(F, read if then is None else read_then)


def _reads_rollouts(method: F, operation: Callable[..., Any]) -> F:
    """Return the protocol's `method` as a read of an `operation` that takes a `RolloutFilter`."""
    names = inspect.signature(method).parameters.keys() & {each.name for each in fields(RolloutFilter)}

    @wraps(method, updated=())
    def read(self: Any, **kwargs: Any) -> Any:
        matching = RolloutFilter(**{name: kwargs.pop(name) for name in [*kwargs] if name in names})
        return self._driver.read(operation, (matching,), kwargs)

    return cast(F, read)


def _writes(method: F, operation: Callable[..., Any]) -> F:
    @wraps(method, updated=())
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._driver.write(operation, args, kwargs)

    return cast(F, write)


def _writes_in_run(method: F, operation: Callable[..., Any]) -> F:
    """Return the protocol's `method`, implemented as a write whose `run_id` is by default the caller's run.

    The caller's run is read here because the operation may run in another thread.
    """

    @wraps(method, updated=())
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("run_id", UNSET), Unset):
            kwargs["run_id"] = current_run_id.get()
        return self._driver.write(operation, args, kwargs)

    return cast(F, write)


class SqlLightningStore(WaitingStore):
    """A store in a SQL database, which this process reaches through `driver`."""

    json_methods: Mapping[str, tuple[Callable[..., Any], Callable[[Any, bool], bytes]]] = {
        "query_spans": (search.query_spans, rows.span_page_json),
        "query_spans_of": (search.query_spans_of, rows.spans_by_rollout_json),
    }
    """The methods that `json_of` implements: the operation, and a function that writes its result."""

    def __init__(self, driver: Driver, signals: Signals, *, durable: bool) -> None:
        super().__init__(signals)
        self._driver = driver
        self._durable = durable
        self._opened = time.monotonic()

    @property
    def url(self) -> str:
        return self._driver.url

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(
            thread_safe=True, async_safe=True, zero_copy=False, swept=False, otlp_traces=False, durable=self._durable
        )

    def __reduce__(self) -> tuple[Any, ...]:
        raise StoreError(
            f"{self.url} belongs to the process that opened it and cannot be pickled; "
            "let the other process open a store of its own, or talk to this one's server"
        )

    async def close(self) -> None:
        await self._driver.close()
        self._signals.close()

    start_rollout = _writes_in_run(LightningStore.start_rollout, rollouts.start_rollout)
    enqueue_many_rollouts = _writes(LightningStore.enqueue_many_rollouts, rollouts.enqueue_many_rollouts)
    undo_claim = _writes(LightningStore.undo_claim, attempts.undo_claim)
    start_attempt = _writes(LightningStore.start_attempt, attempts.start_attempt)
    add_span = _writes(LightningStore.add_span, spans.add_span)
    add_many_spans = _writes(LightningStore.add_many_spans, spans.add_many_spans)
    get_many_span_sequence_ids = _writes(LightningStore.get_many_span_sequence_ids, spans.get_many_span_sequence_ids)
    query_spans = _reads(LightningStore.query_spans, search.query_spans, then=rows.span_page)
    query_spans_of = _reads(LightningStore.query_spans_of, search.query_spans_of, then=rows.spans_by_rollout)
    query_rollouts = _reads_rollouts(LightningStore.query_rollouts, listing.query_rollouts)
    summarise_rollouts = _reads_rollouts(LightningStore.summarise_rollouts, outcomes.summarise_rollouts)
    sum_spending = _reads(LightningStore.sum_spending, outcomes.sum_spending)
    get_rollout_by_id = _reads(LightningStore.get_rollout_by_id, rollouts.get_rollout_by_id)
    query_attempts = _reads(LightningStore.query_attempts, attempts.query_attempts)
    get_latest_attempt = _reads(LightningStore.get_latest_attempt, attempts.get_latest_attempt)
    get_attempt_by_id = _reads(LightningStore.get_attempt_by_id, attempts.get_attempt_by_id)
    update_rollout = _writes(LightningStore.update_rollout, rollouts.update_rollout)
    update_attempt = _writes(LightningStore.update_attempt, attempts.update_attempt)
    update_many_attempts = _writes(LightningStore.update_many_attempts, attempts.update_many_attempts)
    sweep = _writes(LightningStore.sweep, attempts.sweep)
    release_claims = _writes(LightningStore.release_claims, attempts.release_claims)
    pin = _writes(LightningStore.pin, pruning.pin)
    add_resources = _writes(LightningStore.add_resources, resources.add_resources)
    update_resources = _writes(LightningStore.update_resources, resources.update_resources)
    get_resources_by_id = _reads(LightningStore.get_resources_by_id, resources.get_resources_by_id)
    get_latest_resources = _reads(LightningStore.get_latest_resources, resources.get_latest_resources)
    query_resources = _reads(LightningStore.query_resources, resources.query_resources)
    set_label = _writes(LightningStore.set_label, labels.set_label)
    get_labelled_resources = _reads(LightningStore.get_labelled_resources, labels.get_labelled_resources)
    get_labels = _reads(LightningStore.get_labels, labels.get_labels)
    remove_label = _writes(LightningStore.remove_label, labels.remove_label)
    move_labels = _writes(LightningStore.move_labels, labels.move_labels)
    freeze_resources = _writes(LightningStore.freeze_resources, labels.freeze_resources)
    query_audit = _reads(LightningStore.query_audit, labels.query_audit)
    create_release = _writes(LightningStore.create_release, releases.create_release)
    advance_release = _writes(LightningStore.advance_release, releases.advance_release)
    get_release = _reads(LightningStore.get_release, releases.get_release)
    query_releases = _reads(LightningStore.query_releases, releases.query_releases)
    record_live_rollouts = _writes(LightningStore.record_live_rollouts, live.record_live_rollouts)
    add_many_feedback = _writes(LightningStore.add_many_feedback, feedback.add_many_feedback)
    query_feedback = _reads(LightningStore.query_feedback, feedback.query_feedback)
    set_endpoint = _writes(LightningStore.set_endpoint, resources.set_endpoint)
    query_workers = _reads(LightningStore.query_workers, workers.query_workers)
    get_worker_by_id = _reads(LightningStore.get_worker_by_id, workers.get_worker_by_id)
    update_worker = _writes(LightningStore.update_worker, workers.update_worker)
    pause_worker = _writes(LightningStore.pause_worker, workers.pause_worker)
    add_many_samples = _writes(LightningStore.add_many_samples, samples.add_many_samples)
    query_samples = _reads(LightningStore.query_samples, samples.query_samples)
    start_run = _writes(LightningStore.start_run, runs.start_run)
    update_run = _writes(LightningStore.update_run, runs.update_run)
    get_run_by_id = _reads(LightningStore.get_run_by_id, runs.get_run_by_id)
    query_runs = _reads(LightningStore.query_runs, runs.query_runs)
    add_metrics = _writes(LightningStore.add_metrics, runs.add_metrics)
    query_metrics = _reads(LightningStore.query_metrics, runs.query_metrics)
    cut_metrics = _writes(LightningStore.cut_metrics, runs.cut_metrics)

    async def restore(self, restored: Restored) -> None:
        """Add the releases of another store to this one, which must be empty. Raise ConfigError if it is not.

        `leyden.store.restore.import_parquet` reads them from files.
        """
        await self._driver.write(restoring.restore, (restored,), {})

    async def json_of(self, method: str, arguments: Mapping[str, Any], *, packed: bool) -> bytes:
        """Return the result of a method of `json_methods` as JSON, with tokens `packed` as in `rows.span_json`."""
        operation, write = self.json_methods[method]
        return write(await self._driver.read(operation, (), arguments), packed)

    async def index_span_attribute(self, key: str) -> None:
        await self._driver.write(span_index.begin_attribute_index, (key,), {})
        while not await self._driver.write(span_index.extend_attribute_index, (key,), {}):
            pass  # in steps, so that other operations can write between them

    async def next_deadline(self) -> float | None:
        return await self._driver.read(attempts.next_deadline, (), {})

    async def statistics(self) -> StoreStatistics:
        now, totals, by_status = await self._driver.read(statistics.counts, (), {})
        return StoreStatistics(
            name=type(self).__name__,
            time=now,
            total_rollouts=totals["rollouts"],
            total_attempts=totals["attempts"],
            total_spans=totals["spans"],
            total_resources=totals["resources"],
            total_workers=totals["workers"],
            rollouts_by_status=by_status,
            uptime_seconds=time.monotonic() - self._opened,
        )

    async def prune(self, retention: Retention, *, limit: int = 200) -> int:
        if limit < 1:
            raise ConfigError(f"limit must be at least 1, got {limit}")
        if retention.keeps_everything:
            return 0
        # The rollouts are chosen while others write, and deleted in steps between their writes.
        steps = await self._driver.read(pruning.prunable, (retention, limit), {})
        return sum([await self._driver.write(pruning.prune_step, (step,), {}) for step in steps])

    async def _claim(self, limit: int, worker_id: str | None, claim_id: str | None) -> list[AttemptedRollout]:
        return await self._driver.write(attempts.claim, (limit, worker_id, claim_id), {}, undo=attempts.unclaim)

    async def _finished(self, rollout_ids: Sequence[str]) -> Sequence[Rollout]:
        return await self._driver.read(rollouts.finished_rollouts, (rollout_ids,), {})

    async def _new_spans(self, after: str | None, rollout_ids: Sequence[str] | None, limit: int) -> SpanPage:
        return await self._driver.read(stream.new_spans, (after, rollout_ids, limit), {})
