"""All rollouts of a task get the same reward, so that nothing can be learned from them."""

from __future__ import annotations

from leyden._lib.formatting import figure
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_STEPS = 3
"""Training steps that are looked at, the last ones."""


def _find(run: Evidence) -> Finding | None:
    rows = [row for row in run.rows if row.stage == "train" and row.metrics.get("groups")][-_STEPS:]
    flat, groups = (sum(int(row.metrics.get(name) or 0) for row in rows) for name in ("flat_groups", "groups"))
    if len(rows) < _STEPS or flat < 0.95 * groups:
        return None
    rewards = [value for _, value in run.series("reward")[-_STEPS:]]
    solved = bool(rewards) and min(rewards) >= 0.99 * (run.option("algorithm.success_reward") or 1.0)
    if solved:
        return None  # nothing is left to learn
    return Finding(
        cause="the rollouts of each task all get the same reward, so nothing is learned",
        evidence=(
            f"{flat} of the {groups} groups of the last {_STEPS} steps are flat",
            f"the mean rewards of these steps are {', '.join(figure(each, 3) for each in rewards)}",
        ),
        remedy="Compare right and wrong answers with their rewards. If the reward is right, take easier tasks, partial "
        "credit, or more rollouts_per_task.",
        command=f"leyden show {run.source} --worst -n 5",
        severity="critical",
        share=flat / groups,
    )


RULE = Rule("flat-groups", _find, during_fit=True)
