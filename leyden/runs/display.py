"""The texts that a run shows: its first line and its closing summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from leyden.runs.run import Run

if TYPE_CHECKING:
    from leyden.runs.summary import RunSummary

__all__ = ["closing_summary", "first_line"]


def first_line(run: Run, config: Mapping[str, Any]) -> str:
    """Return the line that a run begins with: where it is kept, and on what it works."""
    algorithm: Any = config.get("algorithm") or {}
    return f"run {run.directory or run.run_id}: {algorithm.get('name', 'no algorithm')}"


def closing_summary(summary: RunSummary, width: int = 80) -> str:
    """Return the lines that a run ends with."""
    return str(summary)
