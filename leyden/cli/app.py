"""The sub-commands by name, and what every one of them shares: errors as one line, exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from leyden import __version__
from leyden.cli.demo import demo
from leyden.cli.gateway import gateway
from leyden.cli.rl import rl_commands
from leyden.cli.store import store
from leyden.cli.store_export import export
from leyden.cli.workers import workers
from leyden.errors import LeydenError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Train any agent.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(gateway)
app.command()(workers)
store_commands = typer.Typer(rich_markup_mode=None)
store_commands.callback(invoke_without_command=True)(store)
store_commands.command()(export)
app.add_typer(store_commands, name="store")
app.add_typer(rl_commands, name="rl")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"leyden {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train any agent."""


def main() -> None:
    """Run the command line. Errors that Leyden foresees are shown without a traceback, exit code 1; Ctrl-C exits with 130."""
    console = Console(stderr=True, highlight=False)
    try:
        app()
    except LeydenError as error:
        console.print(f"leyden: {error}", style="red", soft_wrap=True, markup=False)
        sys.exit(1)
