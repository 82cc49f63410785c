"""All rollouts of a run that compares nothing within groups have one reward."""

from __future__ import annotations

from leyden._lib.formatting import figure
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_ENOUGH = 16


def _find(run: Evidence) -> Finding | None:
    reward = None if run.counts is None else run.counts.measures.get("reward")
    if reward is None or reward.count < _ENOUGH or reward.minimum < reward.maximum or run.total("groups"):
        return None  # of groups, flat_groups tells more
    return Finding(
        cause="every rollout has the same reward",
        evidence=(f"all {reward.count:,} rewards are {figure(reward.mean)}",),
        remedy="Compare right and wrong answers with their rewards: the reward may ignore the answer, or the tasks may be "
        "too easy or too hard.",
        command=f"leyden show {run.source} --worst -n 5",
    )


RULE = Rule("constant-reward", _find)
