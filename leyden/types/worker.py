"""Workers, which claim rollouts from a store and run their attempts, and samples: measured values of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat

WorkerStatus = Literal["idle", "busy", "unknown"]


class Worker(BaseModel):
    """A worker in the state that it last reported to the store. Times are Unix seconds."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: dict[str, Any] | None = None
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None
    paused: bool = False
    """Whether it was asked to claim no further rollouts."""


class Sample(BaseModel):
    """One measured value at one time. Samples of one name and worker (or of the whole system) are a time series."""

    name: str
    """The name of the measured quantity, with its unit: `cpu_percent`, `store_latency_seconds`."""
    time: FiniteFloat
    """Unix seconds."""
    value: FiniteFloat
    worker_id: str | None = None
    """The worker that was measured; None: the store, its machine, or all workers together."""
