"""`leyden runs`: the runs in a folder or a store, one line each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leyden.cli.output import AsJson, cell, echo, echo_json, terminal

if TYPE_CHECKING:
    from leyden.training.runs import RecordedRun


def runs(
    source: Annotated[
        str | None, typer.Argument(help="The store whose runs to list: http://host:port, postgresql://..., or a file.")
    ] = None,
    directory: Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="The folder that the runs are in.")] = Path(
        ".leyden"
    ),
    limit: Annotated[
        int, typer.Option("-n", "--limit", min=1, help="The most runs to show; the newest come first.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """List runs with their algorithm, state and reward.

    A run is `running`, `succeeded`, `failed`, `stopped` (by Ctrl-C or a limit) or `crashed` (its process is gone). The
    time that it took does not include pauses before a resume. The size is that of its folder.

    \b
    Examples:
      leyden runs
      leyden runs --dir experiments/.leyden -n 5
      leyden runs http://127.0.0.1:4747
      leyden runs --json | jq -r '.[] | select(.state == "failed") | .name'
    """

    from leyden.cli.run_views import as_data, open_runs
    from leyden.errors import ConfigError, LeydenError
    from leyden.training.runs.recorded_runs import find_runs

    damaged: list[str] = []
    if source is None and not directory.exists():
        if directory != Path(".leyden"):
            raise ConfigError(f"--dir {directory}: there is no such folder")
        found, total = [], 0
    elif source is None:
        listed, damaged = find_runs(directory)
        found, total = listed[:limit], len(listed)
    else:
        found, total = open_runs(source, limit=limit)
    readable: list[tuple[RecordedRun, dict[str, Any]]] = []
    for run in found:
        try:
            readable.append((run, as_data(run)))
        except LeydenError as error:
            damaged.append(f"{run.directory or run.record.name}: {error}")
    if as_json:
        echo_json([data for _, data in readable])
    elif not found and not damaged:
        echo(f"no runs in {source or directory}; a trainer's fit() makes one, and so does leyden demo")
    else:
        _show(readable)
        if total > len(found):
            echo(f"{total - len(found):,} older runs are not shown; use --limit", err=True)
    for trouble in damaged:
        echo(f"a run is left out: {trouble}", err=True)


def _show(found: list[tuple[RecordedRun, dict[str, Any]]]) -> None:
    """Print the runs as a table, with the course of the reward as a sparkline."""
    from rich.table import Table

    from leyden._lib.formatting import duration, size
    from leyden.cli.run_views import COLOURS, age, reward_text
    from leyden.training.runs.chart import sparkline

    table = Table(box=None, pad_edge=False)
    for column in ("name", "kind", "algorithm", "model", "state"):
        table.add_column(column, no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    for column in ("reward", ""):
        table.add_column(column, no_wrap=True)
    for column in ("started", "took", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    for run, data in found:
        folder = "" if run.directory is None else run.directory.name
        reward = run.summary_metrics().reward
        table.add_row(
            cell(data["name"] + (f" ({folder})" if folder not in ("", data["name"]) else "")),
            cell(data["kind"]),
            cell((data["algorithm"] or "-").rpartition(".")[2]),
            cell(Path(data["model"]).name if data["model"] else "-"),
            f"[{COLOURS[run.state]}]{run.state}[/]",
            str(data["iterations"] or "-"),
            reward_text(reward),
            sparkline(reward.values, 12) if reward is not None else "",
            age(data["start_time"]),
            duration(data["seconds"]),
            "-" if data["bytes"] is None else size(sum(data["bytes"].values())),
        )
    terminal().print(table)
