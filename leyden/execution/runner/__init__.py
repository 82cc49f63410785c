"""Claim rollouts and run an agent on them.

The package holds `Runner` and `Hook` (the protocols), `LitAgentRunner` (many rollouts at once in one process), and in
`process` any program as an agent. A runner knows the store, a tracer and one agent. It knows neither the algorithm nor
the gateway: recorders of model calls are handed to it. To run agents another way, subclass `Runner`; to observe an
attempt, write a `Hook`; to reward it by its record, use a `Judge`.
"""

from leyden.execution.runner.judge import Judge as Judge
from leyden.execution.runner.lit_agent_runner import LitAgentRunner as LitAgentRunner
from leyden.execution.runner.runner import AttemptRecorder as AttemptRecorder
from leyden.execution.runner.runner import Hook as Hook
from leyden.execution.runner.runner import ParallelWorkerBase as ParallelWorkerBase
from leyden.execution.runner.runner import Runner as Runner
from leyden.execution.runner.worker_bundle import WorkerBundle as WorkerBundle
