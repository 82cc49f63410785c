"""Notice that a rollout was cancelled in the store while its agent runs in this process.

One query that waits at the store serves all agents of a runner. It returns when a rollout finishes, and is sent again
at most every 0.4 seconds, so its cost grows neither with the store's history nor with the rate of rollouts.
`leyden.execution.runner.attempt` ends the agent. To end agents for another reason, resolve their future here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence

from leyden._lib.aio import first_done
from leyden.errors import LeydenError, UnknownRollout
from leyden.store.base import LightningStore
from leyden.types import RolloutStatus

logger = logging.getLogger(__name__)

_REST_SECONDS = 0.4
"""Seconds between two queries to the store. No query is sent for an agent that ends sooner."""
_WAIT_SECONDS = 30.0
"""The longest wait for a notification of the store, in seconds."""
_UNAVAILABLE_SECONDS = 2.0
"""Seconds between two tries while the store cannot be reached. Its absence is only logged at DEBUG here, because the
runner's heartbeat raises the error.
"""


class CancelWatch:
    """Watches the store for cancellations of the rollouts that one runner works on."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._watched: dict[asyncio.Future[None], str] = {}
        """The rollouts by the futures that are resolved when they are cancelled."""
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncGenerator[None]:
        """Watch the store during the block, and resolve the futures of cancelled rollouts."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @contextlib.contextmanager
    def over(self, rollout_id: str) -> Generator[asyncio.Future[None]]:
        """Yield a future that is resolved within a second if the rollout is cancelled during the block."""
        cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watched[cancelled] = rollout_id
        self._changed.set()
        try:
            yield cancelled
        finally:
            self._watched.pop(cancelled, None)
            cancelled.cancel()

    async def is_cancelled(self, rollout_id: str) -> bool:
        """Query the store whether a rollout was cancelled; False if the query fails."""
        try:
            finished = await self._store.wait_for_any_rollout(rollout_ids=[rollout_id], timeout=0.0)
        except Exception:  # noqa: BLE001 -- asked while an error of the agent is reported, which must not be hidden
            return False
        return any(rollout.status == "cancelled" for rollout in finished)

    async def _run(self) -> None:
        """Resolve the futures of watched rollouts that were cancelled in the store. Runs until it is cancelled. It
        pauses before each query, because most agents end sooner.
        """
        while True:
            await self._changed.wait()
            await asyncio.sleep(_REST_SECONDS)
            self._changed.clear()
            if not self._watched:
                continue
            rollout_ids = list(dict.fromkeys(self._watched.values()))
            try:
                finished = await self._finished(rollout_ids)
                for future, rollout_id in list(self._watched.items()):
                    if rollout_id in finished:
                        del self._watched[future]
                        if finished[rollout_id] == "cancelled":
                            future.set_result(None)
            except LeydenError as error:
                logger.debug("cannot ask the store for cancelled rollouts: %s", error)
                await asyncio.sleep(_UNAVAILABLE_SECONDS)
            self._changed.set()

    async def _finished(self, rollout_ids: Sequence[str]) -> Mapping[str, RolloutStatus]:
        """Return the finished rollouts as soon as there are any; none if others are to be watched meanwhile. A rollout
        that the store has pruned counts as cancelled, because only finished ones are pruned.
        """
        try:
            ended = await self._store.wait_for_any_rollout(rollout_ids=rollout_ids, timeout=0.0)
            if not ended and not self._changed.is_set():
                ending = self._store.wait_for_any_rollout(rollout_ids=rollout_ids, timeout=_WAIT_SECONDS)
                async with first_done(ending, self._changed.wait()) as (waiting, _):
                    ended = waiting.result() if waiting.done() else ()
            return {each.rollout_id: each.status for each in ended}
        except UnknownRollout:
            stored = await self._store.query_rollouts(rollout_id_in=rollout_ids)
            unfinished = {rollout.rollout_id for rollout in stored if not rollout.finished}
            finished: dict[str, RolloutStatus] = dict.fromkeys(rollout_ids, "cancelled")
            finished.update((rollout.rollout_id, rollout.status) for rollout in stored)
            return {each: status for each, status in finished.items() if each not in unfinished}
