"""Recognise a call that a client sends again.

OpenAI's and Anthropic's clients mark retries: `x-stainless-retry-count` is 0 at first and grows. A retry repeats an
earlier call of the same attempt, route and body. If that call was answered, the answer was lost on its way: the gateway
sends it again, and the model is not called. Otherwise the retry goes to the model under the number of the earlier call.
Calls that are not marked as retries are never joined, even if they are equal.

Everything is kept in memory until the attempt ends, `LIMIT_BYTES` in all; the oldest entries are dropped first.
Everything runs in the gateway's event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from leyden.gateway.asgi import Headers, Scope, header
from leyden.gateway.attempts import AttemptKey

LIMIT_BYTES = 64 * 2**20
"""The most bytes of entries that one gateway process keeps."""
_ENTRY_BYTES = 1024
"""The approximate size of one entry without its answer."""

_Digest = bytes
"""The digest of a call's route and body."""


@dataclass(slots=True, eq=False)
class Try:
    """One call of an attempt, kept so that a client's retry gets the same response."""

    key: AttemptKey
    digest: _Digest
    call_index: int
    span_id: str
    state: str = "under way"
    """"under way", "failed" or "answered"."""
    headers: Headers | None = None
    body: bytes = b""
    """The answer that was sent to the client, with `headers`. b"" and None before there is one."""


class Retries:
    """Keeps recent calls with their answers, and finds the call that a client's retry repeats."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._n_bytes = 0
        self._tries: OrderedDict[Try, None] = OrderedDict()
        self._by_attempt: dict[AttemptKey, dict[_Digest, list[Try]]] = {}

    def __len__(self) -> int:
        return len(self._tries)

    def earlier(self, key: AttemptKey, path: str, raw: bytes, scope: Scope) -> Try | None:
        """Return the call that this request retries, and drop it; None if it is no retry, or the call is not kept."""
        count = header(scope, b"x-stainless-retry-count")
        if count is None or not count.isdigit() or int(count) == 0:
            return None
        known = self._by_attempt.get(key, {}).get(_digest(path, raw), ())
        # A retry most likely follows a failed call, then one whose answer was lost. A call under
        # way comes last: the gateway has not noticed yet that its client has left.
        found = next(
            (one for state in ("failed", "answered", "under way") for one in known if one.state == state), None
        )
        if found is not None:
            self._drop(found)
        return found

    def begin(
        self, key: AttemptKey, path: str, raw: bytes, scope: Scope, *, call_index: int, span_id: str
    ) -> Try | None:
        """Keep a call that may be retried, and return its entry; None if its client does not mark retries."""
        if header(scope, b"x-stainless-retry-count") is None:
            return None
        one = Try(key, _digest(path, raw), call_index, span_id)
        self._add(one)
        return one

    def answered(self, one: Try, headers: Headers, body: bytes) -> None:
        """Keep the answer that is sent to the client, unless the entry has been dropped meanwhile."""
        known = one in self._tries
        if known:
            self._drop(one)
        one.state, one.headers, one.body = "answered", headers, body
        if known:
            self._add(one)

    def replayed(self, one: Try) -> None:
        """Keep an entry again whose answer is sent once more, because that may be lost, too."""
        self._add(one)

    def end(self, key: AttemptKey) -> None:
        """Drop the calls of an attempt that is over."""
        for one in [one for tries in self._by_attempt.get(key, {}).values() for one in tries]:
            self._drop(one)

    def _add(self, one: Try) -> None:
        self._tries[one] = None
        self._by_attempt.setdefault(one.key, {}).setdefault(one.digest, []).append(one)
        self._n_bytes += _ENTRY_BYTES + len(one.body)
        while self._n_bytes > self._limit_bytes:
            self._drop(next(iter(self._tries)))

    def _drop(self, one: Try) -> None:
        del self._tries[one]
        self._n_bytes -= _ENTRY_BYTES + len(one.body)
        of_attempt = self._by_attempt[one.key]
        of_attempt[one.digest].remove(one)
        if not of_attempt[one.digest]:
            del of_attempt[one.digest]
        if not of_attempt:
            del self._by_attempt[one.key]


def _digest(path: str, raw: bytes) -> _Digest:
    return blake2b(path.encode() + b"\0" + raw, digest_size=16).digest()
