"""`leyden tasks`: check folders of tasks before an agent is trained on them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leyden.cli.output import AsJson, echo, echo_json

if TYPE_CHECKING:
    from leyden.execution.task_folders.check import CheckedTask

tasks_commands = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@tasks_commands.callback()
def tasks() -> None:
    """Check folders of tasks in Harbor's format.

    \b
    Example:
      leyden tasks check tasks
    """


@tasks_commands.command("check")
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A task, or a folder of tasks.")],
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Take the tasks with such names, as in 'boltons-*'.")
    ] = "*",
    concurrency: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Check that the empty agent fails each task, and that the reference solution passes, three times. Exit code 1: a
    task is bad.

    \b
    Examples:
      leyden tasks check tasks
      leyden tasks check tasks --only 'boltons-*' --json | jq '.[] | select(.causes != [])'
    """
    import asyncio

    from leyden.execution.task_folders.check import check_tasks
    from leyden.execution.task_folders.harbor import task_paths
    from leyden.training import ProgressBar

    paths = task_paths(folder, only)
    bad: list[bool] = []
    with ProgressBar(unit="tasks").job("checking") as bar:

        def report(found: CheckedTask) -> None:
            bad.append(bool(found.causes))
            for cause in found.causes[:1]:
                bar.tally.add_failure(cause)
            bar.report(len(bad), len(paths))

        bar.report(0, len(paths))
        found = asyncio.run(check_tasks(paths, concurrency=concurrency, report=report))
    if as_json:
        echo_json([asdict(each) for each in found])
    else:
        for each in found:
            for cause in each.causes:
                echo(f"{each.task}: {cause}")
        echo(f"{bad.count(False):,} of {len(bad):,} tasks are good")
    if any(bad):
        raise typer.Exit(1)
