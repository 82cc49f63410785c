"""Run the algorithm and the runners (`runner/`): in threads, in processes or on a cluster.

A strategy receives two bundles (coroutine functions) and does not know what they do. It starts them, stops the runners
when the algorithm is done, and leaves no thread or process behind. To add a strategy, implement
`ExecutionStrategy.execute`, add a line to `leyden/trainer/component_registry.py`, and run the contract
`tests/contracts/strategy.py` on it.

`ClientServerExecutionStrategy`, `InterProcessExecutionStrategy` and `RayExecutionStrategy` are in modules of their own,
so that importing this package loads no server.
"""

from leyden.execution.execution_strategy import AlgorithmBundle as AlgorithmBundle
from leyden.execution.execution_strategy import Elsewhere as Elsewhere
from leyden.execution.execution_strategy import ExecutionEvent as ExecutionEvent
from leyden.execution.execution_strategy import ExecutionStrategy as ExecutionStrategy
from leyden.execution.execution_strategy import RunnerBundle as RunnerBundle
from leyden.execution.execution_strategy import ThreadingEvent as ThreadingEvent
from leyden.execution.shared_memory import SharedMemoryExecutionStrategy as SharedMemoryExecutionStrategy
