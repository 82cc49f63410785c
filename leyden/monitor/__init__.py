"""Watch a running system: the health of workers, metrics of machines, alerts, and the page for Prometheus.

Lives here: the names of all metrics (`metric_names.py`), the probe of a machine, its GPUs and a process (`system.py`,
`gpu.py`), the health of a worker (`health.py`), the rules that raise alerts (`rules.py`), sinks and actions for alerts
(`alert.py`, `actions.py`), the schedule that brings them together (`monitor.py`), and the page that Prometheus reads
(`prometheus.py`, imported on its own). It knows the store, and neither runners nor strategies. To add a rule, sink or
action, write a class or function and pass it to `Monitor`.
"""

from leyden.monitor.actions import PauseClaiming as PauseClaiming
from leyden.monitor.actions import RestartWorker as RestartWorker
from leyden.monitor.alert import Action as Action
from leyden.monitor.alert import Alert as Alert
from leyden.monitor.alert import Sink as Sink
from leyden.monitor.alert import log_alert as log_alert
from leyden.monitor.monitor import Monitor as Monitor
from leyden.monitor.monitor import Watch as Watch
from leyden.monitor.rules import DEFAULT_RULES as DEFAULT_RULES
from leyden.monitor.rules import AlertRule as AlertRule
from leyden.monitor.rules import AnomalyRule as AnomalyRule
from leyden.monitor.rules import Judgement as Judgement
from leyden.monitor.rules import Rule as Rule
from leyden.monitor.system import SystemProbe as SystemProbe
from leyden.types.worker_health import WorkerHealth as WorkerHealth
from leyden.types.worker_health import health_of as health_of
