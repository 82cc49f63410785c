"""Is everything well? Workers' health, figures of machines, alerts, metrics for Prometheus.

Lives here: what a machine and a process do (`system.py`, `gpu.py`), whether a worker is well (`health.py`), when to raise an alert
(`rules.py`), who is told and what is done (`alert.py`, `actions.py`), the schedule that brings them together (`monitor.py`), and the page
that Prometheus reads (`prometheus.py`, imported on its own). It knows the store, and neither runners nor strategies.
"""

from leyden.monitor.actions import PauseClaiming, RestartWorker
from leyden.monitor.alert import Action, Alert, Sink, log_alert
from leyden.monitor.health import WorkerHealth, health_of
from leyden.monitor.monitor import Monitor, Watch
from leyden.monitor.rules import DEFAULT_RULES, AlertRule, AnomalyRule, Rule, Verdict
from leyden.monitor.system import SystemProbe

__all__ = [
    "DEFAULT_RULES",
    "Action",
    "Alert",
    "AlertRule",
    "AnomalyRule",
    "Monitor",
    "PauseClaiming",
    "RestartWorker",
    "Rule",
    "Sink",
    "SystemProbe",
    "Verdict",
    "Watch",
    "WorkerHealth",
    "health_of",
    "log_alert",
]
