"""`diagnose`: run the rules and order what they find."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.doctor.rules import RULES
from leyden.errors import LeydenError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with a run, as far as its data show."""

    findings: dict[str, Finding]
    """By the name of the rule, the likeliest root cause first. Consequences follow their cause."""
    unread: tuple[str, ...]
    """The parts of the run that could not be read, each with its reason. Rules that need them found nothing."""


def diagnose(evidence: Evidence, *, live: bool = False, rules: Sequence[Rule] = RULES) -> Diagnosis:
    """Return what is wrong with a run. Nothing is changed.

    live: also run the rules that ask the servers and processes of a running run.
    """
    findings: dict[str, Finding] = {}
    unread: list[str] = []
    for rule in rules:
        if rule.live and not live:
            continue
        if rule.fallback and any(each.severity == "critical" for each in findings.values()):
            continue
        try:
            finding = rule.find(evidence)
        except LeydenError as error:
            unread.append(str(error))
            continue
        except Exception as error:  # a rule must not hide what the others find in a damaged or foreign run
            logger.debug("the rule %s failed", rule.name, exc_info=True)
            unread.append(f"the rule {rule.name} failed: {type(error).__name__}: {error}")
            continue
        if finding is not None:
            findings[rule.name] = finding
    unread += evidence.unread
    return Diagnosis(_ordered(findings, rules), tuple(dict.fromkeys(unread)))


def _ordered(findings: dict[str, Finding], rules: Iterable[Rule]) -> dict[str, Finding]:
    """Return the findings by severity and share, with each consequence behind its cause."""
    explains = {rule.name: rule.explains for rule in rules}

    def consequences(name: str, above: frozenset[str]) -> set[str]:
        below = {each for each in explains[name] if each in findings and each not in above}
        return below.union(*(consequences(each, above | below) for each in below))

    left = sorted(findings, key=lambda name: (findings[name].severity != "critical", -findings[name].share))
    ordered: list[str] = []
    while left:
        explained = set[str]().union(*(consequences(name, frozenset({name})) for name in left))
        # of causes that explain each other, the first counts as the cause
        root = next((name for name in left if name not in explained), left[0])
        after = consequences(root, frozenset({root}))
        # a consequence that shows nothing new is left out
        shown = set(findings[root].evidence)
        repeats = {name for name in after if findings[name].evidence and shown.issuperset(findings[name].evidence)}
        ordered += [root, *(name for name in left if name in after - repeats)]
        left = [name for name in left if name not in ordered and name not in repeats]
    return {name: findings[name] for name in ordered}
