"""Claim rollouts and run an agent on them.

The package holds `Runner` and `Hook` (the protocols), `LitAgentRunner` (many rollouts at once in
one process), and in `process` any program as an agent. A runner knows the store, a tracer and one
agent. It knows neither the algorithm nor the gateway: recorders of model calls are handed to it. To
run agents another way, subclass `Runner`; to observe an attempt, write a `Hook`; to reward it by
its record, use a `Judge`.
"""

from leyden.runner.base import AttemptRecorder as AttemptRecorder
from leyden.runner.base import Hook as Hook
from leyden.runner.base import ParallelWorkerBase as ParallelWorkerBase
from leyden.runner.base import Runner as Runner
from leyden.runner.judge import Judge as Judge
from leyden.runner.litagent import LitAgentRunner as LitAgentRunner
from leyden.runner.worker import WorkerBundle as WorkerBundle
