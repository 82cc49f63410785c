"""Rows of tokens that begin alike as a tree, so that a token which several rows share is computed once.

In a causal model the state of a token depends on the tokens before it alone. Rows with one beginning
therefore share its states, and everything but attention runs on the tree's tokens. Attention gathers
the rows again. It knows token ids and places; no model.

Shapes: U tokens of the tree, B rows, S places of a row (padded to its block), N chosen tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NARROWEST = 0.75
"""Rows shorter than this share of a block's width are padded to a narrower block of their own."""


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two rows have in common at their beginning."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(place for place in range(shorter) if left[place] != right[place])


@dataclass(slots=True)
class PrefixTree:
    """The tokens of a batch, each once, and where the rows find them."""

    ids_U: Tensor
    positions_U: Tensor
    """The place of each token in its rows."""
    blocks_BS: list[Tensor]
    """Blocks of rows of similar length: the tree's token at each place of each row. Padding points at token 0."""
    place_U: Tensor
    """One place of each token among those of all blocks, laid end to end."""
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
        before: int | None = None
        # In this order a row shares most with the one before it.
        for row in sorted(range(len(rows)), key=lambda index: list(rows[index])):
            n_shared = 0 if before is None else shared_length(rows[before], rows[row])
            shared = [] if before is None else sources[before][:n_shared]
            sources[row] = [*shared, *range(len(ids), len(ids) + len(rows[row]) - n_shared)]
            ids += rows[row][n_shared:]
            positions += range(n_shared, len(rows[row]))
            before = row
        places = [0] * len(ids)
        blocks: list[list[list[int]]] = []
        n_places = 0
        for source in sorted(sources, key=len, reverse=True):
            if not blocks or len(source) < _NARROWEST * len(blocks[-1][0]):
                blocks.append([])
            blocks[-1].append(source)
        for block in blocks:
            width = len(block[0])
            for source in block:
                for place, token in enumerate(source, start=n_places):
                    places[token] = place
                source += [0] * (width - len(source))
                n_places += width
        return cls(
            ids_U=torch.tensor(ids, device=device),
            positions_U=torch.tensor(positions, device=device),
            blocks_BS=[torch.tensor(block, device=device) for block in blocks],
            place_U=torch.tensor(places, device=device),
            chosen_N=torch.tensor(
                [sources[row][at] for row, where in enumerate(chosen) for at in where], device=device
            ),
        )

    def in_rows(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return (U, ...): what `function` makes of the rows (B, S, ...) of x (U, ...), for each token in one of its rows."""
        made = [
            function(x.index_select(0, block_BS.flatten()).reshape(*block_BS.shape, *x.shape[1:])).flatten(0, 1)
            for block_BS in self.blocks_BS
        ]
        return (made[0] if len(made) == 1 else torch.cat(made)).index_select(0, self.place_U)
