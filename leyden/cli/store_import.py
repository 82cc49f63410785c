"""`leyden store import`: copy resources, labels, releases and feedback of an export to a new store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leyden.cli.output import echo

if TYPE_CHECKING:
    from leyden.store.restore import Imported


def import_(
    directory: Annotated[Path, typer.Argument(help="A directory that `leyden store export` made.")],
    url: Annotated[str, typer.Option(help="The new store: a file, or postgresql://... .")] = ".leyden/store.db",
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
    echo(f"{url}: " + ", ".join(f"{count:,} {name}" for name, count in imported.rows.items()))


async def _import(url: str, directory: Path) -> Imported:
    from leyden.store import open_store
    from leyden.store.restore import import_parquet

    async with open_store(url) as store:
        return await import_parquet(store, directory)
