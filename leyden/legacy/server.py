"""`AgentLightningServer`: a server of Agent Lightning 0.1 over a store.

It knows sockets and threads; `legacy_app.py` knows requests, and `tasks.py` the store.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Self

from leyden._lib.aio import Latch
from leyden._lib.host.asgi import AsgiThread
from leyden._lib.host.http import SiteGuard
from leyden._lib.host.listening import is_loopback, listen, netloc, reachable
from leyden._lib.options import NamedOptions, check_number
from leyden.errors import ConfigError, StoreError
from leyden.execution.runner import AttemptRecorder
from leyden.legacy.legacy_app import LegacyApp
from leyden.legacy.tasks import TaskQueue
from leyden.legacy.types import RolloutLegacy, warn_deprecated
from leyden.store import InMemoryLightningStore, Sweeper
from leyden.store.base import LightningStore
from leyden.types import NamedResources, RolloutMode


class AgentLightningServer(NamedOptions):
    """Queues tasks for clients of Agent Lightning 0.1, and collects their reports.

    Its methods may be called from any thread and any event loop. It serves between `start` and `stop`, on a thread of
    its own. Each report is returned once; only this object knows which, so a new server over the same store returns
    them again.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        task_timeout_seconds: float = 300.0,
        *,
        store: LightningStore | None = None,
        insecure: bool = False,
        recorder: AttemptRecorder | None = None,
    ) -> None:
        """Check the options; `start` opens the port.

        port: 0 chooses a free one.
        task_timeout_seconds: a task is queued again if no report has come so long after its claim.
        store: where tasks, resources and reports are kept; the server does not close it. None: a new one in memory.
        insecure: allow other machines, without a token, because the protocol has none.
        recorder: the gateway (`LLMProxy`) to which the tasks' resources point. Each claimed task then has resources of
            its own, in which a `ProxyLLM` becomes the LLM of that attempt. So the gateway records the attempt's calls,
            and a report waits for them. None: a task has the resources with which it was queued, and the gateway cannot
            tell which attempt makes a call.
        Raise ConfigError for an address that other machines can reach, unless `insecure` is set.
        """
        warn_deprecated("AgentLightningServer", "LightningStoreServer(store), and store.enqueue_rollout(...)")
        check_number("port", port, at_least=0, at_most=65_535, whole=True)
        check_number("task_timeout_seconds", task_timeout_seconds, above=0)
        if not insecure and not is_loopback(host):
            raise ConfigError(
                f"host {host!r} can be reached from other machines, and this protocol has no token: bind to 127.0.0.1, "
                "say insecure=True in a network that you trust, or use LightningStoreServer(store, token=...)"
            )
        self.host = host
        self.port = port
        self.store = InMemoryLightningStore() if store is None else store
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which the server was started, while it runs."""
        self.startup_event = threading.Event()
        """Set while the server runs."""
        self._local_only = not insecure
        self._tasks = TaskQueue(self.store, task_timeout_seconds=task_timeout_seconds, recorder=recorder)
        self._thread: AsgiThread | None = None
        self._ended = Latch()

    @property
    def endpoint(self) -> str:
        """The URL for clients on this machine. With `port=0` it is known once the server runs."""
        return f"http://{netloc(reachable(self.host), self.port)}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop())

    async def start(self) -> None:
        """Open the port and serve. Calling it again does nothing. Raise StoreError if the port cannot be opened."""
        self.loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._start)
        self.startup_event.set()

    async def stop(self) -> None:
        """Finish running requests and close the port. Calling it again does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.stop)
        self.startup_event.clear()
        self.loop = None
        self._ended.set()

    async def run_forever(self) -> None:
        """Serve until `stop` is called or this is cancelled."""
        self._ended = Latch()
        async with self:
            await self._ended.wait_async()

    async def queue_task(
        self,
        sample: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> str:
        """Queue a task for a client and return its id.

        resources_id: the resources of the task; None: the latest ones now.
        Raise UnknownResources if the store lacks them.
        """
        return await self._tasks.add(sample, mode, resources_id, metadata)

    async def update_resources(self, resources: NamedResources) -> str:
        """Publish resources as the latest ones, and return their id."""
        return await self._tasks.publish(resources)

    async def get_completed_rollout(self, rollout_id: str) -> RolloutLegacy | None:
        """Return the report on a task, once. Return None if there is no report yet, or if it was returned before."""
        return await self._tasks.take(rollout_id)

    async def poll_completed_rollout(self, rollout_id: str, timeout: float | None = None) -> RolloutLegacy | None:
        """Wait for the report on a task and return it, once.

        Return None after the timeout, and at once for a report that was returned before.
        timeout: the longest wait in seconds; None or 0 for no limit.
        Raise UnknownRollout for a task that is not in the store.
        """
        await self.store.wait_for_rollouts(rollout_ids=[rollout_id], timeout=timeout or None)
        return await self._tasks.take(rollout_id)

    async def retrieve_completed_rollouts(self) -> list[RolloutLegacy]:
        """Return the reports on all finished tasks that were queued or reported here, each once."""
        return await self._tasks.take_all()

    def _start(self) -> None:
        if self._thread is not None:
            return
        try:
            listener = listen(self.host, self.port)
        except OSError as error:
            raise StoreError(
                f"the server cannot listen on host={self.host!r}, port={self.port}: {error.strerror or error}; "
                "choose another port, or port=0 for a free one"
            ) from error
        self.port = int(listener.getsockname()[1])
        app = LegacyApp(self._tasks, guard=SiteGuard(local_only=self._local_only))
        thread = AsgiThread(app, name="leyden-legacy-http", lifespan=lambda: Sweeper(self.store))
        thread.start(listener)
        self._thread = thread
