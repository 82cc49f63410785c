"""The run ended with an error that no other rule explains."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule


def _find(run: Evidence) -> Finding | None:
    if run.run.state != "failed":
        return None
    return Finding(
        cause="the run ended with an error",
        evidence=(run.cause or "no cause was recorded",),
        remedy="Mend what the error names. The run goes on from its last finished step.",
        command=run.resume_command or f"leyden show {run.source}",
        severity="critical",
    )


RULE = Rule("run-failed", _find, fallback=True)
