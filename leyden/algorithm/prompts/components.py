"""Choose which of several prompts is rewritten next.

Pure functions of counts, which know no prompts, no models and no optimiser.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

Edits = Mapping[str, tuple[int, int]]
"""For each prompt, by its name: how often it was rewritten, and how often that raised the reward."""


def name_to_improve(names: Sequence[str], edits: Edits, turn: int, seed: str) -> str:
    """Return the name of the prompt to rewrite: each in turn until all were rewritten once, then by how often that has
    helped.

    The choice is Thompson sampling: a rate of success is drawn for each prompt from its Beta distribution, and the
    highest one wins. So a prompt whose edits never help is chosen more and more seldom, but is not given up.

    turn: the number of the choice, from 0.
    seed: of the draw; equal arguments give equal names.
    """
    if any(name not in edits for name in names):
        return names[turn % len(names)]
    chance = random.Random(f"{seed}/component")
    rates = {name: chance.betavariate(1 + edits[name][1], 1 + edits[name][0] - edits[name][1]) for name in names}
    return max(names, key=lambda name: rates[name])
