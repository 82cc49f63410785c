"""Import the releases of an export into a new store (`import_parquet`).

It reads resources with all versions, labels, releases, the audit log and feedback. Rollouts,
attempts, spans, runs and metrics stay in the files, where DuckDB or pandas read them. Of each live
rollout, the new store gets the version and the arm, which late feedback needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from leyden.errors import ConfigError
from leyden.store.base import LightningStore
from leyden.store.export import arrow_modules
from leyden.store.sql.body.restoring import Restored
from leyden.store.sql.store import SqlLightningStore
from leyden.types import AuditRecord, Feedback, Label, Release, ResourcesUpdate
from leyden.utils.text import fault_reason, shown

M = TypeVar("M", bound=BaseModel)

_JSON: dict[type[BaseModel], tuple[str, ...]] = {
    ResourcesUpdate: ("resources", "parent"),
    Release: ("from_version", "canary_version", "details"),
    AuditRecord: ("before", "after"),
    Feedback: ("value",),
    Label: (),
}
"""The columns that are JSON text."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The row counts of a finished import."""

    rows: Mapping[str, int]
    """The number of rows by the name of the file without `.parquet`."""


async def import_parquet(store: LightningStore, directory: str | Path) -> Imported:
    """Add the resources, labels, releases, audit log and feedback of an export, in one transaction.

    Times and the order are kept; sequence ids are assigned anew, from 1.

    store: a file, a database or memory, without resources, feedback and releases.
    directory: one that `leyden store export` made.
    Raise ConfigError for a client of a server, for a store that holds any of these, for files that
    are missing or do not fit, and if pyarrow is not installed. Nothing is added then.
    """
    if not isinstance(store, SqlLightningStore):
        raise ConfigError(
            f"cannot import into {store.url} through its server; stop the server, and give the file or the database behind it"
        )
    directory = Path(directory)
    restored = Restored(
        resources=_items(directory / "resources.parquet", ResourcesUpdate),
        labels=_items(directory / "labels.parquet", Label),
        releases=_items(directory / "releases.parquet", Release),
        audit=_items(directory / "audit.parquet", AuditRecord),
        feedback=_items(directory / "feedback.parquet", Feedback),
        served=[
            (row["rollout_id"], row["resources_id"], row["resources_version"], row["arm"])
            for row in _rows(
                directory / "rollouts.parquet", ["rollout_id", "mode", "resources_id", "resources_version", "arm"]
            )
            if row["mode"] == "live"
        ],
    )
    await store.restore(restored)
    names = ("resources", "labels", "releases", "audit", "feedback")
    return Imported({name: len(getattr(restored, name)) for name in names})


def _items(path: Path, model: type[M]) -> list[M]:
    """Return the rows of one file as objects of `model`. Raise ConfigError for a bad row."""
    columns = _JSON[model]
    try:
        return [
            model.model_validate({**row, **{name: json.loads(row[name], parse_constant=_refuse) for name in columns}})
            for row in _rows(path, list(model.model_fields))
        ]
    except (ValidationError, ValueError, TypeError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))} is {shown(first['input'])}: {fault_reason(first)}"
        raise ConfigError(
            f"{path} has a row that is no {model.__name__}: {reason}; give a directory that `leyden store export` made"
        ) from error


def _refuse(constant: str) -> NoReturn:
    """Raise ValueError for NaN and infinity, which Python's parser would accept."""
    raise ValueError(f"{constant} is no JSON value")


def _rows(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as dicts with these columns.

    Raise ConfigError if the file cannot be read or lacks one of the columns.
    """
    arrow, parquet = arrow_modules()
    try:
        file = parquet.ParquetFile(path)
    except (OSError, arrow.ArrowInvalid) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; give a directory that `leyden store export` made"
        ) from error
    with file:
        if missing := set(columns) - set(file.schema_arrow.names):
            raise ConfigError(
                f"{path} lacks the columns {', '.join(sorted(missing))}; was it made by an older version?"
            )
        for batch in file.iter_batches(columns=columns):
            yield from batch.to_pylist()
