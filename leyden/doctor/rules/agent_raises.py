"""The agent's own code fails."""

from __future__ import annotations

import re

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_KINDS = ("exception", "invalid_return", "missing_resource")
_OTHERS = re.compile(
    r"Error code: \d|APIConnection|Connect|Timeout|timed out|status code|\bHTTP\b|No space left|Too many open files|CUDA",
    re.I,
)
"""Failures of servers and machines, which other rules explain."""
_FEW = 0.02


def _find(run: Evidence) -> Finding | None:
    groups = [each for each in run.failure_groups if each.reason_kind in _KINDS and not _OTHERS.search(each.reason)]
    n_failed = sum(each.count for each in groups)
    if n_failed < 2 or (share := run.share_of_rollouts(n_failed)) < _FEW:
        return None
    return Finding(
        cause="the agent's code fails",
        evidence=tuple(f"{each.count:,} rollouts failed: {each.reason}" for each in groups[:3]),
        remedy="Mend the agent; `Trainer(...).dev(agent, tasks)` runs it in this process, where a debugger stops.",
        command=f"leyden show {run.source} {groups[0].example}",
        severity="critical" if share > 0.5 else "warning",
        share=share,
    )


RULE = Rule("agent-raises", _find, explains=("flat-groups", "constant-reward", "untrained-model"), during_fit=True)
