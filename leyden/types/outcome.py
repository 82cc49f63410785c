"""Counts, means and histograms of many rollouts, as a store computes them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Measure = Literal["reward", "tokens", "cost", "seconds"]
"""A measure of a finished rollout: the primary reward, the tokens of prompts and responses, the cost and the duration
in seconds of its latest attempt."""
Range = tuple[float | None, float | None]
"""`[start, before)` of a measure; None leaves an end open."""


class Histogram(BaseModel):
    """The number of values in each of several bins of equal width."""

    edges: list[float]
    """Length n + 1, ascending. Bin i holds `edges[i] <= value < edges[i + 1]`; the last bin holds
    its upper edge too."""
    counts: list[int]
    """The number of values in each of the n bins."""


class MeasureSummary(BaseModel):
    """One measure over the finished rollouts that have it."""

    count: int
    """The number of rollouts that have a value."""
    mean: float
    minimum: float
    maximum: float
    histogram: Histogram


class RolloutSummary(BaseModel):
    """Counts and measures of many rollouts. See `LightningStore.summarise_rollouts`."""

    finished: int
    by_status: dict[str, int] = Field(default_factory=dict[str, int])
    """Finished rollouts by status; a status without rollouts is left out."""
    by_failure: dict[str, int] = Field(default_factory=dict[str, int])
    """Failed rollouts by kind of failure (`Attempt.failure`)."""
    measures: dict[Measure, MeasureSummary] = Field(default_factory=dict[Measure, MeasureSummary])
    """The requested measures; one that no rollout has is left out."""
