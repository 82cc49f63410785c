"""An episode that was not finished. A finished one is described by `leyden.loop.EpisodeStats`."""

from __future__ import annotations

from dataclasses import dataclass


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
    again: bool = False
    """Whether the episode's seed is taken again; False: the seed is left out."""
