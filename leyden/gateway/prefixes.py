"""Find which earlier call of its attempt each prompt continues, and how many ids they share.

No other module searches for this. The store leaves the shared ids out, and the token graph starts from them; each
compares them first.

A turn that continues a conversation shares nearly all of its prompt with the last turn; a rewritten context shares only
its beginning. Until an attempt ends, the last call of each of its conversations is kept, at four bytes a token and
`LIMIT_BYTES` in all. Beyond that, the attempt without a call for the longest time is dropped, and its later calls are
stored whole.

The module knows ids, never text, and runs in the gateway's event loop.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from leyden.gateway.attempts import AttemptKey
from leyden.types.tokens import common_prefix

LIMIT_BYTES = 256 * 2**20
"""The most bytes of ids that one gateway process keeps."""
_MAX_CONVERSATIONS = 32
"""The number of conversations of one attempt that are kept. The oldest are dropped."""


class Prefixes:
    """The last call of each conversation of the attempts under way."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._n_bytes = 0
        self._ends: OrderedDict[AttemptKey, dict[str, array[int]]] = OrderedDict()
        """Prompt and response of each conversation's last call, by attempt and span id."""

    def __len__(self) -> int:
        return len(self._ends)

    def add(
        self, key: AttemptKey, span_id: str, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> tuple[int, str | None]:
        """Add a call. Return the number of first ids of its prompt that an earlier call has, too, and that call's span
        id; (0, None) if no call shares any.

        Of the earlier calls, the one with the most shared ids is chosen, and of several the newest.
        prompt_ids, response_ids: shapes (P,) and (R,).
        """
        prompt = array("i", prompt_ids)
        ends = self._ends.setdefault(key, {})
        self._ends.move_to_end(key)
        known, earlier = 0, None
        for name in reversed(ends):
            if (n_ids := common_prefix(ends[name], prompt)) > known:
                known, earlier = n_ids, name
                if known == len(prompt_ids):  # no other call can share more
                    break
        if earlier is not None and known == len(ends[earlier]):  # the call replaces the one that it continues
            self._n_bytes -= _size(ends.pop(earlier))
        ends[span_id] = prompt + array("i", response_ids)
        self._n_bytes += _size(ends[span_id])
        if len(ends) > _MAX_CONVERSATIONS:
            self._n_bytes -= _size(ends.pop(next(iter(ends))))
        while self._n_bytes > self._limit_bytes:
            self.end(next(iter(self._ends)))
        return known, earlier

    def end(self, key: AttemptKey) -> None:
        """Drop the conversations of an attempt that is over."""
        self._n_bytes -= sum(map(_size, self._ends.pop(key, {}).values()))


def _size(ids: array[int]) -> int:
    return len(ids) * ids.itemsize
