"""Groups of rollouts on the tiny model's vocabulary, drawn from a seed: several calls, branches, failures."""

from __future__ import annotations

import random

from leyden.adapter import merge_triplets
from leyden.algorithm.policy_gradient.step_data import Group, RolloutData
from leyden.types import Triplet, TripletPrompt, TripletResponse


def make_groups(seed: int, *, n_groups: int = 4, size: int = 3, failures: bool = True) -> list[Group]:
    """Return groups with unequal rewards; some rollouts have branched, and with `failures` some have no trajectory."""
    rng = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(3, 250) for _ in range(rng.randint(1, most))]

    def conversation() -> list[Triplet]:
        seen: list[int] = []
        calls: list[Triplet] = []
        for _ in range(rng.randint(1, 4)):
            prompt = tokens(6) if rng.random() < 0.3 else seen + tokens(6)
            answer = tokens(5)
            logprobs = [rng.uniform(-6.0, -4.0) for _ in answer]
            response = TripletResponse(token_ids=answer, logprobs=logprobs)
            calls.append(Triplet(prompt=TripletPrompt(token_ids=prompt), response=response))
            seen = prompt + answer
        return calls

    groups = [
        Group(
            [
                RolloutData(
                    f"ro-{group}-{place}",
                    float(place) + 0.25 * rng.randrange(4),
                    [] if failures and place == 1 and group % 2 else merge_triplets(conversation()),
                )
                for place in range(size)
            ]
        )
        for group in range(n_groups)
    ]
    return groups
