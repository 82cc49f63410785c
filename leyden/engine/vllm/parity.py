"""Check by fixed probes that a server samples with the learner's weights.

A reload that fails on one tensor leaves a server that answers 200 and samples with other weights than the learner
trains. After each push, the server and the learner therefore score the same token ids (the probes), and their
log-probabilities are compared. The module knows log-probabilities and folders; no HTTP, no process.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from leyden.engine.policy_backend import Learner
from leyden.engine.vllm.folder import OUTPUT_HEAD, copy_with_changed, groups_of, is_tied, untie_embeddings
from leyden.types import TrainingSequence

Score = Callable[[], Awaitable[list[list[float]]]]
"""A function that returns the server's log-probability of each token of each probe except the first."""
Publish = Callable[[Path], Awaitable[None]]
"""A function that lets the server load the weights of a folder."""

_N_PROBES: Final = 4
_LENGTH: Final = 24
"""The number of tokens of a probe."""
_SAME: Final = 1e-6
"""The largest difference between two scores of a server whose weights have not changed."""


def probes_for(n_vocabulary: int, max_length: int) -> list[list[int]]:
    """Return the probes: random token ids that depend only on the size of the vocabulary."""
    draw = random.Random(f"leyden/probes/{n_vocabulary}")
    length = min(_LENGTH, max_length - 1)
    return [[draw.randrange(n_vocabulary) for _ in range(length)] for _ in range(_N_PROBES)]


async def learner_scores(learner: Learner, probes: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the learner's log-probability of each token of each probe except the first."""
    sequences = [TrainingSequence(list(probe), [0.0] + [1.0] * (len(probe) - 1)) for probe in probes]
    return [logprobs[1:] for logprobs in (await learner.forward(sequences)).logprobs]


def largest_difference(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> float:
    """Return the largest absolute difference of two lists of scores; infinity if a score is NaN."""
    differences = [abs(a - b) for each in zip(found, wanted, strict=True) for a, b in zip(*each, strict=True)]
    return max((each if each == each else float("inf") for each in differences), default=0.0)  # NaN != NaN


async def stale_weights(
    folder: Path,
    work: Path,
    *,
    publish: Publish,
    score: Score,
    wanted: Sequence[Sequence[float]],
    tolerance: float,
) -> list[str]:
    """Return the names of the weights that the server does not take from a folder (groups of `groups_of`).

    Each group of tensors is changed in a copy of the folder, which the server loads. If the server's scores do not
    change, it ignores that group. A tied output head has no tensor that could be changed: the copy gets one, and if the
    scores then agree with the learner's, the server had ignored the head. Afterwards the server has the folder's own
    weights.

    work: a directory for the copies that the server can read; it is created and removed.
    wanted: the learner's scores of the probes.
    """
    before, stale = await score(), list[str]()
    try:
        for name, tensors in groups_of(folder).items():
            await asyncio.to_thread(copy_with_changed, folder, work, tensors)
            await publish(work)
            if largest_difference(await score(), before) <= _SAME:
                stale.append(name)
        if not stale and (work / "config.json").exists() and is_tied(work):
            await asyncio.to_thread(copy_with_changed, folder, work, [])
            await asyncio.to_thread(untie_embeddings, work)
            await publish(work)
            if largest_difference(await score(), wanted) <= tolerance:
                stale.append(OUTPUT_HEAD)
    finally:
        await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
    await publish(folder)
    return stale
