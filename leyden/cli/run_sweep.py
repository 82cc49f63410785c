"""`leyden run --sweep`: a run for each value of an option, one after the other, and a comparison of them.

Each run is a process of its own, with a folder whose name is made of its settings. The same command therefore finds the
runs that it has done, and continues after a kill. This module starts the processes; what a run is, `run_parts` says.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from leyden._lib.config_file import parse_value
from leyden._lib.formatting import duration, figure
from leyden._lib.host.child import Command
from leyden._lib.json import is_list
from leyden.cli.output import Coloured, Column, echo, echo_json, echo_table
from leyden.cli.run_parts import Start, job_of
from leyden.cli.run_views import COLOURS
from leyden.errors import ConfigError
from leyden.training.runs import open_run
from leyden.training.runs.folder import MANIFEST, RUNS
from leyden.training.runs.overview import as_data
from leyden.training.runs.run_description import hides, without_secrets
from leyden.training.runs.start import option_value

_MAX_RUNS = 1000
_GRACE_SECONDS = 30.0
"""How long a run that Ctrl-C ends may take to keep what it has done."""


@dataclass(slots=True)
class _Member:
    """One run of a sweep."""

    label: str
    overrides: dict[str, Any]
    folder: Path
    last_line: str = ""
    """The last line that its process wrote."""

    def data(self) -> dict[str, Any]:
        """Return what has come of it, as `leyden runs --json` has it."""
        facts: dict[str, Any] = {"label": self.label, "overrides": self.overrides, "run": str(self.folder)}
        facts |= dict.fromkeys(("reward", "val_reward", "seconds"))
        if not (self.folder / MANIFEST).exists():
            return {**facts, "state": "failed" if self.last_line else "not started", "cause": self.last_line or None}
        run = as_data(open_run(self.folder))
        return {**facts, **{name: run[name] for name in ("state", "cause", "reward", "val_reward", "seconds")}}


def read_sweep(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each `--sweep PATH=VALUE,VALUE`. Raise ConfigError for one without values or given twice."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        path, _, values = (part.strip() for part in text.partition("="))
        listed: Any = parse_value(f"[{values}]", name=f"--sweep {path}")
        if not path or not is_list(listed) or not listed:
            raise ConfigError(
                f"--sweep is {text!r}; write --sweep PATH=VALUE,VALUE, such as optim.learning_rate=1e-4,3e-4"
            )
        if hides(path):
            raise ConfigError(f"--sweep {path} would show a secret in names of runs; sweep another option")
        if path == "trainer.run_dir":
            raise ConfigError(
                "--sweep trainer.run_dir would compare one configuration with itself; sweep another option"
            )
        same = path.removeprefix("algorithm.").removeprefix("vessel.")
        if any(each.removeprefix("algorithm.").removeprefix("vessel.") == same for each in found) or any(
            value in listed[:place] for place, value in enumerate(listed)
        ):
            raise ConfigError(f"--sweep {path} has a value twice; give each once")
        found[path] = listed
    return found


def run_sweep(
    read: Callable[[Mapping[str, Any]], Start],
    values: Mapping[str, list[Any]],
    arguments: Sequence[str],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run the product of all values, and print a comparison. Exit with 1 if a run has not succeeded, with 130 after
    Ctrl-C.

    read: returns the settings with some overrides.
    arguments: those of the command without `--sweep`, for the processes.
    Raise ConfigError before the first run if one of them is wrong.
    """
    members = _members(read, values)
    interrupted = False
    for number, member in enumerate(members, start=1):
        state = member.data()["state"]
        if dry_run or interrupted or state in ("succeeded", "running"):
            continue
        echo(f"[{number}/{len(members)}] {member.label}", err=True)
        interrupted = _run(member, arguments, resume=state != "not started")
    rows = [member.data() for member in members]
    if as_json:
        echo_json(rows)
    else:
        _show(rows)
    if interrupted:
        echo("leyden: the sweep was stopped; the same command continues it", err=True)
        raise typer.Exit(130)
    if not dry_run and any(row["state"] != "succeeded" for row in rows):
        raise typer.Exit(1)


def _members(read: Callable[[Mapping[str, Any]], Start], values: Mapping[str, list[Any]]) -> list[_Member]:
    """Return the runs of a sweep, each checked."""
    products = list(itertools.islice(itertools.product(*values.values()), _MAX_RUNS + 1))
    if len(products) > _MAX_RUNS:
        raise ConfigError(f"--sweep makes more than {_MAX_RUNS:,} runs; give fewer values")
    names = [path.rpartition(".")[2] for path in values]
    if len(set(names)) < len(names):
        names = list(values)
    members: list[_Member] = []
    for product in products:
        overrides = dict(zip(values, without_secrets(product), strict=True))
        label = ", ".join(f"{name}={_text(value)}" for name, value in zip(names, overrides.values(), strict=True))
        start = read(overrides)
        try:
            with chdir(start.folder):
                job_of(start).check()
        except ConfigError as error:
            raise ConfigError(f"{label}: {error}") from error
        content = json.dumps([start.source, label, without_secrets(start.settings)], sort_keys=True)
        stem = Path(start.source.rpartition(":")[0] or start.source).stem
        slug = re.sub(r"[^\w.=+-]+", "_", label)[:80]
        folder = RUNS / f"{stem}-{slug}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"
        if name := option_value(start.settings, ("trainer", "name")):
            overrides["trainer.name"] = f"{name} {label}"[:200]
        others = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
        members.append(_Member(label, overrides, next(filter(_is_usable, itertools.chain([folder], others)))))
    return members


def _is_usable(folder: Path) -> bool:
    """Return whether a folder is free, or holds a run that is done or can be continued."""
    if not (folder / MANIFEST).exists():
        return True
    try:
        run = open_run(folder)
    except ConfigError:  # damaged, or of a newer version
        return False
    return run.state in ("succeeded", "running") or not str(run.record.config.get("store")).startswith("memory:")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _run(member: _Member, arguments: Sequence[str], *, resume: bool) -> bool:
    """Run a member in a process of its own. Return whether Ctrl-C has ended it."""
    folder = member.folder.absolute()
    if resume:
        words = ["--from", str(folder), "--resume"]
    else:
        given = {**member.overrides, "trainer.run_dir": str(folder)}
        words = [*arguments, *(f"--set={path}={json.dumps(value)}" for path, value in given.items())]

    def relay(line: str) -> None:
        member.last_line = line or member.last_line
        echo("  ", line, err=True)

    process = Command([sys.executable, "-m", "leyden", "run", *words], name="run", relay=relay, guard=True)
    try:
        process.wait()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        process.close(_GRACE_SECONDS)


def _show(rows: list[dict[str, Any]]) -> None:
    rewards: list[dict[str, Any]] = [row.get("reward") or row.get("val_reward") or {} for row in rows]
    columns = [
        Column("run", [row["label"] for row in rows]),
        Column("state", [Coloured(row["state"], COLOURS.get(row["state"], "yellow")) for row in rows]),
        *(
            Column(name, [figure(each[name]) if each else "-" for each in rewards], right=True)
            for name in ("first", "last", "best")
        ),
        Column("took", [duration(row["seconds"]) if row.get("seconds") else "-" for row in rows], right=True),
        Column("folder", [Path(row["run"]).name for row in rows], rank=1),
    ]
    echo_table(columns)
    for row in rows:
        if row["state"] == "failed" and row["cause"]:
            echo(row["label"], ": ", str(row["cause"]).removeprefix("leyden: "), err=True)
