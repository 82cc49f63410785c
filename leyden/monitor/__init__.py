"""Watch a running system: the health of workers, metrics of machines, alerts, and the page for Prometheus.

Lives here: the names of all metrics (`metrics.py`), the probe of a machine, its GPUs and a process (`system.py`, `gpu.py`), the health of
a worker (`health.py`), the rules that raise alerts (`rules.py`), sinks and actions for alerts (`alert.py`, `actions.py`), the schedule that
brings them together (`monitor.py`), and the page that Prometheus reads (`prometheus.py`, imported on its own). It knows the store, and
neither runners nor strategies. A new rule, sink or action is a class or function of the user's own, passed to `Monitor`.
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
