"""`leyden run`: start a run from a file, or from what a function returns."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leyden.cli.output import AsJson, echo, echo_json, echo_text

if TYPE_CHECKING:
    from leyden.cli.run_parts import Job, Start

_RUN_DIR = ("trainer", "run_dir")


def run(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|FUNCTION",
            help="A .yaml, .toml or .json file; or module:function or file.py:function.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "-s", "--set", metavar="PATH=VALUE", help="An option in place of the file's, such as trainer.n_runners=4."
        ),
    ] = None,
    recorded: Annotated[
        str | None, typer.Option("--from", metavar="RUN", help="Repeat a run that leyden run has started.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --from, continue that run in its folder.")] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=VALUE,VALUE",
            help="A run for each value, one after the other, and a comparison; for several, their product.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the settings, and start nothing.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of such a file, for editors, and start nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run from a file with the sections agent, train, val, algorithm and trainer; or vessel and trainer.

    Options are those of the Python classes. A path of --set that begins with no section is an option of the algorithm
    or the vessel. Relative paths mean the file's folder.

    \b
    Examples:
      leyden run train.yaml
      leyden run train.yaml --set trainer.n_runners=4 --set optim.learning_rate=3e-4
      leyden run train.yaml --dry-run
      leyden run experiments.py:small --set rate=1e-3
      leyden run --from latest --set optim.learning_rate=1e-4
      leyden run --from latest --resume
      leyden run train.yaml --sweep optim.learning_rate=1e-4,3e-4
      leyden run --schema > train.schema.json
    """
    from leyden._lib.logs import setup_logging
    from leyden.cli.run_parts import job_of, joined, read_overrides, read_recorded, read_start
    from leyden.training.runs.start import with_option

    if schema:
        from leyden.cli.run_schema import run_schema

        if target or overrides or recorded or resume or sweep or dry_run:
            raise typer.BadParameter("--schema is the same for every file; give it alone")
        echo_json(run_schema())
        return
    if (target is None) == (recorded is None):
        raise typer.BadParameter("give a FILE or FUNCTION, or --from RUN")
    if resume and (recorded is None or sweep):
        raise typer.BadParameter("--resume continues one run; give --from RUN, and no --sweep")
    setup_logging("WARNING")
    given = read_overrides(overrides or [])
    if "trainer.run_dir" in given and (resume or sweep):
        raise typer.BadParameter(
            "--set trainer.run_dir: a sweep and a resumed run have folders of their own; leave it out"
        )

    def read(further: Mapping[str, Any]) -> Start:
        options = joined(given, further)
        return read_recorded(recorded, options, resume=resume) if recorded else read_start(str(target), options)

    if sweep:
        from leyden.cli.run_sweep import read_sweep, run_sweep

        source = ["--from", recorded] if recorded else [str(target)]
        options = [f"--set={each}" for each in overrides or []]
        run_sweep(read, read_sweep(sweep), source, options, dry_run=dry_run, as_json=as_json)
        return
    start = read({})
    directory = None if dry_run else _folder(start)
    settings = start.settings if directory is None else with_option(start.settings, _RUN_DIR, str(directory))
    with contextlib.chdir(start.folder):
        job = job_of(replace(start, settings=settings))
    if start.recorded is not None and not resume:  # one that goes on says so itself
        _echo_changes(start, job)
    if directory is None:
        _check(start, job, as_json=as_json)
    else:
        _run(start, job, directory, as_json=as_json)


def _echo_changes(start: Start, job: Job) -> None:
    """Report how the code and the settings differ from those of the run that is repeated."""
    from leyden.training.runs.run_code import code_changes

    assert start.recorded is not None
    record = start.recorded.record
    before = record.config.get("code")
    if not before:
        echo(f"run {record.name} did not record its code, which may have changed since", err=True)
    elif edits := code_changes(before, job.code):
        echo(f"the code has changed since run {record.name}: ", ", ".join(edits), err=True)
    if start.changes:
        echo(f"{start.source} returns other settings than for run {record.name}: ", "; ".join(start.changes), err=True)


def _check(start: Start, job: Job, *, as_json: bool) -> None:
    """Check the settings, and print them as a file would have them."""
    from leyden.training.runs.run_description import without_secrets

    runs = _folder(start).absolute().parent
    with contextlib.chdir(start.folder):
        job.check()
        expected = job.estimate(runs)
    settings = without_secrets(start.settings)
    if as_json:
        echo_json(settings)
    else:
        import yaml

        echo_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=100).rstrip())
    if expected is not None:
        echo(expected, err=True)
    echo(f"{job.in_words}: nothing was started", err=True)


def _run(start: Start, job: Job, directory: Path, *, as_json: bool) -> None:
    """Begin the run, and show how it ended. Exit with 1 if it has stopped early.

    directory: the run's folder, which the job knows.
    """
    from leyden.cli.run_parts import record_of
    from leyden.errors import RunInterrupted
    from leyden.training.runs import open_run
    from leyden.training.runs.folder import MANIFEST
    from leyden.training.runs.start import how_to_continue, started_from

    token = started_from.set(record_of(start))
    try:
        with contextlib.chdir(start.folder):
            job.run(resume=start.directory is not None)
        ended = open_run(directory) if (directory / MANIFEST).exists() else None
    finally:
        started_from.reset(token)
    if ended is None:  # `dev: true` and runners for an algorithm elsewhere keep no run
        if as_json:
            echo_json({"run": None, "run_id": None, "state": "succeeded", "stopped": None})
        return
    record = ended.record
    if record.status == "stopped" and record.cause == "interrupted":  # a simulator's run ends without an error
        raise RunInterrupted(f"the run was stopped; continue with {how_to_continue(True, directory)}")
    if as_json:
        echo_json({"run": str(directory), "run_id": record.run_id, "state": record.status, "stopped": record.cause})
    if record.status != "succeeded":
        raise typer.Exit(1)


def _folder(start: Start) -> Path:
    """Return the run's folder: that of the run to continue, the one that the settings name, or a new one under
    `.leyden/` of the current folder. It is absolute unless the settings are of the current folder too.
    """
    is_here = start.folder == Path.cwd()
    if start.directory is not None:
        return Path(os.path.relpath(start.directory)) if is_here else start.directory
    from leyden.training.runs.start import option_value

    if given := option_value(start.settings, _RUN_DIR):
        return Path(str(given)) if is_here else start.folder / str(given)
    stem = Path(start.source.rpartition(":")[0] or start.source).stem
    new = Path(".leyden") / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}-{secrets.token_hex(2)}"
    return new if is_here else new.absolute()
