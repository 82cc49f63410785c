"""`leyden report`: a run, or several, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leyden.cli.output import AsJson, echo, echo_json


def report(
    run: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folder, name or id of a run, its beginning, latest, or a store."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write the page: report.html in the run's folder by default, here for several runs.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page that explains a run: whether it learned, what is wrong, its curves, and its rollouts.

    The page is one file of at most 1 MB, without scripts, that loads nothing. Several runs are compared with the first
    one. Each `fit` writes the page of its run at its end, unless report=False.

    \b
    Examples:
      leyden report latest
      leyden report baseline slow fast --output three.html
      leyden report latest --json | jq '.runs[0].learned'
    """
    from leyden.cli.run_views import await_server
    from leyden.errors import ConfigError
    from leyden.report import report_data, write_report
    from leyden.training.runs import open_run
    from leyden.training.runs.folder import REPORT

    if as_json and output is not None:
        raise ConfigError("--json prints the data of the page to standard output; leave --output out")
    for each in run:
        await_server(each)
    opened = [open_run(each) for each in run]
    if as_json:
        echo_json(report_data(opened, sources=run))
        return
    folder = opened[0].directory if len(opened) == 1 else None
    path = output or (folder or Path()) / REPORT
    write_report(opened, path, sources=run, replace=output is not None)
    echo(path)
