"""Alerts, the sinks that are notified of them, and the actions taken while they are raised."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from leyden.monitor.rules import Comparison, Severity
from leyden.store.base import LightningStore

logger = logging.getLogger(__name__)

ALERT_PREFIX = "alert:"
"""Prefix of the series that records a rule's alerts: 1 while one is raised, 0 when it is resolved."""

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule's finding about one subject, from its beginning to its end."""

    rule: str
    severity: Severity
    metric: str
    comparison: Comparison
    value: float
    limit: float
    worker_id: str | None
    """The subject; None: the store, its machine, or all workers together."""
    since: float
    """Unix seconds."""
    until: float | None = None
    """Unix seconds; None while the alert is raised."""

    @property
    def resolved(self) -> bool:
        """Whether the alert has ended."""
        return self.until is not None

    def __str__(self) -> str:
        subject = "" if self.worker_id is None else f" of {self.worker_id}"
        if self.until is not None:
            return f"{self.rule}{subject} is resolved after {self.until - self.since:.0f} s"
        return f"{self.rule}{subject}: {self.metric} is {self.value:.4g} (limit: {self.comparison} {self.limit:.4g})"


Sink = Callable[[Alert], Awaitable[None] | None]
"""A function or coroutine function that is notified of each alert twice: when it is raised and when it is resolved."""


class Action(Protocol):
    """Acts on the system while an alert is raised. An exception of an action is logged and goes no further."""

    async def raised(self, store: LightningStore, alert: Alert) -> None:
        """Act on an alert that was raised."""
        ...

    async def resolved(self, store: LightningStore, alert: Alert) -> None:
        """Undo the action: the alert is resolved, the monitor ends, or a killed monitor left the alert behind."""
        ...


def log_alert(alert: Alert) -> None:
    """Write the alert to the log, at the level of its severity."""
    logger.log(logging.INFO if alert.resolved else _LEVELS[alert.severity], "alert %s", alert)


async def notify(sink: Sink, alert: Alert) -> None:
    """Call a sink of either kind. Its exceptions are logged."""
    try:
        result = sink(alert)
        if inspect.isawaitable(result):
            await result
    except Exception:
        logger.exception("a sink failed on the alert %s; the others are notified", alert.rule)
