"""The tasks: four data sets of the `reasoning-gym` package, as it words and scores them.

A task is the package's own entry (question, answer, metadata), a JSON value. Entry `i` of a data
set with seed `s` is drawn from `Random(s + i)`, so two seeds far apart give two ranges. Of the
second range, only questions that never occur in the first are kept. To train on another data set of
the package, add a line to `KINDS` and a pupil to `make_weights.py`, and make starting weights.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import reasoning_gym

__all__ = ["KINDS", "Kind", "Task", "held_out_tasks", "score", "train_tasks"]

Task = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Kind:
    """A data set of the package, small enough for a tiny model."""

    name: str
    """The package's name of it."""
    config: dict[str, int]
    max_tokens: int
    """The longest answer: what the right one takes, the end of the turn, and room for mistakes."""
    steps: int
    """Training steps that are enough, of 512 rollouts each."""
    minibatch_size: int
    """Rollouts of an optimizer step."""
    schedule: Literal["constant", "linear"] = "constant"
    """Whether the learning rate falls to zero over the steps."""

    @property
    def weights(self) -> Path:
        """The folder of the starting policy."""
        return Path(__file__).parent / "weights" / self.name


KINDS = {
    kind.name: kind
    for kind in (
        Kind("chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}, 5, 40, 256),
        Kind("spell_backward", {"min_word_len": 3, "max_word_len": 4}, 6, 12, 64),
        Kind("rotate_matrix", {"min_n": 2, "max_n": 2, "min_rotations": 1, "max_rotations": 3}, 9, 12, 64),
        Kind(
            "number_filtering",
            {"min_numbers": 3, "max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 9},
            12,
            30,
            64,
            "linear",
        ),
    )
}

TRAIN_SIZE = 5000
"""About 2,850 different questions of chain_sum's 4,000, 3,500 of spell_backward's 5,500, 4,600 of
rotate_matrix's 30,000, 4,250 of number_filtering's more than 18,000.
"""
TRAIN_SEED, HELD_OUT_SEED = 0, 1_000_000


@functools.cache
def train_tasks(kind: Kind) -> list[Task]:
    """Return the tasks that starting weights and reinforcement learning may use."""
    return list(reasoning_gym.create_dataset(kind.name, **kind.config, seed=TRAIN_SEED, size=TRAIN_SIZE))


def held_out_tasks(kind: Kind, n: int) -> list[Task]:
    """Return `n` different questions, at most about 800, none of which occurs in `train_tasks`."""
    seen = {task["question"] for task in train_tasks(kind)}
    drawn = reasoning_gym.create_dataset(kind.name, **kind.config, seed=HELD_OUT_SEED, size=TRAIN_SIZE)
    unseen = {task["question"]: task for task in drawn if task["question"] not in seen}
    if n > len(unseen):
        raise ValueError(f"{n} held-out tasks were asked for; there are {len(unseen)}")
    return list(itertools.islice(unseen.values(), n))


def score(task: Task, answer: str) -> float:
    """Score an answer by the package's verifier, from 0.0 to 1.0 (right)."""
    return float(_verifier(task["metadata"]["source_dataset"])(answer=answer, entry=task))


_verifier = functools.cache(reasoning_gym.get_score_answer_fn)  # it makes the data set anew in each call
