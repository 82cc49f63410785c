"""Rollouts are sampled with weights that are not the learner's, or arrive too late to be trained on."""

from __future__ import annotations

from statistics import median

from leyden._lib.formatting import figure
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_LAST = 5
_LARGE = 0.1
"""Nats a token. bfloat16 and vLLM's kernels differ by 0.01 to 0.03."""


def _find(run: Evidence) -> Finding | None:
    stale, groups = run.total("stale_groups", last=_LAST), run.total("groups", last=_LAST)
    late = stale / (stale + groups) if stale else 0.0
    on_policy = [row for row in run.train_rows if not row.metrics.get("staleness")]
    at = {row.iteration for row in on_policy}
    off = [value for n, value in run.series("mean_logprob_difference") if n in at][-_LAST:]
    differs = len(off) >= 3 and median(off) > _LARGE
    old = [] if run.option("algorithm.max_staleness") else _old_versions(run)
    if late < 0.2 and not differs and not old:
        return None
    evidence: list[str] = []
    if old:
        evidence.append(
            f"rollout {old[0][0]} was sampled with version {old[0][1]} of the weights, after update {old[0][2]}"
        )
    if differs:
        evidence.append(
            f"the sampler's log-probabilities differ from the learner's by {figure(median(off), 2)} nats a token in the mean"
        )
    if late >= 0.2:
        evidence.append(
            f"{stale:,.0f} groups of the last steps were cancelled as too old, {groups:,.0f} were trained on"
        )
    return Finding(
        cause="rollouts are sampled with other weights than the learner's"
        if differs or old
        else "many rollouts are too old to be trained on when they end",
        evidence=tuple(evidence),
        remedy="Look in the log for weights that the sampler did not load, and sample in the learner's precision."
        if differs or old
        else "Give rollouts a shorter timeout_seconds, or raise max_staleness.",
        command=f"leyden plot {run.source} --metric {'mean_logprob_difference' if differs else 'stale_groups'}",
        severity="critical" if differs or old else "warning",
        share=1.0 if differs else late or 0.5,
    )


def _old_versions(run: Evidence) -> list[tuple[str, int, int]]:
    """Return the sampled rollouts whose calls had older weights than the step before left: id, version, updates."""
    after = {row.iteration: row.metrics.get("policy_version") for row in run.train_rows}
    found: list[tuple[str, int, int]] = []
    for sampled, calls in run.calls:
        step = sampled.rollout.metadata.get("step")
        versions = [
            version for call in calls if call.tokens is not None for version in call.tokens.policy_versions or ()
        ]
        expected = after.get(step) if isinstance(step, int) and sampled.rollout.mode == "train" else None
        if isinstance(expected, int) and versions and min(versions) < expected:
            found.append((sampled.rollout.rollout_id, min(versions), expected))
    return found


RULE = Rule("stale-weights", _find, explains=("collapse", "unstable-loss", "flat-groups"), during_fit=True)
