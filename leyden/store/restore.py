"""Import the releases of an export into a new store (`import_parquet`).

It reads resources with all versions, labels, releases, the audit log and feedback. Rollouts, attempts, spans, runs and
metrics stay in the files, where DuckDB or pandas read them. Of each live rollout, the new store gets the version and
the arm, which late feedback needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, Field, ValidationError

from leyden._lib.extras import import_optional
from leyden._lib.host.http import MAX_BODY_BYTES
from leyden._lib.json import check_json_work
from leyden._lib.text import fault_reason, shown
from leyden.errors import ConfigError
from leyden.store.base import LightningStore
from leyden.store.export import JSON, arrow_modules, columns_of
from leyden.store.sql.body.restoring import Restored
from leyden.store.sql.sql_store import SqlLightningStore
from leyden.types import AuditRecord, Feedback, Label, Release, ResourcesUpdate
from leyden.types.checks import check_audit, check_feedback, check_id, check_label, check_release, check_version


class _Rollout(BaseModel):
    """The columns of a rollout that an import reads."""

    rollout_id: str
    mode: str | None
    resources_id: str | None
    resources_version: int | None = Field(ge=1, lt=2**63)
    arm: str | None


def _check_rollout(rollout: _Rollout) -> None:
    check_id("rollout_id", rollout.rollout_id)
    check_id("resources_id", rollout.resources_id)
    check_id("arm", rollout.arm)


_FILES: dict[str, tuple[type[BaseModel], tuple[str, ...], Callable[[Any], object]]] = {
    "resources": (ResourcesUpdate, ("resources_id", "version"), check_version),
    "labels": (Label, ("label",), check_label),
    "releases": (Release, ("release_id",), check_release),
    "audit": (AuditRecord, (), check_audit),
    "feedback": (Feedback, ("feedback_id",), check_feedback),
    "rollouts": (_Rollout, ("rollout_id",), _check_rollout),
}
"""The model of the rows of each file, the columns that no two rows share, and the check that every way into a store
makes."""
_MAX_CHUNK_BYTES = 2**30
"""The most bytes of one column in one row group. An export writes row groups of 8 MiB."""
_MAX_BYTES = 2**30
"""The most bytes of text in one file, all of which an import holds in memory."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The row counts of a finished import."""

    rows: Mapping[str, int]
    """The number of rows by the name of the file without `.parquet`."""


async def import_parquet(store: LightningStore, directory: str | Path) -> Imported:
    """Add the resources, labels, releases, audit log and feedback of an export, in one transaction.

    Times and the order are kept; sequence ids start again at 1.

    store: a file, a database or memory, without resources, feedback and releases.
    directory: one that `leyden store export` made.
    Raise ConfigError for a client of a server, for a store that holds any of these, for files that are missing or do
    not fit, and if pyarrow is not installed. Nothing is added then.
    """
    if not isinstance(store, SqlLightningStore):
        raise ConfigError(
            f"cannot import into {store.url} through its server; stop the server, and give the file or the database behind it"
        )
    directory = Path(directory)
    rows = {name: _items(directory / f"{name}.parquet", *of) for name, of in _FILES.items()}
    restored = Restored(
        served=[
            (live.rollout_id, live.resources_id, live.resources_version, live.arm)
            for live in rows.pop("rollouts")
            if live.mode == "live" and live.resources_id is not None and live.resources_version is not None
        ],
        **rows,
    )
    versions = {(row.resources_id, row.version) for row in restored.resources}
    for number, label in enumerate(restored.labels, 1):
        if (label.resources_id, label.version) not in versions:
            raise ConfigError(
                f"{directory / 'labels.parquet'}, row {number}: label {label.label!r} is on version {label.version} of "
                f"{label.resources_id!r}, which resources.parquet lacks; give a directory that `leyden store export` made"
            )
    await store.restore(restored)
    return Imported({name: len(items) for name, items in rows.items()})


def _items(path: Path, model: type[BaseModel], keys: tuple[str, ...], check: Callable[[Any], object]) -> list[Any]:
    """Return one file's rows as objects of `model`. A ConfigError names the row and column that no store takes."""
    columns = columns_of(model)
    items: list[Any] = []
    seen: set[tuple[Any, ...]] = set()
    for number, row in enumerate(_rows(path, list(columns)), 1):
        column = ""
        try:
            for column in (name for name, kind in columns.items() if kind == JSON):
                cell = row[column]
                check_json_work(cell.encode() if isinstance(cell, str) else b"")
                row[column] = json.loads(cell, parse_constant=_refuse)
            column = ""
            items.append(model.model_validate(row))
            check(items[-1])
            key = tuple(row[name] for name in keys)
            if keys and key in seen:
                raise ValueError(f"an earlier row has the same {' and '.join(keys)}, {', '.join(map(repr, key))}")
            seen.add(key)
        except (ValidationError, ValueError, TypeError) as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False)[0]
                column = str(first["loc"][0]) if first["loc"] else ""
                reason = f"{'.'.join(map(str, first['loc']))} is {shown(first['input'])}: {fault_reason(first)}"
            where = f"row {number}" + (f", column {column}" if column else "")
            raise ConfigError(
                f"{path}, {where}, is no {model.__name__.strip('_')}: {reason}; give a directory that `leyden store export` made"
            ) from error
    return items


def _refuse(constant: str) -> NoReturn:
    """Raise ValueError for NaN and infinity, which Python's parser would accept."""
    raise ValueError(f"{constant} is no JSON value")


def _rows(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as dicts with these columns.

    Raise ConfigError if the file cannot be read or lacks one of the columns.
    """
    arrow, parquet = arrow_modules()
    try:
        schema = parquet.read_schema(path)
        names = schema.names
        for name in set(names) & set(columns):
            if arrow.types.is_nested(schema.field(name).type):
                raise ConfigError(f"{path}, column {name}, has the type {schema.field(name).type}, not one value a row")
        # A text that many rows share is unpacked once, however many they are.
        file = parquet.ParquetFile(path, read_dictionary=[name for name in columns if name in names])
    except (OSError, arrow.ArrowInvalid) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; give a directory that `leyden store export` made"
        ) from error
    with file:
        if missing := set(columns) - set(names):
            raise ConfigError(
                f"{path} lacks the columns {', '.join(sorted(missing))}; was it made by an older version?"
            )
        for group in range(file.metadata.num_row_groups):
            for index in range(file.metadata.row_group(group).num_columns):
                column = file.metadata.row_group(group).column(index)
                if column.total_uncompressed_size > _MAX_CHUNK_BYTES:
                    raise ConfigError(
                        f"{path}, column {column.path_in_schema}, unpacks to {column.total_uncompressed_size:,} bytes in one "
                        f"row group, and {_MAX_CHUNK_BYTES:,} is the most"
                    )
        number = total = 0
        for batch in file.iter_batches(columns=columns):
            lengths = {name: _lengths(batch.column(name)) for name in columns}
            for index in range(batch.num_rows):
                number += 1
                for name, sizes in lengths.items():
                    size = sizes[index].as_py() or 0 if sizes is not None else 0
                    total += size
                    if size > MAX_BODY_BYTES:
                        raise ConfigError(
                            f"{path}, row {number}, column {name}, has {size:,} bytes, and {MAX_BODY_BYTES:,} is the most"
                        )
                if total > _MAX_BYTES:
                    raise ConfigError(
                        f"{path} unpacks to more than {_MAX_BYTES:,} bytes by row {number}, the most of one import"
                    )
                yield {name: batch.column(name)[index].as_py() for name in columns}


def _lengths(column: Any) -> Any:
    """Return the byte length of each text of a column, without making the texts; None for a column of another type."""
    arrow, _ = arrow_modules()
    texts = column.dictionary if arrow.types.is_dictionary(column.type) else column
    if not (arrow.types.is_string(texts.type) or arrow.types.is_large_string(texts.type)):
        return None
    compute = import_optional("pyarrow.compute", extra="export", needed_by="a Parquet file")
    lengths = compute.binary_length(texts)
    return lengths.take(column.indices) if texts is not column else lengths
