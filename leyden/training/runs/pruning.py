"""Choose runs to remove, see what still needs them, and remove them.

A run stays if it works, if a person has tagged it, if its store is open, if a label is on its resources, and if a run
that stays names its folder in its configuration (a model to begin from, a store, a checkpoint), in a link, or in
resources that have a label. What cannot be read cannot be shown to need nothing, so it stays with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from leyden.errors import ConfigError, LeydenError
from leyden.store.base import LightningStore
from leyden.store.lockfile import LockFile, owner_of
from leyden.training.runs.folder import FAILURES, LOG, MANIFEST, METRICS, RunState, report_of, store_path
from leyden.training.runs.notes import NOTES
from leyden.training.runs.recorded_runs import RecordedRun, find_runs
from leyden.training.runs.run_options import GENERATED_NAME
from leyden.types.run_record import best_label

_PARTS = {
    "checkpoints": ("checkpoints", "best"),
    "model": ("model", "model-last"),
    "store": ("store.sqlite*",),
    "records": (METRICS, FAILURES, f"{LOG}*", NOTES, "control.jsonl", "reflections.jsonl", MANIFEST),
}
"""The names of a run's own files, by what they are. `run.json` is the last, so that a run of which a part is removed is
still listed, and can be pruned again."""

_READ_SECONDS = 10.0
"""Seconds within which a store must have answered."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """A run that would be removed, or that stays although it was chosen."""

    run: RecordedRun
    name: str
    sizes: dict[str, int]
    """Bytes that its removal frees, by part."""
    needed: str | None = None
    """Why it stays; None: it can be removed."""

    @property
    def directory(self) -> Path:
        assert self.run.directory is not None
        return self.run.directory


def choose_runs(
    root: Path, *, days: float | None = None, states: Collection[RunState] = (), keep: int | None = None
) -> tuple[list[Pruned], list[str]]:
    """Return the runs in a folder that fit all of these, the newest first, and for each damaged run why it is left out.

    days: ended at least so many days ago; None: at any time.
    states: in one of these states; empty: in any.
    keep: not among this many newest ones; None: any.
    """
    runs, damaged = find_runs(root)
    chosen = [
        run
        for run in runs[keep or 0 :]
        if (not states or run.state in states) and (days is None or time.time() - _end_of(run) >= days * 86_400)
    ]
    needed, texts = dict[Path | None, str](), dict[Path | None, str]()  # by folder, as a copy has the same id
    unreadable = dict[str, str]()
    for run in runs:
        url, labels = str(run.record.config.get("store") or run.directory), list[tuple[str, str]]()
        if url not in unreadable:
            try:
                labels = _labels_of(run)
            except (LeydenError, TimeoutError) as error:  # other runs in the same store are spared the wait
                unreadable[url] = f"its store cannot be read: {str(error) or f'{url} does not answer'}"
        trouble = unreadable.get(url)
        texts[run.directory] = "\n".join([_text_of(run), *(text for _, text in labels)])
        if run in chosen and (reason := _own_reason(run, [name for name, _ in labels]) or trouble) is not None:
            needed[run.directory] = reason
    while True:  # a run that stays may need another one
        staying = [run for run in runs if run not in chosen or run.directory in needed]
        more = {
            run.directory: f"run {'' if other.directory is None else other.directory.name} names its folder"
            for run in chosen
            for other in staying
            if run.directory not in needed and _names_folder(texts[other.directory], run)
        }
        needed |= more
        if not more:
            return [Pruned(run, run.record.name, _sizes(run), needed.get(run.directory)) for run in chosen], damaged


def _end_of(run: RecordedRun) -> float:
    record = run.record
    return record.end_time or record.last_heartbeat_time or record.start_time


def _own_reason(run: RecordedRun, labels: Sequence[str]) -> str | None:
    """Return why a run stays whatever other runs need; None if nothing of its own keeps it."""
    assert run.directory is not None
    if run.state == "running":
        return "it is running"
    if run.notes.tags:
        return f"it has the tag {', '.join(run.notes.tags)}"
    if labels:
        return f"the label {labels[0]} is on its resources"
    if run.directory.is_symlink():
        return "its folder is a link; remove the link by hand"
    owner = owner_of(store_path(run.directory))
    return None if owner is None else f"its store is open in process {owner.pid}"


def _labels_of(run: RecordedRun) -> list[tuple[str, str]]:
    """Return the labels on resources that the run has made, each with the resources as JSON. The label of a prompt
    optimiser's best prompts, which every such run has, is not one of them.
    """
    own = run.directory is not None and store_path(run.directory).exists()
    url = str(run.record.config.get("store") or "memory:")
    is_gone = url.startswith("sqlite://") and not Path(url.removeprefix("sqlite://")).exists()
    if not own and (is_gone or url.startswith("memory:")):
        return []

    async def read(store: LightningStore) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        async with asyncio.timeout(_READ_SECONDS):
            for label in await store.get_labels():
                version = await store.get_resources_by_id(label.resources_id, version=label.version)
                is_own = own or version.author == run.record.run_id
                if is_own and label.label != best_label(run.record.run_id):
                    found.append((label.label, version.model_dump_json()))
        return found

    return run.read_store(read)


def _text_of(run: RecordedRun) -> str:
    """Return where a run may name the folder of another one: its configuration, and the targets of its links."""
    assert run.directory is not None
    config = {name: value for name, value in run.record.config.items() if name not in ("cwd", "program")}
    found = [json.dumps(config, ensure_ascii=False)]
    for path in (run.directory, *run.directory.glob("*"), *run.directory.glob("*/*")):
        if path.is_symlink():
            found.append(str(path.resolve()))
    return "\n".join(found)


def _names_folder(text: str, run: RecordedRun) -> bool:
    assert run.directory is not None
    folder = run.directory.resolve()
    name = json.dumps(f"{folder.parent.name}/{folder.name}", ensure_ascii=False)[1:-1]
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", text) is not None


def _own_paths(directory: Path) -> dict[str, list[Path]]:
    """Return a run's own files and folders by part. In a folder whose name Leyden has made, all are the run's."""
    found = {part: [path for name in names for path in directory.glob(name)] for part, names in _PARTS.items()}
    found["records"][:0] = [] if (report := report_of(directory)) is None else [report]
    if GENERATED_NAME.match(directory.name):
        known = {path for paths in found.values() for path in paths}
        found["records"][:0] = [path for path in directory.iterdir() if path not in known]
    return found


def _sizes(run: RecordedRun) -> dict[str, int]:
    """Return the bytes of each part; a file with two names, such as the weights of a checkpoint that is the best one,
    counts once.
    """
    assert run.directory is not None
    sizes, seen = dict[str, int](), set[tuple[int, int]]()
    for part, paths in _own_paths(run.directory).items():
        found = [each.lstat() for path in paths for each in (path, *path.rglob("*")) if not each.is_dir()]
        new = {(each.st_dev, each.st_ino): each.st_size for each in found if (each.st_dev, each.st_ino) not in seen}
        sizes[part] = sum(new.values())
        seen.update(new)
    return sizes


def remove_run(run: RecordedRun) -> list[str]:
    """Remove a run's own files, and its folder if nothing else is in it. Return the names of files that stay.

    Raise ConfigError if it works again, StoreError if its store is open, and OSError if a file cannot be removed; the
    run is then still listed, with what is left of it.
    """
    assert run.directory is not None
    if run.state == "running":
        raise ConfigError("it is running")
    store = store_path(run.directory)
    with contextlib.ExitStack() as stack:
        if store.exists():
            stack.callback(LockFile(store, f"sqlite:///{store}").release)
        for path in (path for paths in _own_paths(run.directory).values() for path in paths):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    left = sorted(path.name for path in run.directory.iterdir())
    if not left:
        run.directory.rmdir()
    return left
