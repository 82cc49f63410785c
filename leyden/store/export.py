"""Export the contents of a store as Parquet files, for DuckDB, pandas or Polars, and for `restore`.

The module knows the protocol and no kind of store. Rows are read in pages and written in row groups, so that memory
stays small whatever the size of the store. Fields with a fixed type have columns. Fields that may be any JSON (inputs,
metadata, attributes, events) are JSON text, which functions such as `json_extract` read in every engine; a map would
need one type for all values. Times are Unix seconds.

    rollouts.parquet    one row for each rollout, with the final reward of its latest attempt
    attempts.parquet    one row for each attempt
    spans.parquet       one row for each span of each attempt, tokens as lists
    resources.parquet   one row for each version, in the order in which they were written
    runs.parquet        one row for each run
    metrics.parquet     one row for each metric of a run
    feedback.parquet    one row for each opinion, in the order of arrival
    labels.parquet      one row for each label, with the version that it is on
    releases.parquet    one row for each release
    audit.parquet       one row for each change of a label, a freeze or a release, in their order

To add a column, add its type to `_COLUMNS`, and its value to the file's `_..._row` function.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from leyden._lib.atomic import ASIDE, append_privately, commit_directory
from leyden._lib.extras import import_optional
from leyden.errors import ConfigError, UnknownRollout, redact
from leyden.store.base import LightningStore
from leyden.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    AuditRecord,
    Feedback,
    MetricPoint,
    PaginatedResult,
    Release,
    ResourcesUpdate,
    Rollout,
    RolloutStatus,
    RunRecord,
    Span,
)
from leyden.types.checks import json_text, typed_json_text

T = TypeVar("T", bound=BaseModel)

ParquetRow = dict[str, Any]

_PAGE = 5000
"""Items in one query. Each page scans all pages before it, so a page is large."""
_BATCH_ROLLOUTS = 50
"""Rollouts whose spans are read in one call."""
_GROUP_ROWS, _GROUP_BYTES = 20_000, 8 * 2**20
"""A row group is written when it has this many rows, or about this many bytes."""

_COLUMNS = {
    "rollouts": {
        "rollout_id": "string",
        "status": "string",
        "mode": "string",
        "priority": "int32",
        "resources_id": "string",
        "run_id": "string",
        "group_id": "string",
        "arm": "string",
        "resources_version": "int64",
        "reward": "float64",
        "start_time": "float64",
        "end_time": "float64",
        "input": "string",
        "config": "string",
        "metadata": "string",
    },
    "attempts": {
        "rollout_id": "string",
        "attempt_id": "string",
        "sequence_id": "int64",
        "status": "string",
        "worker_id": "string",
        "start_time": "float64",
        "end_time": "float64",
        "last_heartbeat_time": "float64",
        "reward": "float64",
        "rewards": "string",
        "prompt_tokens": "int64",
        "response_tokens": "int64",
        "cost": "float64",
        "failure": "string",
        "metadata": "string",
    },
    "spans": {
        "rollout_id": "string",
        "attempt_id": "string",
        "sequence_id": "int64",
        "trace_id": "string",
        "span_id": "string",
        "parent_id": "string",
        "name": "string",
        "kind": "string",
        "status_code": "string",
        "status_description": "string",
        "start_time": "float64",
        "end_time": "float64",
        "attributes": "string",
        "events": "string",
        "resource": "string",
        "prompt_ids": "list<int32>",
        "response_ids": "list<int32>",
        "logprobs": "list<float32>",
        "policy_versions": "list<int32>",
        "loss_mask": "list<int8>",
    },
    "resources": {
        "resources_id": "string",
        "version": "int64",
        "create_time": "float64",
        "update_time": "float64",
        "parent": "string",
        "author": "string",
        "frozen": "bool",
        "resources": "string",
    },
    "runs": {
        "run_id": "string",
        "name": "string",
        "kind": "string",
        "status": "string",
        "start_time": "float64",
        "end_time": "float64",
        "last_heartbeat_time": "float64",
        "cause": "string",
        "config": "string",
    },
    "metrics": {
        "run_id": "string",
        "stage": "string",
        "iteration": "int64",
        "name": "string",
        "value": "float64",
        "time": "float64",
    },
    "feedback": {
        "sequence_id": "int64",
        "feedback_id": "string",
        "rollout_id": "string",
        "source": "string",
        "kind": "string",
        "value": "string",
        "given_time": "float64",
        "received_time": "float64",
        "resources_id": "string",
        "version": "int64",
        "arm": "string",
    },
    "labels": {
        "label": "string",
        "resources_id": "string",
        "version": "int64",
    },
    "releases": {
        "release_id": "string",
        "state": "string",
        "from_version": "string",
        "canary_version": "string",
        "details": "string",
        "deadline": "float64",
        "create_time": "float64",
        "update_time": "float64",
    },
    "audit": {
        "sequence_id": "int64",
        "action": "string",
        "time": "float64",
        "label": "string",
        "before": "string",
        "after": "string",
        "release_id": "string",
        "state": "string",
        "who": "string",
        "why": "string",
    },
}
"""The columns of each file with their types. A column holds the field of the same name unless the file's `_..._row`
function says otherwise."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The directory and the row counts of a finished export."""

    directory: Path
    rows: dict[str, int]
    """The number of rows of each file, by its name without `.parquet`."""


async def export_parquet(
    store: LightningStore,
    directory: str | Path,
    *,
    status_in: Sequence[RolloutStatus] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the rollouts of `store`, with their attempts and spans, and its runs to Parquet files in the new
    `directory`.

    The directory appears when it is complete. The store may be written meanwhile: each rollout is exported with its
    attempts and spans as they are when it is read, and a rollout that is pruned meanwhile is left out.

    status_in: only rollouts that have one of these statuses; everything else is always complete.
    on_progress: called with the rollouts done and the rollouts in all.
    Raise ConfigError if the directory exists, or if pyarrow is not installed.
    """
    arrow_modules()
    directory = Path(directory)
    if directory.exists():
        raise ConfigError(f"{directory} is there already; export to a directory that is not")
    aside = directory.with_name(ASIDE + directory.name)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"cannot export to {directory}: {error}") from error
    tables = {name: _Table(aside / f"{name}.parquet", columns) for name, columns in _COLUMNS.items()}
    try:
        try:
            await _write_rollouts(store, tables, status_in, on_progress)
            await _write_resources(store, tables["resources"])
            await _write_runs(store, tables["runs"], tables["metrics"])
            await _write_feedback(store, tables["feedback"])
            await _write_releases(store, tables)
        finally:
            for table in tables.values():
                table.close()
        await asyncio.to_thread(commit_directory, aside, directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Exported(directory, {name: table.written for name, table in tables.items()})


# ---- reading -------------------------------------------------------------------------------------


async def _write_rollouts(
    store: LightningStore,
    tables: dict[str, _Table],
    status_in: Sequence[RolloutStatus] | None,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Write the rollouts of these statuses, with their attempts and spans, to the tables.

    status_in: None for all.
    on_progress: called after each batch with the rollouts read so far, and their total.
    """

    # All rollouts in the order of their arrival: a page of some statuses would shift with every
    # rollout that changes its status.
    async def ask(limit: int, offset: int) -> PaginatedResult[Rollout]:
        return await store.query_rollouts(limit=limit, offset=offset)

    done = 0
    async for page, total in _pages(ask, attrgetter("rollout_id")):
        for start in range(0, len(page), _BATCH_ROLLOUTS):
            batch = page[start : start + _BATCH_ROLLOUTS]
            wanted = [rollout for rollout in batch if status_in is None or rollout.status in status_in]
            for record in await _records(store, wanted):
                tables["rollouts"].add(_rollout_row(record))
                tables["attempts"].add_many(_attempt_row(attempt) for attempt in record.attempts)
                tables["spans"].add_many(_span_row(span) for span in record.spans)
            for table in tables.values():
                await table.write_if_full()
            done += len(batch)
            if on_progress is not None:
                on_progress(done, max(done, total))


async def _write_resources(store: LightningStore, table: _Table) -> None:
    """Write all versions of all resources, in the order in which they were written."""

    async def ask(limit: int, offset: int) -> PaginatedResult[ResourcesUpdate]:
        return await store.query_resources(all_versions=True, limit=limit, offset=offset)

    async for updates, _ in _pages(ask, attrgetter("resources_id", "version")):
        table.add_many(_resources_row(update) for update in updates)
        await table.write_if_full()


async def _write_runs(store: LightningStore, runs: _Table, metrics: _Table) -> None:
    """Write all runs and their metrics."""

    async def ask(limit: int, offset: int) -> PaginatedResult[RunRecord]:
        return await store.query_runs(sort_by=None, sort_order="asc", limit=limit, offset=offset)

    async for page, _ in _pages(ask, attrgetter("run_id")):
        for run in page:
            runs.add(vars(run) | {"config": redact(json_text(run.config, "the config of a run"))})
            await _write_metrics(store, run.run_id, metrics)
        await runs.write_if_full()


async def _write_metrics(store: LightningStore, run_id: str, table: _Table) -> None:
    async def ask(limit: int, offset: int) -> PaginatedResult[MetricPoint]:
        return await store.query_metrics(run_id, limit=limit, offset=offset)

    async for points, _ in _pages(ask, attrgetter("iteration", "stage", "name")):
        table.add_many(vars(point) | {"run_id": run_id} for point in points)
        await table.write_if_full()


async def _write_feedback(store: LightningStore, table: _Table) -> None:
    """Write all feedback in the order of arrival."""

    async def ask(limit: int, offset: int) -> PaginatedResult[Feedback]:
        return await store.query_feedback(limit=limit, offset=offset)

    async for page, _ in _pages(ask, attrgetter("sequence_id")):
        table.add_many(vars(one) | {"value": json_text(one.value, "the value of feedback")} for one in page)
        await table.write_if_full()


async def _write_releases(store: LightningStore, tables: dict[str, _Table]) -> None:
    """Write labels, releases and the audit log. The log is read last, so that it explains the others."""

    async def ask_releases(limit: int, offset: int) -> PaginatedResult[Release]:
        return await store.query_releases(sort_order="asc", limit=limit, offset=offset)

    async def ask_audit(limit: int, offset: int) -> PaginatedResult[AuditRecord]:
        return await store.query_audit(sort_order="asc", limit=limit, offset=offset)

    tables["labels"].add_many(vars(label) for label in await store.get_labels())
    async for page, _ in _pages(ask_releases, attrgetter("release_id")):
        tables["releases"].add_many(_release_row(release) for release in page)
        await tables["releases"].write_if_full()
    async for page, _ in _pages(ask_audit, attrgetter("sequence_id")):
        tables["audit"].add_many(_audit_row(record) for record in page)
        await tables["audit"].write_if_full()


async def _pages(
    ask: Callable[[int, int], Awaitable[PaginatedResult[T]]], key: Callable[[T], Hashable]
) -> AsyncIterator[tuple[Sequence[T], int]]:
    """Yield all items page by page, without repeats, each page with the total number of items.

    Items may be deleted meanwhile, and then the items behind them move forward. Each page therefore begins with the
    last item of the page before. If it holds no item of that page, items would be missed, so the query is repeated with
    a smaller offset.

    ask: returns a page, given limit and offset.
    key: returns the value that identifies an item.
    """
    offset, before = 0, set[Hashable]()
    while True:
        page = await ask(_PAGE, max(0, offset - 1))
        known = [index for index, item in enumerate(page) if key(item) in before]
        if before and not known and page.offset > 0:
            offset = max(1, offset - _PAGE + 1)
            continue
        fresh = page[known[-1] + 1 if known else 0 :]
        if not fresh:
            return
        yield fresh, page.total
        before = {key(item) for item in fresh}
        offset = page.offset + len(page)


@dataclass(slots=True)
class _Record:
    """A rollout with its attempts and spans."""

    rollout: Rollout
    attempts: Sequence[Attempt]
    spans: Sequence[Span]


async def _records(store: LightningStore, rollouts: Sequence[Rollout]) -> list[_Record]:
    """Return the records of rollouts. Rollouts that were pruned meanwhile are left out."""
    try:
        latest = await store.query_spans_of([rollout.rollout_id for rollout in rollouts])
        return [await _record(store, rollout, latest[rollout.rollout_id]) for rollout in rollouts]
    except UnknownRollout:
        if len(rollouts) == 1:
            return []
        return [record for rollout in rollouts for record in await _records(store, [rollout])]


async def _record(store: LightningStore, rollout: Rollout, latest_spans: Sequence[Span]) -> _Record:
    """Return a rollout with all its attempts and their spans, in the order of the attempts.

    latest_spans: the spans of the latest attempt. If that is the first attempt, there are no others, so no further
        query is made.
    """
    if not isinstance(rollout, AttemptedRollout) and not latest_spans:
        return _Record(rollout, [], [])
    if (
        isinstance(rollout, AttemptedRollout)
        and rollout.attempt.sequence_id == 1
        and all(span.attempt_id == rollout.attempt.attempt_id for span in latest_spans)
    ):
        return _Record(rollout, [rollout.attempt], latest_spans)
    # There are several attempts, some of them perhaps newer than the page, so read everything anew.
    rollout = await store.get_rollout_by_id(rollout.rollout_id)
    attempts = await store.query_attempts(rollout.rollout_id)
    spans = [await store.query_spans(rollout.rollout_id, attempt.attempt_id) for attempt in attempts]
    return _Record(rollout, attempts, [span for group in spans for span in group])


# ---- rows ----------------------------------------------------------------------------------------


def _rollout_row(record: _Record) -> ParquetRow:
    """Return a rollout's values by column name, with the reward of its latest attempt."""
    rollout = record.rollout
    return vars(rollout) | {
        "reward": record.attempts[-1].reward if record.attempts else None,
        "input": json_text(rollout.input, "the input of a rollout"),
        "config": rollout.config.model_dump_json(),
        "metadata": json_text(rollout.metadata, "the metadata of a rollout"),
    }


def _attempt_row(attempt: Attempt) -> ParquetRow:
    return vars(attempt) | {
        "metadata": json_text(attempt.metadata, "the metadata of an attempt"),
        "rewards": json_text(attempt.rewards, "the rewards of an attempt"),
    }


def _span_row(span: Span) -> ParquetRow:
    """Return a span's values by column name, with those of its token record."""
    tokens = {} if span.tokens is None else vars(span.tokens)
    return (
        tokens
        | vars(span)
        | {
            "status_code": span.status.status_code,
            "status_description": span.status.description,
            "attributes": typed_json_text(span.attributes, "the attributes of a span"),
            "events": typed_json_text(span.events, "the events of a span"),
            "resource": typed_json_text(span.resource, "the resource of a span"),
        }
    )


def _resources_row(update: ResourcesUpdate) -> ParquetRow:
    """Return a version of resources without the keys of models, because the files are copied to places that are not as
    secret as the store.
    """
    resources = {name: _without_keys(each) for name, each in update.resources.items()}
    return vars(update) | {
        "parent": json_text(update.parent, "the parent of resources"),
        "resources": json_text(resources, "resources"),
    }


def _without_keys(resource: Any) -> Any:
    """Return a model as JSON without its key, and with `***` for keys in its address and sampling parameters. Return
    any other resource unchanged.
    """
    if not isinstance(resource, LLM):
        return resource
    fields = {**resource.model_dump(mode="json"), "api_key": None}
    return json.loads(redact(json_text(fields, "resources")))


def _release_row(release: Release) -> ParquetRow:
    return vars(release) | {
        "from_version": json_text(release.from_version, "a version"),
        "canary_version": json_text(release.canary_version, "a version"),
        "details": redact(json_text(release.details, "the details of a release")),
    }


def _audit_row(record: AuditRecord) -> ParquetRow:
    return vars(record) | {
        "before": json_text(record.before, "a version"),
        "after": json_text(record.after, "a version"),
    }


# ---- writing -------------------------------------------------------------------------------------


class _Table:
    """One Parquet file, written row group by row group."""

    def __init__(self, path: Path, columns: dict[str, str]) -> None:
        arrow, parquet = arrow_modules()
        kinds = {
            "string": arrow.string(),
            "int32": arrow.int32(),
            "int64": arrow.int64(),
            "bool": arrow.bool_(),
            "float64": arrow.float64(),
            "list<int8>": arrow.list_(arrow.int8()),
            "list<int32>": arrow.list_(arrow.int32()),
            "list<float32>": arrow.list_(arrow.float32()),
        }
        self._schema = arrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
        append_privately(path).close()  # with its mode
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._names = list(columns)
        self._rows: list[tuple[Any, ...]] = []
        self._bytes = 0
        self.written = 0

    def add(self, row: ParquetRow) -> None:
        """Add a row. Values without a column are left out, and missing values are null."""
        values = tuple(row.get(name) for name in self._names)
        self._rows.append(values)
        self._bytes += sum(_length(value) for value in values)

    def add_many(self, rows: Iterable[ParquetRow]) -> None:
        for row in rows:
            self.add(row)

    async def write_if_full(self) -> None:
        """Write a row group if the pending rows are enough for one."""
        if len(self._rows) >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            await asyncio.to_thread(self._write)

    def close(self) -> None:
        self._write()
        self._writer.close()

    def _write(self) -> None:
        """Write the pending rows as one row group."""
        arrow, _ = arrow_modules()
        columns = zip(*self._rows, strict=True) if self._rows else [() for _ in self._names]
        arrays = [arrow.array(values, kind) for values, kind in zip(columns, self._schema.types, strict=True)]
        self._writer.write_table(arrow.table(arrays, schema=self._schema))
        self.written += len(self._rows)
        self._rows, self._bytes = [], 0


def _length(value: Any) -> int:
    """Return the approximate size of a value in bytes."""
    return 4 * len(cast("list[int]", value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 8


@cache
def arrow_modules() -> tuple[Any, Any]:
    """Import and return `pyarrow` and `pyarrow.parquet`. Raise MissingExtra if they are not installed."""
    arrow = import_optional("pyarrow", extra="export", needed_by="a Parquet file")
    return arrow, import_optional("pyarrow.parquet", extra="export", needed_by="a Parquet file")
