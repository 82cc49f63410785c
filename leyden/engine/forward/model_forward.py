"""`ModelForward`, the protocol of a forward pass for decoding (with a cache) and for training (with a gradient), and
`KeyValueStore`, the cache's storage.

Shapes: B rows of a batch, S new tokens of a row (padded), T tokens that a row attends to, N tokens of a batch without
padding, E width of a hidden state, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

_ROUNDING: Final = {torch.float32: 1e-4, torch.float64: 1e-6}
"""The largest difference between two ways to compute a tensor, relative to its largest number, by dtype."""
_COARSE_ROUNDING: Final = 0.1
"""The same in half precision: in bfloat16, two orders of summation differ that much."""


def rounding(wanted: Tensor) -> float:
    """Return the largest difference from a tensor that counts as rounding. It is relative to the tensor's largest
    number, because logits of 40 differ by more than those of 1.
    """
    return _ROUNDING.get(wanted.dtype, _COARSE_ROUNDING) * max(1.0, float(wanted.abs().max()))


class ModelForward(Protocol):
    """Computes hidden states and logits of one model from the model's own parameters, never a copy."""

    name: str
    """A name for the log."""
    max_length: int
    """The most tokens of a sequence."""
    caches: bool
    """Whether `decode` keeps what it computed. Without a cache, every token of a sequence is new in each step."""
    shares_prefixes: bool
    """Whether `hidden_at` computes a token that several sequences begin with only once."""
    head: Callable[[Tensor], Tensor] | None
    """The module that turns hidden states (N, E) into logits (N, V). None if the model's logits are not this module's
    output; then do not call `hidden_at`."""
    headless: str
    """Why `head` is None, as a clause for messages; empty if it is not."""

    def decode(self, rows: Sequence[int], sequences: Sequence[Sequence[int]], cached: Sequence[int]) -> Tensor:
        """Return logits (B, V) after the last token of each sequence.

        The cache's row `rows[b]` holds the first `cached[b]` tokens of `sequences[b]`. Afterwards it holds all of them.
        """
        ...

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one row of the cache to another. Call it only if `caches` is true."""
        ...

    def logits_at(self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        """Return differentiable logits (N, V) after the N tokens at `positions[b]` of each sequence b."""
        ...

    def hidden_at(self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        """Return differentiable hidden states (N, E), the head's input, at the N tokens at `positions[b]` of each
        sequence b.
        """
        ...

    def recompute_layers(self) -> None:
        """From now on, keep only each layer's input for the gradient, and compute its activations again.

        Raise ConfigError if the model's layers are not known.
        """
        ...

    def release(self) -> None:
        """Free the cache's memory; the next `decode` starts with every row empty."""
        ...


class KeyValueStore:
    """Keys and values of every layer in preallocated rows: tensors (rows, heads, length, dim).

    The tensors grow by doubling, so that short conversations on a long-context model need little memory. Rows keep
    their content until it is overwritten.
    """

    def __init__(self, max_rows: int, max_length: int) -> None:
        self._max_rows = max_rows
        self._max_length = max_length
        self._layers: list[list[Tensor]] = []
        """The keys and the values of each layer."""
        self._rows = min(16, max_rows)
        """The number of rows that are allocated at least."""
        self._length = min(64, max_length)
        """The number of tokens that each row has room for."""
        self._read: list[Tensor] = []
        """Memory for the keys and values that `read` returns. Allocating it again for each layer takes longer than the
        copy."""

    def reserve(self, row: int, length: int) -> None:
        """Make room for `length` tokens in the rows up to `row`, whose content is kept."""
        if row >= self._max_rows or length > self._max_length:
            raise IndexError(f"row {row}, length {length}: the cache has {self._max_rows} rows of {self._max_length}")
        held = [tensor.shape for layer in self._layers for tensor in layer]
        if held:  # an earlier reservation that could not be allocated is given up
            self._rows = max(min(shape[0] for shape in held), min(16, self._max_rows))
            self._length = max(min(shape[2] for shape in held), min(64, self._max_length))
        if row >= self._rows:
            self._rows = min(max(2 * self._rows, row + 1), self._max_rows)
        if length > self._length:
            self._length = min(max(2 * self._length, length), self._max_length)

    def write(self, layer: int, rows_N: Tensor, positions_N: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the keys and values (N, heads, dim) of N tokens to their rows and positions."""
        while len(self._layers) <= layer:
            self._layers.append([each.new_empty(0, each.shape[1], 0, each.shape[2]) for each in (keys, values)])
        held = self._fitted(layer)
        held[0][rows_N, :, positions_N] = keys
        held[1][rows_N, :, positions_N] = values

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of the first `length` tokens of a row to another row, in every layer."""
        self.reserve(max(source, target), length)
        for layer in range(len(self._layers)):
            for tensor in self._fitted(layer):
                tensor[target, :, :length] = tensor[source, :, :length]

    def addresses(self) -> tuple[int, ...]:
        """Make the room that was reserved, and return where the tensors are. A captured graph is valid for these."""
        held = [tensor for layer in range(len(self._layers)) for tensor in self._fitted(layer)]
        return tuple(tensor.data_ptr() for tensor in (*held, *self._read))

    def read(self, layer: int, rows_B: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values (B, heads, length, dim) of the first `length` positions of each row. They are
        valid until the next call.
        """
        found: list[Tensor] = []
        for index, tensor in enumerate(self._layers[layer]):
            _, n_heads, _, size = tensor.shape
            shape = len(rows_B), n_heads, length, size
            read = self._memory(index, tensor, math.prod(shape)).view(shape)
            found.append(torch.index_select(tensor[:, :, :length], 0, rows_B, out=read))
        return found[0], found[1]

    def read_at(self, layer: int, rows_B1: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values (B, T, heads, dim) at the given positions of each row."""
        keys, values = self._layers[layer]
        return keys[rows_B1, :, positions_BT], values[rows_B1, :, positions_BT]

    def clear(self) -> None:
        """Free the memory of all keys and values."""
        self._layers.clear()
        self._read.clear()

    def _memory(self, index: int, like: Tensor, n: int) -> Tensor:
        """Return memory for `n` numbers, of the kind `index`: keys (0) or values (1).

        like: a tensor with the dtype and device to use.
        """
        if index == len(self._read):
            self._read.append(like.new_empty(0))
        if len(self._read[index]) < n:
            self._read[index] = like.new_empty(n)
        return self._read[index][:n]

    def _fitted(self, layer: int) -> list[Tensor]:
        """Return a layer's keys and values, with the room that was reserved."""
        held = self._layers[layer]
        for index, tensor in enumerate(held):
            if tensor.shape[0] < self._rows or tensor.shape[2] < self._length:
                held[index] = self._grown(tensor)
        return held

    def _grown(self, held: Tensor) -> Tensor:
        # Zeros and not empty memory, because a masked position may be read, and NaN times zero is NaN.
        grown = held.new_zeros(self._rows, held.shape[1], self._length, held.shape[3])
        grown[: held.shape[0], :, : held.shape[2]] = held
        return grown


def unseen(length: int, positions: Tensor, window: int | None) -> Tensor:
    """Return which of `length` positions a query at each of the given positions (...) does not see, (..., length).

    window: the number of tokens, its own included, that a query sees; None: all before it.
    """
    keys, queries = torch.arange(length, device=positions.device), positions[..., None]
    return keys > queries if window is None else (keys > queries) | (keys <= queries - window)


def hiding_mask(hidden: Tensor, like: Tensor) -> Tensor:
    """Return a mask that is minus infinity where `hidden` is true, else 0, with the dtype and the device of `like`.

    Attention would convert a boolean mask in each layer, and on CUDA copy one whose rows do not begin at multiples of
    16 bytes.
    """
    *shape, length = hidden.shape
    mask = torch.zeros(*shape, length + -length % 8, dtype=like.dtype, device=hidden.device)
    mask[..., :length].masked_fill_(hidden, -math.inf)
    return mask.to(like.device)[..., :length]
