"""Where the algorithm and the runners live.

Lives here: `ExecutionStrategy` and the strategies. A strategy is given two bundles (coroutine functions) and knows nothing of what they
do: it starts them, tells the runners to stop when the algorithm is done, and never leaves anything behind. To add one, implement
`execute`, add a line to `trainer/registry.py`, and hold it to `tests/execution/`.
"""

from leyden.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle
from leyden.execution.events import ExecutionEvent, ThreadingEvent
from leyden.execution.shared_memory import SharedMemoryExecutionStrategy

__all__ = [
    "AlgorithmBundle",
    "ExecutionEvent",
    "ExecutionStrategy",
    "RunnerBundle",
    "SharedMemoryExecutionStrategy",
    "ThreadingEvent",
]
