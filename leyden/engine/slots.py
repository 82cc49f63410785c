"""Which cache row belongs to which request, and which finished rows a new request can continue.

Bookkeeping only: it knows token ids and row numbers, no tensors and no model. A finished row stays
behind until its place is needed or the weights change; a prompt that begins with exactly its tokens
takes it over and computes only the rest.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence


class SlotTable:
    """`n_rows` rows, each free, in use, or kept for its prefix.

    Not thread-safe: the decoder's thread owns it.
    """

    def __init__(self, n_rows: int, *, reuse: bool = True) -> None:
        """reuse: False hands out rows without ever looking at earlier requests."""
        self._free = list(range(n_rows - 1, -1, -1))
        self._reuse = reuse
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        """Row to the bytes of its tokens, the longest unused first."""
        self._rows_of: dict[bytes, list[int]] = {}
        self._lengths: defaultdict[int, int] = defaultdict(int)
        """The number of kept rows by their number of tokens."""
        self.reused_tokens = 0

    def acquire(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """Return a row for `prompt`, and how many of its tokens the row's cache already holds.

        The number is always below the prompt's length, because the last token must run. None if
        every row is in use.
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
        """Free `row`. Its cache holds `tokens`, and may be reused for them; none: drop the
        cache.
        """
        if not tokens or not self._reuse:
            self._free.append(row)
            return
        key = _key(tokens)
        self._kept[row] = key
        self._rows_of.setdefault(key, []).append(row)
        self._lengths[len(key)] += 1

    def forget(self) -> None:
        """Drop every kept row: the weights that made them are gone."""
        self._free.extend(self._kept)
        self._kept.clear()
        self._rows_of.clear()
        self._lengths.clear()

    def _longest_prefix(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """Take the kept row whose tokens are the longest prefix of the prompt. Return it with its
        number of tokens; None if none fits.
        """
        if not self._kept:
            return None
        key = _key(prompt)
        for n_bytes in sorted(self._lengths, reverse=True):
            if n_bytes <= len(key) and (rows := self._rows_of.get(key[:n_bytes])):
                row = rows[-1]
                self._unkeep(row)
                return row, n_bytes // _ITEM
        return None

    def _unkeep(self, row: int) -> None:
        """Forget what a kept row holds, so that it can be used for another sequence."""
        key = self._kept.pop(row)
        rows = self._rows_of[key]
        rows.remove(row)
        if not rows:
            del self._rows_of[key]
        self._lengths[len(key)] -= 1
        if not self._lengths[len(key)]:
            del self._lengths[len(key)]


_ITEM = array("i").itemsize


def _key(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()
