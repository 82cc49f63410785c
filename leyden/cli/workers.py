"""`leyden workers`: the workers of a store, and their health."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leyden.cli.output import AsJson, cell, echo, echo_json, terminal
from leyden.cli.store_options import WAIT_SECONDS, ServerToken, ServerWait, StoreAddress

if TYPE_CHECKING:
    from rich.table import Table

    from leyden.types import Worker

_FIGURES = {"cpu_percent": "CPU %", "memory_percent": "memory %", "disk_free_percent": "free disk %"}
_COLOURS = {"healthy": "green", "unhealthy": "red", "ended": "dim"}
_SHOWN_SECONDS = 86_400.0
"""Workers whose last heartbeat is older are not listed."""


def workers(
    url: StoreAddress,
    token: ServerToken = None,
    wait: ServerWait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Show the workers of a store that reported within the last day, and their health.

    \b
    Examples:
      leyden workers http://127.0.0.1:4747
      leyden workers .leyden/20260102-101500-ab12/store.sqlite
      leyden workers http://127.0.0.1:4747 --json | jq '.[] | select(.health != "healthy")'
    """
    import asyncio

    from leyden.monitor import health_of

    read, now = asyncio.run(_read(url, token, wait))
    found = [w for w in read if now - (w.last_heartbeat_time or 0) < _SHOWN_SECONDS]
    if as_json:
        rows = [{**worker.model_dump(mode="json"), "health": health_of(worker, now)} for worker in found]
        echo_json(rows)
    elif found:
        terminal().print(_table(found, now))
    else:
        echo("no worker reported within the last day")


async def _read(url: str, token: str | None, wait_seconds: float) -> tuple[list[Worker], float]:
    from leyden.cli.connecting import answer_of, store_in_words, store_to_read

    async with store_to_read(url, token, wait_seconds) as store:
        workers = list(await answer_of(store_in_words(url), store.query_workers()))
        return workers, (await answer_of(store_in_words(url), store.statistics()))["time"]


def _table(workers: list[Worker], now: float) -> Table:
    """Return the workers as a table of their health and last heartbeat.

    now: Unix seconds by the store's clock.
    """
    from rich.table import Table

    from leyden.monitor import health_of

    table = Table(box=None, pad_edge=False)
    for column in ("worker", "health", "status", "heard", *_FIGURES.values(), "latency", "running", "succeeded"):
        table.add_column(column, justify="left" if column in ("worker", "health", "status") else "right")
    for worker in workers:
        stats, health = worker.heartbeat_stats or {}, health_of(worker, now)
        latency = stats.get("store_latency_seconds")
        table.add_row(
            cell(worker.worker_id),
            f"[{_COLOURS[health]}]{health}[/]",
            f"{worker.status}, paused" if worker.paused else worker.status,
            f"{max(0.0, now - (worker.last_heartbeat_time or now)):.0f} s ago",
            *(_number(stats.get(name)) for name in _FIGURES),
            f"{1000 * latency:.1f} ms" if isinstance(latency, int | float) else "",
            _number(stats.get("rollouts_running")),
            f"{_number(stats.get('attempts_succeeded'))} of {_number(stats.get('attempts_ended'))}",
        )
    return table


def _number(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) else ""
