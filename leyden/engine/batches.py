"""Prepare sequences for a gradient: check them, cut them after the last trained token, and batch them by memory.

The module knows token ids, weights and columns; no model and no loss.

Shapes: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from leyden.engine.forward.prefix_tree import shared_length
from leyden.engine.refusal import unknown_token
from leyden.errors import ConfigError
from leyden.types import TrainingSequence

_ATTENTION_SHARE: Final = 4
"""One over the share of a layer's activations that are the attention's, about a quarter."""


def check_sequences(
    sequences: Sequence[TrainingSequence],
    n_vocabulary: int,
    max_length: int,
    loss: str = "",
    columns: Sequence[str] = (),
) -> None:
    """Raise ConfigError, which names the sequence, if a sequence is invalid: it lacks a column, has lists of unequal
    length, an unknown token id or too many tokens, or a weight on its first token. Raise it, too, if no token of any
    sequence has a weight.

    loss: the name of the loss, for messages.
    columns: the columns that the loss needs; a forward pass needs none.
    """
    for index, sequence in enumerate(sequences):
        n = len(sequence.token_ids)
        if missing := [name for name in columns if name not in sequence.columns]:
            raise ConfigError(
                f"sequence {index} has no column {missing[0]!r}, which the loss {loss!r} needs; "
                f"it has {', '.join(sequence.columns) or 'none'}"
            )
        for name, values in {"weights": sequence.weights, **sequence.columns}.items():
            if len(values) != n:
                raise ConfigError(
                    f"sequence {index} has {n} token_ids and {len(values)} {name}; they must have the same length"
                )
        if fault := unknown_token(sequence.token_ids, n_vocabulary):
            raise ConfigError(f"sequence {index} {fault}")
        if n > max_length:
            raise ConfigError(
                f"sequence {index} has {n} tokens; the engine's max_length is {max_length}, so shorten the sequence or give the "
                "engine a larger max_length"
            )
        if n and sequence.weights[0]:
            raise ConfigError(
                f"sequence {index} gives its first token the weight {sequence.weights[0]}; it must be 0, because no token "
                "comes before that could predict it"
            )
    if not any(any(sequence.weights) for sequence in sequences):
        raise ConfigError(
            f"none of the {len(sequences)} sequences has a token with a weight other than 0; there is nothing to train on"
        )


@dataclass(slots=True)
class TrainedPart:
    """The part of a sequence that a gradient needs: up to its last trained token."""

    inputs: list[int]
    """Every token before the last trained one."""
    positions: list[int]
    """The positions of the tokens before each trained token."""
    targets: list[int]
    """The trained tokens."""
    weights: list[float]
    """The weight of each trained token."""
    columns: list[list[float]]
    """The columns that the loss needs, in its order, each with its values at the trained tokens."""
    index: int
    """The sequence's index in the argument of `forward_backward`."""

    @classmethod
    def of(cls, sequence: TrainingSequence, columns: Sequence[str], index: int) -> TrainedPart:
        """Return the part of a sequence that a gradient needs. The logits at `positions` predict `targets`.

        sequence: has at least one weight other than 0.
        columns: the names of the columns to keep.
        index: its index in the call.
        """
        trained = [index for index, weight in enumerate(sequence.weights) if weight]
        return cls(
            inputs=list(sequence.token_ids[: trained[-1]]),
            positions=[at - 1 for at in trained],
            targets=[sequence.token_ids[at] for at in trained],
            weights=[sequence.weights[at] for at in trained],
            columns=[[sequence.columns[name][at] for at in trained] for name in columns],
            index=index,
        )


def micro_batches(
    sequences: Sequence[TrainedPart], max_tokens: int, *, shares_prefixes: bool
) -> list[list[TrainedPart]]:
    """Return batches that hold at most `max_tokens` each (`held_tokens`). A sequence that holds more is a batch of its
    own.

    With shared prefixes, sequences that begin alike come into one batch; without, sequences of similar length, the
    shortest first. Equal sequences keep their order, so the order of summation depends only on the order of the input.
    """
    batches: list[list[TrainedPart]] = []
    held = 0
    for sequence in sorted(sequences, key=lambda s: s.inputs if shares_prefixes else [len(s.inputs)]):
        if batches:
            # Sorted by length, the newest is the longest and sets the padded width.
            more = held + _new_tokens(sequence, batches[-1][-1])
            more = more if shares_prefixes else (len(batches[-1]) + 1) * len(sequence.inputs)
            if more <= max_tokens:
                batches[-1].append(sequence)
                held = more
                continue
        batches.append([sequence])
        held = _new_tokens(sequence, None) if shares_prefixes else len(sequence.inputs)
    return batches


def held_tokens(batch: Sequence[TrainedPart], *, shares_prefixes: bool) -> int:
    """Return how many tokens' activations a gradient of the sequences holds.

    With shared prefixes, a token that n sequences share counts 1 + n/4: its activations once, and its attention for
    each sequence. Without, every sequence is padded to the longest.
    """
    if not shares_prefixes:
        return len(batch) * max(len(part.inputs) for part in batch)
    ordered = sorted(batch, key=lambda part: part.inputs)
    return sum(_new_tokens(part, before) for before, part in zip([None, *ordered], ordered, strict=False))


def _new_tokens(part: TrainedPart, before: TrainedPart | None) -> int:
    """Return how many tokens a part adds to a batch with shared prefixes: those that the part before, in order, does
    not have, and a quarter of all for its attention.
    """
    n_shared = 0 if before is None else shared_length(before.inputs, part.inputs)
    return len(part.inputs) - n_shared + len(part.inputs) // _ATTENTION_SHARE


@dataclass(slots=True)
class Targets:
    """The trained tokens of a micro-batch as tensors of shape (N,)."""

    ids_N: Tensor
    weights_N: Tensor
    columns: dict[str, Tensor]
    """The loss's columns by name."""
    sequence_N: Tensor
    """The index in the micro-batch of each token's sequence."""

    @classmethod
    def of(cls, batch: Sequence[TrainedPart], columns: Sequence[str], device: torch.device) -> Targets:
        """Return the trained tokens of a batch, N in all, as flat tensors on the device."""

        def floats(lists: Iterable[list[float]]) -> Tensor:
            return torch.tensor([value for values in lists for value in values], dtype=torch.float32, device=device)

        return cls(
            ids_N=torch.tensor([token for s in batch for token in s.targets], device=device),
            weights_N=floats(s.weights for s in batch),
            columns={name: floats(s.columns[index] for s in batch) for index, name in enumerate(columns)},
            sequence_N=torch.tensor([index for index, s in enumerate(batch) for _ in s.targets], device=device),
        )
