"""All rollouts of a task get the same reward, or too few of them are usable, so that nothing can be learned."""

from __future__ import annotations

from leyden._lib.formatting import figure
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_STEPS = 3
"""Training steps that are looked at, the last ones."""
_ENOUGH = 8
"""Groups without signal that suffice in a run of fewer steps."""


def _find(run: Evidence) -> Finding | None:
    flat, small, groups = (int(run.total(name, last=_STEPS)) for name in ("flat_groups", "small_groups", "groups"))
    steps = min(_STEPS, len(run.series("groups")))
    if flat + small < 0.95 * groups or (steps < _STEPS and flat + small < _ENOUGH) or not groups:
        return None
    first, rewards = run.series("reward")[:1], [value for _, value in run.series("reward")[-_STEPS:]]
    best = max((value for _, value in run.series("reward")), default=0.0)
    is_solved = bool(rewards) and sum(rewards) >= 0.95 * len(rewards) * (run.option("algorithm.success_reward") or 1.0)
    if small <= flat and (is_solved or (first and rewards[-1] >= best - 1e-9 * abs(best) > first[0][1])):
        return None  # nothing is left to learn
    few = small > flat
    return Finding(
        cause="too few rollouts of each task are usable, so nothing is learned"
        if few
        else "the rollouts of each task all get the same reward, so nothing is learned",
        evidence=(
            f"{small} of the {groups} groups of the last {steps} steps have fewer than two usable rollouts"
            if few
            else f"{flat} of the {groups} groups of the last {steps} steps are flat",
            f"the mean rewards of these steps are {', '.join(figure(each, 3) for each in rewards)}",
        ),
        remedy="Mend what makes rollouts fail or be refused, and run several rollouts_per_task."
        if few
        else "Compare right and wrong answers with their rewards. If the reward is right, take easier tasks, partial "
        "credit, or more rollouts_per_task.",
        command=f"leyden show {run.source} {'--failed' if few else '--worst -n 5'}",
        severity="critical",
        share=(flat + small) / groups,
    )


RULE = Rule(
    "flat-groups",
    _find,
    explains=("untrained-model",),
    during_fit=True,
    warned="nothing to learn|all answers|nothing is left to learn",
)
