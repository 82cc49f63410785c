"""Fixed probes: whether a server samples with the learner's weights, to the log-probability.

A reload that fails on one tensor leaves a server that answers 200 and samples from other weights
than the learner trains. After each push, the server and the learner therefore score the same
token ids. It knows log-probabilities and folders; no HTTP, no process.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from leyden.engine.base import Learner
from leyden.engine.vllm.folder import OUTPUT_HEAD, copy_with_changed, groups_of, is_tied, untie_embeddings
from leyden.types import TrainingSequence

Score = Callable[[Sequence[Sequence[int]]], Awaitable[list[list[float]]]]
"""Returns the log-probability of each token of each probe but its first."""
Publish = Callable[[Path], Awaitable[None]]
"""Lets the server load the weights of a folder."""

_N_PROBES: Final = 4
_LENGTH: Final = 24
_SAME: Final = 1e-6
"""Scores of a server whose weights did not change differ by no more than this."""


def probes_for(n_vocabulary: int, max_length: int) -> list[list[int]]:
    """Return the probes: token ids that depend on the size of the vocabulary alone."""
    draw = random.Random(f"leyden/probes/{n_vocabulary}")
    length = min(_LENGTH, max_length - 1)
    return [[draw.randrange(n_vocabulary) for _ in range(length)] for _ in range(_N_PROBES)]


async def learner_scores(learner: Learner, probes: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the learner's log-probability of each token of each probe but its first."""
    sequences = [TrainingSequence(list(probe), [0.0] + [1.0] * (len(probe) - 1)) for probe in probes]
    return [logprobs[1:] for logprobs in (await learner.forward(sequences)).logprobs]


def largest_difference(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> float:
    """Return the largest absolute difference of two lists of scores; infinity if a score is NaN."""
    differences = [abs(a - b) for each in zip(found, wanted, strict=True) for a, b in zip(*each, strict=True)]
    return max((each if each == each else float("inf") for each in differences), default=0.0)


async def stale_weights(
    folder: Path,
    work: Path,
    *,
    publish: Publish,
    score: Score,
    probes: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[float]],
    tolerance: float,
) -> list[str]:
    """Return the names of the weights that the server does not take from a folder.

    Each group of tensors is changed in a copy of the folder that the server loads. Its scores
    change, unless it ignores that group. A tied output head has no tensor to change: the folder
    gets one, and the head is stale if the scores then agree. The server has the folder's own
    weights afterwards.
    work: a directory on the file system that the server reads; it is made and removed.
    wanted: the learner's scores of the probes.
    """
    before, stale = await score(probes), list[str]()
    try:
        for name, tensors in groups_of(folder).items():
            await asyncio.to_thread(copy_with_changed, folder, work, tensors)
            await publish(work)
            if largest_difference(await score(probes), before) <= _SAME:
                stale.append(name)
        if not stale and (work / "config.json").exists() and is_tied(work):
            await asyncio.to_thread(copy_with_changed, folder, work, [])
            await asyncio.to_thread(untie_embeddings, work)
            await publish(work)
            if largest_difference(await score(probes), wanted) <= tolerance:
                stale.append(OUTPUT_HEAD)
    finally:
        await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
    await publish(folder)
    return stale
