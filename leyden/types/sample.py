"""Samples: one measured value at one moment. Samples of one name and worker are a time series."""

from __future__ import annotations

from pydantic import BaseModel, FiniteFloat


class Sample(BaseModel):
    """One measured value at one time, of one worker or of the whole system."""

    name: str
    """The name of the measured quantity, with its unit: `cpu_percent`, `store_latency_seconds`."""
    time: FiniteFloat
    """Unix seconds."""
    value: FiniteFloat
    worker_id: str | None = None
    """The worker that was measured; None: the store, its machine, or all workers together."""
