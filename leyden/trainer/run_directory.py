"""Run directories: `.leyden/<run>/` with `run.json`, the store's file, checkpoints and what callbacks write; and how a run ended."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from leyden.algorithm import Run
from leyden.errors import ConfigError
from leyden.store.base import LightningStore
from leyden.types import RolloutStatus, failure_reason
from leyden.utils.atomic import private_directory, write_file

__all__ = ["MANIFEST", "RunSummary", "newest_run", "open_run", "store_path", "summarise"]

RUNS = Path(".leyden")
MANIFEST = "run.json"
_FORMAT = 1
_SHOWN_REASONS = 5


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run did: rollouts by status (each of them, 0 included), reasons of failed ones, most frequent first.

    Both are of the rollouts that the store still has; `forgotten` counts those that retention removed while `fit` ran.
    """

    run_dir: Path | None
    rollouts: dict[str, int] = field(default_factory=dict[str, int])
    failures: dict[str, int] = field(default_factory=dict[str, int])
    forgotten: int = 0
    stopped: str | None = None
    """Why the run ended before the algorithm did; None if the algorithm has done its work."""

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {status}" for status, count in self.rollouts.items() if count) or "none"
        forgotten = f"; and {self.forgotten:,} that retention has forgotten" if self.forgotten else ""
        lines = [f"rollouts: {counts}{forgotten}"]
        shown = list(self.failures.items())[:_SHOWN_REASONS]
        lines += [f"  {count:,} x {reason:.300}" for reason, count in shown]
        if len(self.failures) > len(shown):
            rest = sum(self.failures.values()) - sum(count for _, count in shown)
            lines.append(f"  {rest:,} x something else ({len(self.failures) - len(shown):,} other reasons)")
        if self.stopped is not None:
            lines.append(f"stopped: {self.stopped}")
        if self.run_dir is not None:
            lines.append(f"run: {self.run_dir}")
        return "\n".join(lines)


def store_path(directory: Path) -> Path:
    """The store's file in a run directory."""
    return directory / "store.sqlite"


def newest_run(root: Path = RUNS) -> Path:
    """The run that was started last. Raises ConfigError when there is none."""
    runs = sorted(root.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime) if root.is_dir() else []
    if not runs:
        raise ConfigError(f"there is no run to resume in {root.resolve()}; give run_dir=, or start one without resume")
    return runs[-1].parent


def open_run(directory: Path | None, *, resume: bool, options: dict[str, Any] | None = None) -> Run:
    """The run in `directory` (None: a new one under `.leyden/`, or with `resume` the newest there).

    Raises ConfigError for a directory that holds a run when `resume` is false, and for one that holds none when it is true.
    """
    if directory is None:
        directory = newest_run() if resume else RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    manifest = directory / MANIFEST
    if resume:
        return _read(manifest)
    if manifest.exists():
        raise ConfigError(
            f"{directory} holds a run already; pass resume=True to continue it, or choose another run_dir"
        )
    run = Run(run_id=secrets.token_hex(6), directory=directory, options=options or {})
    content = {"format": _FORMAT, "run_id": run.run_id, "started": time.time(), "options": run.options}
    try:
        private_directory(directory)
        write_file(manifest, json.dumps(content))
    except OSError as error:
        raise ConfigError(f"cannot keep a run in {directory}: {error}; choose another run_dir") from error
    return run


def _read(manifest: Path) -> Run:
    try:
        read: Any = json.loads(manifest.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{manifest.parent} holds no run to resume ({MANIFEST} is missing)") from None
    except OSError as error:
        raise ConfigError(f"cannot read the run in {manifest.parent}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{manifest} is damaged: {error}") from error
    content = cast(dict[str, Any], read) if isinstance(read, dict) else {}
    if not isinstance(run_id := content.get("run_id"), str):
        raise ConfigError(f"{manifest} is damaged: it names no run")
    if content.get("format") != _FORMAT:
        raise ConfigError(f"{manifest} has format {content.get('format')!r}; this version of Leyden reads {_FORMAT}")
    return Run(run_id=run_id, directory=manifest.parent, resume=True, options=content.get("options", {}))


async def summarise(
    store: LightningStore, run_dir: Path | None, *, forgotten: int = 0, stopped: str | None = None
) -> RunSummary:
    """Count rollouts by status, and failed ones by reason."""
    failed = await store.query_rollouts(status_in=["failed"])
    reasons = Counter(failure_reason(rollout) for rollout in failed)
    statistics = await store.statistics()
    by_status = statistics["rollouts_by_status"]
    counts = {status: by_status.get(status, 0) for status in get_args(RolloutStatus)}
    return RunSummary(run_dir, counts, dict(reasons.most_common()), forgotten, stopped)
