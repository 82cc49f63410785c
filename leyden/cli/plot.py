"""`leyden plot`: the curves of one or several runs, in the terminal or as a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from leyden.cli.output import AsJson, echo, echo_json, echo_text

if TYPE_CHECKING:
    from leyden.training.runs import RecordedRun
    from leyden.training.runs.chart import Series


def plot(
    run: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folder, name or id of a run, the beginning of a name or id, or latest."),
    ],
    metric: Annotated[str, typer.Option("-m", "--metric", help="The metric to draw.")] = "reward",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write an .svg or .png file instead.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=30, help="Columns; those of the terminal by default.", show_default=False)
    ] = None,
    height: Annotated[int | None, typer.Option(min=3, max=100, help="Lines of the drawing; 14 by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a metric of one or several runs over the iterations, of training and of validation.

    A running run can be drawn too. The legend says what differs between several runs: their options, and names that a
    person has chosen. SVG needs nothing; PNG needs matplotlib.

    \b
    Examples:
      leyden plot latest
      leyden plot latest --metric loss
      leyden plot 20260102-101500-ab12 20260102-114000-cd34 --output compared.svg
    """
    import math
    import shutil
    import sys

    from leyden._lib.formatting import is_on_terminal
    from leyden.cli.run_views import await_server
    from leyden.errors import ConfigError
    from leyden.training.runs import open_run
    from leyden.training.runs.chart import draw_file, draw_text
    from leyden.training.runs.run_options import labels_of

    if as_json and output is not None:
        raise ConfigError("--json prints the points, and --output writes a picture; give one of them")
    if (as_json or output is not None) and (width or height):
        raise ConfigError("--width and --height are for the drawing in a terminal; leave them out here")
    for each in run:
        await_server(each)
    opened = [open_run(each) for each in run]
    names = labels_of(opened) if len(opened) > 1 else [""]
    series = [each for one, name in zip(opened, names, strict=True) for each in _series_of(one, metric, name)]
    if not series:
        _refuse(opened, metric)
    if as_json:
        points = [
            {
                "name": each.name,
                "iterations": each.iterations,
                "values": [value if math.isfinite(value) else None for value in each.values],
            }
            for each in series
        ]
        echo_json(points, indent=None)
        return
    title = metric if len(opened) > 1 else f"{metric} of {opened[0].record.name}"
    if output is not None:
        draw_file(series, output, title=title)
        echo(str(output))
        return
    columns = width or min(100, shutil.get_terminal_size().columns if is_on_terminal(sys.stdout) else 80)
    echo(title if len(series) > 1 else f"{title}, {series[0].name}")
    echo_text("\n".join(draw_text(series, width=columns, height=height or 14)))
    for row in (row for one in opened for row in one.metrics() if "restored_to" in row.metrics):
        echo(f"iteration {row.iteration}: back to the weights after step {row.metrics['restored_to']}")


def _series_of(run: RecordedRun, metric: str, label: str) -> list[Series]:
    """Return a run's values of a metric, one series for each stage that has some.

    label: stands before the stage's name, to tell runs apart.
    """
    from leyden.training.runs.chart import Series

    prefix = f"{label}{',' if ' ' in label else ''} " if label else ""
    rows = run.metrics()
    found: list[Series] = []
    for stage in ("train", "val", "test"):
        points = [
            (row.iteration, float(value))
            for row in rows
            if row.stage == stage and isinstance(value := row.metrics.get(metric), int | float)
        ]
        if points:
            iterations, values = zip(*points, strict=True)
            found.append(Series(f"{prefix}{stage}", iterations, values))
    return found


def _refuse(runs: list[RecordedRun], metric: str) -> NoReturn:
    """Raise ConfigError that names the metrics of these runs, or the one with the nearest name."""
    import difflib

    from leyden.errors import ConfigError

    names = sorted({name for run in runs for row in run.metrics() for name in row.metrics})
    who = ", ".join(run.record.name for run in runs)
    if not names and any(run.state == "running" for run in runs):
        raise ConfigError(f"{who} has no metrics yet; wait for the first iteration")
    if not names:
        raise ConfigError(
            f"{who} ended without metrics, so there is nothing to draw; see it with `leyden show {runs[0].record.name}`"
        )
    nearest = difflib.get_close_matches(metric, names, n=1)
    raise ConfigError(
        f"{who} has no metric {metric!r}; "
        + (f"did you mean {nearest[0]!r}?" if nearest else f"there are: {', '.join(names)}")
    )
