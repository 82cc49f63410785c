"""Read and write what the store keeps about the prompts of a run: the label of the best version, and the candidates of
each round.

Prompt optimisers write them. `leyden prompts` and `get_best_prompt(run)` read them, also for a run that has ended or
crashed. The record of a round is an attempt of the algorithm itself, like those of its model calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

from pydantic import BaseModel

from leyden.algorithm.collector import rollout_id_at
from leyden.algorithm.prompts.candidate import Candidate
from leyden.algorithm.prompts.comparison import Comparison
from leyden.errors import ConfigError, IllegalTransition
from leyden.store.base import LightningStore
from leyden.types import ResourcesUpdate
from leyden.types.run_record import algorithm_group
from leyden.types.run_record import best_label as best_label

_ATTEMPT_ID = "at-decided"
_PURPOSE = "selection"


class CandidateRecord(BaseModel):
    """One candidate of a round, and what the round decided about it."""

    round: int
    """The number of the round, from 1; 0 for the user's prompts."""
    branch: int
    resources_id: str
    version: int
    parent: tuple[str, int] | None
    """The id and version of the resources from which the candidate was made."""
    edited: str | None
    """The name of the prompt that differs from the parent's; several names are joined by commas."""
    reason: str
    """The critique that the edit follows; those of several edits are joined by line breaks."""
    reward: float
    """With GEPA, the mean reward over validation tasks. With APO, the expected reward, given all rewards so far."""
    tasks: int
    """The number of tasks on which the candidate has run."""
    kept: bool
    """Whether the search still uses the candidate after the round."""
    accepted: bool
    """Whether the candidate became the best one in this round."""
    comparison: str = ""
    """The comparison with the candidate that was the best before, as text; empty if there is none."""


def record_of(
    candidate: Candidate,
    version: ResourcesUpdate,
    *,
    reward: float,
    tasks: int,
    kept: bool,
    accepted: bool,
    comparison: Comparison | None = None,
) -> CandidateRecord:
    """Return the record of a measured candidate.

    version: the resources that hold the candidate.
    reward: the mean reward over validation tasks (GEPA), or the expected reward (APO).
    tasks: the number of tasks on which the candidate has run.
    kept: whether the search still uses the candidate after the round.
    accepted: whether the candidate is the best one now.
    comparison: the comparison with the candidate that was the best before; only recorded for an accepted candidate.
    """
    return CandidateRecord(
        round=candidate.round,
        branch=candidate.branch,
        resources_id=version.resources_id,
        version=version.version,
        parent=candidate.parent,
        edited=candidate.edited,
        reason=candidate.reason,
        reward=reward,
        tasks=tasks,
        kept=kept,
        accepted=accepted,
        comparison=str(comparison) if accepted and comparison is not None else "",
    )


async def record_round(
    store: LightningStore,
    run_id: str,
    round_: int,
    candidates: Sequence[CandidateRecord],
    *,
    algorithm: str,
    pin: str,
) -> None:
    """Write the record of a round, and pin the records of all rounds so far. Safe to repeat: the first record of a
    round stays, whatever its status.

    algorithm: the name of the algorithm's class.
    pin: the name under which the records are pinned.
    """
    records = [rollout_id_at(run_id, _PURPOSE, number) for number in range(round_ + 1)]
    await store.start_rollout(
        {"algorithm": algorithm, "purpose": _PURPOSE, "round": round_},
        metadata={"run_id": run_id, "candidates": [candidate.model_dump(mode="json") for candidate in candidates]},
        rollout_id=records[-1],
        attempt_id=_ATTEMPT_ID,
        run_id=None,
        group_id=algorithm_group(run_id),
    )
    with contextlib.suppress(IllegalTransition):  # a resumed run has cancelled the record that a crash left open
        await store.update_attempt(records[-1], _ATTEMPT_ID, status="succeeded")
    present = await store.query_rollouts(rollout_id_in=records)  # a round that measured nothing has none
    await store.pin(pin, [rollout.rollout_id for rollout in present])


async def read_history(store: LightningStore, run_id: str) -> list[CandidateRecord]:
    """Return the records of all candidates that a run has measured, by round and branch. If several rounds have
    measured a candidate, the last one's record is returned.

    A record is complete from its first write on, so it is read whatever its status.
    """
    rounds = await store.query_rollouts(group_id=algorithm_group(run_id))
    decided = [
        (cast("dict[str, Any]", each.input)["round"], each.metadata["candidates"])
        for each in rounds
        if cast("dict[str, Any]", each.input).get("purpose") == _PURPOSE
    ]
    found: dict[str, CandidateRecord] = {}
    for _, candidates in sorted(decided, key=lambda each: each[0]):
        for record in map(CandidateRecord.model_validate, candidates):
            if (before := found.get(record.resources_id)) is not None and before.accepted:
                record = record.model_copy(update={"accepted": True, "comparison": before.comparison})
            found[record.resources_id] = record
    return sorted(found.values(), key=lambda candidate: (candidate.round, candidate.branch))


async def read_best(store: LightningStore, run_id: str) -> ResourcesUpdate:
    """Return the version with the best prompts of a run. Raise ConfigError if the run has none."""
    found = await store.get_labelled_resources(best_label(run_id))
    if found is None:
        raise ConfigError(
            f"{store.url} has no best prompt of this run; APO and GEPA label one as soon as they have measured it, FewShot at its end"
        )
    return found
