"""The earlier turns of the Responses API, for models whose servers do not keep them.

A client of that API may send its new turn only, and name the answer before it (`previous_response_id`). Where the request
is translated, the gateway keeps what was said: in memory, for as long as the attempt lasts, `LIMIT_BYTES` in all. What is
beyond that is forgotten, oldest first, and a request that refers to it is refused, as OpenAI does after 30 days.

Everything runs in the gateway's event loop. It knows items of that API, and no HTTP.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from leyden.dialects import Json
from leyden.dialects.responses import input_items
from leyden.gateway.attempts import AttemptKey
from leyden.host.http import Refusal

LIMIT_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class _Kept:
    items: list[Json]
    """The whole conversation, the answer included."""
    response: Json
    n_bytes: int


class KeptResponses:
    """Answers by attempt and id."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._n_bytes = 0
        self._kept: OrderedDict[tuple[AttemptKey, str], _Kept] = OrderedDict()
        self._ids: dict[AttemptKey, set[str]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def whole(self, key: AttemptKey, request: Json) -> Json:
        """The request with the turns before it, in place of the id that names them. Raises Refusal, Untranslatable."""
        before: Any = request.get("previous_response_id")
        if before is None:
            return request
        items = self.get(key, before).items
        return {**request, "previous_response_id": None, "input": [*items, *input_items(request)]}

    def get(self, key: AttemptKey, response_id: str) -> _Kept:
        """Raises Refusal if it is not there."""
        found = self._kept.get((key, response_id))
        if found is None:
            raise Refusal(
                404,
                "previous_response_not_found",
                f"the gateway keeps no response {response_id!r} of attempt {key[1]!r}: it belongs to another attempt, was sent "
                "with store=false, or was forgotten; send the whole conversation as `input`",
                param="previous_response_id",
            )
        return found

    def keep(self, key: AttemptKey, request: Json, response: Json, *, n_bytes: int) -> None:
        """Keep an answer unless the client said `store: false`. request: the whole one. n_bytes: what it takes."""
        if request.get("store") is False:
            return
        self.forget(key, response["id"])
        self._kept[key, response["id"]] = _Kept([*input_items(request), *response["output"]], response, n_bytes)
        self._ids.setdefault(key, set()).add(response["id"])
        self._n_bytes += n_bytes
        while self._n_bytes > self._limit_bytes:
            self.forget(*next(iter(self._kept)))

    def forget(self, key: AttemptKey, response_id: str) -> bool:
        """Whether it was there."""
        found = self._kept.pop((key, response_id), None)
        if found is None:
            return False
        self._n_bytes -= found.n_bytes
        self._ids[key].discard(response_id)
        if not self._ids[key]:
            del self._ids[key]
        return True

    def end(self, key: AttemptKey) -> None:
        """Forget everything of an attempt that is over."""
        for response_id in list(self._ids.get(key, ())):
            self.forget(key, response_id)
