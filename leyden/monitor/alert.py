"""Alerts, the sinks that are notified of them, and the actions that are taken while one is raised."""

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
    """A rule's finding about one subject: a worker, or the store with its machine."""

    rule: str
    """The name of the rule."""
    severity: Severity
    metric: str
    """The metric that was judged; `A per B` for a share."""
    comparison: Comparison
    value: float
    """The value when the alert was raised; NaN for an alert that a killed monitor left behind."""
    limit: float
    """The limit with which the value was compared; NaN where the value is."""
    worker_id: str | None
    """The subject; None: the store, its machine, or all workers together."""
    since: float
    """When the alert was raised, in Unix seconds."""
    until: float | None = None
    """When the alert was resolved, in Unix seconds; None while it is raised."""

    @property
    def resolved(self) -> bool:
        return self.until is not None

    def __str__(self) -> str:
        subject = "" if self.worker_id is None else f" of {self.worker_id}"
        if self.until is not None:
            return f"{self.rule}{subject} is resolved after {self.until - self.since:.0f} s"
        return f"{self.rule}{subject}: {self.metric} is {self.value:.4g} (limit: {self.comparison} {self.limit:.4g})"


Sink = Callable[[Alert], Awaitable[None] | None]
"""A function or coroutine function that is notified of each alert twice: when it is raised and when it is resolved."""


class Action(Protocol):
    """Acts on the system while an alert is raised. Its exceptions are logged."""

    async def raised(self, store: LightningStore, alert: Alert) -> None:
        """Act on an alert that was raised."""
        ...

    async def resolved(self, store: LightningStore, alert: Alert) -> None:
        """Undo the action, because the alert is resolved or the monitor ends. Also called for an alert that a killed
        monitor left behind; undoing nothing must be safe.
        """
        ...


def log_alert(alert: Alert) -> None:
    """Write the alert to the log, at the level of its severity."""
    logger.log(logging.INFO if alert.resolved else _LEVELS[alert.severity], "alert %s", alert)


async def notify(sink: Sink, alert: Alert) -> None:
    """Call a sink, and await it if it is a coroutine function. Its exceptions are logged."""
    try:
        result = sink(alert)
        if inspect.isawaitable(result):
            await result
    except Exception:
        logger.exception("a sink failed on the alert %s; the others are notified", alert.rule)
