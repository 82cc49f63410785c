"""Runs and their metrics, as a store and a run folder keep them.

A run is one call of a trainer's `fit`, together with every resume of that call. To record something more about a run,
add it to `RunRecord.config`: it is JSON, and no store interprets it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

current_run_id: ContextVar[str | None] = ContextVar("leyden_run_id", default=None)
"""The run whose algorithm is at work here. New rollouts belong to it unless the caller names another run."""

RunStatus: TypeAlias = Literal["running", "succeeded", "failed", "stopped"]
"""`stopped`: a user (Ctrl-C), SIGTERM, a cancellation or a limit ended the run before the algorithm was done."""

FINAL_RUN_STATUSES: Final[frozenset[RunStatus]] = frozenset({"succeeded", "failed", "stopped"})


def algorithm_group(run_id: str) -> str:
    """Return the group id of the rollouts that record the own model calls of a run's algorithm."""
    return f"{run_id}/algorithm"


def best_label(run_id: str) -> str:
    """Return the label that a run of a prompt optimiser puts on its best version of resources."""
    return f"prompts/{run_id}/best"


class RunRecord(BaseModel):
    """A run: its configuration, its state, and its end.

    A run whose process was killed stays `running`; its heartbeat is then old.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    run_id: str
    name: str
    """For people: the name of the run's folder, unless the user chose another."""
    kind: str
    """The kind of work: `fit`, `dev`, `eval`, `replay` or `rl`."""
    status: RunStatus = "running"
    start_time: float
    """Unix seconds. A resume keeps it."""
    end_time: float | None = None
    last_heartbeat_time: float | None = None
    """Unix seconds."""
    cause: str | None = None
    """Why the run ended without success, in one line; None while it runs and after success."""
    config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The resolved configuration, as JSON: algorithm, options, model, data sets, seed, package versions."""


class MetricPoint(BaseModel):
    """One number that a stage of a run ended with.

    Stage, iteration and name together are unique within a run.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    stage: str
    """`train`, `val` or `test`."""
    iteration: int
    """The number of finished iterations: `train` 3 is the third step, `val` 3 measures the policy after that step,
    `val` 0 the policy before the first step."""
    name: str
    value: float | None
    """None: the value was NaN or infinite, which JSON lacks."""
    time: float
    """The time at which it was reported, in Unix seconds."""
