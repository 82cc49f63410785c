"""`ipc`: the algorithm here, each runner in its own process on this machine, and no port between them."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from leyden.execution.process_strategy import ProcessExecutionStrategy
from leyden.monitor.prometheus import metrics
from leyden.store.base import LightningStore
from leyden.store.server import LightningStoreServer


class InterProcessExecutionStrategy(ProcessExecutionStrategy):
    """Runners in processes on this machine, which reach the store over a Unix socket.

    It has the options of ProcessExecutionStrategy and no others.
    """

    @asynccontextmanager
    async def share(self, store: LightningStore) -> AsyncGenerator[Any]:
        """Yield what runners open: the store itself if other processes can open it by its URL (the capability
        `zero_copy`), else a server of it on a Unix socket.

        The socket's path and folder are `left_behind`, so that runners remove them if this process is killed.
        """
        if store.capabilities["zero_copy"]:
            yield store
            return
        with tempfile.TemporaryDirectory(prefix="leyden-") as folder:
            self.left_behind = (path := Path(folder) / "store.sock", Path(folder))
            async with LightningStoreServer(store, socket_path=path, views=metrics(store)) as server:
                yield server
