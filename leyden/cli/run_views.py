"""Helpers of the commands that show recorded runs: opening them, and formatting them as text."""

from __future__ import annotations

import asyncio
import time

from leyden._lib.formatting import figure
from leyden.cli.store_options import WAIT_SECONDS
from leyden.training.runs import RecordedRun, RewardMetrics
from leyden.training.runs.recorded_runs import list_store_runs

COLOURS = {"running": "cyan", "succeeded": "green", "failed": "red", "stopped": "yellow", "crashed": "red"}


def open_runs(store_url: str, *, limit: int) -> tuple[list[RecordedRun], int]:
    """Return up to `limit` runs of a store, the newest first, and the number of all its runs."""
    await_server(store_url)
    runs, _, total = list_store_runs(store_url, limit=limit)
    return list(runs.values()), total


def await_server(source: str) -> None:
    """Wait until the store server at `source` accepts connections. Return at once for any other source.

    The wait is reported on standard error. Raise StoreError after ten seconds.
    """
    from leyden.cli.connecting import connect, is_remote, store_in_words

    if is_remote(source):
        asyncio.run(connect(store_in_words(source), source, wait_seconds=WAIT_SECONDS))


def reward_text(reward: RewardMetrics | None) -> str:
    """Return the first and last reward as `0.12 -> 0.8`, a single one as `0.8`, none as `-`."""
    if reward is None:
        return "-"
    if len(reward.values) == 1:
        return figure(reward.first, 3)
    return f"{figure(reward.first, 3)} -> {figure(reward.last, 3)}"


def age(moment: float) -> str:
    """Return how long ago a moment was, such as `12 s ago`, `5 min ago`, `3 h ago` or `2 d ago`.

    moment: Unix seconds.
    """
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
