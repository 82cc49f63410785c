"""The model's chat template drops what the agent sends, or ends an answer where sampling does not stop."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.types import semconv

_REFUSED = r"chat template of the model .*(?:drops |has no place for )|the chat template refuses|has no chat template"
_WARNED = r"the chat template of the model .* (?:ends an answer with|, and leaves out: )"


def _find(run: Evidence) -> Finding | None:
    groups, warned = run.failed_like(_REFUSED), run.logged(_WARNED)
    unstopped = next((line for line in warned if "ends an answer with" in line.text), None)
    if unstopped is not None and not groups and cut_share(run)[0] < 0.5:
        warned = [line for line in warned if line is not unstopped]  # the model ends its answers nevertheless
    if not groups and not warned:
        return None
    share = run.share_of_rollouts(sum(each.count for each in groups)) if groups else 1.0
    return Finding(
        cause="the model's chat template does not fit what the agent sends"
        if groups or unstopped not in warned
        else "the model's chat template ends an answer where sampling does not stop",
        evidence=(
            *(f"{each.count:,} rollouts failed: {each.reason}" for each in groups[:3]),
            *dict.fromkeys(line.text for line in warned),
        ),
        remedy="Save the tokenizer with a template that writes what is dropped."
        if groups or unstopped not in warned
        else "Add the token to eos_token_id in the model's generation_config.json, or make it the eos_token.",
        command=f"leyden show {run.source} {groups[0].example if groups else '--worst -n 3'}",
        severity="critical" if (share > 0.5 and groups) or unstopped in warned else "warning",
        share=share,
    )


def cut_share(run: Evidence) -> tuple[float, int]:
    """Return which share of the sampled model calls `max_tokens` has ended, and how many calls those are."""
    reasons = [call.span.attributes.get(semconv.GEN_AI_FINISH_REASONS) for _, calls in run.calls for call in calls]
    known = [each for each in reasons if isinstance(each, list | tuple) and each]
    cut = sum("length" in each for each in known)
    return cut / max(len(known), 1), cut


RULE = Rule(
    "chat-template", _find, explains=("cut-answers", "flat-groups", "agent-raises", "untrained-model", "collapse")
)
