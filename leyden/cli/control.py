"""`leyden stop`, `pause`, `resume`, `extend` and `set`: steer a run that works, through its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leyden.cli.output import AsJson, echo, echo_json

if TYPE_CHECKING:
    from leyden.training.runs.control import ControlLine

_POLL_SECONDS = 0.1

RunArgument = Annotated[str, typer.Argument(help="Folder, name or id of a run, its beginning, or latest.")]
WaitOption = Annotated[float, typer.Option("--wait", min=0, metavar="SECONDS", help="How long to wait for the answer.")]


def stop(
    run: RunArgument,
    after_step: Annotated[bool, typer.Option("--after-step", help="Let the step under way end first.")] = False,
    wait: WaitOption = 10.0,
    as_json: AsJson = False,
) -> None:
    """End a run as Ctrl-C does. All that it has finished is kept, and it can be continued.

    A run in a simulator always ends after the stage under way.

    \b
    Examples:
      leyden stop latest
      leyden stop first --after-step --wait 600
    """
    from leyden.training.runs.control import AFTER_STEP

    _steer(run, [("stop", None, AFTER_STEP if after_step else None)], wait, as_json=as_json)


def pause(run: RunArgument, wait: WaitOption = 10.0, as_json: AsJson = False) -> None:
    """Let a run wait after the step under way, with its runners, its model and its store.

    It stays paused if it is killed and continued, until `leyden resume`.

    \b
    Examples:
      leyden pause latest
      leyden pause first --wait 600
    """
    _steer(run, [("pause", None, None)], wait, as_json=as_json)


def resume(run: RunArgument, wait: WaitOption = 10.0, as_json: AsJson = False) -> None:
    """Let a paused run go on. One that has ended is continued by `leyden run --from RUN --resume`, or by its program.

    \b
    Examples:
      leyden resume latest
      leyden resume first --json
    """
    _steer(run, [("resume", None, None)], wait, as_json=as_json)


def extend(
    run: RunArgument,
    steps: Annotated[int | None, typer.Option("--steps", min=1, metavar="N", help="How many more steps.")] = None,
    to: Annotated[int | None, typer.Option("--to", min=1, metavar="N", help="How many steps in all.")] = None,
    wait: WaitOption = 10.0,
    as_json: AsJson = False,
) -> None:
    """Give a run more steps: n_steps of a policy, beam_rounds of APO, max_steps of GEPA, n_epochs of Baseline,
    max_iters of others.

    \b
    Examples:
      leyden extend latest --steps 50
      leyden extend first --to 200
    """
    from leyden.errors import ConfigError

    if (steps is None) == (to is None):
        raise ConfigError("say how far: give --steps N for N more, or --to N for N in all, and one of them")
    value = {"to": to} if steps is None else {"steps": steps}
    _steer(run, [("extend", None, value)], wait, as_json=as_json)


def set_(
    run: RunArgument,
    options: Annotated[list[str], typer.Argument(metavar="OPTION=VALUE...", help="Options by their paths.")],
    wait: WaitOption = 10.0,
    as_json: AsJson = False,
) -> None:
    """Change options of a run from its next step on, such as its learning rate. A wrong option names the possible ones.

    \b
    Examples:
      leyden set latest optim.learning_rate=3e-4
      leyden set first temperature=0.8 loss.kl_coefficient=0.01
      leyden set latest trainer.val_every_n_iters=5
    """
    _steer(run, [("set", *_setting(option)) for option in options], wait, as_json=as_json)


def _setting(text: str) -> tuple[str, Any]:
    """Return the path and the value of `PATH=VALUE`. Raise ConfigError for another form, and for what JSON lacks."""
    import json

    from leyden._lib.config_file import parse_value
    from leyden.errors import ConfigError
    from leyden.training.runs.run_description import hides, without_secrets

    path, equals, given = text.partition("=")
    path, given = path.strip(), given.strip()
    if hides(path):
        raise ConfigError(f"{path} is a secret, which the run's history would show; start a run with it")
    if not equals or not path or not given:
        raise ConfigError(f"{text!r} is no OPTION=VALUE, such as optim.learning_rate=3e-4")
    value = parse_value(given, name=f"the value of {path}")
    try:
        json.dumps(value, allow_nan=False)  # as a line of JSON has it, where NaN would become null
    except (ValueError, TypeError):
        raise ConfigError(
            f"{path} is {given}, which is no finite number, and no text, list or mapping of JSON"
        ) from None
    return path, without_secrets(value)


def _steer(run: str, requests: list[tuple[str, str | None, Any]], wait: float, *, as_json: bool) -> None:
    """Ask a run, wait for its answers, and print them. Raise ConfigError with the reason for one that it refused."""
    from leyden.cli.store_options import login
    from leyden.errors import ConfigError
    from leyden.training.runs.control import ask, in_words

    directory = _directory_of(run)
    asked = [ask(directory, command, by=login(), path=path, value=value) for command, path, value in requests]
    answers, state = _await_answers(directory, asked, wait)
    if as_json:
        from dataclasses import asdict

        data = [{**asdict(answer), "run": str(directory), "run_state": state} for answer in answers]
        echo_json(data[0] if len(data) == 1 else data)
    refused = [answer for answer in answers if answer.state == "refused"]
    for answer in answers if not as_json else []:
        if answer.state == "done":
            echo(in_words(answer) if answer.command != "stop" or state != "running" else "the run is about to end")
        elif answer.state == "asked" and state == "running":
            echo(
                f"{answer.command}: asked; the run answers at the end of its step, and leyden show {run} has the answer"
            )
        elif answer.command == "stop":
            echo("stopped before it had begun; nothing is left of it" if not directory.exists() else f"it has {state}")
        elif answer.state == "asked":
            echo(f"{answer.command}: the run has ended ({state}) without an answer; a continued run takes what is left")
    if refused and as_json:
        raise typer.Exit(1)
    if refused:
        raise ConfigError("; ".join(in_words(answer) for answer in refused))


def _directory_of(run: str) -> Path:
    from leyden.errors import ConfigError
    from leyden.training.runs import open_run

    directory = None if "://" in run else open_run(run).directory
    if directory is None:
        raise ConfigError(
            f"{run} is a store, and a run is steered through its folder; give the command on the machine where it works, with the "
            "folder's path or name. A run without a folder (run_dir) ends by Ctrl-C alone"
        )
    return directory


def _await_answers(directory: Path, asked: list[ControlLine], wait: float) -> tuple[list[ControlLine], str]:
    """Return for each request its answer, or the request itself if there was none in time, and the run's state then.

    The answer to `stop` counts when the run has ended.
    """
    import time

    from leyden.training.runs.control import ControlFile, answer_to
    from leyden.training.runs.folder import MANIFEST, read_manifest

    file, lines, deadline = ControlFile(directory), list["ControlLine"](), time.monotonic() + wait
    while True:
        # Before the lines, because a run that has ended writes none. One that had nothing to keep removes its folder.
        state = read_manifest(directory).state if (directory / MANIFEST).exists() else "stopped"
        if file.has_grown():
            lines += file.read_new()
        found = [answer_to(each, lines) for each in asked]
        all_answered = None not in found and not (asked[0].command == "stop" and state == "running")
        if all_answered or state != "running" or time.monotonic() >= deadline:
            return [answer or each for answer, each in zip(found, asked, strict=True)], state
        time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
