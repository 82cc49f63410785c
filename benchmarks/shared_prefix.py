"""What it brings to compute the prefix that rollouts share once: the gradient over a tree of tokens, and over separate rows.

`games` is the demo's first step (see `rl_tiny`): eight groups of 16 short games. The others are groups of rollouts with one prompt and
100 sampled tokens each, of random tokens, on a Qwen2 of 829,568 weights. Both sides are Leyden's learner, and the peer finds no shared
tokens. Both must have the same gradient before a row is made. One thread, CPU seconds, micro-batches of
8,192 tokens, because a group must fit into one to share its prompt once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from benchmarks.harness import MINIMUM_RUNS, Peer, Row, Sample, summary
from benchmarks.rl_tiny import LOSS, load_model, recorded_games, recorded_turns, training_batch
from leyden.engine.forward import prefix_tree
from leyden.engine.forward.layout import LayoutForward
from leyden.engine.learner import TorchLearner
from leyden.types import TrainingSequence

HEADLINES = ()
PROMPTS = {250: 16, 1000: 8}
"""Rollouts of the group, by the tokens of their prompt."""
SAMPLED = 100


def main(peer: Peer | None) -> list[Row]:
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    games = asyncio.run(recorded_games(n_groups=8))
    works = {"8 groups of 16 short games, 117k model": (games.model, training_batch(games.episodes))}
    with tempfile.TemporaryDirectory() as folder:
        model = recorded_turns(Path(folder), n_groups=1, turns=(1, 1)).model
        for n_prompt, n_rollouts in PROMPTS.items():
            name = f"{n_rollouts} rollouts with one prompt of {n_prompt:,} tokens"
            works[name] = (model, group(n_prompt, n_rollouts))
        return [compared(name, *work) for name, work in works.items()]


def group(n_prompt: int, n_rollouts: int) -> list[TrainingSequence]:
    """Return rollouts that have their prompt alone in common."""
    rng = random.Random(n_prompt)
    prompt = [rng.randrange(3, 280) for _ in range(n_prompt)]
    return [
        TrainingSequence(
            [*prompt, *(rng.randrange(3, 280) for _ in range(SAMPLED))],
            [0.0] * n_prompt + [1 / (SAMPLED * n_rollouts)] * SAMPLED,
            {"logprobs": [-5.7] * (n_prompt + SAMPLED), "advantages": [(-1.0) ** row] * (n_prompt + SAMPLED)},
        )
        for row in range(n_rollouts)
    ]


def compared(name: str, folder: Path, sequences: Sequence[TrainingSequence]) -> Row:
    """Return the row of one work. Raise RuntimeError if the two gradients differ."""
    tree: list[Sample] = []
    rows: list[Sample] = []
    model = load_model(folder)
    for _ in range(MINIMUM_RUNS):
        ours, of_tree = gradient(model, sequences, shares=True)
        theirs, of_rows = gradient(model, sequences, shares=False)
        if not (difference := float((of_tree - of_rows).norm() / of_rows.norm())) < 1e-4:
            raise RuntimeError(f"{name}: the gradients differ by {difference:.2g} of their norm")
        tree.append(ours)
        rows.append(theirs)
    found = summary(
        f"gradient, {name}", "tokens/CPU s", tree, rows, "Leyden, every row by itself", higher_is_better=True
    )
    print(found, flush=True)
    return found


def gradient(
    model: torch.nn.Module, sequences: Sequence[TrainingSequence], *, shares: bool
) -> tuple[Sample, torch.Tensor]:
    """Return trained tokens a CPU second, and the gradient."""
    forward = LayoutForward(model, max_rows=4, max_length=4096)
    forward.shares_prefixes = shares
    nothing_shared = mock.patch.object(prefix_tree, "shared_length", return_value=0)
    learner = TorchLearner(model, forward, max_tokens_per_microbatch=8192)
    with contextlib.nullcontext() if shares else nothing_shared:
        began = time.process_time()
        result = learner.forward_backward(sequences, LOSS, 1.0)
        seconds = time.process_time() - began
    found = torch.cat([p.grad.flatten() for p in learner.parameters.values() if p.grad is not None])
    learner.clear_gradient()
    return Sample(result.n_trained / seconds, seconds), found
