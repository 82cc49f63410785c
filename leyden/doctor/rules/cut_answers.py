"""Nearly all answers end at max_tokens, so that the model never says what it would."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.doctor.rules.chat_template import cut_share

_ENOUGH = 8


def _find(run: Evidence) -> Finding | None:
    share, cut = cut_share(run)
    limit = run.option("algorithm.max_tokens")
    if cut < _ENOUGH or share < 0.9 or limit == 1:  # of one token, no answer can end
        return None
    return Finding(
        cause="nearly all answers are cut off at max_tokens",
        evidence=(f"{share:.0%} of the sampled model calls ended at their limit",),
        remedy=f"Raise max_tokens of the algorithm{'' if limit is None else f' (it is {limit})'} or of the agent. A base "
        "model ends no answer by itself: give it a stop text.",
        command=f"leyden show {run.source} --worst -n 3",
        severity="warning",
        share=share,
    )


RULE = Rule("cut-answers", _find, explains=("flat-groups", "constant-reward", "untrained-model"))
