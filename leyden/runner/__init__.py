"""Claim rollouts and run an agent on them.

The package holds `Runner` and `Hook` (the protocols), `LitAgentRunner` (many rollouts at once in
one process), and in `process` any program as an agent. A runner knows the store, a tracer and one
agent. It knows neither the algorithm nor the gateway: recorders of model calls are handed to it. To
run agents another way, subclass `Runner`; to observe an attempt, write a `Hook`; to reward it by
its record, use a `Judge`.
"""

from leyden.runner.base import AttemptRecorder, Hook, ParallelWorkerBase, Runner
from leyden.runner.judge import Judge
from leyden.runner.litagent import LitAgentRunner
from leyden.runner.worker import WorkerBundle

__all__ = ["AttemptRecorder", "Hook", "Judge", "LitAgentRunner", "ParallelWorkerBase", "Runner", "WorkerBundle"]
