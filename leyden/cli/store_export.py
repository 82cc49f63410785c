"""`leyden store export` and `import`: write a store's content as Parquet files, and copy parts of it to a new store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from leyden.cli.output import AsJson, counting, echo_data
from leyden.cli.store_options import WAIT_SECONDS, ServerToken
from leyden.errors import ConfigError, redact

if TYPE_CHECKING:
    from leyden.store.export import Exported
    from leyden.store.restore import Imported


def export(
    out_dir: Annotated[Path, typer.Argument(help="The directory to make.")],
    url: Annotated[
        str, typer.Option(help="A file, also one that is in use; postgresql://...; or http://host:port of a server.")
    ] = ".leyden/store.db",
    token: ServerToken = None,
    status: Annotated[
        list[str] | None, typer.Option(help="Only rollouts of this status; may be given several times.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write rollouts, spans, resources, runs, feedback and releases to Parquet files.

    \b
    Examples:
      leyden store export --url .leyden/20260102-101500-ab12/store.sqlite out
      leyden store export --url http://127.0.0.1:4747 --status succeeded out
      duckdb -c "SELECT mode, avg(reward) FROM 'out/rollouts.parquet' GROUP BY mode"
    """
    import asyncio

    from leyden.types import RolloutStatus

    for name in status or ():
        if name not in get_args(RolloutStatus):
            raise ConfigError(f"--status {name} is none; possible: {', '.join(get_args(RolloutStatus))}")
    exported = asyncio.run(_export(url, token, out_dir, status))
    counts = ", ".join(f"{count:,} {name}" for name, count in exported.rows.items())
    size = sum(file.stat().st_size for file in exported.directory.iterdir())
    data = {"folder": exported.directory, "rows": exported.rows, "bytes": size}
    echo_data(as_json, data, f"{exported.directory}: {counts}; {size / 1e6:,.1f} MB")


async def _export(url: str, token: str | None, directory: Path, status: Any) -> Exported:
    """Export a store to Parquet files in `directory`, with a progress bar on a terminal."""
    from leyden.cli.connecting import store_to_read
    from leyden.store.export import export_parquet

    async with store_to_read(url, token, WAIT_SECONDS) as store:
        with counting("rollouts") as show:
            return await export_parquet(store, directory, status_in=status, on_progress=show)


def import_(
    directory: Annotated[Path, typer.Argument(help="A directory that `leyden store export` made.")],
    url: Annotated[str, typer.Option(help="The new store: a file, or postgresql://... .")] = ".leyden/store.db",
    as_json: AsJson = False,
) -> None:
    """Copy resources, labels, releases, the audit log and feedback of an export to a new store.

    Rollouts and spans stay in the Parquet files.

    \b
    Examples:
      leyden store export --url old.db out
      leyden store import --url new.db out
      leyden store import --url postgresql://leyden@db/agents out
    """
    import asyncio

    imported = asyncio.run(_import(url, directory))
    counts = ", ".join(f"{count:,} {name}" for name, count in imported.rows.items())
    echo_data(as_json, {"store": redact(url), "rows": imported.rows}, f"{redact(url)}: {counts}")


async def _import(url: str, directory: Path) -> Imported:
    from leyden.store import open_store
    from leyden.store.restore import import_parquet

    async with open_store(url) as store:
        return await import_parquet(store, directory)
