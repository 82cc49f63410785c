"""Samples: one figure at one moment. Those of one name and one worker are a time series."""

from __future__ import annotations

from pydantic import BaseModel, FiniteFloat


class Sample(BaseModel):
    """One figure at one time, of one worker or of everything."""

    name: str
    """The name of the measured quantity, with its unit: `cpu_percent`, `store_latency_seconds`."""
    time: FiniteFloat
    """Unix seconds."""
    value: FiniteFloat
    worker_id: str | None = None
    """The worker that was measured; None: the store, its machine, or all workers together."""
