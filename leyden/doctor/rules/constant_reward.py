"""All rollouts of a run that compares nothing within groups have one reward."""

from __future__ import annotations

from leyden._lib.formatting import figure
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_ENOUGH, _STEPS = 16, 6


def _find(run: Evidence) -> Finding | None:
    reward = None if run.counts is None else run.counts.measures.get("reward")
    if run.total("groups"):
        return None  # flat_groups tells more
    rows = [value for _, value in run.series("reward")]
    if reward is None and len(rows) >= _STEPS and min(rows) == max(rows) and not run.total("reward_std"):
        evidence = f"the mean reward is {figure(rows[0])} in all {len(rows):,} iterations"
    elif reward is not None and reward.count >= _ENOUGH and reward.minimum == reward.maximum:
        evidence = f"all {reward.count:,} rewards are {figure(reward.mean)}"
    else:
        return None
    only_measured = run.run.record.kind == "eval" or str(run.option("algorithm.name")).endswith("Baseline")
    if only_measured and reward is not None and reward.mean == 1.0:
        return None  # all tasks are solved
    return Finding(
        cause="every rollout has the same reward",
        evidence=(evidence,),
        remedy="Compare right and wrong answers with their rewards: the reward may ignore the answer, or the tasks may be "
        "too easy or too hard.",
        command=f"leyden show {run.source} --worst -n 5",
    )


RULE = Rule("constant-reward", _find)
