"""The run ends with the weights that it began with."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule


def _find(run: Evidence) -> Finding | None:
    steps = [value for _, value in run.series("optimizer_steps")]
    if len(steps) < 3 or any(steps):
        return None
    return Finding(
        cause="no step has changed the weights, so the model and the checkpoints are those of the beginning",
        evidence=(f"optimizer_steps is 0 in all {len(steps)} steps",),
        remedy="If each task is solved from the start, give harder ones; else mend the reward. Nothing here is worth keeping.",
        command=f"leyden show {run.source} --best -n 5",
        severity="critical",
    )


RULE = Rule("untrained-model", _find)
