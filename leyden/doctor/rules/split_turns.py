"""The turns of a conversation do not continue each other's tokens, so that each is trained on by itself."""

from __future__ import annotations

from leyden._lib.numbers import mean_of
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_FEW = 0.95


def _find(run: Evidence) -> Finding | None:
    merged = run.series("merged_turns")[-5:]
    if not merged or (share := mean_of(value for _, value in merged)) >= _FEW:
        return None
    examples = [line.text.partition("For example ")[2] for line in run.logged("sequences of their own")]
    return Finding(
        cause="turns do not continue the tokens of the turns before, so their context is computed again",
        evidence=(f"{share:.0%} of the turns of the last steps merged", *filter(None, examples[-1:])),
        remedy="Send back each answer as it came, and append to the messages only. Training is correct, and slower.",
        command=f"leyden show {run.source} --worst -n 1",
        share=1 - share,
    )


RULE = Rule("split-turns", _find)
