"""The tasks: sums and differences of three digits from the `reasoning-gym` package, as it words and scores them.

A task is the package's own entry (question, answer, metadata), a JSON value. Entry `i` of a data set made with seed `s` is drawn from
`Random(s + i)`, so two seeds far apart are two ranges; of the second one only questions that never occur in the first are kept.
To train on another of its data sets, change `DATASET` and `CONFIG` and make the starting weights again (`make_weights.py`).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import reasoning_gym

__all__ = ["held_out_tasks", "score", "train_tasks"]

DATASET = "chain_sum"
CONFIG = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}

TRAIN_SIZE = 5000
"""About 2,850 different questions of the 4,000 that there are."""
TRAIN_SEED, HELD_OUT_SEED = 0, 1_000_000

Task = dict[str, Any]


@functools.cache
def train_tasks() -> list[Task]:
    """What starting weights and reinforcement learning may use."""
    return list(reasoning_gym.create_dataset(DATASET, **CONFIG, seed=TRAIN_SEED, size=TRAIN_SIZE))


def held_out_tasks(n: int) -> list[Task]:
    """`n` different questions, at most 827, none of which occurs in `train_tasks`."""
    seen = {task["question"] for task in train_tasks()}
    drawn = reasoning_gym.create_dataset(DATASET, **CONFIG, seed=HELD_OUT_SEED, size=TRAIN_SIZE)
    unseen = {task["question"]: task for task in drawn if task["question"] not in seen}
    if n > len(unseen):
        raise ValueError(f"{n} held-out tasks were asked for; there are {len(unseen)}")
    return list(itertools.islice(unseen.values(), n))


def score(task: Task, answer: str) -> float:
    """The verifier of the package: 1.0 for the right number, part of it where the number is a part of the answer, else 0.0."""
    verifier = reasoning_gym.get_score_answer_fn(task["metadata"]["source_dataset"])
    return float(verifier(answer=answer, entry=task))
