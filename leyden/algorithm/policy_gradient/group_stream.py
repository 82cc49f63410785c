"""`GroupStream`: numbered groups of rollouts, enqueued ahead of their use and taken as they finish.

It knows a collector and the requests of each group. It does not know whether a group has signal, or when one is too
old. Groups that are enqueued together are collected together (a *wave*). The number of a group determines its requests,
so a resumed run requests the same rollouts and finds the finished ones. Likewise, a group's results determine the
requests of its forks.
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
    """A group of rollouts, some of which may still run."""

    number: int
    step: int
    """The training step at which the group was enqueued."""
    rollout_ids: list[str]
    """The ids of the group's rollouts, then of its forks."""
    results: list[CollectedRollout | None]
    """The result of each rollout, by its index in the group; None while the rollout runs."""
    forks: list[CollectedRollout | None] | None = None
    """The result of each fork; None until all rollouts have finished, because their results determine the forks."""

    @property
    def finished(self) -> bool:
        """Whether all rollouts of the group and all of their forks have finished."""
        return self.forks is not None and None not in self.forks


@dataclass(frozen=True, slots=True)
class _GroupSlot:
    """One rollout or fork of a group that is being run, and where its result belongs."""

    group: CollectedGroup
    results: list[CollectedRollout | None]
    """The list of the group that gets the result: that of its rollouts or of its forks."""
    place: int
    """The result's index in `results`."""
    request: EnqueueRolloutRequest


@dataclass(slots=True)
class GroupStream:
    """The groups that are enqueued and not taken yet. Use it in one event loop."""

    collector: RolloutCollector
    requests_of: Callable[[int], Sequence[EnqueueRolloutRequest]]
    """Returns the requests of the group with a number; each request has an id."""
    collect: Callable[[Sequence[EnqueueRolloutRequest], int], AsyncGenerator[CollectedRollout]]
    """Runs requests and yields their results as they finish. The integer is the step until which the rollouts stay
    pinned in the store."""
    forks_of: Callable[[CollectedGroup], Sequence[EnqueueRolloutRequest]] = lambda group: ()
    """Returns the requests of a finished group's forks; each request has an id."""
    groups: dict[int, CollectedGroup] = field(default_factory=dict[int, CollectedGroup])
    """Groups that are enqueued and not taken, by their number."""
    _waves: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    """Tasks that collect rollouts or forks."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a group has finished or a wave has failed."""
    _failure: Exception | None = None
    """The error that ended a wave; `take` raises it."""

    def enqueue(self, numbers: Iterable[int], *, step: int, keep_until: int) -> None:
        """Start the rollouts of several groups together.

        numbers: the numbers of the groups.
        step: the training step under way.
        keep_until: the step until which the rollouts stay pinned in the store.
        """
        wave: list[_GroupSlot] = []
        for number in numbers:
            requests = self.requests_of(number)
            group = CollectedGroup(number, step, [str(each.rollout_id) for each in requests], [None] * len(requests))
            self.groups[number] = group
            wave += [_GroupSlot(group, group.results, place, request) for place, request in enumerate(requests)]
        self._start(wave, keep_until)

    async def take(self, count: int) -> list[CollectedGroup]:
        """Wait until `count` groups have finished; remove and return those with the lowest numbers.

        Raise the error that ended a collection, if any.
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
        if wave:
            task = asyncio.create_task(self._run(wave, keep_until))
            self._waves.add(task)
            task.add_done_callback(self._waves.discard)

    async def _run(self, wave: Sequence[_GroupSlot], keep_until: int) -> None:
        """Collect a wave's rollouts, and write each result into its group. Start a group's forks after its last
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
        requests = self.forks_of(group) if self.groups.get(group.number) is group else ()
        group.rollout_ids += [str(each.rollout_id) for each in requests]
        forks: list[CollectedRollout | None] = [None] * len(requests)
        group.forks = forks
        return [_GroupSlot(group, forks, place, request) for place, request in enumerate(requests)]
