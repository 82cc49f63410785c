"""An alert, and who is told of it: sinks hear of it, actions do something about it."""

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
"""Of the series that says when a rule's alert is raised: 1 while it is, 0 when it is resolved."""

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


@dataclass(frozen=True, slots=True)
class Alert:
    """What a rule found about one subject, from when on, and until when."""

    rule: str
    severity: Severity
    figure: str
    comparison: Comparison
    value: float
    limit: float
    worker_id: str | None
    """Whom it is about; None: the store, its machine, or all workers together."""
    since: float
    """Unix seconds."""
    until: float | None = None
    """Unix seconds; None: it is still raised."""

    @property
    def resolved(self) -> bool:
        """Whether it is over."""
        return self.until is not None

    def __str__(self) -> str:
        who = "" if self.worker_id is None else f" of {self.worker_id}"
        if self.until is not None:
            return f"{self.rule}{who} is resolved after {self.until - self.since:.0f} s"
        return f"{self.rule}{who}: {self.figure} is {self.value:.4g} (limit: {self.comparison} {self.limit:.4g})"


Sink = Callable[[Alert], Awaitable[None] | None]
"""Told of each alert twice: when it is raised and when it is resolved. A function, or a coroutine function."""


class Action(Protocol):
    """Does something while an alert is raised. What it raises is logged and goes no further."""

    async def raised(self, store: LightningStore, alert: Alert) -> None:
        """The alert was raised."""
        ...

    async def resolved(self, store: LightningStore, alert: Alert) -> None:
        """It is resolved, or the monitor ends, or begins and finds it left behind by one that was killed."""
        ...


def log_alert(alert: Alert) -> None:
    """The sink that writes to the log, at the level of the alert's severity."""
    logger.log(logging.INFO if alert.resolved else _LEVELS[alert.severity], "alert %s", alert)


async def tell(sink: Sink, alert: Alert) -> None:
    """Call a sink of either kind; what it raises is logged."""
    try:
        answer = sink(alert)
        if inspect.isawaitable(answer):
            await answer
    except Exception:
        logger.exception("a sink failed on the alert %s; the others are told", alert.rule)
