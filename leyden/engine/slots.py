"""`SlotTable`: assigns the rows of the key-value cache to requests, and finds what a row holds of a new prompt.

The module knows token ids and row numbers, no tensors and no model. A finished row is kept until it is needed or the
weights change. A prompt that begins with exactly the row's tokens takes the row over. A prompt that begins like another
row, finished or under way, gets a row into which the caller copies the common tokens, if they are worth the copy. Only
the rest of the prompt is computed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A row of the cache for a prompt."""

    row: int
    n_cached: int = 0
    """How many of the prompt's tokens the row holds. It is below the prompt's length, because the model must run on the
    last token to predict the next one."""
    copy_from: int | None = None
    """The row whose first `n_cached` tokens the caller has to copy to `row`; None: they are there."""


class SlotTable:
    """A table of `n_rows` rows, each free, in use, or kept for its tokens. Only the decoder's thread may use it."""

    def __init__(self, n_rows: int, *, reuse: bool = True, min_copied: int | None = None) -> None:
        """reuse: whether finished rows are kept for prompts that continue them.
        min_copied: copy the tokens that a prompt has in common with another row if they are at least as many; None:
            never.
        """
        self._free = list(range(n_rows - 1, -1, -1))
        self._reuse = reuse
        self._min_copied = min_copied if reuse else None
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        """The tokens of each kept row, as bytes; the longest unused first."""
        self._rows_of: dict[bytes, list[int]] = {}
        """The kept rows by their tokens."""
        self._begun: dict[int, bytes] = {}
        """The prompts of rows in use that are not computed yet."""
        self._held: list[tuple[bytes, int]] = []
        """The tokens of each row that can be copied, sorted, so that the row with the longest common beginning stands
        beside the place of a prompt."""
        self._held_of: dict[int, bytes] = {}
        self.reused_tokens = 0
        """How many tokens of prompts were found in other rows."""

    def acquire(self, prompt: Sequence[int]) -> Place | None:
        """Return a row for `prompt`; None if every row is in use."""
        key = _key(prompt)
        source, n_shared = self._most_shared(key)
        found = self._longest_prefix(key, more_than=n_shared - 1)
        if found is not None:
            row, n_cached = found
            place = Place(row, min(n_cached, len(prompt) - 1))
        else:
            row = self._free_row(besides=source)
            if row is None:
                return None
            place = Place(row) if source is None else Place(row, min(n_shared, len(prompt) - 1), source)
        self._drop(place.row)
        self._begun[place.row] = key
        self.reused_tokens += place.n_cached
        return place

    def should_wait(self, prompt: Sequence[int]) -> bool:
        """Return whether a row that is about to be computed will hold more of the prompt than any row does now, so that
        the prompt had better be given a row afterwards.
        """
        if self._min_copied is None or not self._begun or len(prompt) < self._min_copied:
            return False
        key = _key(prompt)
        begun = max(_n_common(key, other) for other in self._begun.values())
        return begun >= self._min_copied and begun > max(self._most_shared(key)[1], self._n_kept_prefix(key))

    def computed(self) -> None:
        """Record that the prompts of all rows in use are in the cache."""
        for row, key in self._begun.items():
            self._hold(row, key)
        self._begun.clear()

    def release(self, row: int, tokens: Sequence[int] = ()) -> None:
        """Free `row`.

        tokens: the tokens that its cache holds, for which it is kept; none: the cache is dropped.
        """
        self._begun.pop(row, None)
        self._drop(row)
        if not tokens or not self._reuse:
            self._free.append(row)
            return
        key = _key(tokens)
        self._kept[row] = key
        self._rows_of.setdefault(key, []).append(row)
        self._hold(row, key)

    def drop(self) -> None:
        """Free every kept row, because the weights that computed their caches have changed."""
        self._free.extend(self._kept)
        self._kept.clear()
        self._rows_of.clear()
        self._held.clear()
        self._held_of.clear()

    def _most_shared(self, key: bytes) -> tuple[int | None, int]:
        """Return the row that shares the most tokens with a prompt, and how many; None and 0 if they are too few."""
        best: tuple[int | None, int] = (None, 0)
        if not self._held:
            return best
        at = bisect_left(self._held, (key, -1))
        for tokens, row in self._held[max(at - 1, 0) : at + 1]:
            if (n_common := _n_common(key, tokens)) > best[1]:
                best = (row, n_common)
        return best if self._min_copied is not None and best[1] >= self._min_copied else (None, 0)

    def _n_kept_prefix(self, key: bytes) -> int:
        lengths = (len(kept) for kept in self._rows_of if key.startswith(kept))
        return max(lengths, default=0) // _ITEM

    def _longest_prefix(self, key: bytes, *, more_than: int) -> tuple[int, int] | None:
        """Remove the kept row whose tokens are the longest prefix of a prompt, if they are more than `more_than`.
        Return the row and its number of tokens; None if there is none.
        """
        for n_bytes in sorted({len(kept) for kept in self._rows_of}, reverse=True):
            if n_bytes <= more_than * _ITEM:
                return None
            if n_bytes <= len(key) and (rows := self._rows_of.get(key[:n_bytes])):
                row = rows[-1]
                self._unkeep(row)
                return row, n_bytes // _ITEM
        return None

    def _free_row(self, *, besides: int | None) -> int | None:
        """Return a free row, else the kept row that was not used for the longest time, unless it is `besides`."""
        if self._free:
            return self._free.pop()
        row = next((row for row in self._kept if row != besides), None)
        if row is not None:
            self._unkeep(row)
        return row

    def _unkeep(self, row: int) -> None:
        """Remove a row from the kept rows, so that it can be used for another sequence."""
        key = self._kept.pop(row)
        rows = self._rows_of[key]
        rows.remove(row)
        if not rows:
            del self._rows_of[key]

    def _hold(self, row: int, key: bytes) -> None:
        self._drop(row)
        if self._min_copied is None or len(key) < self._min_copied * _ITEM:
            return
        insort(self._held, (key, row))
        self._held_of[row] = key

    def _drop(self, row: int) -> None:
        if (key := self._held_of.pop(row, None)) is not None:
            del self._held[bisect_left(self._held, (key, row))]


_ITEM = array("i").itemsize


def _key(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes, so that a prefix of the ids is a prefix of the bytes."""
    return array("i", tokens).tobytes()


def _n_common(one: bytes, other: bytes) -> int:
    """Return how many tokens two keys have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high // _ITEM
    while low < high:  # one[:low] is common, one[: high + 1] is not
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low // _ITEM
