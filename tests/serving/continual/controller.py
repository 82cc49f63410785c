"""A controller of one cycle of learning that may be killed, as a program.

    python -m tests.serving.continual.controller URL FOLDER OUTCOME [MOMENT N]

It works until the cycle has ended. With MOMENT N it kills itself at its N-th write to the store:
`before` the request leaves, or `after` the store has answered. The test kills it at any time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from leyden.errors import ReleaseAdvanced, StoreError, UnknownRelease
from leyden.serving.continual import (
    OPEN_STATES,
    REWARD,
    CanarySettings,
    ContinualLearning,
    GateSettings,
    GuardSettings,
    Limits,
    Trigger,
)
from leyden.store import LightningStore, LightningStoreClient
from tests.serving.continual import world

CYCLE, RELEASE = "learning-000001", "learning-000001-release"
WRITES = ("create_release", "update_resources", "advance_release")
"""What a cycle writes: itself, its candidate, the candidate's release, and their transitions."""


class DoomedClient(LightningStoreClient):
    """A client whose process dies at one of its writes."""

    def __init__(self, url: str, moment: str, at: int) -> None:
        super().__init__(url)
        self._moment, self._at, self._writes = moment, at, 0
        for name in WRITES:
            setattr(self, name, self._dying(getattr(self, name)))

    def _dying(self, write: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def written(*arguments: Any, **options: Any) -> Any:
            self._writes += 1
            if self._writes == self._at and self._moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = await write(*arguments, **options)
            if self._writes == self._at and self._moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return written


async def ended(store: LightningStore) -> bool:
    """Return whether the cycle and the release of its candidate are final."""
    try:
        return (await store.get_release(RELEASE)).state not in OPEN_STATES
    except UnknownRelease:
        return False


def learning(store: LightningStore, folder: Path, outcome: str) -> ContinualLearning:
    """Return the learner of a cycle that ends in `promoted`, `rolled_back` or `refused`."""
    return ContinualLearning(
        world.rude if outcome == "refused" else world.most_wanted,
        world.support,
        store=store,
        folder=folder,
        trigger=Trigger(count=50),
        canary=CanarySettings(
            share=0.5,
            guard=GuardSettings(metrics=(REWARD,)),
            waiting_seconds=60,
            deadline_seconds=1000,
            settle_seconds=0.3,
            lag_seconds=0.3,
        ),
        gate=GateSettings(n_tasks=8),
        limits=Limits(nice=0, seconds=600),
        every_seconds=0.05,
        pause_seconds=3600,
    )


async def main(url: str, folder: str, outcome: str, moment: str = "never", at: str = "0") -> None:
    """Work until the cycle has ended."""
    async with DoomedClient(url, moment, int(at)) as store, learning(store, Path(folder), outcome) as controller:
        while not await ended(store):
            try:
                await controller.step()
            except (StoreError, ReleaseAdvanced) as error:
                print(repr(error), flush=True)
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
