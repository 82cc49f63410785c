"""A recorded run as JSON data: its head, its newest metrics, its warnings, and what people asked of it while it worked.

Commands, the report and other viewers of runs show these data, so that they say the same.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any, cast

from leyden._lib.formatting import figure
from leyden.training.metrics import MetricValue
from leyden.training.runs.control import ControlLine, pause_in_force, paused_seconds, read_control
from leyden.training.runs.folder import folder_bytes
from leyden.training.runs.opening import PAUSED_SECONDS
from leyden.training.runs.recorded_runs import RecordedRun
from leyden.training.runs.run_description import NOT_DEFAULT, command_of
from leyden.training.runs.run_metrics import RewardMetrics


def as_data(run: RecordedRun) -> dict[str, Any]:
    """Return a run's record, times and rewards as JSON data."""
    record, metrics = run.record, run.summary_metrics()
    algorithm, model = part_of(record.config, "algorithm"), part_of(record.config, "model")
    return {
        "run_id": record.run_id,
        "name": record.name,
        "tags": list(run.notes.tags),
        "notes": [dataclasses.asdict(note) for note in run.notes.notes],
        "kind": record.kind,
        "state": run.state,
        "cause": record.cause,
        "directory": None if run.directory is None else str(run.directory),
        "algorithm": algorithm.get("name"),
        "model": model.get("name"),
        "options": record.config.get(NOT_DEFAULT),
        "command": command_of(record.config),
        "start_time": record.start_time,
        "end_time": record.end_time,
        "seconds": seconds_of(run),
        "iterations": metrics.iterations,
        "reward": rewards_as_data(metrics.reward),
        "val_reward": rewards_as_data(metrics.val_reward),
        "rollouts": metrics.rollouts,
        "failed": metrics.failed,
        "reflection_calls": metrics.reflection_calls,
        "bytes": None if run.directory is None else folder_bytes(run.directory),
    }


def warnings_of(run: RecordedRun) -> list[str]:
    """Return the warnings in the run's log, each once, in their order."""
    log = "" if run.log_path is None else run.log_path.read_text("utf-8", errors="replace")
    return list(dict.fromkeys(re.findall(r"^\S+ \S+ WARNING (.*)$", log, re.MULTILINE)))


def control_of(run: RecordedRun) -> list[ControlLine]:
    """Return what people asked of a run while it worked, with its answers; empty for a run without a folder."""
    return [] if run.directory is None else read_control(run.directory)


def paused_of(run: RecordedRun) -> tuple[ControlLine | None, float]:
    """Return the pause that is in force, if any, and how many seconds the run was paused in all while it worked."""
    lines, record = control_of(run), run.record
    paused = pause_in_force(lines) if run.state in ("running", "crashed") else None
    until = time.time() if run.state == "running" else record.end_time or record.last_heartbeat_time or 0.0
    return paused, min(paused_seconds(lines, until), seconds_of(run))


def part_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a part of a run's configuration; empty if it has none, or something else there."""
    part = config.get(name)
    return cast("dict[str, Any]", part) if isinstance(part, dict) else {}


def rewards_as_data(reward: RewardMetrics | None) -> dict[str, Any] | None:
    """Return the rewards of a stage as JSON data; None without rewards."""
    if reward is None:
        return None
    return {
        "first": reward.first,
        "last": reward.last,
        "best": reward.best,
        "best_iteration": reward.best_iteration,
        "values": list(reward.values),
        "iterations": list(reward.iterations),
    }


def newest_metrics(run: RecordedRun) -> dict[str, dict[str, MetricValue]]:
    """Return the metrics of the last row of each stage, by the stage; none for a stage without rows."""
    return {row.stage: row.metrics for row in run.metrics()}


def budget_left(run: RecordedRun) -> dict[str, str]:
    """Return how much of the algorithm's budget was left at the last step, by the limit's name.

    Return an empty dict for a run without a budget.
    """
    found: dict[str, str] = {}
    for row in run.metrics("train"):
        for name in ("rollouts", "tokens", "cost", "seconds"):
            left = row.metrics.get(f"budget_{name}_left")
            if isinstance(left, (int, float)):
                found[name] = f"{left:,.0f}" if name != "cost" else figure(left)
    return found


def seconds_of(run: RecordedRun) -> float:
    """Return how many seconds processes have worked on the run, without the pauses before resumes.

    A crashed run counts until its last heartbeat.
    """
    record = run.record
    end = record.end_time
    if end is None:
        end = time.time() if run.state == "running" else record.last_heartbeat_time or record.start_time
    paused = record.config.get(PAUSED_SECONDS)
    return max(0.0, end - record.start_time - (paused if isinstance(paused, int | float) else 0.0))
