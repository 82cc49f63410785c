"""`Rule` and `Finding`: what the doctor looks for, and what it has found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from leyden.doctor.evidence import Evidence

Severity = Literal["critical", "warning"]
"""`critical`: the run ended, or learned nothing, because of it. `warning`: it lost data, time or quality."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause of trouble in a run."""

    cause: str
    """What is wrong, in one sentence without its full stop."""
    evidence: tuple[str, ...]
    """Figures, ids and messages that show it, the strongest first."""
    remedy: str
    """What to do, in one or two sentences."""
    command: str | None = None
    """A command that shows more, or that mends it."""
    severity: Severity = "warning"
    share: float = 1.0
    """The share of the run's rollouts, steps or workers that it touches, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Looks for one cause."""

    name: str
    """Words joined by hyphens; unique."""
    find: Callable[[Evidence], Finding | None]
    """Returns the finding, or None for a run without this cause, and for one whose data cannot show it."""
    explains: tuple[str, ...] = ()
    """The rules whose findings are consequences of this one; they are shown after it."""
    live: bool = False
    """Whether the rule asks servers or processes of a run that is running. It is left out unless that is asked for."""
    during_fit: bool = False
    """Whether the last rows, failures and log lines of the run's folder suffice for the rule, so that `fit` runs it."""
    warned: str = ""
    """A regular expression of the log's own warnings of this cause, which `fit` does not repeat."""
    fallback: bool = False
    """Whether the rule is asked only if the rules before it found nothing critical."""
