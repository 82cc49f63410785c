"""A metric that someone waits for is never reported, or stops."""

from __future__ import annotations

import math

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_WARNED = r"waits for the metric|has no metrics; the vessel|lacks .*, which earlier rows have|does not take a metric of the run"


def _find(run: Evidence) -> Finding | None:
    evidence = [line.text for line in run.logged(_WARNED)][-3:]
    if ended := "needs the metric" in run.cause:
        evidence.insert(0, run.cause)
    rewards = [(row.iteration, row.metrics.get("reward")) for row in run.rows if row.metrics.get("rollouts", 1)]
    lost = [n for n, value in rewards if isinstance(value, float) and not math.isfinite(value)]
    if lost:
        evidence.append(
            f"{len(lost)} of {len(rewards)} rows have a reward that is no number, first that of iteration {lost[0]}"
        )
    every, last = run.option("algorithm.val_every_n_steps"), run.rows[-1].iteration if run.rows else 0
    if isinstance(every, int) and last > every and run.option("data.val.length") and not run.series("reward", "val"):
        evidence.append(f"val_every_n_steps={every}, and no validation has a reward after {last} steps")
    if not evidence:
        return None
    return Finding(
        cause="metrics are missing that something reads",
        evidence=tuple(evidence),
        remedy="Report the metric from step or validate, or correct the name in the callback that waits for it.",
        command=f"leyden show {run.source}",
        severity="critical" if ended else "warning",
        share=len(lost) / len(rewards) if lost else 0.5,
    )


RULE = Rule("missing-metrics", _find)
