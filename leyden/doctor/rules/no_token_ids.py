"""Model calls have no token ids or log-probabilities, or do not go through the gateway, so nothing can be trained."""

from __future__ import annotations

import re

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_OTHER = re.compile(r"sampled (?:at|with)|agent_match")
"""Refusals that other rules explain."""


def _find(run: Evidence) -> Finding | None:
    refused = [(n, reason) for reason, n in run.refusals.most_common() if not _OTHER.search(reason)]
    elsewhere = run.failed_like("^no_model_call: the agent never called the model through the gateway")
    if not refused and not elsewhere:
        return None
    evidence = [f"{n:,} model calls cannot be trained on: {reason}" for n, reason in refused[:3]]
    evidence += [f"{each.count:,} rollouts failed: {each.reason}" for each in elsewhere[:2]]
    n_rollouts = sum(each.count for each in elsewhere)
    share = run.share_of_rollouts(n_rollouts) if not refused else refused_share(run, sum(n for n, _ in refused))
    return Finding(
        cause="the model calls have no token ids that can be trained on"
        if refused
        else "the agent calls no model through the gateway: none at all, or one past it, whose tokens are not recorded",
        evidence=tuple(evidence),
        remedy="Let the server return token ids and log-probabilities (vLLM does), or train with a backend of Leyden's."
        if refused
        else "Make the agent's client from its `llm` in each rollout: base_url=llm.endpoint, or llm.openai().",
        command=f"leyden show {run.source} {elsewhere[0].example}"
        if elsewhere
        else f"leyden show {run.source} --worst",
        severity="critical" if share > 0.5 else "warning",
        share=share,
    )


def refused_share(run: Evidence, n: int) -> float:
    """Return the share of the run's model calls that so many refused ones are; 1 for a run that ended before a row."""
    return min(1.0, n / max(run.total("model_calls"), n))


RULE = Rule("no-token-ids", _find, explains=("flat-groups", "agent-raises", "untrained-model"))
