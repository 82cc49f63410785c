"""The advantages of a group's rollouts, computed again with the recorded estimator, where they can be known exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from leyden._lib.json import Json
from leyden.errors import ConfigError
from leyden.objectives.advantages import ESTIMATORS, RolloutRewards, make_advantages
from leyden.training.runs import RecordedRun
from leyden.training.runs.overview import control_of, part_of
from leyden.types import AttemptedRollout, Rollout

_OF_REWARDS: Final = ("grpo", "dr_grpo", "rloo")
"""The estimators that read nothing but the final rewards of one group."""


def recorded_credit(run: RecordedRun) -> Json:
    """Return how the run credited its rollouts (`Algorithm.credit_assignment`); empty if that is not recorded."""
    return part_of(part_of(run.record.config, "algorithm"), "credit")


def advantages_of(run: RecordedRun, members: Sequence[Rollout]) -> dict[str, float]:
    """Return the advantages of a group by rollout id, as training computed them.

    members: all rollouts of the group that the store has.
    Raise ConfigError, with the reason as its message, if they cannot be known exactly.
    """
    credit = recorded_credit(run)
    name, wanted = credit.get("advantages"), credit.get("rollouts_per_task")
    changed = {(line.path or "").rpartition(".")[2] for line in control_of(run) if line.state == "done"}
    imitated = [each for each in members if each.metadata.get("step", 0) < credit.get("sft_steps", 0)]
    reasons = {
        "the run records no estimator of advantages": not credit,
        f"the estimator {name} reads more than the rewards of a group": name not in _OF_REWARDS,
        "a KL penalty, which is not recorded, was subtracted from its reward": credit.get("kl_in_reward"),
        "the size of groups, or a penalty in the reward, was changed during the run": changed
        & {"rollouts_per_task", "kl_in_reward"},
        "it was not sampled for training": any(each.mode != "train" for each in members),
        "its step imitated successes": imitated,
        f"the store has {len(members)} rollouts of its group of {wanted}": len(members) != wanted,
    }
    rewards: dict[str, float] = {}
    for each in members:
        reward = each.attempt.reward if isinstance(each, AttemptedRollout) else None
        if each.status == "failed" and (reward := credit.get("failed_reward")) is None:
            continue  # it is left out of the comparison
        is_known = each.status in ("succeeded", "failed") and reward is not None and math.isfinite(reward)
        reasons[f"{each.rollout_id}, which is {each.status}, has no reward to compare with"] = not is_known
        rewards[each.rollout_id] = reward or 0.0
    reasons["it has no other rollout to be compared with"] = len(rewards) < 2
    if (reason := next((text for text, holds in reasons.items() if holds), None)) is not None:
        raise ConfigError(reason)
    given = [RolloutRewards(group=0, reward=reward, call_rewards=[reward]) for reward in rewards.values()]
    found = ESTIMATORS[str(name)].function(given, make_advantages(str(name), credit.get("constants"))).advantages
    return {rollout_id: own[0] for rollout_id, own in zip(rewards, found, strict=True)}
