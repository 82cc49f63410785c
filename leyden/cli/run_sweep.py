"""`leyden run --sweep`: a run for each value of an option, one after the other, and a comparison of them.

Each run is a process of its own, with a folder whose name is made of its settings, its code, its data and its model.
The same command therefore finds the runs that it has done, and continues after a kill. This module starts the
processes; what a run is, `run_parts` says.
"""

from __future__ import annotations

import glob
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
from leyden.training.runs.opening import EARLIER_CODE
from leyden.training.runs.overview import as_data
from leyden.training.runs.run_code import code_changes
from leyden.training.runs.run_description import without_secrets
from leyden.training.runs.start import option_value, short_path

_MAX_RUNS = 1000
_GRACE_SECONDS = 30.0
"""How long a run that Ctrl-C ends may take to keep what it has done."""


@dataclass(slots=True)
class _Member:
    """One run of a sweep."""

    label: str
    overrides: dict[str, Any]
    folder: Path
    code: Mapping[str, Any]
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
        hidden: list[list[str]] = []
        if without_secrets(listed, path, hidden=hidden) and hidden:
            raise ConfigError(f"--sweep {path} would show a secret in names of runs; sweep another option")
        if path == "trainer.run_dir":
            raise ConfigError(
                "--sweep trainer.run_dir would compare one configuration with itself; sweep another option"
            )
        if short_path(path) in map(short_path, found) or any(value in listed[:n] for n, value in enumerate(listed)):
            raise ConfigError(f"--sweep {path} has a value twice; give each once")
        found[path] = listed
    return found


def run_sweep(
    read: Callable[[Mapping[str, Any]], Start],
    values: Mapping[str, list[Any]],
    source: Sequence[str],
    options: Sequence[str],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run the product of all values, and print a comparison. Exit with 1 if a run has not succeeded, with 130 after
    Ctrl-C.

    read: returns the settings with some overrides.
    source: the arguments of the command that name what is run.
    options: those of `--set`.
    Raise ConfigError before the first run if one of them is wrong, and later if the code was edited meanwhile.
    """
    members = _members(read, values)
    interrupted = False
    for number, member in enumerate(members, start=1):
        state = member.data()["state"]
        if dry_run or interrupted or state in ("succeeded", "running"):
            continue
        echo(f"[{number}/{len(members)}] {member.label}", err=True)
        interrupted = _run(member, source, options, resume=state != "not started")
        if (edits := _edits(member.folder, member.code)) and not interrupted:
            raise ConfigError(
                f"the code was edited while the sweep worked: {', '.join(edits)}; the same command starts its runs anew"
            )
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
        overrides = dict(zip(values, without_secrets(product), strict=True))  # JSON has no infinity
        label = ", ".join(f"{name}={_text(value)}" for name, value in zip(names, overrides.values(), strict=True))
        start = read(overrides)
        try:
            with chdir(start.folder):
                job = job_of(start)
                job.check()
                identity = job.identity()
        except ConfigError as error:
            raise ConfigError(f"{label}: {error}") from error
        content = json.dumps([start.source, label, without_secrets(start.settings), identity], sort_keys=True)
        stem = Path(start.source.rpartition(":")[0] or start.source).stem
        slug = re.sub(r"[^\w.=+-]+", "_", label)[:80]
        folder = RUNS / f"{stem}-{slug}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"
        others = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
        chosen = next(each for each in itertools.chain([folder], others) if _is_usable(each, job.code))
        if not chosen.exists() and any(RUNS.glob(f"{glob.escape(f'{stem}-{slug}')}-*")):
            echo(label, ": begun anew, because its settings, tasks, code or model are not those of before", err=True)
        if given := option_value(start.settings, ("trainer", "name")):
            overrides["trainer.name"] = f"{given} {label}"[:200]
        members.append(_Member(label, overrides, chosen, job.code))
    return members


def _is_usable(folder: Path, code: Mapping[str, Any]) -> bool:
    """Return whether a folder is free, or holds a run of this code that is done or can be continued."""
    if not (folder / MANIFEST).exists():
        return True
    try:
        run = open_run(folder)
    except ConfigError:  # damaged, or of a newer version
        return False
    is_kept = run.state in ("succeeded", "running") or not str(run.record.config.get("store")).startswith("memory:")
    return is_kept and not _edits(folder, code)


def _edits(folder: Path, code: Mapping[str, Any]) -> list[str]:
    """Return how the code of a run differs from the one of its sweep."""
    config = open_run(folder).record.config if (folder / MANIFEST).exists() else {}
    return code_changes(code, config.get("code", code)) + ["before it went on"] * bool(config.get(EARLIER_CODE))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _run(member: _Member, source: Sequence[str], options: Sequence[str], *, resume: bool) -> bool:
    """Run a member in a process of its own. Return whether Ctrl-C has ended it.

    options: given again when it goes on, because secrets among them are not recorded.
    """
    folder = str(member.folder.absolute())
    given = member.overrides if resume else {**member.overrides, "trainer.run_dir": folder}
    words = ["--from", folder, "--resume"] if resume else [*source]
    words += [*options, *(f"--set={path}={json.dumps(value)}" for path, value in given.items())]

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
