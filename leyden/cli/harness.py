"""`leyden harness`: the coding agents of the command line that can be trained, and a check that one works here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leyden.cli.output import AsJson, echo, echo_json

_COLUMNS = ("name", "installer", "package", "version", "dialect", "program", "remarks", "unsupported")

harness_commands = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@harness_commands.callback()
def harness() -> None:
    """Show the coding agents of the command line that can be trained, and try one.

    \b
    Examples:
      leyden harness list
      leyden harness check pi
    """


@harness_commands.command("list")
def list_harnesses(as_json: AsJson = False) -> None:
    """List the harnesses, with the version that was tested, and why some cannot be used.

    \b
    Examples:
      leyden harness list
      leyden harness list --json
    """
    from leyden.errors import ConfigError
    from leyden.execution.harness.harness import harness_program, harness_programs
    from leyden.execution.harness.installed import find_program

    rows: list[dict[str, str | None]] = []
    for name in harness_programs():
        try:
            kind = harness_program(name)
        except ConfigError as error:  # of another distribution
            rows.append({**dict.fromkeys(_COLUMNS), "name": name, "unsupported": str(error)})
            continue
        try:
            program = None if kind.unsupported else str(find_program(kind))
        except ConfigError:
            program = None
        row = {"name": kind.name, "installer": kind.installer, "package": kind.package, "version": kind.version}
        rows.append(
            {
                **row,
                "dialect": kind.dialect,
                "program": program,
                "remarks": kind.remarks,
                "unsupported": kind.unsupported,
            }
        )
    if as_json:
        echo_json(rows)
        return
    for row in rows:
        state = "unsupported" if row["unsupported"] else "installed" if row["program"] else "-"
        echo(
            f"{row['name']:<15} {row['version'] or '-':<9} {state:<12} {row['unsupported'] or row['remarks'] or ''}".rstrip()
        )
    echo("`leyden harness check NAME` installs one and tries it.")


@harness_commands.command()
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of `leyden harness list`.")],
    program: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its command, if it is installed elsewhere; nothing is installed."),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="The time that it may take.")] = 180.0,
    as_json: AsJson = False,
) -> None:
    """Install a harness, run it once against a fake model, and show what was recorded.

    It is installed at the tested version, into a folder of its own ($LEYDEN_HARNESSES, or ~/.cache/leyden/harness). The
    exit code is 1 if it is not fit for training.

    \b
    Examples:
      leyden harness check pi
      leyden harness check claude-code --program ~/.local/bin/claude
    """
    import asyncio
    from dataclasses import asdict

    from leyden.errors import ConfigError
    from leyden.execution.harness import harness_program
    from leyden.execution.harness.check import check as run_check
    from leyden.execution.harness.installed import find_program, install, installed_version
    from leyden.training import ProgressBar

    kind = harness_program(name)
    if kind.unsupported:
        raise ConfigError(f"the harness {name!r} cannot be used: {kind.unsupported}")
    if program is not None and not program.exists():
        raise ConfigError(f"--program is {str(program)!r}, which does not exist")
    with ProgressBar().job("looking for it") as bar:
        if program is None:
            try:
                program = find_program(kind)
            except ConfigError:
                bar.begin_stage("installing")
                echo(f"installing {kind.package} {kind.version} by {kind.installer} ...", err=True)
                program = install(kind)
        version = installed_version(kind, program)
        bar.begin_stage(f"trying {name}")
        checked = asyncio.run(run_check(kind, program, timeout_seconds=timeout))
    if as_json:
        row = {"name": name, "program": str(program), "version": version, "tested_version": kind.version}
        echo_json({**row, **asdict(checked), "trouble": checked.trouble or None})
    else:
        other = "" if version == kind.version else f"; {kind.version} was tested"
        echo(f"program     {program}")
        echo(f"version     {version or 'unknown'}{other}")
        for number, call in enumerate(checked.calls, 1):
            why = call["error"] or call["refused"]
            tokens = f"{call['prompt_tokens']:,} + {call['response_tokens']:,} tokens, exact"
            echo(f"call {number:<6} {tokens if why is None else why}")
        echo(f"turns       {checked.merged} of {checked.continued} continue earlier tokens")
        for reason in checked.splits:
            echo(f"            {reason}")
        if checked.foreign_spans:
            echo(f"spans       {checked.foreign_spans:,} of the program's own")
        echo(f"result      {checked.trouble or 'fit for training'}")
        if checked.trouble and checked.output:
            echo(f"its output ends:\n{checked.output}")
    if checked.trouble:
        raise typer.Exit(1)
