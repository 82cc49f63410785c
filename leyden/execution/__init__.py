"""Strategies: they run the algorithm and the runners, in threads, processes or on a cluster.

Lives here: `ExecutionStrategy` and the strategies. A strategy is given two bundles (coroutine
functions) and knows nothing of what they do: it starts them, tells the runners to stop when the
algorithm is done, and never leaves anything behind. To add one, implement `execute`, add a line to
`trainer/registry.py`, and hold it to `tests/contracts/strategy.py`.

`ClientServerExecutionStrategy`, `InterProcessExecutionStrategy` and `RayExecutionStrategy` are in
modules of their own, which bring processes and servers.
"""

from leyden.execution.base import AlgorithmBundle as AlgorithmBundle
from leyden.execution.base import Elsewhere as Elsewhere
from leyden.execution.base import ExecutionStrategy as ExecutionStrategy
from leyden.execution.base import RunnerBundle as RunnerBundle
from leyden.execution.events import ExecutionEvent as ExecutionEvent
from leyden.execution.events import ThreadingEvent as ThreadingEvent
from leyden.execution.shared_memory import SharedMemoryExecutionStrategy as SharedMemoryExecutionStrategy
