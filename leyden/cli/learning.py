"""`leyden learning`: list the cycles of `ContinualLearning`, stop them, and allow them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from leyden.cli.output import AsJson, echo, echo_data, echo_json
from leyden.cli.store_options import DEFAULT_STORE, OperatorToken, StoreUrl, Who, Why, login, name_of, with_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from leyden.store import LightningStore
    from leyden.types import Release

learning_commands = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@learning_commands.callback()
def learning() -> None:
    """Show the cycles of continual learning and their releases, stop them, and allow them again.

    \b
    Examples:
      leyden learning list
      leyden learning stop --why "users complain"
      leyden learning allow --why "the prompt was repaired"
    """


@learning_commands.command("list")
def list_releases(
    store: StoreUrl = DEFAULT_STORE,
    token: OperatorToken = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 10,
    as_json: AsJson = False,
) -> None:
    """List cycles and releases, the newest first: state, version, times, and why.

    \b
    Examples:
      leyden learning list
      leyden learning list --limit 1 --json
    """
    from datetime import UTC, datetime

    from leyden.serving.continual import is_stopped

    def day(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")

    async def read(opened: LightningStore) -> None:
        """Print the releases, newest first, each with the reason of its last change."""
        rows = await opened.query_releases(sort_order="desc", limit=limit)
        if as_json:
            echo_json([row.model_dump(mode="json") for row in rows])
            return
        if await is_stopped(opened):
            echo("learning is stopped; `leyden learning allow` allows it again")
        if not rows:
            echo("no cycle and no release yet")
        for row in rows:
            records = await opened.query_audit(release_id=row.release_id, limit=1)
            why = f": {records[0].why}" if records and records[0].why else ""
            until = "" if row.deadline is None else f", until {day(row.deadline)}"
            echo(
                f"{row.release_id}  {row.state}  {name_of(row.canary_version)}  since {day(row.update_time)}{until}{why}"
            )

    with_store(store, token, read, read_only=True)


@learning_commands.command()
def stop(
    who: Who = None,
    why: Why = None,
    store: StoreUrl = DEFAULT_STORE,
    token: OperatorToken = None,
    as_json: AsJson = False,
) -> None:
    """Roll back or refuse every open release, end training, and let no cycle begin until `allow`.

    \b
    Examples:
      leyden learning stop --why "users complain"
    """
    from leyden.serving.continual import stop_learning

    async def end(opened: LightningStore) -> Sequence[Release]:
        return await stop_learning(opened, who=who or login(), why=why)

    rows = with_store(store, token, end)
    data = {"stopped": True, "releases": [row.model_dump(mode="json") for row in rows]}
    echo_data(as_json, data, *(f"{row.release_id} is {row.state}" for row in rows), "learning is stopped")


@learning_commands.command()
def allow(
    who: Who = None,
    why: Why = None,
    store: StoreUrl = DEFAULT_STORE,
    token: OperatorToken = None,
    as_json: AsJson = False,
) -> None:
    """Allow learning again after `leyden learning stop`.

    \b
    Examples:
      leyden learning allow --why "the prompt was repaired"
    """
    from leyden.serving.continual import allow_learning

    with_store(store, token, lambda opened: allow_learning(opened, who=who or login(), why=why))
    echo_data(as_json, {"stopped": False}, "learning is allowed")
