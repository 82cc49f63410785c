"""Which of several prompts is rewritten next.

Pure functions of counts: they know no prompts, no models and no optimiser.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

Edits = Mapping[str, tuple[int, int]]
"""For each prompt's name: the number of its rewritings, and of those that raised the reward."""


def name_to_improve(names: Sequence[str], edits: Edits, turn: int, seed: str) -> str:
    """Return the prompt to rewrite: each in turn at first, then by how often that has helped so
    far.

    The choice is Thompson sampling: of each prompt's rate of success, which is Beta
    distributed, the highest draw wins. So a prompt whose edits never help gets fewer and fewer,
    and is not given up.

    turn: counts the choices. seed: of the draw; equal counts and seeds give equal names.
    """
    if any(name not in edits for name in names):
        return names[turn % len(names)]
    chance = random.Random(f"{seed}/component")
    rates = {name: chance.betavariate(1 + edits[name][1], 1 + edits[name][0] - edits[name][1]) for name in names}
    return max(names, key=lambda name: rates[name])
