"""The review: a queue of rollouts that people judge, and their answers as feedback in the store.

An answer has its reviewer as the source, as scores of `leyden rescore` have their judge: `leyden dataset --reward NAME`
reads both. Of several answers of one person about one rollout, the last counts. A preference of a pair is a reward of 1
for the one and of 0 for the other.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from leyden._lib.json import Json
from leyden._lib.numbers import mean_of
from leyden.dashboard.source import Source
from leyden.statistics import estimate
from leyden.store.base import LightningStore
from leyden.training.runs import RecordedRun
from leyden.training.runs.rollouts import has_the_store_for_itself
from leyden.types import AttemptedRollout, Feedback
from leyden.types.checks import check_id

Order = Literal["random", "worst", "uncertain", "disagree"]
"""`uncertain`: those of a task first whose rewards differ the most. `disagree`: those first whose recorded reward and
whose mean answer of people differ the most."""

_QUEUED = 20
_LOOKED_AT = 5_000
"""The newest rollouts among which a queue is made."""


class Answer(BaseModel):
    """An answer of a reviewer about one rollout."""

    model_config = ConfigDict(extra="forbid")

    rollout_id: str
    kind: Literal["reward", "label", "correction"]
    value: Any
    feedback_id: str = Field(pattern=r"^fb-[0-9a-f]{16,32}$")
    """Chosen by the page, so that a repeated request counts once."""


class Answers(BaseModel):
    """Body of `POST /api/review`."""

    model_config = ConfigDict(extra="forbid")

    run: str
    who: str
    answers: list[Answer] = Field(min_length=1, max_length=20)


def queue(run: RecordedRun, order: Order, who: str, seed: int) -> Json:
    """Return the ids of rollouts that a person has not judged yet, each with those of its task, and how far people and
    recorded rewards agree.
    """
    check_id("who", who)
    found, feedback = run.read_store(lambda store: _read(run, store))
    answers: dict[str, dict[str, float]] = {}
    for each in feedback:
        if each.kind == "reward":
            answers.setdefault(each.rollout_id, {})[each.source] = float(each.value)
    mine = {each.rollout_id for each in feedback if each.source == who}
    rewards = {each.rollout_id: each.attempt.reward for each in found}
    waiting = [each for each in found if each.rollout_id not in mine]
    groups: dict[str, list[float]] = {}
    for each in found:
        if each.group_id is not None and (reward := each.attempt.reward) is not None:
            groups.setdefault(each.group_id, []).append(reward)

    def spread(rollout: AttemptedRollout) -> float:
        of_group = groups.get(rollout.group_id or "", [0.0])
        return max(of_group) - min(of_group)

    def disagreement(rollout: AttemptedRollout) -> float:
        said, reward = answers.get(rollout.rollout_id), rollout.attempt.reward
        return -1.0 if not said or reward is None else abs(mean_of(said.values()) - reward)

    shuffled = sorted(waiting, key=lambda each: random.Random(f"{seed} {each.rollout_id}").random())
    keys: Mapping[str, Callable[[AttemptedRollout], float]] = {
        "random": lambda _: 0.0,
        "worst": lambda each: float("inf") if (reward := each.attempt.reward) is None else reward,
        "uncertain": lambda each: -spread(each),
        "disagree": lambda each: -disagreement(each),
    }
    ordered = sorted(shuffled, key=keys[order])  # stable, so that equal ones stay shuffled
    if order == "disagree":
        ordered = [each for each in ordered if disagreement(each) > 0]
    members: dict[str, list[str]] = {}
    for each in waiting:
        members.setdefault(each.group_id or each.rollout_id, []).append(each.rollout_id)
    queued = ordered[:_QUEUED]
    return {
        "rollouts": [each.rollout_id for each in queued],
        "partners": {each.rollout_id: members[each.group_id or each.rollout_id][:_QUEUED] for each in queued},
        "left": len(ordered),
        "judged": len(mine & rewards.keys()),
        "agreement": _agreement(rewards, answers),
    }


def answered(run: RecordedRun, rollout_ids: Sequence[str]) -> list[Json]:
    """Return what people and judges have said about some rollouts: the last of each source and kind."""

    async def read(store: LightningStore) -> list[Feedback]:
        return [each for id_ in rollout_ids for each in await store.query_feedback(rollout_id=id_, counted=True)]

    return [each.model_dump(mode="json") for each in run.read_store(read)]


def write(source: Source, body: bytes) -> Json:
    """Write answers to the run's store. Raise ConfigError, or StoreError if another process owns the store's file."""
    asked = Answers.model_validate_json(body)
    check_id("who", asked.who)
    run, now = source.run(asked.run), time.time()
    feedback = [Feedback(**each.model_dump(), source=asked.who, given_time=now) for each in asked.answers]

    async def add() -> int:
        async with source.open_to_write(run) as store:
            return len(await store.add_many_feedback(feedback))

    return {"stored": asyncio.run(add())}


async def _read(run: RecordedRun, store: LightningStore) -> tuple[list[AttemptedRollout], Sequence[Feedback]]:
    run_id = None if has_the_store_for_itself(run) else run.record.run_id
    found = await store.query_rollouts(
        status_in=["succeeded"], run_id=run_id, sort_by="end_time", sort_order="desc", limit=_LOOKED_AT
    )
    feedback = await store.query_feedback(counted=True)
    return [each for each in found if isinstance(each, AttemptedRollout)], feedback


def _agreement(rewards: Mapping[str, float | None], answers: Mapping[str, Mapping[str, float]]) -> list[Json]:
    """Return for each source how often it and the recorded reward say the same: both at least 0.5, or both below."""
    pairs: dict[str, list[float]] = {}
    for rollout_id, said in answers.items():
        if (reward := rewards.get(rollout_id)) is not None:
            for source, value in said.items():
                pairs.setdefault(source, []).append(float((value >= 0.5) == (reward >= 0.5)))
    found: list[Json] = []
    for source, same in sorted(pairs.items()):
        share = estimate([[each] for each in same])
        found.append({"source": source, "n": len(same), "share": share.mean, "low": share.low, "high": share.high})
    return found
