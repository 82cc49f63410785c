"""Checkpoints: directories that are whole or do not exist, with a manifest of their contents.

    checkpoints/step-000012/
      manifest.json      format, versions, iteration, config, size and sha256 of every other file
      state.json         the loop, its callbacks and writers, random states
      vessel/...         what the vessel wrote (tensors, JSON)
      callbacks/...      what callbacks wrote that is no JSON (the best weights)
    checkpoints/latest -> step-000012      optional
    checkpoints/superseded/step-000015     left behind when the run was resumed from an older one

A checkpoint is written to a temporary directory, made durable and renamed, and never changes afterwards. It holds no
pickle, so reading it runs no code. `CheckpointStore` knows no loop: `Checkpoint` (a callback) decides when to save, and
the vessel decides what.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from leyden import __version__
from leyden._lib.atomic import ASIDE, commit_directory, fsync_directory, remove_directory
from leyden._lib.json import is_object
from leyden._lib.options import check_number
from leyden.errors import CheckpointError
from leyden.training.pth import SavedFile, read_pth
from leyden.training.state_files import load_vessel, read_state

FORMAT: Final = 1
_KIND: Final = "leyden checkpoint"
_MANIFEST, _STATE, _VESSEL, _LATEST, _SUPERSEDED = "manifest.json", "state.json", "vessel", "latest", "superseded"
CALLBACKS: Final = "callbacks"
_NAME = re.compile(r"step-(\d{6,})")

logger = logging.getLogger(__name__)


class _DamagedError(CheckpointError):
    """The files of a checkpoint changed after they were written. An older one may be intact."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint whose files were verified when it was opened."""

    path: Path
    iteration: int
    """Finished iterations."""
    state: dict[str, Any]
    """The value that `TrainLoop.run_state` returned."""

    @property
    def vessel_path(self) -> Path:
        return self.path / _VESSEL

    @property
    def vessel_state(self) -> Any:
        """The value that the vessel's `state_dict` returned.

        Raises CheckpointError if the vessel has its own `save` instead.
        """
        return read_state(self.vessel_path)

    @property
    def callbacks_path(self) -> Path:
        return self.path / CALLBACKS

    def restore(self, vessel: Any) -> Any:
        return load_vessel(vessel, self.vessel_path)


class CheckpointStore:
    """The checkpoints of one run, in one directory. One process writes; any may read.

    keep: how many of the newest checkpoints to keep; None: all. The default is two, so that a damaged newest one costs
        a step and not the run.
    link_latest: keep a link `latest` to the newest checkpoint. The link is relative, so it still works when the
        directory is moved.
    config: JSON that must be the same when the run is continued. `load` refuses a checkpoint with another config and
        names the difference.
    """

    def __init__(
        self,
        dirpath: str | Path,
        *,
        keep: int | None = 2,
        link_latest: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        check_number("keep", keep, at_least=1, whole=True, or_none="all checkpoints")
        self.dirpath, self.keep, self.link_latest = Path(dirpath), keep, link_latest
        self.config: dict[str, Any] = json.loads(json.dumps(dict(config or {})))  # as it will be read back

    # ---- writing ---------------------------------------------------------------------------------

    def prepare(self, iteration: int) -> Path:
        """Return an empty temporary directory for the vessel's files, instead of that of an earlier call."""
        self._remove_asides()
        vessel = self.prepared(iteration) / _VESSEL
        vessel.mkdir(parents=True)
        return vessel

    def commit(self, iteration: int, state: Mapping[str, Any], *, best: int | None = None) -> Path:
        """Make the prepared directory the checkpoint of `iteration`, then prune the oldest ones.

        The write is durable. A damaged checkpoint of this iteration is replaced.
        best: the iteration of the best checkpoint so far, which is kept as well, and which this one names in its
            manifest.
        Raise CheckpointError for a state that is not JSON.
        """
        aside, path = self.prepared(iteration), self._path(iteration)
        try:
            (aside / _STATE).write_text(json.dumps(state), encoding="utf-8")
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of {_culprit(state)} is not JSON: {error}; see its state_dict()"
            ) from error
        files = {
            file.relative_to(aside).as_posix(): _fingerprint(file)
            for file in sorted(aside.rglob("*"))
            if file.is_file()
        }
        manifest = {
            "kind": _KIND,
            "format": FORMAT,
            "leyden_version": __version__,
            "iteration": iteration,
            "config": self.config,
            "files": files,
        }
        if best is not None:
            manifest["best"] = best
        (aside / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        remove_directory(path)
        commit_directory(aside, path)
        self.tidy(iteration, best=best)
        return path

    def tidy(self, newest: int, *, best: int | None = None) -> None:
        """Remove the remains of interrupted saves and old checkpoints, and correct `latest`.

        Of the checkpoints up to the iteration `newest`, the last `keep` and the best one stay.
        best: the iteration of the best checkpoint; None if there is none.
        """
        self._remove_asides()
        if self.link_latest and self._path(newest).is_dir():
            link_beside(self._path(newest), _LATEST)
        kept = self.kept(newest, best=best)
        # Later checkpoints are damaged, since the run was resumed before them. They do not count.
        for iteration in self.steps():
            if iteration <= newest and iteration not in kept:
                remove_directory(self._path(iteration))

    def kept(self, newest: int, *, best: int | None = None) -> set[int]:
        """Return the iterations whose checkpoints stay, `best` among them, once the checkpoint of `newest` exists."""
        steps = sorted({step for step in self.steps() if step <= newest} | {newest})
        return set(steps if self.keep is None else steps[-self.keep :]) | ({best} if best is not None else set())

    def _remove_asides(self) -> None:
        for aside in self.dirpath.glob(f"{ASIDE}*"):
            if aside.is_dir() and not aside.is_symlink():
                shutil.rmtree(aside)
            else:
                aside.unlink()

    def supersede(self, iteration: int, files: Sequence[str] = ()) -> Path:
        """Move a checkpoint and files beside it into `superseded/`. Return the checkpoint's new path.

        `steps` and `latest` no longer find it. An earlier superseded checkpoint of the same iteration is replaced. Safe
        to repeat after a kill.
        files: names in the directory of checkpoints; missing ones are skipped.
        """
        folder = self.dirpath / _SUPERSEDED
        folder.mkdir(exist_ok=True)
        for name in files:
            if (file := self.dirpath / name).exists():
                file.replace(folder / name)
        path = self._path(iteration)
        moved = folder / path.name
        remove_directory(moved)
        path.rename(moved)
        fsync_directory(folder)
        fsync_directory(self.dirpath)
        return moved

    # ---- reading ---------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the iterations that have a checkpoint, damaged or not, oldest first."""
        if not self.dirpath.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.dirpath.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def latest(self) -> SavedCheckpoint | None:
        """Return the newest intact checkpoint, or None if there is no checkpoint at all.

        Log a warning for each damaged checkpoint that is skipped. Raise CheckpointError if all are damaged. Also raise
        CheckpointError if another configuration or a newer Leyden wrote it, because continuing from an older checkpoint
        would throw its work away.
        """
        steps = self.steps()
        for iteration in reversed(steps):
            try:
                return self.load(iteration)
            except _DamagedError as damage:
                logger.warning("passed over a damaged checkpoint: %s", damage)
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.dirpath} is intact; the log says what is wrong"
            )
        return None

    def best(self) -> SavedCheckpoint | None:
        """Return the best checkpoint, as the newest intact one's manifest says; None if there is none."""
        newest = self.latest()
        best = None if newest is None else self.verify(newest.iteration).get("best")
        return None if best is None else self.load(best)

    def load(self, iteration: int) -> SavedCheckpoint:
        """Verify and read the checkpoint of `iteration`.

        Raise CheckpointError if it is missing or damaged, if a newer Leyden wrote it, or if its config is another.
        """
        manifest = self.verify(iteration)
        path = self._path(iteration)
        for name in sorted(self.config.keys() | manifest["config"].keys()):
            then, now = manifest["config"].get(name), self.config.get(name)
            if then != now:
                raise CheckpointError(
                    f"{path} was made with {name}={then!r}, this run has {name}={now!r}; "
                    "resume with the same configuration, or start a new run"
                )
        return SavedCheckpoint(path, iteration, _read_json(path / _STATE))

    def damage(self, iteration: int) -> str | None:
        """Return what is wrong with a checkpoint; None if it is intact or a newer Leyden wrote it."""
        try:
            self.verify(iteration)
        except _DamagedError as damage:
            return str(damage)
        except CheckpointError:
            return None
        return None

    def verify(self, iteration: int) -> dict[str, Any]:
        """Return the manifest of the checkpoint of `iteration`.

        Raise CheckpointError unless every file that it lists has the right size and sha256.
        """
        path = self._path(iteration)
        manifest_path = path / _MANIFEST
        manifest = _read_json(manifest_path)
        if manifest.get("kind") != _KIND or not isinstance(manifest.get("format"), int):
            raise _DamagedError(f"{manifest_path} is not a manifest of a Leyden checkpoint")
        if manifest["format"] > FORMAT:
            raise CheckpointError(
                f"{manifest_path} has format {manifest['format']}, written by Leyden {manifest.get('leyden_version')}; "
                f"this one reads up to {FORMAT}; install that version to continue"
            )
        if manifest.get("iteration") != iteration:
            raise _DamagedError(
                f"{manifest_path} is of iteration {manifest.get('iteration')}, its directory of {iteration}"
            )
        files, config = manifest.get("files"), manifest.get("config")
        if not is_object(files) or not is_object(config) or _STATE not in files:
            raise _DamagedError(f"{manifest_path} does not list its files and configuration")
        for name, expected in files.items():
            _verify_file(path, name, expected)
        return manifest

    def n_bytes(self, iteration: int) -> int:
        """Return the bytes of a checkpoint's files; 0 if there is no such checkpoint."""
        return sum(file.stat().st_size for file in self._path(iteration).rglob("*") if file.is_file())

    def _path(self, iteration: int) -> Path:
        return self.dirpath / f"step-{iteration:06d}"

    def prepared(self, iteration: int) -> Path:
        """Return the temporary directory of the whole checkpoint, which `prepare` makes."""
        return self.dirpath / f"{ASIDE}step-{iteration:06d}"


def open_checkpoint(path: str | Path, *, config: Mapping[str, Any] | None = None) -> SavedCheckpoint | SavedFile:
    """Verify and return the checkpoint at `path`.

    path: a checkpoint's directory or a link to it, a directory of checkpoints (for its newest one), or a `.pth` file.
    config: the configuration that a checkpoint must have been made with; None: an empty one. A `.pth` file does not
        record its configuration.
    Raise CheckpointError for any other path, a damaged checkpoint, and one of another configuration. No code of the
    checkpoint is run.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(
            f"there is no checkpoint {path}; give its directory, the directory of all, or a .pth file"
        )
    if path.is_file():
        return read_pth(path)
    path = path.resolve()  # of a link
    if name := _NAME.fullmatch(path.name):
        return CheckpointStore(path.parent, config=config).load(int(name[1]))
    if saved := CheckpointStore(path, config=config).latest():
        return saved
    raise CheckpointError(f"{path} holds no checkpoint (a directory step-000012 and the like)")


def link_beside(target: Path, name: str) -> None:
    """Make `name` in the directory of `target` a relative link to it.

    The link is replaced in one step, so that readers find the old target or the new one.
    """
    aside = target.with_name(ASIDE + name)
    aside.unlink(missing_ok=True)
    aside.symlink_to(target.name)
    aside.replace(target.with_name(name))
    fsync_directory(target.parent)


def _fingerprint(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def _verify_file(directory: Path, name: str, expected: Any) -> None:
    """Raise _DamagedError unless a file lies in the checkpoint's directory, and has the manifest's size and sha256."""
    file = directory / name
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise _DamagedError(f"{directory / _MANIFEST} lists {name!r}, which lies outside the checkpoint")
    try:
        actual = _fingerprint(file)
    except OSError as error:
        raise _DamagedError(f"{file} cannot be read: {error.strerror}") from error
    if actual == expected:
        return
    if not is_object(expected) or actual["bytes"] == expected.get("bytes"):
        raise _DamagedError(
            f"{file} is not what was saved: its sha256 is {actual['sha256'][:12]}..., not the manifest's"
        )
    raise _DamagedError(f"{file} has {actual['bytes']} bytes, the manifest says {expected.get('bytes')}")


def _read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise _DamagedError if it holds none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _DamagedError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _DamagedError(f"{file} is not JSON: {error}") from error
    if not is_object(content):
        raise _DamagedError(f"{file} holds a {type(content).__name__}, not an object")
    return content


def _culprit(state: Mapping[str, Any]) -> str:
    for noun, group in (("callback", "callbacks"), ("writer", "loggers")):
        for key, part in state.get(group, {}).items():
            try:
                json.dumps(part)
            except (TypeError, ValueError):
                return f"{noun} {key!r}"
    return "the loop"
