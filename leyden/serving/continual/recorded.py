"""Read the recorded live requests with their rewards from which a cycle learns, and split them.

A hash of a request's input decides whether it is for training, validation or the gate. So the tasks on which the gate
measures a candidate are not trained on in any cycle. This module reads the store. It does not train.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

from pydantic import BaseModel

from leyden._lib.options import check_number
from leyden.serving.continual.watch import CONTROL, request_values
from leyden.store.base import LightningStore
from leyden.types import Feedback, Rollout, VersionKey

_REWARD: Final = "reward"


class RecordedTask(BaseModel):
    """One live request that has a reward."""

    rollout_id: str
    input: Any = None
    reward: float
    resources_id: str
    """The resources with which the request was served."""
    version: int
    """The version of `resources_id` with which the request was served."""
    arm: str | None = None
    """The side of the experiment that served it: `control`, or the canary's label."""
    feedback: list[Feedback] = []
    """The feedback about the request that counts: the last one of each source and kind."""
    replayed: bool = False
    """Whether an earlier cycle may have learned from it already."""


class RecordedTasks(Sequence[Any]):
    """The requests' inputs as a data set. `records` has the requests with their rewards and feedback."""

    def __init__(self, records: Sequence[RecordedTask]) -> None:
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> RecordedTasks: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return RecordedTasks(self.records[index])
        return self.records[index].input

    def __iter__(self) -> Iterator[Any]:
        return (record.input for record in self.records)


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Which recorded requests a cycle learns from.

    new_tasks: the most new requests; the newest are used, and come first. New are the requests since the cycle before
        or, after a drop of the reward, since the drop.
    replayed: the share of older requests in the training data, from 0 to 0.95, so that earlier learning is not
        forgotten.
    validation: the part of all inputs that the algorithm gets as `val_dataset`.
    held_out: the part of all inputs that no algorithm ever sees, for the gate.
    read: the most live requests that are read from the store, the newest.
    values: returns the metrics of one request, given its rollout and the feedback that counts. Requests without a
        `reward` are left out.
    """

    new_tasks: int = 1000
    replayed: float = 0.2
    validation: float = 0.2
    held_out: float = 0.2
    read: int = 20_000
    values: Callable[[Rollout, Sequence[Feedback]], Mapping[str, float]] = request_values

    def __post_init__(self) -> None:
        for name in ("new_tasks", "read"):
            check_number(name, getattr(self, name), at_least=1, whole=True)
        check_number("replayed", self.replayed, at_least=0, at_most=0.95)
        check_number("validation", self.validation, at_least=0, at_most=0.9)
        check_number("held_out", self.held_out, at_least=0, at_most=0.9)


class LearningData(BaseModel):
    """The requests that one cycle learns from. No input is in two of the three parts."""

    train: list[RecordedTask]
    validation: list[RecordedTask]
    held_out: list[RecordedTask]
    """One request for each input, the newest first."""


async def read_data(
    store: LightningStore, settings: DataSettings, *, since: float, before: float, cycle_id: str
) -> LearningData:
    """Return the training data of a cycle: finished live requests that have a reward.

    since: requests that reached the store from this time on (Unix seconds) are new. Earlier ones fill the share
        `replayed` of the training data, chosen by a hash with `cycle_id`.
    before: requests from this time on are left out, so that a cycle that is continued reads the same requests again.
    """
    page = await store.query_rollouts(mode_in=["live"], sort_by="start_time", sort_order="desc", limit=settings.read)
    rollouts = [each for each in page if each.finished and each.start_time < before]
    feedback = await _counted_feedback(store, rollouts, before)
    found = [
        record
        for rollout in rollouts
        if (record := _record(rollout, feedback.get(rollout.rollout_id, ()), settings, since)) is not None
    ]
    new = [record for record in found if not record.replayed][: settings.new_tasks]
    older = sorted(
        (record for record in found if record.replayed), key=lambda record: _share(cycle_id, record.rollout_id)
    )
    n_older = round(len(new) * settings.replayed / (1 - settings.replayed))
    return _split([*new, *older[:n_older]], settings)


async def read_inputs(store: LightningStore, version: VersionKey, *, since: float, limit: int) -> list[Any]:
    """Return the inputs of the first `limit` finished live requests of `version`'s control arm since a Unix time."""
    found = await store.query_rollouts(
        mode_in=["live"], arm_in=[CONTROL], resources_id=version[0], resources_version=version[1]
    )
    return [each.input for each in found if each.start_time >= since and each.finished][:limit]


def _split(records: Sequence[RecordedTask], settings: DataSettings) -> LearningData:
    """Split the records into training, validation and held-out data by a hash of the input, so that a task never
    changes sides. Only the first record of a held-out input is kept.
    """
    data = LearningData(train=[], validation=[], held_out=[])
    known: set[str] = set()
    for record in records:
        content = json.dumps(record.input, sort_keys=True, ensure_ascii=False)
        share = _share("task", content)
        if share < settings.held_out:
            if content not in known:
                known.add(content)
                data.held_out.append(record)
        elif share < settings.held_out + settings.validation:
            data.validation.append(record)
        else:
            data.train.append(record)
    return data


def _record(
    rollout: Rollout, feedback: Sequence[Feedback], settings: DataSettings, since: float
) -> RecordedTask | None:
    """Return a rollout as a task to learn from; None if it has no reward or ran without stored resources.

    since: start of this cycle's data, in seconds since the epoch. An earlier rollout is marked as replayed, because a
        former cycle may have learned from it.
    """
    reward = settings.values(rollout, feedback).get(_REWARD)
    if reward is None or rollout.resources_id is None or rollout.resources_version is None:
        return None
    return RecordedTask(
        rollout_id=rollout.rollout_id,
        input=rollout.input,
        reward=reward,
        resources_id=rollout.resources_id,
        version=rollout.resources_version,
        arm=rollout.arm,
        feedback=list(feedback),
        replayed=rollout.start_time < since,
    )


async def _counted_feedback(
    store: LightningStore, rollouts: Sequence[Rollout], before: float
) -> Mapping[str, Sequence[Feedback]]:
    """Return by rollout id the feedback that counts: the last of each source and kind before the time `before`."""
    versions = {(each.resources_id, each.resources_version) for each in rollouts}
    oldest = min((each.start_time for each in rollouts), default=0.0)
    found: dict[str, dict[tuple[str, str], Feedback]] = {}
    for resources_id, version in versions:
        given = await store.query_feedback(
            resources_id=resources_id, version=version, received_from=oldest, received_before=before
        )
        for each in given:
            found.setdefault(each.rollout_id, {})[each.source, each.kind] = each
    return {rollout_id: list(counted.values()) for rollout_id, counted in found.items()}


def _share(*names: str) -> float:
    """Return a number in [0, 1) that is uniform over texts and equal for equal ones."""
    digest = hashlib.sha256("\x1f".join(names).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
