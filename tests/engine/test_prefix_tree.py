"""A gradient over a tree of prefixes equals that over the separate rows, and holds no token twice."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.engine.batches import TrainedPart, held_tokens
from leyden.engine.forward.cached import UncachedForward
from leyden.engine.forward.layout import LayoutForward
from leyden.engine.forward.prefix_tree import PrefixTree
from leyden.engine.learner import TorchLearner
from leyden.objectives.losses import PPOLoss
from leyden.types import TrainingSequence
from tests.contracts.engine import sequence_of
from tests.engine import tiny

torch.set_num_threads(1)


def random_rows(rng: random.Random, n: int, *, prompt: int = 0) -> list[list[int]]:
    """Rows that each continue a beginning of an earlier one, or begin anew; some are equal, some end inside another.

    prompt: the number of extra tokens of the first row; others continue it behind them.
    """
    rows: list[list[int]] = []
    for _ in range(n):
        begins = rng.choice(rows)[: prompt + rng.randrange(30)] if rows and rng.random() < 0.9 else []
        n_new = (0 if rows else prompt) + rng.randrange(0 if len(begins) > 1 else 2, 12)
        rows.append([*begins, *(rng.randrange(260) for _ in range(n_new))])
    return rows


def sequences_of(rows: list[list[int]], rng: random.Random) -> list[TrainingSequence]:
    return [
        sequence_of(
            token_ids=row,
            logprobs=[rng.uniform(-6.5, -4.5) for _ in row],
            advantages=[rng.gauss(0, 1) for _ in row],
            weights=[0.0, *(rng.choice([0.0, 0.1, 1.0]) for _ in row[2:]), 1.0],
        )
        for row in rows
    ]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 9),
    prompt=st.sampled_from([0, 94, 110]),
    max_tokens=st.sampled_from([1, 60, 10_000]),
    again=st.booleans(),
)
def test_loss_and_gradient_of_a_tree_are_those_of_separate_rows(
    seed: int, n: int, prompt: int, max_tokens: int, again: bool
):
    rng = random.Random(seed)
    sequences = sequences_of(random_rows(rng, n, prompt=prompt), rng)
    model, twin = tiny.model(), tiny.model()
    tree = LayoutForward(model, max_rows=4, max_length=256)
    if again:
        tree.recompute_layers()
    rows = UncachedForward(twin, max_rows=4, max_length=256)
    ours = TorchLearner(model, tree, max_tokens_per_microbatch=max_tokens)
    theirs = TorchLearner(twin, rows, max_tokens_per_microbatch=1)

    got, wanted = (each.forward_backward(sequences, PPOLoss(), 1.0) for each in (ours, theirs))

    assert got.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-5)
    flat, wanted_flat = (
        torch.cat([parameter.grad.flatten() for parameter in each.parameters.values() if parameter.grad is not None])
        for each in (ours, theirs)
    )
    assert float((flat - wanted_flat).norm()) <= 1e-5 * float(wanted_flat.norm())


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 20), prompt=st.sampled_from([0, 94, 110]))
def test_a_tree_holds_each_prefix_once_and_gives_every_row_back(seed: int, n: int, prompt: int):
    rows = random_rows(random.Random(seed), n, prompt=prompt)
    tree = PrefixTree.of(rows, [[len(row) - 1] for row in rows], torch.zeros(0))

    assert len(tree.ids_U) == len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})
    assert tree.ids_U[tree.chosen_N].tolist() == [row[-1] for row in rows]
    assert tree.positions_U[tree.chosen_N].tolist() == [len(row) - 1 for row in rows]
    back = [tree.ids_U[row].tolist() for block in tree.blocks for row in block.tokens_BS]
    assert all(any(found[: len(row)] == row for found in back) for row in rows)
    tokens_U = torch.arange(len(tree.ids_U))
    given_back = tree.in_rows(lambda queries_BQ, keys_BS, mask_BQS: queries_BQ, tokens_U, tokens_U)
    assert given_back.tolist() == tokens_U.tolist()


def test_after_a_long_prefix_only_the_tokens_of_a_rows_own_are_queries():
    prompt = list(range(100))
    rows = [[*prompt, 200 + index, *range(index)] for index in range(8)]
    tree = PrefixTree.of([*rows, rows[7]], [[100] for _ in range(9)], torch.zeros(0))

    n_queries = sum(
        (block.tokens_BS if block.queries_BQ is None else block.queries_BQ).numel() for block in tree.blocks
    )
    assert len(tree.ids_U) == 100 + 8 + sum(range(8)) == 136
    assert n_queries < 160, "all tokens of nine rows would be 935"


def test_a_group_with_one_prompt_holds_it_once():
    prompt = list(range(100))
    parts = [
        TrainedPart.of(s, (), 0) for s in sequences_of([[*prompt, 200 + i, 7, 8] for i in range(8)], random.Random(0))
    ]

    assert held_tokens(parts, shares_prefixes=False) == 8 * 102
    assert held_tokens(parts, shares_prefixes=True) == 100 + 8 * 2 + 8 * (102 // 4)
