"""`leyden run`: start a run from a file, or from what a function returns."""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leyden.cli.output import AsJson, echo, echo_json, echo_text

if TYPE_CHECKING:
    from leyden.cli.run_parts import Start


def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|FUNCTION", help="A .yaml, .toml or .json file; or module:function or file.py:function."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "-s", "--set", metavar="PATH=VALUE", help="An option in place of the file's, such as trainer.n_runners=4."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the settings, and start nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run from a file with the sections agent, train, val, algorithm and trainer.

    Options are those of the Python classes. A path of --set that begins with no section is an option of the algorithm.
    Relative paths mean the file's folder.

    \b
    Examples:
      leyden run train.yaml
      leyden run train.yaml --set trainer.n_runners=4 --set optim.learning_rate=3e-4
      leyden run train.yaml --dry-run
      leyden run experiments.py:small --set rate=1e-3
    """
    from leyden._lib.logs import setup_logging
    from leyden.cli.run_parts import read_start

    setup_logging("WARNING")
    start = read_start(target, overrides or [])
    if dry_run:
        _check(start, as_json=as_json)
    else:
        _run(start, as_json=as_json)


def _check(start: Start, *, as_json: bool) -> None:
    """Check the settings, and print them as a file would have them."""
    from leyden.cli.run_parts import job_of
    from leyden.training.runs.run_description import without_secrets

    with contextlib.chdir(start.folder):
        job = job_of(start)
        job.check()
    settings = without_secrets(start.settings)
    if as_json:
        echo_json(settings)
    else:
        import yaml

        echo_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=100).rstrip())
    echo(f"{job.in_words()}: nothing was started", err=True)


def _run(start: Start, *, as_json: bool) -> None:
    """Begin the run, and show how it ended. Its folder is under `.leyden/` of the current folder unless it is given."""
    from leyden.cli.run_parts import job_of
    from leyden.training.runs.run_description import without_secrets
    from leyden.training.runs.start import started_from

    token = started_from.set(
        {
            "file": start.source,
            "settings": without_secrets(start.settings),
            "overrides": without_secrets(start.overrides),
        }
    )
    start.settings["trainer"] = {"run_dir": str(_new_folder(start)), **(start.settings.get("trainer") or {})}
    try:
        with contextlib.chdir(start.folder):
            summary = job_of(start).run()
    finally:
        started_from.reset(token)
    if as_json:
        echo_json({"run": str(summary.run_dir), "run_id": summary.run_id, "stopped": summary.stopped})


def _new_folder(start: Start) -> Path:
    """Return a new folder under `.leyden/` of the current folder."""
    stem = Path(start.source.rpartition(":")[0] or start.source).stem
    new = Path(".leyden") / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}-{secrets.token_hex(2)}"
    return new if start.folder == Path.cwd() else new.absolute()
