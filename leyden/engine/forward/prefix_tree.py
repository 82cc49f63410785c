"""`PrefixTree`: rows of tokens that begin alike as a tree, so that a token that several rows share is computed once.

In a causal model the state of a token depends only on the tokens before it. Rows with the same beginning therefore
share its states, and all computations but attention run on the tree's tokens. Attention gathers the keys and values of
each row again. If a row shares many tokens, only its own tokens are queries. This module knows token ids and positions;
no model.

Shapes: U tokens of the tree, B rows, S positions of a row (padded to its block), Q queries of a row (padded, too), N
chosen tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from leyden.engine.forward.model_forward import hiding_mask, unseen

T = TypeVar("T")
P = TypeVar("P")

_NARROWEST = 0.75
"""Rows shorter than this share of a block's width are padded to their own narrower block."""
_MIN_SHARED = 96
"""A row that shares fewer tokens than this has all of its tokens as queries, so that short rows need no mask."""

Attend = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""An attention function. It takes queries (B, Q, ...), keys with values (B, S, ...) and a mask (B, Q, S) that is minus
infinity at positions that a query may not see. It returns (B, Q, ...). A mask of None means that all tokens are
queries, and each sees itself and the tokens before it."""


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two rows have in common at their beginning."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(index for index in range(shorter) if left[index] != right[index])


@dataclass(slots=True)
class RowBlock:
    """Rows of similar length, as indices of the tree's tokens. Padding is index 0."""

    tokens_BS: Tensor
    """The index of the tree's token at each position of each row."""
    queries_BQ: Tensor | None = None
    """The indices of the tokens that are queries: those that a row does not share with earlier ones. None: all of its
    tokens are queries."""
    positions_BQ: Tensor | None = None
    """The position of each query in its row; None: 0 to S - 1 in every row."""
    masks: dict[int | None, Tensor | None] = field(default_factory=dict[int | None, "Tensor | None"])
    """The masks that were made, by window."""

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """Return minus infinity at positions that a query does not see, else 0, (B, Q, S). None if all tokens are
        queries and each sees itself and the tokens before it.

        window: the number of tokens, its own included, that a query sees; None: all before it.
        """
        length = self.tokens_BS.shape[1]
        if window is not None and length <= window:
            window = None
        if window not in self.masks:
            if self.positions_BQ is None and window is None:
                self.masks[window] = None
            else:
                positions = torch.arange(length)[None] if self.positions_BQ is None else self.positions_BQ
                self.masks[window] = hiding_mask(unseen(length, positions, window), like)
        return self.masks[window]


@dataclass(slots=True)
class PrefixTree:
    """A batch whose rows share prefixes: each distinct token once (U in all), and rows of indices of these tokens."""

    ids_U: Tensor
    """The token ids."""
    positions_U: Tensor
    """The position of each token in its rows, the same in all of them."""
    blocks: list[RowBlock]
    query_U: Tensor
    """The index of each token among the queries of all blocks, one block after the other."""
    chosen_N: Tensor
    """The index of the tree's token at each chosen position."""
    like: Tensor
    """A tensor with the device and dtype of masks."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]], like: Tensor) -> PrefixTree:
        """Return the tree of a batch.

        rows: the token ids of each row.
        chosen: the positions in each row whose outputs are wanted, N in all.
        like: a tensor with the device, and the dtype of masks.
        """
        ids: list[int] = []
        positions: list[int] = []
        sources: list[list[int]] = [[]] * len(rows)
        n_shared = [0] * len(rows)
        before: int | None = None
        # In this order no earlier row shares more with a row than the one before it.
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
        whole = [sources[row] for row in longest_first if n_shared[row] < _MIN_SHARED]
        parts = [(sources[row], n) for row, n in enumerate(n_shared) if _MIN_SHARED <= n < len(sources[row])]
        device = like.device
        blocks, queries = _whole_blocks(whole, device)
        for alike in _part_blocks(parts):
            block, of_block = _part_block(alike, device)
            blocks.append(block)
            queries += of_block
        query_of = [0] * len(ids)
        for index, token in enumerate(queries):
            if token is not None:
                query_of[token] = index
        return cls(
            ids_U=torch.tensor(ids, device=device),
            positions_U=torch.tensor(positions, device=device),
            blocks=blocks,
            query_U=torch.tensor(query_of, device=device),
            chosen_N=torch.tensor(chosen_tokens, device=device),
            like=like,
        )

    def in_rows(self, attend: Attend, queries_U: Tensor, keys_U: Tensor, window: int | None = None) -> Tensor:
        """Apply attention in each row, and return its result for each token of the tree, (U, ...).

        queries_U, keys_U: the queries, and the keys with the values, of the tree's tokens, (U, ...).
        window: the number of tokens, its own included, that a token sees; None: all before it.
        """

        def gather(x_U: Tensor, indices: Tensor) -> Tensor:
            return x_U.index_select(0, indices.flatten()).reshape(*indices.shape, *x_U.shape[1:])

        made = [
            attend(
                gather(queries_U, block.tokens_BS if block.queries_BQ is None else block.queries_BQ),
                gather(keys_U, block.tokens_BS),
                block.mask(window, self.like),
            ).flatten(0, 1)
            for block in self.blocks
        ]
        return (made[0] if len(made) == 1 else torch.cat(made)).index_select(0, self.query_U)


def _whole_blocks(sources: Sequence[list[int]], device: torch.device) -> tuple[list[RowBlock], list[int | None]]:
    """Return blocks of rows whose tokens are all queries, and the index of the token of each query of all blocks, None
    at padding.

    sources: the token indices of each row, the longest row first.
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
    return int(math.log(n, 1 / _NARROWEST))


def _part_block(rows: Sequence[tuple[list[int], int]], device: torch.device) -> tuple[RowBlock, list[int | None]]:
    """Return a block of rows in which only each row's own tokens are queries, and the token index of each query, None
    at padding.

    rows: the token indices of each row, and how many of them it shares with other rows.
    """
    own = [source[n_shared:] for source, n_shared in rows]
    length, n_queries = max(len(source) for source, _ in rows), max(map(len, own))
    # A query that is padding sees the first position, because a softmax over nothing is NaN.
    last_seen = [_padded(list(range(n_shared, len(source))), n_queries, 0) for source, n_shared in rows]
    block = RowBlock(
        _tokens([source for source, _ in rows], length, device),
        _tokens(own, n_queries, device),
        torch.tensor(last_seen),
    )
    return block, [token for tokens in own for token in _padded(tokens, n_queries, None)]


def _tokens(sources: Sequence[list[int]], width: int, device: torch.device) -> Tensor:
    return torch.tensor([_padded(source, width, 0) for source in sources], device=device)


def _padded(values: list[T], width: int, padding: P) -> list[T | P]:
    return [*values, *[padding] * (width - len(values))]
