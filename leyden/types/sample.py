"""Samples: one figure at one moment. Those of one name and one worker are a time series."""

from __future__ import annotations

from pydantic import BaseModel, FiniteFloat


class Sample(BaseModel):
    """One figure at one time, of one worker or of everything."""

    name: str
    """What is measured, with its unit: `cpu_percent`, `store_latency_seconds`."""
    time: FiniteFloat
    """Unix seconds."""
    value: FiniteFloat
    worker_id: str | None = None
    """Whose figure it is; None: of the store, of its machine, or of all workers together."""
