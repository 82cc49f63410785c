"""The contract, on every strategy."""

from __future__ import annotations

import pytest

from leyden.execution import ExecutionStrategy, SharedMemoryExecutionStrategy
from leyden.execution.client_server import ClientServerExecutionStrategy
from leyden.execution.process_strategy import InterProcessExecutionStrategy
from tests.contracts.strategy import *  # noqa: F403
from tests.contracts.strategy import MakeStrategy


@pytest.fixture(
    params=["shm", "shm, runners on the main thread", "ipc", pytest.param("cs", marks=pytest.mark.slow)]
)  # cs differs from ipc in its road alone
def make_strategy(request: pytest.FixtureRequest) -> MakeStrategy:
    def make(n_runners: int) -> ExecutionStrategy:
        if request.param == "shm":
            return SharedMemoryExecutionStrategy(n_runners)
        if request.param == "shm, runners on the main thread":
            return SharedMemoryExecutionStrategy(n_runners, main_thread="runner")
        if request.param == "ipc":
            return InterProcessExecutionStrategy(n_runners)
        return ClientServerExecutionStrategy(n_runners)

    return make
