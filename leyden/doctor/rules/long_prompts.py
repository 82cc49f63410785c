"""Prompts are longer than the model's context."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_PATTERN = (
    r"the prompt has [\d,]+ tokens; the context has|maximum context length|context_length_exceeded|prompt is too long"
    r"|longer than the maximum model length|exceeds? the (?:model's )?(?:available )?context"
)


def _find(run: Evidence) -> Finding | None:
    groups = run.failed_like(_PATTERN)
    n_failed = sum(each.count for each in groups)
    if not n_failed:
        return None
    share, limit = run.share_of_rollouts(n_failed), run.option("algorithm.backend.max_length")
    return Finding(
        cause="prompts are longer than the model's context",
        evidence=tuple(f"{each.count:,} rollouts failed: {each.reason}" for each in groups[:3]),
        remedy=f"Raise max_length of the backend{'' if limit is None else f' (it is {limit})'}, or shorten the "
        "conversation: a chat grows with each turn.",
        command=f"leyden show {run.source} {groups[0].example}",
        severity="critical" if share > 0.5 else "warning",
        share=share,
    )


RULE = Rule("long-prompts", _find, explains=("flat-groups", "agent-raises", "untrained-model"), during_fit=True)
