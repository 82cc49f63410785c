"""What is known of an episode when it is over: the numbers that writers and collectors are given."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["EpisodeLost", "EpisodeStats"]


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """An episode that ended by itself."""

    length: int
    """Steps."""
    reward: float
    """The sum over its steps."""
    logs: dict[str, float] = field(default_factory=dict[str, float])
    """Scalars that simulator, interpreters and reward logged, each its mean over the steps that have it."""
    seed_index: int | None = None
    """Of its seed, in the data set."""
    seed_number: int | None = None
    """How many seeds were taken before this one."""


@dataclass(frozen=True, slots=True)
class EpisodeLost:
    """An episode that was not finished: its simulator failed or hung, or its worker died."""

    env_id: int
    seed_index: int | None
    seed_number: int | None
    step: int
    """Steps it had made."""
    reason: str
    """In one line."""
