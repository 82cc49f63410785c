"""Which earlier call of its attempt each prompt goes on from, and for how many ids.

This is the one place that searches for it. The store leaves those ids out and the token graph starts there, each after
it has compared them; what an engine's prefix cache can hold is the same number.

A turn that goes on where the last one ended knows nearly all of its prompt; a rewritten context knows its beginning
alone. The ends of an attempt's conversations are kept, four bytes a token, until the attempt ends; `LIMIT_BYTES` in
all, the attempt that was silent longest forgotten first. Calls of an attempt that was forgotten are stored whole.

It knows ids, never text, and runs in the gateway's event loop.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from leyden.gateway.attempts import AttemptKey
from leyden.types.tokens import common_prefix

LIMIT_BYTES = 256 * 2**20
_ENDS_KEPT = 32
"""Of one attempt: its newest conversations."""


class Prefixes:
    """The conversations of the attempts under way."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._n_bytes = 0
        self._ends: OrderedDict[AttemptKey, dict[str, array[int]]] = OrderedDict()
        """Of each attempt, by the span id of a conversation's last call: its prompt and response."""

    def __len__(self) -> int:
        return len(self._ends)

    def add(
        self, key: AttemptKey, span_id: str, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> tuple[int, str | None]:
        """Add a call; returns how many of its prompt's first ids an earlier call has, and the span id of that one (the newest of equals).

        Shapes (P,) and (R,).
        """
        prompt = array("i", prompt_ids)
        ends = self._ends.setdefault(key, {})
        self._ends.move_to_end(key)
        known, earlier = 0, None
        for name in reversed(ends):
            if (n_ids := common_prefix(ends[name], prompt)) > known:
                known, earlier = n_ids, name
                if known == len(prompt_ids):  # nobody knows more
                    break
        if earlier is not None and known == len(ends[earlier]):  # it goes on where that one ended
            self._n_bytes -= _size(ends.pop(earlier))
        ends[span_id] = prompt + array("i", response_ids)
        self._n_bytes += _size(ends[span_id])
        if len(ends) > _ENDS_KEPT:
            self._n_bytes -= _size(ends.pop(next(iter(ends))))
        while self._n_bytes > self._limit_bytes:
            self.end(next(iter(self._ends)))
        return known, earlier

    def end(self, key: AttemptKey) -> None:
        """Forget an attempt that is over."""
        self._n_bytes -= sum(map(_size, self._ends.pop(key, {}).values()))


def _size(ids: array[int]) -> int:
    return len(ids) * ids.itemsize
