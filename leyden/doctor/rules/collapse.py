"""The policy fell: its reward was good and is gone."""

from __future__ import annotations

from leyden._lib.formatting import figure
from leyden._lib.numbers import mean_of
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_WINDOW = 3
"""Steps whose mean reward is compared."""


def _find(run: Evidence) -> Finding | None:
    rewards = run.series("reward")
    if len(rewards) < 2 * _WINDOW + 1:
        return None
    means = [mean_of(value for _, value in rewards[n : n + _WINDOW]) for n in range(len(rewards) - _WINDOW + 1)]
    best, last, first = max(means), means[-1], means[0]
    at = rewards[means.index(best) + _WINDOW - 1][0]
    spread = max(best - min(means), 1e-12)
    if best - last < 0.5 * spread or best - last < 0.1 * max(abs(best), abs(first)):
        return None
    evidence = [f"the mean reward of {_WINDOW} steps was {figure(best, 3)} at step {at} and is {figure(last, 3)} now"]
    for name in ("entropy", "kl", "grad_norm", "response_tokens"):
        values = run.series(name)
        before = [value for n, value in values if n <= at][-_WINDOW:]
        if before and len(values) > _WINDOW:
            now = mean_of(value for _, value in values[-_WINDOW:])
            if not 0.5 < (now + 1e-9) / (mean_of(before) + 1e-9) < 2:
                evidence.append(f"{name} went from {figure(mean_of(before), 3)} to {figure(now, 3)}")
    return Finding(
        cause="the policy has fallen: its reward was better before",
        evidence=tuple(evidence),
        remedy="Train with half the learning rate, or find one. model/ holds the best weights if the run ended by itself.",
        command=f"leyden plot {run.source} --metric reward",
        severity="critical",
        share=1 - (at / rewards[-1][0]) if rewards[-1][0] else 1.0,
    )


RULE = Rule("collapse", _find, during_fit=True)
