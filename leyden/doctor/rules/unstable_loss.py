"""The update breaks: numbers that are not finite, or steps that move the policy far."""

from __future__ import annotations

import math
import re
from statistics import median

from leyden._lib.formatting import figure
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_UPDATE = re.compile(r"(?:.*_)?(?:loss|grad_norm|kl|entropy)")
_DIVERGED = r"the loss of \d+ sequences is|the gradient's norm is"
_LARGE_KL, _HUGE_KL = 0.1, 1.0
"""Nats a token by which one step moves the policy."""


def _find(run: Evidence) -> Finding | None:
    broken = [
        (row.iteration, name)
        for row in run.train_rows
        for name, value in row.metrics.items()
        if _UPDATE.fullmatch(name) and isinstance(value, float) and not math.isfinite(value)
    ]
    diverged = [line.text for line in run.logged(_DIVERGED)][-1:] + [run.cause] * bool(re.search(_DIVERGED, run.cause))
    kl = run.series("kl")
    large = [(n, value) for n, value in kl if value > _LARGE_KL]
    usual = median(value for _, value in norms) if len(norms := run.series("grad_norm")) >= 8 else math.inf
    spikes = [(n, value) for n, value in norms if value > 100 * usual > 0]
    unsteady = len(large) >= max(2, 0.1 * len(kl)) or any(value > _HUGE_KL for _, value in large)
    if not broken and not diverged and not unsteady and len(spikes) < 2:
        return None
    evidence = [f"{name} is not finite in step {n}" for n, name in broken[:3]]
    evidence += diverged[-1:]
    if large:
        worst = max(large, key=lambda each: each[1])
        evidence.append(
            f"{len(large):,} of {len(kl):,} steps moved the policy by a kl above {_LARGE_KL}, step {worst[0]} by {figure(worst[1], 3)}"
        )
    if spikes:
        worst = max(spikes, key=lambda each: each[1])
        evidence.append(f"grad_norm is usually {figure(usual, 3)}, and {figure(worst[1], 3)} in step {worst[0]}")
    steps = {n for n, _ in (*broken, *large, *spikes)}
    return Finding(
        cause="the loss or the gradient is not finite" if broken or diverged else "updates move the policy too far",
        evidence=tuple(evidence),
        remedy="Look for rewards or advantages that are not finite or very large, and start again from a checkpoint before."
        if broken or diverged
        else "Halve the learning rate, take one epoch, or more tasks_per_step; keep max_grad_norm at 1.",
        command=f"leyden plot {run.source} --metric {broken[0][1] if broken else 'kl' if large else 'grad_norm'}",
        severity="critical" if broken or diverged else "warning",
        share=min(1.0, len(steps) / max(1, len(run.train_rows))),
    )


RULE = Rule("unstable-loss", _find, explains=("collapse", "flat-groups", "cut-answers"), during_fit=True)
