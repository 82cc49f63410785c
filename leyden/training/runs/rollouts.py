"""Queries of a recorded run's rollouts: counts by status, failures by reason, the best and the worst."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from leyden.errors import ConfigError
from leyden.store.base import LightningStore
from leyden.training.runs.recorded_runs import FailedRollout, RecordedRun, failure_of
from leyden.types import AttemptedRollout, Feedback, Range, ResourcesUpdate, Rollout, RolloutStatus
from leyden.types.run_record import algorithm_group

_PAGE = 200
"""Rollouts whose spans are read at once."""
_OFFERED = 5
"""Ids that an error message names if several match."""
VARYING = re.compile(r"\b(?![45]\d\d\b)[\w-]*\d[\w.:-]*")
"""Words with a digit: ids, addresses, numbers, times. HTTP statuses such as 404 are left alone."""


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failures of a run that have the same reason, but for ids, addresses and numbers."""

    reason: str
    """The reason of the last of them, with "(id)" in place of its own ids."""
    reason_kind: str | None
    """The kind of failure as the runner names it; None if it named none."""
    count: int
    example: str
    """The id of the rollout that failed last for this reason."""


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout and the final reward of its latest attempt."""

    rollout: Rollout
    reward: float


def group_failures(failures: Iterable[FailedRollout]) -> list[FailureGroup]:
    """Return the failures in groups by reason, the most frequent reason first.

    Reasons that differ only in ids, addresses or numbers are one group.
    failures: in the order in which they were recorded.
    """
    groups: dict[tuple[str | None, str], list[FailedRollout]] = {}
    for failure in failures:
        groups.setdefault((failure.reason_kind, VARYING.sub("#", _without_ids(failure))), []).append(failure)
    found = [
        FailureGroup(_without_ids(members[-1]), kind, len(members), members[-1].rollout_id)
        for (kind, _), members in groups.items()
    ]
    return sorted(found, key=lambda group: -group.count)


def _without_ids(failure: FailedRollout) -> str:
    text = failure.reason
    for identifier in filter(None, (failure.rollout_id, failure.attempt_id)):
        text = text.replace(identifier, "(id)")
    return re.sub(r"\s+", " ", text).strip()


async def count_by_status(run: RecordedRun, store: LightningStore) -> dict[str, int]:
    """Return the number of the run's rollouts in the store by status. Statuses without rollouts are left out, as are
    the rollouts in which the algorithm records its own calls.
    """
    if has_the_store_for_itself(run):
        found = dict((await store.statistics())["rollouts_by_status"])
        for own in await store.query_rollouts(group_id=algorithm_group(run.record.run_id)):
            found[own.status] -= 1
    else:
        found = dict[str, int]()
        async for page in pages_of(run, store):
            for rollout in page:
                found[rollout.status] = found.get(rollout.status, 0) + 1
    return {status: found[status] for status in get_args(RolloutStatus) if found.get(status)}


async def failures_of(run: RecordedRun, store: LightningStore | None) -> list[FailedRollout]:
    """Return the failures that the run's folder records; if it has none, those in the store.

    The store lacks failed rollouts that retention has removed.

    store: None looks only in the folder.
    """
    if (recorded := run.failures()) or store is None:
        return recorded
    return [failure_of(rollout) async for page in pages_of(run, store, ["failed"]) for rollout in page]


async def scored_rollouts(
    run: RecordedRun, store: LightningStore, *, order: Literal["best", "worst"], limit: int
) -> list[ScoredRollout]:
    """Return up to `limit` succeeded rollouts with the highest or lowest rewards, and of equal ones the newest."""
    run_id = None if has_the_store_for_itself(run) else run.record.run_id
    sign = -1 if order == "best" else 1

    async def query(between: Range, sort_by: str, sort_order: Literal["asc", "desc"]) -> list[ScoredRollout]:
        found = await store.query_rollouts(
            run_id=run_id,
            status_in=["succeeded"],
            between={"reward": between},
            sort_by=sort_by,
            sort_order=sort_order,
            limit=limit,
        )
        return [
            ScoredRollout(rollout, rollout.attempt.reward)
            for rollout in found
            if isinstance(rollout, AttemptedRollout) and rollout.attempt.reward is not None
        ]

    found = await query((None, None), "reward", "desc" if order == "best" else "asc")
    if len(found) == limit:  # of those that are equal to the last, others may be newer
        last = found[-1].reward
        equal = await query((last, math.nextafter(last, math.inf)), "start_time", "desc")
        found = [one for one in found if one.reward != last]
        found += equal[: limit - len(found)]
    return sorted(found, key=lambda one: (sign * one.reward, -one.rollout.start_time))


async def find_rollout(run: RecordedRun, store: LightningStore, part_of_id: str) -> Rollout:
    """Return the rollout with this id, or the only rollout whose id contains this text.

    Raise ConfigError if there is none, or if several ids contain it.
    """
    run_id = None if has_the_store_for_itself(run) else run.record.run_id
    exact = await store.query_rollouts(rollout_id_in=[part_of_id], run_id=run_id)
    found = exact or await store.query_rollouts(rollout_id_contains=part_of_id, run_id=run_id, limit=_OFFERED + 1)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(
            f"run {run.record.name} has no rollout {part_of_id!r}; `leyden show {run.record.name} --best`, --worst and "
            "--failed list rollouts"
        )
    names = ", ".join(rollout.rollout_id for rollout in found[:_OFFERED])
    raise ConfigError(
        f"{part_of_id!r} is in the ids of several rollouts: {names}{', ...' * (len(found) > _OFFERED)}; give a longer part"
    )


async def read_rewards(store: LightningStore, name: str | None) -> Callable[[Rollout], float | None]:
    """Return a function that gives a rollout's reward, None without one.

    name: a dimension of the reward, or the source of feedback that counts as one (`leyden rescore` gives it); None: the
        primary reward.
    The function raises ConfigError for a rollout that has both under this name, and for a score of another version of
    the judge than the scores before it.
    """
    given = dict[str, Feedback]()
    for each in () if name is None else await store.query_feedback(source=name, kind="reward", counted=True):
        given[each.rollout_id] = each
    versions = set[str]()

    def read(rollout: Rollout) -> float | None:
        attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
        own = None if attempt is None else attempt.reward if name is None else attempt.rewards.get(name)
        if (score := given.get(rollout.rollout_id)) is None:
            return own
        if own is not None:
            raise ConfigError(
                f"{name!r} is a dimension of the reward of rollout {rollout.rollout_id} and the source of feedback about it; "
                "score it again under another name"
            )
        versions.add(score.feedback_id.rpartition(f":{rollout.rollout_id}:")[0])
        if len(versions) > 1:
            raise ConfigError(
                f"some scores {name!r} are of another judge than others, or of an earlier version of it; complete the new "
                "ones with leyden rescore --again"
            )
        return float(score.value)

    return read


async def latest_resources(run: RecordedRun, store: LightningStore) -> ResourcesUpdate | None:
    """Return the resources that the run published last; None if there are none.

    Resources do not name their run. In a store that several runs may share, the resources of the run's newest rollout
    are returned instead.
    """
    if has_the_store_for_itself(run):
        return await store.get_latest_resources()
    newest = await store.query_rollouts(run_id=run.record.run_id, sort_by="start_time", sort_order="desc", limit=1)
    if not newest or newest[0].resources_id is None:
        return None
    return await store.get_resources_by_id(newest[0].resources_id)


async def pages_of(
    run: RecordedRun, store: LightningStore, status_in: list[RolloutStatus] | None = None
) -> AsyncIterator[list[Rollout]]:
    """Yield the run's rollouts page by page, in the order in which they were enqueued."""
    run_id = None if has_the_store_for_itself(run) else run.record.run_id
    offset = 0
    while page := list(await store.query_rollouts(status_in=status_in, run_id=run_id, limit=_PAGE, offset=offset)):
        yield page
        offset += len(page)


def has_the_store_for_itself(run: RecordedRun) -> bool:
    """Return whether every rollout in the store is the run's: it is a file in the run's folder."""
    return run.directory is not None and (run.directory / "store.sqlite").exists()
