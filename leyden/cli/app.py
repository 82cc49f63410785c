"""The commands by name, and everything that all of them share: help, errors, exit codes, logging.

A command's module is imported when `leyden` starts, so that every `--help` has its options. Modules of commands
therefore import nothing heavy (pydantic, rich, aiohttp) outside their functions.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import traceback
from typing import Annotated, Any, Literal

import typer
import typer.core
import typer.main

from leyden import __version__
from leyden._lib.extras import extension
from leyden.cli.compare import compare
from leyden.cli.control import extend, pause, resume, set_, stop
from leyden.cli.dashboard import dashboard
from leyden.cli.dataset import dataset
from leyden.cli.demo.command import demo
from leyden.cli.doctor import doctor
from leyden.cli.evaluate import evaluate
from leyden.cli.gateway import gateway
from leyden.cli.harness import harness_commands
from leyden.cli.init import init
from leyden.cli.learning import learning_commands
from leyden.cli.lr_range import lr_range
from leyden.cli.models import models_commands
from leyden.cli.note import note
from leyden.cli.output import (
    Coloured,
    OutputLost,
    echo,
    echo_json,
    echo_text,
    json_only,
    lost_output,
    open_standard_streams,
)
from leyden.cli.plot import plot
from leyden.cli.prompts import prompts_commands
from leyden.cli.replay import replay
from leyden.cli.report import report
from leyden.cli.rescore import rescore
from leyden.cli.resources import resources_commands
from leyden.cli.run import run
from leyden.cli.runs import runs
from leyden.cli.samples import samples
from leyden.cli.serve import serve
from leyden.cli.show import show
from leyden.cli.store import store, upgrade
from leyden.cli.store_export import export, import_
from leyden.cli.tasks import tasks_commands
from leyden.cli.workers import workers
from leyden.errors import ConfigError, LeydenError, MissingExtra

LogLevel = Literal["debug", "info", "warning", "error", "critical"]

_HELP = "Train agents, look at their runs, and serve what was learned.\n\n`leyden COMMAND -h` shows a command's options and examples."


class _Commands(typer.core.TyperGroup):
    """The commands. `rl` is loaded from leyden-compat only when called or listed, because it takes time to find."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "rl":
            with contextlib.suppress(MissingExtra):
                return typer.main.get_command(extension("commands", "rl", needed_by="leyden rl"))
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted(str(error)) from error


app = typer.Typer(
    cls=_Commands,
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="Train an agent on this machine, in a few minutes.")(demo)
app.command(short_help="Write a project that trains an agent.")(init)
app.command(short_help="Start a run from a file.")(run)
app.command(short_help="List runs, with their rewards.")(runs)
app.command(short_help="Show a run, what failed in it, or one rollout.")(show)
app.command(short_help="Draw the curves of runs.")(plot)
app.command(short_help="Compare runs: options, rewards, and the tasks that flipped.")(compare)
app.command(short_help="Name what is wrong with a run, and what to do.")(doctor)
app.command(short_help="Write a page that explains a run, or compares several.")(report)
app.command(short_help="Write a run's rollouts as a data set.")(dataset)
app.command(short_help="Score recorded rollouts again with another judge.")(rescore)
app.command(short_help="Show runs in a browser.")(dashboard)
app.command(short_help="Give a run a note, tags or another name.")(note)
app.command(short_help="End a run, and keep what it has finished.")(stop)
app.command(short_help="Let a run wait after its step.")(pause)
app.command(short_help="Let a paused run go on.")(resume)
app.command(short_help="Give a run more steps.")(extend)
app.command("set", short_help="Change an option of a run, such as its learning rate.")(set_)
app.command(short_help="Run a recorded rollout again, call by call.")(replay)
app.command("eval", short_help="Measure an agent, before and after training.")(evaluate)
app.command("lr-range", short_help="Try a few learning rates, and recommend one.")(lr_range)
app.command(short_help="Pass model calls on, and record them.")(gateway)
app.command(short_help="Serve released resources to applications.")(serve)
app.command(short_help="Show the workers of a store.")(workers)
app.command(short_help="Draw the recent history of a store's metrics.")(samples)
store_commands = typer.Typer(rich_markup_mode=None)
store_commands.callback(invoke_without_command=True)(store)
store_commands.command()(export)
store_commands.command("import")(import_)
store_commands.command()(upgrade)
app.add_typer(store_commands, name="store", short_help="Serve a store over HTTP, export or import it.")
app.add_typer(prompts_commands, name="prompts", short_help="Show the prompts that a prompt optimiser has tried.")
app.add_typer(
    resources_commands, name="resources", short_help="Show versions of resources, promote them, roll them back."
)
app.add_typer(models_commands, name="models", short_help="Get a pretrained model, read or write a GGUF file.")
app.add_typer(tasks_commands, name="tasks", short_help="Check folders of tasks before training on them.")
app.add_typer(harness_commands, name="harness", short_help="Show the coding agents that can be trained, and try one.")
app.add_typer(learning_commands, name="learning", short_help="Show and stop learning in production.")


@app.command(
    "rl",
    hidden=True,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def rl() -> None:
    """Say what brings the command, if leyden-compat is not installed."""
    extension("commands", "rl", needed_by="leyden rl")


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"leyden {__version__}")
        raise typer.Exit


@app.callback(help=_HELP)
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            envvar="LEYDEN_LOG",
            show_envvar=True,
            case_sensitive=False,
            help="The least severe log lines to show, on standard error; stands before the command.",
        ),
    ] = None,
) -> None:
    """Handle the options that stand before the command, and check what all commands need."""
    try:
        os.getcwd()  # noqa: PTH109 -- the check alone
    except FileNotFoundError:
        raise ConfigError("the working directory does not exist any more; change to another one") from None
    if log_level is not None:
        os.environ["LEYDEN_LOG"] = log_level  # `setup_logging` reads it, also in child processes


def main() -> None:
    """Run the command line.

    Exit code 2: the arguments are wrong. 1: an error, output that could not be written, or a command that found a
    failure. 130: Ctrl-C. 141: the reader of the output has ended. A `LeydenError` is shown in a line, another error
    with its traceback. With `--json`, standard output has nothing but JSON, and an error is an object there too.
    """
    if (trouble := open_standard_streams()) is not None:
        _show_error(trouble)
        sys.exit(1)
    if "--json" not in sys.argv:
        sys.exit(_run(as_json=False))
    with json_only():
        sys.exit(_run(as_json=True))


def _run(*, as_json: bool) -> int:
    """Run the command, print its error if it has one, and return the exit code."""
    try:
        code = app(standalone_mode=False, prog_name="leyden")
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (OutputLost, OSError) as error:
        if (status := lost_output(error)) is not None:
            return status
        failure: Exception = error
    except Exception as error:  # noqa: BLE001 -- the boundary: each kind of error is shown below
        failure = error
    try:
        return _show_failure(failure, as_json=as_json)
    except OutputLost as error:
        return lost_output(error) or 1


class _Interrupted(Exception):
    """Ctrl-C, which typer would turn into an exit code without a message."""


# click's UsageError, found through a subclass because versions of typer keep it in different places
_USAGE_ERRORS: Any = typer.BadParameter.__base__


def _show_failure(error: Any, *, as_json: bool) -> int:
    """Print an error on standard error, and as JSON if `as_json`. Return the exit code."""
    kind, message, code, remedy = type(error).__name__, str(error), 1, ""
    if isinstance(error, _USAGE_ERRORS):
        _show_usage_error(error)
        kind, message, code = "UsageError", _sentence(error), 2
        remedy = f"{error.ctx.command_path} --help" if error.ctx is not None else "leyden --help"
    elif isinstance(error, _Interrupted):
        kind, code = type(error.__cause__).__name__, 130
        echo(Coloured(f"leyden: {message}", "yellow") if message else "", err=True)
        message = message or "stopped by Ctrl-C"
    elif isinstance(error, typer.Abort):
        kind, message = "Aborted", "a question was not answered"
    elif isinstance(error, LeydenError):
        _show_error(message)
    else:
        traceback.print_exception(error)
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind, message = "Unexpected", f"{kind}: {message} ({last.filename}, line {last.lineno})"
        remedy = "see the traceback on standard error"
    if as_json:
        told = _REMEDY.search(message)
        remedy = told[1] if told else remedy
        echo_json({"error": {"kind": kind, "message": message, **({"remedy": remedy} if remedy else {})}})
    return code


_REMEDY = re.compile(
    r"(?:; |\. )((?:add|allow|ask|call|catch|change|check|choose|claim|continue|convert|copy|correct|create|decorate|define|"
    r"did you mean|export|give|import|increase|indent|install|it takes|join|keep|known|leave|let|look|lower|make|move|name|"
    r"open|pass|possible|put|raise|read|remove|rename|repeat|resume|return|run|save|say|scale|see|send|set|start|stop|take|"
    r"there (?:are|is)|train|try|unset|upgrade|use|wait|write|(?:it|its name|they) (?:can|must)|a \w+ needs)\b.*)$",
    re.IGNORECASE | re.DOTALL,
)
"""The end of a message that says what to do, which our messages put after the first semicolon or in a last sentence."""


def _show_error(message: str) -> None:
    echo_text(Coloured(f"leyden: {message}", "red"), err=True)


def _show_usage_error(error: Any) -> None:
    """Print a usage error and how the command is used; for a command without arguments, its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        echo_text(error.format_message(), err=True)
        return
    _show_error(_sentence(error))
    if error.ctx is not None:
        usage = " ".join(error.ctx.get_usage().split())
        echo(usage, err=True)
        echo(f"Try: {error.ctx.command_path} --help", err=True)


def _sentence(error: Any) -> str:
    """Return a usage error's message in lower case, with the value that was refused.

    For an unknown option, name the nearest option, or say that it belongs before the command.
    """
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        params: list[Any] = error.ctx.command.params if error.ctx else []
        known: list[str] = [name for param in params for name in param.opts if name.startswith("-")]
        if error.ctx and any(option in param.opts for param in error.ctx.find_root().command.params):
            return f"the option {option!r} stands before the command: leyden {option} ... {error.ctx.info_name}"
        nearest: list[str] = difflib.get_close_matches(str(option), known, n=1)
        possible = f"did you mean {nearest[0]!r}?" if nearest else f"possible: {', '.join(sorted(known))}"
        return f"there is no option {option!r}; {possible}"
    message: str = error.format_message().strip().replace("Value error, ", "").removesuffix(".")
    refused = getattr(error.__cause__, "errors", list[Any])()  # the cause may be pydantic's ValidationError
    given = f", got {refused[0]['input']!r}" if refused and "input" in refused[0] else ""
    return f"{message[:1].lower()}{message[1:]}{given}"
