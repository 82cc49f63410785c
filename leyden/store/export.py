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

The columns are the fields of the models in `leyden.types`, those with JSON last. `_COLUMNS` names the exceptions.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

from leyden._lib.atomic import ASIDE, append_privately, commit_directory
from leyden._lib.extras import import_optional
from leyden._lib.json import is_list
from leyden.errors import ConfigError, UnknownRollout, redact
from leyden.store.base import LightningStore
from leyden.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    AuditRecord,
    Feedback,
    Label,
    MetricPoint,
    PaginatedResult,
    Release,
    ResourcesUpdate,
    Rollout,
    RolloutStatus,
    RunRecord,
    Span,
)
from leyden.types.checks import typed_json_text

T = TypeVar("T", bound=BaseModel)

_PAGE = 5000
"""Items in one query. Each page scans all pages before it, so a page is large."""
_BATCH_ROLLOUTS = 50
"""Rollouts whose spans are read in one call."""
_GROUP_ROWS, _GROUP_BYTES = 20_000, 8 * 2**20
"""A row group is written when it has this many rows, or about this many bytes."""

JSON: Final = "json"
"""The kind of a column with the JSON text of a field."""
_REDACTED: Final = "redacted json"
"""The kind of a column with JSON text without keys, because the files are copied to places that are not as secret as
the store."""
_KINDS = {str: "string", int: "int64", float: "float64", bool: "bool"}


def columns_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the kind of the column for each field of a model, by name. Those with JSON come last."""
    columns = {name: _kind(field.annotation) for name, field in model.model_fields.items()}
    return dict(sorted(columns.items(), key=lambda column: column[1] == JSON))


def _kind(hint: Any) -> str:
    """Return the kind of the column for a field of this type: JSON unless all its values are of one plain type."""
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        return _kind(parts[0])
    if get_origin(hint) is Literal:
        return _kind(type(parts[0]))
    if get_origin(hint) in (Union, UnionType):
        kinds = {_kind(part) for part in parts if part is not NoneType}
        return kinds.pop() if len(kinds) == 1 else JSON
    return _KINDS.get(hint, JSON)


_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "rollouts": {**columns_of(Rollout), "priority": "int32", "reward": "float64"},
    "attempts": columns_of(Attempt),
    "spans": {
        **{name: kind for name, kind in columns_of(Span).items() if name not in ("status", "tokens")},
        **dict.fromkeys(("status_code", "status_description"), "string"),
        **dict.fromkeys(("prompt_ids", "response_ids", "policy_versions"), "list int32"),
        "logprobs": "list float32",
        "loss_mask": "list int8",
    },
    "resources": columns_of(ResourcesUpdate),
    "runs": {**columns_of(RunRecord), "config": _REDACTED},
    "metrics": {"run_id": "string", **columns_of(MetricPoint)},
    "feedback": columns_of(Feedback),
    "labels": columns_of(Label),
    "releases": {**columns_of(Release), "details": _REDACTED},
    "audit": columns_of(AuditRecord),
}
"""The columns of each file with their kinds."""


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
            versions = partial(store.query_resources, all_versions=True)
            async for updates, _ in _pages(versions, "resources_id", "version"):
                await tables["resources"].add(map(_without_keys, updates))
            async for runs, _ in _pages(partial(store.query_runs, sort_by=None, sort_order="asc"), "run_id"):
                for run in runs:
                    points = partial(store.query_metrics, run.run_id)
                    async for page, _ in _pages(points, "iteration", "stage", "name"):
                        await tables["metrics"].add({"run_id": run.run_id, **vars(point)} for point in page)
                await tables["runs"].add(map(vars, runs))
            async for page, _ in _pages(store.query_feedback, "sequence_id"):
                await tables["feedback"].add(map(vars, page))
            await tables["labels"].add(map(vars, await store.get_labels()))
            async for page, _ in _pages(partial(store.query_releases, sort_order="asc"), "release_id"):
                await tables["releases"].add(map(vars, page))
            # The audit log is read last, so that it explains the others.
            async for page, _ in _pages(partial(store.query_audit, sort_order="asc"), "sequence_id"):
                await tables["audit"].add(map(vars, page))
        finally:
            for table in tables.values():
                table.close()
        await asyncio.to_thread(commit_directory, aside, directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Exported(directory, {name: table.written for name, table in tables.items()})


async def _write_rollouts(
    store: LightningStore,
    tables: Mapping[str, _Table],
    status_in: Sequence[RolloutStatus] | None,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Write the rollouts of these statuses (None: of all), with their attempts and spans.

    All rollouts are read in the order of their arrival, because a page of some statuses would shift with every rollout
    that changes its status.

    on_progress: called after each batch with the rollouts read so far, and their total.
    """
    done = 0
    async for page, total in _pages(store.query_rollouts, "rollout_id"):
        for start in range(0, len(page), _BATCH_ROLLOUTS):
            batch = page[start : start + _BATCH_ROLLOUTS]
            wanted = [rollout for rollout in batch if status_in is None or rollout.status in status_in]
            for rollout, attempts, spans in await _records(store, wanted):
                reward = attempts[-1].reward if attempts else None
                await tables["rollouts"].add([{**vars(rollout), "reward": reward}])
                await tables["attempts"].add(map(vars, attempts))
                await tables["spans"].add(map(_span_fields, spans))
            done += len(batch)
            if on_progress is not None:
                on_progress(done, max(done, total))


async def _pages(
    ask: Callable[..., Awaitable[PaginatedResult[T]]], *key: str
) -> AsyncIterator[tuple[Sequence[T], int]]:
    """Yield all items page by page, without repeats, each page with the total number of items.

    Items may be deleted meanwhile, and then the items behind them move forward. Each page therefore begins with the
    last item of the page before. If it holds no item of that page, items would be missed, so the query is repeated with
    a smaller offset.

    ask: returns a page, given limit and offset.
    key: the fields that together identify an item.
    """
    identity = attrgetter(*key)
    offset, before = 0, set[Any]()
    while True:
        page = await ask(limit=_PAGE, offset=max(0, offset - 1))
        known = [index for index, item in enumerate(page) if identity(item) in before]
        if before and not known and page.offset > 0:
            offset = max(1, offset - _PAGE + 1)
            continue
        fresh = page[known[-1] + 1 if known else 0 :]
        if not fresh:
            return
        yield fresh, page.total
        before = {identity(item) for item in fresh}
        offset = page.offset + len(page)


_Record: TypeAlias = tuple[Rollout, Sequence[Attempt], Sequence[Span]]
"""A rollout with its attempts and their spans."""


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
        return rollout, [], []
    if (
        isinstance(rollout, AttemptedRollout)
        and rollout.attempt.sequence_id == 1
        and all(span.attempt_id == rollout.attempt.attempt_id for span in latest_spans)
    ):
        return rollout, [rollout.attempt], latest_spans
    # There are several attempts, some of them perhaps newer than the page, so read everything again.
    rollout = await store.get_rollout_by_id(rollout.rollout_id)
    attempts = await store.query_attempts(rollout.rollout_id)
    spans = [await store.query_spans(rollout.rollout_id, attempt.attempt_id) for attempt in attempts]
    return rollout, attempts, [span for group in spans for span in group]


def _span_fields(span: Span) -> dict[str, Any]:
    status = {"status_code": span.status.status_code, "status_description": span.status.description}
    return ({} if span.tokens is None else vars(span.tokens)) | vars(span) | status


def _without_keys(update: ResourcesUpdate) -> dict[str, Any]:
    """Return a version's values by column name. Its models lack their keys, and have `***` for keys in their addresses
    and sampling parameters, because the files are copied to places that are not as secret as the store.
    """
    resources: dict[str, Any] = dict(update.resources)
    for name, resource in update.resources.items():
        if isinstance(resource, LLM):
            fields = {**resource.model_dump(mode="json"), "api_key": None}
            resources[name] = json.loads(redact(typed_json_text(fields, "resources")))
    return {**vars(update), "resources": resources}


class _Table:
    """One Parquet file, written row group by row group."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        arrow, parquet = arrow_modules()
        fields: list[tuple[str, Any]] = []
        for name, kind in columns.items():
            if kind.startswith("list "):
                fields.append((name, arrow.list_(arrow.type_for_alias(kind.removeprefix("list ")))))
            else:
                fields.append((name, arrow.string() if kind in (JSON, _REDACTED) else arrow.type_for_alias(kind)))
        self._schema = arrow.schema(fields)
        append_privately(path).close()  # with its mode
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._columns = columns
        self._rows: list[tuple[Any, ...]] = []
        self._bytes = 0
        self.written = 0

    async def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of values by column name, and write a row group if there are enough. Values without a column are
        left out, and missing values are null.
        """
        for row in rows:
            cells: list[Any] = []
            for name, kind in self._columns.items():
                cell = row.get(name)
                if kind in (JSON, _REDACTED):
                    cell = typed_json_text(cell, f"the {name}")
                    cell = redact(cell) if kind == _REDACTED else cell
                cells.append(cell)
                self._bytes += 4 * len(cell) if is_list(cell) else len(cell) if isinstance(cell, str) else 8
            self._rows.append(tuple(cells))
        if len(self._rows) >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            await asyncio.to_thread(self._write)

    def close(self) -> None:
        self._write()
        self._writer.close()

    def _write(self) -> None:
        arrow, _ = arrow_modules()
        columns = zip(*self._rows, strict=True) if self._rows else [() for _ in self._columns]
        arrays = [arrow.array(values, kind) for values, kind in zip(columns, self._schema.types, strict=True)]
        self._writer.write_table(arrow.table(arrays, schema=self._schema))
        self.written += len(self._rows)
        self._rows, self._bytes = [], 0


@cache
def arrow_modules() -> tuple[Any, Any]:
    """Import and return `pyarrow` and `pyarrow.parquet`. Raise MissingExtra if they are not installed."""
    arrow = import_optional("pyarrow", extra="export", needed_by="a Parquet file")
    return arrow, import_optional("pyarrow.parquet", extra="export", needed_by="a Parquet file")
