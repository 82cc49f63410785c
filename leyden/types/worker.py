"""Workers, which claim rollouts from a store and run their attempts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

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
