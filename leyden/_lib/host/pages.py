"""The pages that every server of Leyden has at the same paths: `HEALTH`, which needs no token, for load balancers, and
`METRICS` for Prometheus, which needs the server's token if it has one.

A server yields its metric families; `prometheus_client` writes its text format (version 0.0.4). Its process-wide
registry is not used, so each server shows its own metrics only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from leyden._lib.host.http import JSON, HttpReply, Message, Scope, Send

if TYPE_CHECKING:
    from prometheus_client import Metric

HEALTH: Final = "/health"
METRICS: Final = "/metrics"
_TEXT: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


def health() -> HttpReply:
    """Return the reply of a server that works."""
    return HttpReply(200, b'{"status":"ok"}', JSON)


def metrics(families: Iterable[Metric]) -> HttpReply:
    """Return the page with these metric families."""
    return HttpReply(200, metrics_text(families), _TEXT)


@contextmanager
def counting(scope: Scope, send: Send, add: Callable[[str, int, float], None]) -> Generator[Send]:
    """Yield a `send` for the reply to one request. When the block ends, call `add` with the target (`scope["asked"]`,
    which the application sets), the status and the seconds; not for a client that has left before a reply.
    """
    started, statuses = time.perf_counter(), list[int]()

    async def counted(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        await send(message)

    try:
        yield counted
    finally:
        if statuses:
            add(scope.get("asked", "other"), statuses[0], time.perf_counter() - started)


def joined_metrics(texts: Iterable[str]) -> HttpReply:
    """Return one page with the metrics of several processes of one server, whose number becomes the label `process`.

    texts: the page of each process.
    """
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Metric] = {}
    for number, text in enumerate(texts):
        for family in text_string_to_metric_families(text):
            joined = families.setdefault(family.name, family)
            samples = list(family.samples)
            if joined is family:
                joined.samples = []
            for sample in samples:
                joined.add_sample(sample.name, {**sample.labels, "process": str(number)}, sample.value)
    return metrics(families.values())


def metrics_text(families: Iterable[Metric]) -> bytes:
    """Return metric families in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class Scrape(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scrape())
    return generate_latest(registry)
