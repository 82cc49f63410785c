"""`leyden workers`: who works on a store, and how they are."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from leyden.types import Worker

__all__ = ["workers"]

_FIGURES = {"cpu_percent": "CPU %", "memory_percent": "memory %", "disk_free_percent": "free disk %"}
_COLOURS = {"healthy": "green", "unhealthy": "red", "ended": "dim"}
_SHOWN_SECONDS = 86_400.0


def workers(
    url: Annotated[
        str, typer.Argument(help="The store: http://host:port, postgresql://..., or a file, in use or not.")
    ],
    token: Annotated[
        str | None, typer.Option(envvar="LEYDEN_STORE_TOKEN", show_envvar=True, help="What the server asks for.")
    ] = None,
) -> None:
    """Show the workers of a store that were heard of in the last day, and how they are.

    \b
    Example:
      leyden workers http://127.0.0.1:4747
    """
    found = [w for w in asyncio.run(_read(url, token)) if time.time() - (w.last_heartbeat_time or 0) < _SHOWN_SECONDS]
    console = Console(highlight=False)
    if found:
        console.print(_table(found, time.time()))
    else:
        console.print("no worker was heard of in the last day")


async def _read(url: str, token: str | None) -> list[Worker]:
    from leyden.store import open_store

    if url.startswith("http"):
        opened = open_store(url, token=token)
    else:
        opened = open_store(url, read_only=not url.startswith("postgres"))
    async with opened as store:
        return list(await store.query_workers())


def _table(workers: list[Worker], now: float) -> Table:
    from leyden.monitor import health_of

    table = Table(box=None, pad_edge=False)
    for column in ("worker", "health", "status", "heard", *_FIGURES.values(), "latency", "running", "succeeded"):
        table.add_column(column, justify="left" if column in ("worker", "health", "status") else "right")
    for worker in workers:
        stats, health = worker.heartbeat_stats or {}, health_of(worker, now)
        latency = stats.get("store_latency_seconds")
        table.add_row(
            escape(worker.worker_id),
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
