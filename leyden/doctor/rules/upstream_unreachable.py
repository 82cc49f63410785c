"""The server of the model does not accept connections, or answers that it is out of order."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_PATTERN = r"connection (?:refused|error|reset)|cannot connect|name or service not known|no route to host|\b50[234]\b"


def _find(run: Evidence) -> Finding | None:
    groups = run.failed_like(_PATTERN)
    n_failed = sum(each.count for each in groups)
    if not n_failed:
        return None
    share = run.share_of_rollouts(n_failed)
    return Finding(
        cause="the model's server cannot be reached",
        evidence=tuple(f"{each.count:,} rollouts failed: {each.reason}" for each in groups[:3]),
        remedy="Start the server, or correct its address in LLMProxy(model_list=...) or in the agent's LLM resource.",
        command=f"leyden show {run.source} {groups[0].example}",
        severity="critical" if share > 0.5 else "warning",
        share=share,
    )


RULE = Rule("upstream-unreachable", _find, explains=("flat-groups",), during_fit=True)
