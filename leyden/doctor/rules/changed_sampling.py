"""The agent samples from another distribution than the policy's, so that its calls are not trained on."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.doctor.rules.no_token_ids import refused_share


def _find(run: Evidence) -> Finding | None:
    refused = [(n, each) for each, n in run.refusals.most_common() if each.startswith("the agent sampled ")]
    if not refused:
        return None
    share = refused_share(run, sum(n for n, _ in refused))
    return Finding(
        cause="the agent changes how the model samples, so its calls are not trained on",
        evidence=tuple(f"{n:,} model calls: {reason}" for n, reason in refused[:3]),
        remedy="Pass **llm.sampling_parameters to the model and no other sampling option; set the temperature in the "
        "algorithm.",
        command=f"leyden show {run.source} --worst -n 1",
        severity="critical" if share > 0.5 else "warning",
        share=share,
    )


RULE = Rule("changed-sampling", _find, explains=("flat-groups", "untrained-model"))
