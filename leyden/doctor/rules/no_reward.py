"""Agents end without a reward."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule


def _find(run: Evidence) -> Finding | None:
    groups = [each for each in run.failure_groups if each.reason_kind == "no_reward"]
    n_failed, counts = sum(each.count for each in groups), run.counts
    n_silent = 0
    if counts is not None and run.option("algorithm.name") is not None:
        reward = counts.measures.get("reward")
        n_silent = counts.by_status.get("succeeded", 0) - (0 if reward is None else reward.count)
    if (n := n_failed + max(0, n_silent)) < 2:
        return None
    share = run.share_of_rollouts(n)
    evidence = [f"{n_failed:,} rollouts failed: {groups[0].reason}"] if groups else []
    if n_silent > 0:
        evidence.append(f"{n_silent:,} rollouts succeeded without a reward")
    return Finding(
        cause="the agent ends without a reward",
        evidence=tuple(evidence),
        remedy="Return a number on every path of the agent, or call emit_reward(...) before it ends.",
        command=f"leyden show {run.source} {groups[0].example if groups else '-n 5'}",
        severity="critical" if share > 0.5 else "warning",
        share=share,
    )


RULE = Rule("no-reward", _find, explains=("flat-groups", "constant-reward", "untrained-model"))
