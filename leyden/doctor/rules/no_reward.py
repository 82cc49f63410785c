"""Agents end without a reward."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule


def _find(run: Evidence) -> Finding | None:
    groups = [each for each in run.failure_groups if each.reason_kind == "no_reward"]
    n_failed = sum(each.count for each in groups)
    silent: list[str] = []
    if run.option("algorithm.name") is not None:  # without an algorithm, rollouts may need no reward
        silent = [each.rollout.rollout_id for each in run.succeeded if each.rollout.attempt.reward is None]
    if n_failed < 2 and len(silent) < 2:
        return None
    share = max(run.share_of_rollouts(n_failed), len(silent) / max(len(run.succeeded), 1))
    evidence = [f"{n_failed:,} rollouts failed: {groups[0].reason}"] if groups else []
    if silent:
        evidence.append(f"{len(silent)} of the newest {len(run.succeeded)} rollouts succeeded without a reward")
    return Finding(
        cause="the agent ends without a reward",
        evidence=tuple(evidence),
        remedy="Return a number on every path of the agent, or call emit_reward(...) before it ends.",
        command=f"leyden show {run.source} {groups[0].example if groups else silent[0]}",
        severity="critical" if share > 0.5 else "warning",
        share=share,
    )


RULE = Rule("no-reward", _find, explains=("flat-groups", "constant-reward", "untrained-model"))
