"""Keep responses that a client may continue by id, for models whose servers do not keep them.

A client of OpenAI's Responses API may send only its new turn, with the id of the response before it. If the gateway
translates such a request, it keeps the conversation in memory while the attempt lasts, `LIMIT_BYTES` in all. Beyond
that the oldest responses are dropped. A request that refers to a dropped response is refused, as OpenAI does after 30
days.

Everything runs in the gateway's event loop. `Dialect.conversations` knows the form of the items.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from leyden._lib.host.http import Refusal
from leyden._lib.json import Json
from leyden.dialects.dialect import Conversations
from leyden.gateway.attempts import AttemptKey

LIMIT_BYTES = 256 * 2**20
"""The most bytes of conversations that one gateway process keeps."""


@dataclass(frozen=True, slots=True)
class _KeptResponse:
    """A response and the conversation up to it."""

    items: list[Json]
    """The items of the conversation, from its first turn to this response."""
    response: Json
    """The response as the client received it."""
    n_bytes: int


class KeptResponses:
    """The kept responses, by attempt and id."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._n_bytes = 0
        self._kept: OrderedDict[tuple[AttemptKey, str], _KeptResponse] = OrderedDict()
        self._ids: dict[AttemptKey, set[str]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def whole(self, key: AttemptKey, request: Json, conversations: Conversations) -> Json:
        """Return the request with the earlier turns in place of the id of the response that it continues; the request
        itself if it continues none.

        Raise Refusal (404) if that response is not kept, Untranslatable if the request's own items cannot be read.
        """
        before = conversations.previous(request)
        return request if before is None else conversations.with_history(request, self.get(key, before).items)

    def get(self, key: AttemptKey, response_id: str) -> _KeptResponse:
        """Return a kept response. Raise Refusal (404) if none with this id is kept."""
        found = self._kept.get((key, response_id))
        if found is None:
            raise Refusal(
                404,
                "previous_response_not_found",
                f"the gateway keeps no response {response_id!r} of attempt {key[1]!r}: it belongs to another attempt, was sent "
                "with store=false, or was dropped; send the whole conversation as `input`",
                param="previous_response_id",
            )
        return found

    def keep(
        self, key: AttemptKey, request: Json, response: Json, conversations: Conversations, *, n_bytes: int
    ) -> None:
        """Keep a response unless the client asked not to. The oldest responses are dropped if the limit is exceeded.

        request: the request with its earlier turns.
        n_bytes: the approximate size of the conversation in memory.
        """
        items = conversations.items(request, response)
        if items is None:
            return
        self.drop(key, response["id"])
        self._kept[key, response["id"]] = _KeptResponse(items, response, n_bytes)
        self._ids.setdefault(key, set()).add(response["id"])
        self._n_bytes += n_bytes
        while self._n_bytes > self._limit_bytes:
            self.drop(*next(iter(self._kept)))

    def drop(self, key: AttemptKey, response_id: str) -> bool:
        """Drop a response, and return whether it was kept."""
        found = self._kept.pop((key, response_id), None)
        if found is None:
            return False
        self._n_bytes -= found.n_bytes
        self._ids[key].discard(response_id)
        if not self._ids[key]:
            del self._ids[key]
        return True

    def end(self, key: AttemptKey) -> None:
        """Drop every response of an attempt that is over."""
        for response_id in list(self._ids.get(key, ())):
            self.drop(key, response_id)
