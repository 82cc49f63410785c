"""`rule_of_messages`: a rule that knows causes by their messages.

Failed rollouts, failed model calls, warnings of the log and the cause of the run's end are searched. The messages are
those of Leyden itself, and of the clients and systems that agents use.
"""

from __future__ import annotations

from dataclasses import dataclass

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

CONSEQUENCES = (
    "agent-raises",
    "constant-reward",
    "flat-groups",
    "missing-metrics",
    "no-reward",
    "no-token-ids",
    "untrained-model",
)
"""Rules that also find something when rollouts fail, whatever the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One cause, with the messages that name it."""

    pattern: str
    """A regular expression; case does not matter."""
    cause: str
    remedy: str
    command: str | None = None
    """Shown if no rollout is an example. `{run}` is the run as the user names it."""


def rule_of_messages(name: str, *kinds: Kind, explains: tuple[str, ...] = (), during_fit: bool = True) -> Rule:
    """Return a rule that finds the kind whose messages touch most of the run.

    explains: names of rules beside CONSEQUENCES.
    """

    def find(run: Evidence) -> Finding | None:
        found = [(said, kind) for kind in kinds if (said := run.said(kind.pattern)) is not None]
        if not found:
            return None
        said, kind = max(found, key=lambda each: (each[0].ended, each[0].share))
        command = kind.command
        if command is None and said.example is not None:
            command = f"leyden show {{run}} {said.example}"
        return Finding(
            cause=kind.cause,
            evidence=said.evidence,
            remedy=kind.remedy,
            command=None if command is None else command.replace("{run}", run.source),
            severity="critical" if said.ended or said.share > 0.5 else "warning",
            share=said.share,
        )

    return Rule(name, find, explains=(*CONSEQUENCES, *explains), during_fit=during_fit)
