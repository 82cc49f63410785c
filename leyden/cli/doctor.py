"""`leyden doctor`: what is wrong with a run, and what to do."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from leyden._lib.formatting import one_line
from leyden.cli.output import AsJson, Coloured, echo, echo_json, terminal


def doctor(
    run: Annotated[
        str, typer.Argument(help="Folder, name or id of a run, its beginning, latest, or the path or URL of a store.")
    ],
    live: Annotated[
        bool, typer.Option("--live", help="Also ask the servers and processes of a run that is running.")
    ] = False,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="Which run, of a store that holds several.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Name what is wrong with a run that is running, finished or crashed: cause, evidence and remedy.

    The likeliest root cause comes first. The exit code is 1 if something was found. Nothing is changed.

    \b
    Examples:
      leyden doctor latest
      leyden doctor latest --live
      leyden doctor .leyden/20260102-101500-ab12 --json | jq -r '.findings[0].remedy'
    """
    from dataclasses import asdict

    from leyden.cli.run_views import COLOURS, await_server
    from leyden.doctor import Evidence, diagnose
    from leyden.training.runs import open_run

    await_server(run)
    opened = open_run(run, run_id=run_id)
    found = diagnose(Evidence(opened, run), live=live)
    if as_json:
        findings = [{"rule": name, **asdict(each)} for name, each in found.findings.items()]
        echo_json({"run": opened.record.name, "state": opened.state, "findings": findings, "unread": found.unread})
    else:
        number = len(found.findings)
        title = "nothing wrong was found" if not number else f"{number} finding{'s' * (number > 1)}"
        echo(f"{opened.record.name} (", Coloured(opened.state, COLOURS[opened.state]), f"): {title}")
        for place, (name, each) in enumerate(found.findings.items(), start=1):
            colour = "red" if each.severity == "critical" else "yellow"
            echo("")
            _echo(f"{place}. ", f"{each.cause[:1].upper()}{each.cause[1:]} [{name}]", colour)
            for line in each.evidence:
                _echo("   - ", line)
            _echo("   ", each.remedy)
            if each.command is not None:
                echo(f"     {each.command}")
        for reason in found.unread:
            echo(f"not looked at: {reason}", err=True)
    if found.findings:
        raise typer.Exit(1)


def _echo(head: str, text: str, colour: str | None = None) -> None:
    """Print a text after a head, wrapped with the head's indentation."""
    for line in textwrap.wrap(one_line(text), max(20, min(100, terminal().width - len(head))), break_on_hyphens=False):
        echo(head, line if colour is None else Coloured(line, colour))
        head = " " * len(head)
