"""`ModelForward`: logits for decoding (with a cache) and for training (with a gradient), and the
cache's storage.

Shapes: B rows of a batch, S new tokens of a row (padded), T tokens a row attends to, N tokens of a
batch without padding, E width of a hidden state, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class ModelForward(Protocol):
    """Computes hidden states and logits of one model from the model's own parameters, never a
    copy.
    """

    name: str
    max_length: int
    """No sequence is longer."""
    shares_prefixes: bool
    """Whether `hidden_at` computes tokens once that several sequences begin with."""
    head: Callable[[Tensor], Tensor] | None
    """The module that turns hidden states (N, E) into logits (N, V). None if the model's logits are
    more than its head's output (scaled or capped); `hidden_at` is not to be called then."""

    def decode(self, rows: Sequence[int], sequences: Sequence[Sequence[int]], cached: Sequence[int]) -> Tensor:
        """Return logits (B, V) after the last token of each sequence.

        The cache row `rows[b]` holds the first `cached[b]` tokens of `sequences[b]`, and holds all
        of them afterwards.
        """
        ...

    def logits_at(self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        """Return differentiable logits (N, V) after the N tokens at `positions[b]` of each sequence
        b.
        """
        ...

    def hidden_at(self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        """Return differentiable hidden states (N, E), as the head reads them, of the
        tokens of `logits_at`.
        """
        ...

    def recompute_layers(self) -> None:
        """Recompute each layer's activations for the gradient from now on, and keep only its input.

        Raise ConfigError if the model's layers are not known.
        """
        ...

    def release(self) -> None:
        """Free the cache's memory; the next `decode` starts with every row empty."""
        ...


class KeyValueStore:
    """Keys and values of every layer in preallocated rows: tensors (rows, heads, length, dim).

    They grow by doubling, which keeps short conversations on a long-context model small. Rows keep
    their content until they are written over.
    """

    def __init__(self, max_rows: int, max_length: int) -> None:
        self._max_rows = max_rows
        self._max_length = max_length
        self._keys: list[Tensor | None] = []
        self._values: list[Tensor | None] = []
        self._rows = min(16, max_rows)
        self._length = min(64, max_length)
        self._read: list[Tensor] = []
        """Memory of what was read last: keys and values. Getting it anew from the system for each
        layer takes longer than the copy."""

    def reserve(self, row: int, length: int) -> None:
        """Make room for `length` tokens in rows up to `row`; contents stay."""
        if row >= self._max_rows or length > self._max_length:
            raise IndexError(f"row {row}, length {length}: the cache has {self._max_rows} rows of {self._max_length}")
        if row >= self._rows:
            self._rows = min(max(2 * self._rows, row + 1), self._max_rows)
        if length > self._length:
            self._length = min(max(2 * self._length, length), self._max_length)

    def write(self, layer: int, rows_N: Tensor, positions_N: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys (N, heads, dim) and values (N, heads, dim) of one token each at their places."""
        self._at_least(self._keys, layer, keys)[rows_N, :, positions_N] = keys
        self._at_least(self._values, layer, values)[rows_N, :, positions_N] = values

    def read(self, layer: int, rows_B: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, heads, length, dim) of the first `length` places of each
        row. They last until the next call.
        """
        found: list[Tensor] = []
        for place, tensor in enumerate(self._layer(layer)):
            _, n_heads, _, size = tensor.shape
            shape = len(rows_B), n_heads, length, size
            read = self._memory(place, tensor, math.prod(shape)).view(shape)
            found.append(torch.index_select(tensor[:, :, :length], 0, rows_B, out=read))
        return found[0], found[1]

    def read_at(self, layer: int, rows_B1: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, T, heads, dim) at the given places of each row."""
        keys, values = self._layer(layer)
        return keys[rows_B1, :, positions_BT], values[rows_B1, :, positions_BT]

    def clear(self) -> None:
        """Free the memory of all keys and values."""
        self._keys.clear()
        self._values.clear()
        self._read.clear()

    def _memory(self, place: int, like: Tensor, n: int) -> Tensor:
        """Return `n` numbers of the memory for keys (0) or values (1)."""
        if place == len(self._read):
            self._read.append(like.new_empty(0))
        if len(self._read[place]) < n:
            self._read[place] = like.new_empty(n)
        return self._read[place][:n]

    def _layer(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None
        assert values is not None
        return keys, values

    def _at_least(self, tensors: list[Tensor | None], layer: int, like: Tensor) -> Tensor:
        """Return a layer's keys or values with room for `_rows` rows of `_length` tokens. If the
        stored tensor is too small, copy it into a larger one.

        like: any tensor of shape (tokens, heads, head size) with the dtype and device to use.
        """
        while len(tensors) <= layer:
            tensors.append(None)
        held = tensors[layer]
        if held is not None and held.shape[0] >= self._rows and held.shape[2] >= self._length:
            return held
        # Zeros and not empty memory: a masked place may be read, and NaN times zero is NaN.
        n_heads, size = like.shape[1:]
        grown = torch.zeros(self._rows, n_heads, self._length, size, dtype=like.dtype, device=like.device)
        if held is not None:
            grown[: held.shape[0], :, : held.shape[2]] = held
        tensors[layer] = grown
        return grown
