"""`leyden runs --prune`: say what removing runs would free, ask, and remove them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from leyden.cli.output import Column, echo, echo_json, echo_table

if TYPE_CHECKING:
    from leyden.training.runs.pruning import Pruned


def prune(chosen: list[Pruned], damaged: list[str], *, yes: bool, as_json: bool) -> None:
    """Print what would be removed and what stays, ask unless `yes`, and remove.

    as_json: print one object; without `yes`, nothing is removed.
    A run that cannot be removed does not keep the others; the exit code is then 1.
    """
    from leyden._lib.formatting import is_on_terminal
    from leyden.errors import ConfigError

    going = [each for each in chosen if each.needed is None]
    if not as_json:
        _show(chosen, going)
        for trouble in damaged:
            echo(f"a run is left out: {trouble}", err=True)
        if not going:
            return
        if not yes and not is_on_terminal(sys.stdin):
            raise ConfigError("nothing was removed, because nobody can be asked; add --yes")
        if not yes and not typer.confirm(f"remove {len(going)} run{'s' * (len(going) > 1)}?"):
            echo("nothing was removed")
            return
    removed, failed = _remove(going) if yes or not as_json else ([], {})
    freed = sum(sum(each.sizes.values()) for each in removed)
    if as_json:
        runs = [{"name": each.name, "directory": str(each.directory), "bytes": each.sizes} for each in going]
        needed = {str(each.directory): each.needed for each in chosen if each.needed}
        data: dict[str, Any] = {"would_remove" if not yes else "chosen": runs, "stay": needed, "damaged": damaged}
        echo_json(
            {**data, "removed": [str(each.directory) for each in removed], "failed": failed, "freed_bytes": freed}
        )
    else:
        from leyden._lib.formatting import size

        echo(f"removed {len(removed)} run{'s' * (len(removed) != 1)}, {size(freed)}")
    if failed:
        raise typer.Exit(1)


def _show(chosen: list[Pruned], going: list[Pruned]) -> None:
    from leyden._lib.formatting import size
    from leyden.cli.run_views import age

    if going:
        total = sum(sum(each.sizes.values()) for each in going)
        echo(f"{len(going)} run{'s' * (len(going) > 1)} can be removed, {size(total)}:")
        parts = ("checkpoints", "model", "store", "records")
        columns = [
            Column("name", [_name(each) for each in going]),
            Column("state", [each.run.state for each in going]),
            Column("started", [age(each.run.record.start_time) for each in going], 5, right=True),
            *(
                Column(part, [size(each.sizes[part]) for each in going], 4 - n, right=True)
                for n, part in enumerate(parts)
            ),
            Column("all", [size(sum(each.sizes.values())) for each in going], right=True),
        ]
        echo_table(columns)
    for each in chosen:
        if each.needed is not None:
            echo(f"{_name(each)} stays: {each.needed}")
    if not going:
        echo("no run can be removed")


def _name(pruned: Pruned) -> str:
    folder = pruned.directory.name
    return folder if pruned.name == folder else f"{pruned.name} ({folder})"


def _remove(going: list[Pruned]) -> tuple[list[Pruned], dict[str, str]]:
    """Remove runs. Return those that are removed, and why others are not, by folder."""
    from leyden.errors import LeydenError
    from leyden.training.runs.pruning import remove_run

    removed: list[Pruned] = []
    failed: dict[str, str] = {}
    for each in going:
        try:
            left = remove_run(each.run)
        except (LeydenError, OSError) as error:
            failed[str(each.directory)] = str(error)
            echo(f"{_name(each)} is not removed: {error}", err=True)
        except KeyboardInterrupt:
            part = f"a part of {_name(each)}, which is still listed; prune again to remove the rest"
            raise KeyboardInterrupt(f"{len(removed)} of {len(going)} runs are removed, and {part}") from None
        else:
            removed.append(each)
            if left:
                echo(f"{each.directory} keeps files that are not the run's: {', '.join(left)}", err=True)
    return removed, failed
