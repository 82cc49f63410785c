"""Rows of tokens that begin alike as a tree, so that a token which several rows share is computed
once.

In a causal model the state of a token depends on the tokens before it alone. Rows with one
beginning therefore share its states, and everything but attention runs on the tree's tokens.
Attention gathers the keys and values of the rows again. Where a row shares many tokens, its own
tokens alone are queries. This module knows token ids and places; no model.

Shapes: U tokens of the tree, B rows, S places of a row (padded to its block), Q queries of a row
(padded likewise), N chosen tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
P = TypeVar("P")

_NARROWEST = 0.75
"""Rows shorter than this share of a block's width are padded to a narrower block of their own."""
_LEAST_SHARED = 96
"""A row that shares fewer tokens has all of its tokens as queries, so that short
rows need no mask."""

Attend = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From queries (B, Q, ...), keys with values (B, S, ...) and the places that each query may
not see (B, Q, S), to (B, Q, ...). None stands for a causal pass over rows whose queries are
all of their tokens."""


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two rows have in common at their beginning."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(place for place in range(shorter) if left[place] != right[place])


@dataclass(slots=True)
class RowBlock:
    """Rows of similar length, as indices into the tree's tokens. Padding is index 0."""

    tokens_BS: Tensor
    """The tree's token at each place of each row."""
    queries_BQ: Tensor | None = None
    """The tree's tokens that each row has and no row before it; None: all of its
    tokens are queries."""
    hidden_BQS: Tensor | None = None
    """The places that a query may not see, because they come after it."""


@dataclass(slots=True)
class PrefixTree:
    """A batch whose rows share prefixes: each distinct token once (U of them), and its
    place in each row.
    """

    ids_U: Tensor
    positions_U: Tensor
    """The place of each token in its rows."""
    blocks: list[RowBlock]
    place_U: Tensor
    """One place of each token among the queries of all blocks, laid end to end."""
    chosen_N: Tensor
    """The tree's token at each chosen place."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]], device: torch.device) -> PrefixTree:
        """
        rows: token ids of each row.
        chosen: places in each row.
        """
        ids: list[int] = []
        positions: list[int] = []
        sources: list[list[int]] = [[]] * len(rows)
        n_shared = [0] * len(rows)
        before: int | None = None
        # In this order a row shares most with the one before it.
        for row in sorted(range(len(rows)), key=lambda index: list(rows[index])):
            n_same = 0 if before is None else shared_length(rows[before], rows[row])
            shared = [] if before is None else sources[before][:n_same]
            sources[row] = [*shared, *range(len(ids), len(ids) + len(rows[row]) - n_same)]
            n_shared[row] = n_same
            ids += rows[row][n_same:]
            positions += range(n_same, len(rows[row]))
            before = row
        chosen_tokens = [sources[row][at] for row, where in enumerate(chosen) for at in where]
        longest_first = sorted(range(len(rows)), key=lambda row: len(sources[row]), reverse=True)
        whole = [sources[row] for row in longest_first if n_shared[row] < _LEAST_SHARED]
        parts = [(sources[row], n) for row, n in enumerate(n_shared) if _LEAST_SHARED <= n < len(sources[row])]
        blocks, queries = _whole_blocks(whole, device)
        for alike in _part_blocks(parts):
            block, of_block = _part_block(alike, device)
            blocks.append(block)
            queries += of_block
        places = [0] * len(ids)
        for place, token in enumerate(queries):
            if token is not None:
                places[token] = place
        return cls(
            ids_U=torch.tensor(ids, device=device),
            positions_U=torch.tensor(positions, device=device),
            blocks=blocks,
            place_U=torch.tensor(places, device=device),
            chosen_N=torch.tensor(chosen_tokens, device=device),
        )

    def in_rows(self, attend: Attend, queries_U: Tensor, keys_U: Tensor) -> Tensor:
        """Return (U, ...): what `attend` makes of the queries (U, ...) and the keys and values (U,
        ...) of their rows.
        """

        def gather(x_U: Tensor, places: Tensor) -> Tensor:
            return x_U.index_select(0, places.flatten()).reshape(*places.shape, *x_U.shape[1:])

        made = [
            attend(
                gather(queries_U, block.tokens_BS if block.queries_BQ is None else block.queries_BQ),
                gather(keys_U, block.tokens_BS),
                block.hidden_BQS,
            ).flatten(0, 1)
            for block in self.blocks
        ]
        return (made[0] if len(made) == 1 else torch.cat(made)).index_select(0, self.place_U)


def _whole_blocks(sources: Sequence[list[int]], device: torch.device) -> tuple[list[RowBlock], list[int | None]]:
    """Return blocks of rows, longest first, all of whose tokens are queries; and the token at each
    query, None at padding.
    """
    blocks: list[list[list[int]]] = []
    for source in sources:
        if not blocks or len(source) < _NARROWEST * len(blocks[-1][0]):
            blocks.append([])
        blocks[-1].append(source)
    queries = [token for block in blocks for source in block for token in _padded(source, len(block[0]), None)]
    return [RowBlock(_tokens(block, len(block[0]), device)) for block in blocks], queries


def _part_blocks(rows: Sequence[tuple[list[int], int]]) -> list[list[tuple[list[int], int]]]:
    """Group rows of similar length and with a similar number of tokens that are not shared.

    rows: for each row, its tokens in the tree and the number of shared ones among them.
    """
    blocks: dict[tuple[int, int], list[tuple[list[int], int]]] = {}
    for source, n_shared in rows:
        size = _width_class(len(source)), _width_class(len(source) - n_shared)
        blocks.setdefault(size, []).append((source, n_shared))
    return list(blocks.values())


def _width_class(n: int) -> int:
    """Return a number that differs for numbers of tokens of which the smaller is below
    `_NARROWEST` of the larger.
    """
    return int(math.log(n, 1 / _NARROWEST))


def _part_block(rows: Sequence[tuple[list[int], int]], device: torch.device) -> tuple[RowBlock, list[int | None]]:
    """Return a block of rows in which only each row's own tokens are queries, and the token index
    of each query, None at padding.

    rows: the token indices of each row, and how many of them it shares with other rows.
    """
    own = [source[n_shared:] for source, n_shared in rows]
    length, n_queries = max(len(source) for source, _ in rows), max(map(len, own))
    # A query that is padding sees the first place, because a softmax over nothing is not a number.
    last_seen = [_padded(list(range(n_shared, len(source))), n_queries, 0) for source, n_shared in rows]
    block = RowBlock(
        _tokens([source for source, _ in rows], length, device),
        _tokens(own, n_queries, device),
        torch.arange(length, device=device) > torch.tensor(last_seen, device=device)[..., None],
    )
    return block, [token for tokens in own for token in _padded(tokens, n_queries, None)]


def _tokens(sources: Sequence[list[int]], width: int, device: torch.device) -> Tensor:
    return torch.tensor([_padded(source, width, 0) for source in sources], device=device)


def _padded(values: list[T], width: int, padding: P) -> list[T | P]:
    return [*values, *[padding] * (width - len(values))]
