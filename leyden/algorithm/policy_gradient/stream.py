"""`GroupStream`: numbered groups of rollouts, enqueued ahead of their use and taken as they finish.

It knows a collector and the requests of each group; not what a group is worth, nor when one is too
old. Groups that are enqueued together are one collection. The number of a group determines its
requests, so a resumed run asks for the same rollouts and finds the finished ones. A group's results
likewise determine the requests of its forks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from leyden.algorithm.collector import CollectedRollout, RolloutCollector
from leyden.types import EnqueueRolloutRequest


@dataclass(slots=True)
class CollectedGroup:
    """A group of which some rollouts may still run."""

    number: int
    step: int
    """The training step at which it was enqueued."""
    rollout_ids: list[str]
    results: list[CollectedRollout | None]
    """The result of each rollout, by its place in the group; None while the rollout runs."""
    forks: list[CollectedRollout | None] | None = None
    """The result of each fork; None until all rollouts have finished, because the
    forks follow from them."""

    @property
    def finished(self) -> bool:
        """Return whether all of its rollouts have finished, and their forks."""
        return self.forks is not None and None not in self.forks


@dataclass(frozen=True, slots=True)
class _GroupSlot:
    """A rollout of a group, and the place that its result has there."""

    group: CollectedGroup
    results: list[CollectedRollout | None]
    place: int
    request: EnqueueRolloutRequest


@dataclass(slots=True)
class GroupStream:
    """The groups that are enqueued and not taken yet. Used by one event loop."""

    collector: RolloutCollector
    requests_of: Callable[[int], Sequence[EnqueueRolloutRequest]]
    """Return the requests of the group with this number; each request has an id."""
    collect: Callable[[Sequence[EnqueueRolloutRequest], int], AsyncGenerator[CollectedRollout]]
    """Run requests and yield their results as they finish. The integer is the step until which the
    rollouts are kept."""
    forks_of: Callable[[CollectedGroup], Sequence[EnqueueRolloutRequest]] = lambda group: ()
    """Return the requests of a finished group's forks; each request has an id."""
    groups: dict[int, CollectedGroup] = field(default_factory=dict[int, CollectedGroup])
    """Groups that are enqueued and not taken, by their number."""
    _waves: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: Exception | None = None

    def enqueue(self, numbers: Iterable[int], *, step: int, keep_until: int) -> None:
        """Start the rollouts of groups, all at the same time."""
        wave: list[_GroupSlot] = []
        for number in numbers:
            requests = self.requests_of(number)
            group = CollectedGroup(number, step, [str(each.rollout_id) for each in requests], [None] * len(requests))
            self.groups[number] = group
            wave += [_GroupSlot(group, group.results, place, request) for place, request in enumerate(requests)]
        self._start(wave, keep_until)

    async def take(self, count: int) -> list[CollectedGroup]:
        """Wait until `count` groups have finished, and take those with the lowest numbers.

        Raise what ended a collection.
        """
        while len(finished := [group for group in self.groups.values() if group.finished]) < count:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        taken = sorted(finished, key=lambda group: group.number)[:count]
        for group in taken:
            del self.groups[group.number]
        return taken

    async def drop(self, numbers: Collection[int]) -> None:
        """Drop groups, and cancel their unfinished rollouts."""
        dropped = [self.groups.pop(number) for number in numbers]
        if dropped:
            await self.collector.cancel([each for group in dropped for each in group.rollout_ids])

    async def close(self) -> None:
        """Stop waiting for results. The rollouts continue. Safe to repeat."""
        waves = list(self._waves)
        self.groups.clear()
        for wave in waves:
            wave.cancel()
        await asyncio.gather(*waves, return_exceptions=True)

    def _start(self, wave: Sequence[_GroupSlot], keep_until: int) -> None:
        """Start a task that runs a wave's rollouts together."""
        if wave:
            task = asyncio.create_task(self._run(wave, keep_until))
            self._waves.add(task)
            task.add_done_callback(self._waves.discard)

    async def _run(self, wave: Sequence[_GroupSlot], keep_until: int) -> None:
        """Collect a wave's rollouts into their groups. Start a group's forks after its last
        rollout, and wake `take` for each finished group.
        """
        try:
            async with contextlib.aclosing(self.collect([each.request for each in wave], keep_until)) as results:
                async for result in results:
                    each = wave[result.place]
                    each.results[each.place] = result
                    if each.group.forks is None and None not in each.group.results:
                        self._start(self._forks(each.group), keep_until)
                    if each.group.finished:
                        self._changed.set()
        except Exception as error:  # noqa: BLE001 -- `take` raises it, whatever it is
            self._failure = error
            self._changed.set()

    def _forks(self, group: CollectedGroup) -> list[_GroupSlot]:
        """Return the forks of a group whose rollouts have finished; none of a group that was
        dropped.
        """
        requests = self.forks_of(group) if self.groups.get(group.number) is group else ()
        group.rollout_ids += [str(each.rollout_id) for each in requests]
        forks: list[CollectedRollout | None] = [None] * len(requests)
        group.forks = forks
        return [_GroupSlot(group, forks, place, request) for place, request in enumerate(requests)]
