"""`SlotTable`: assigns the rows of the key-value cache to requests, and keeps finished rows for prompts that continue
them.

The module knows token ids and row numbers, no tensors and no model. A finished row is kept until it is needed or the
weights change. A prompt that begins with exactly the row's tokens takes the row over, so that only the rest of the
prompt is computed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence


class SlotTable:
    """A table of `n_rows` rows, each free, in use, or kept for its tokens. Not thread-safe: the decoder's thread owns
    it.
    """

    def __init__(self, n_rows: int, *, reuse: bool = True) -> None:
        """reuse: whether finished rows are kept for prompts that continue them."""
        self._free = list(range(n_rows - 1, -1, -1))
        self._reuse = reuse
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        """The tokens of each kept row, as bytes; the longest unused first."""
        self._rows_of: dict[bytes, list[int]] = {}
        """The kept rows by their tokens."""
        self.reused_tokens = 0
        """How many tokens of prompts were found in kept rows."""

    def acquire(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """Return a row for `prompt`, and how many of the prompt's tokens its cache holds already; None if every row is
        in use.

        The number is below the prompt's length, because the model must run on the last token to predict the next one.
        """
        found = self._longest_prefix(prompt)
        if found is not None:
            row, length = found
            n_cached = min(length, len(prompt) - 1)
            self.reused_tokens += n_cached
            return row, n_cached
        if self._free:
            return self._free.pop(), 0
        if self._kept:
            row = next(iter(self._kept))
            self._unkeep(row)
            return row, 0
        return None

    def release(self, row: int, tokens: Sequence[int] = ()) -> None:
        """Free `row`.

        tokens: the tokens that its cache holds, for which it is kept; none: the cache is dropped.
        """
        if not tokens or not self._reuse:
            self._free.append(row)
            return
        key = _key(tokens)
        self._kept[row] = key
        self._rows_of.setdefault(key, []).append(row)

    def forget(self) -> None:
        """Free every kept row, because the weights that computed their caches have changed."""
        self._free.extend(self._kept)
        self._kept.clear()
        self._rows_of.clear()

    def _longest_prefix(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """Remove the kept row whose tokens are the longest prefix of the prompt. Return the row and its number of
        tokens; None if no row's tokens are a prefix.
        """
        if not self._kept:
            return None
        key = _key(prompt)
        for n_bytes in sorted({len(kept) for kept in self._rows_of}, reverse=True):
            if n_bytes <= len(key) and (rows := self._rows_of.get(key[:n_bytes])):
                row = rows[-1]
                self._unkeep(row)
                return row, n_bytes // _ITEM
        return None

    def _unkeep(self, row: int) -> None:
        """Remove a row from the kept rows, so that it can be used for another sequence."""
        key = self._kept.pop(row)
        rows = self._rows_of[key]
        rows.remove(row)
        if not rows:
            del self._rows_of[key]


_ITEM = array("i").itemsize


def _key(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes, so that a prefix of the ids is a prefix of the bytes."""
    return array("i", tokens).tobytes()
