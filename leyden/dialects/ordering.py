"""`InOrder`: the tool calls of a chat stream one after the other, for APIs whose events cannot interleave them.

Anthropic's messages and the Responses API have one open block or item at a time. A chat server may send the pieces of
several calls in turn, and their ids and names late or in pieces. A call begins for the client once its arguments have
begun and every earlier call is complete. Everything else waits, at the longest until the end of the stream.
"""

from __future__ import annotations

from leyden._lib.json import Json
from leyden.dialects.chat_reader import ChatReader, StreamedCall
from leyden.dialects.fields import made_call_id, without
from leyden.errors import Untranslatable


class InOrder:
    """Puts the chunks of one stream with one choice in an order that other APIs can express."""

    def __init__(self, reader: ChatReader) -> None:
        """reader: reads each chunk of the same stream before it is fed here."""
        self._reader = reader
        self._choice_index: int | None = None
        self._head: Json = {}
        self._finish_reason: str | None = None
        self._open: StreamedCall | None = None
        """The call whose pieces are passed on as they arrive."""
        self._begun: dict[int, int] = {}
        """The calls that the client has seen: the index under which it sees each, by number."""
        self._held: list[Json] = []
        """Deltas that came while a call was incomplete."""

    def feed(self, chunk: Json) -> list[Json]:
        """Return the chunks to translate for one chunk in OpenAI's form. Raise Untranslatable for a second choice, and
        for a call that continues after its arguments were complete.
        """
        choices: list[Json] = chunk.get("choices") or []
        if not choices:
            return [chunk]
        choice = choices[0]
        self._choice_index = choice["index"] if self._choice_index is None else self._choice_index
        if len(choices) > 1 or choice["index"] != self._choice_index:
            raise Untranslatable("choices", "must be one for this API, got several")
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        calls = self._calls()
        if not calls:  # until the first call, everything passes as it comes
            return [chunk]
        self._head = self._head or {name: chunk.get(name) for name in ("id", "object", "created", "model")}
        delta: Json = choice.get("delta") or {}
        pieces: list[Json] = delta.get("tool_calls") or []
        delta = without(delta, ("tool_calls", "function_call"))
        if any(delta[name] for name in delta if name != "role") and self._waiting():
            self._held.append({"delta": delta, "logprobs": choice.get("logprobs")})
            delta, choice = {}, without(choice, ("logprobs",))
        found = [{**chunk, "choices": [{**choice, "delta": delta}]}]
        for piece in pieces:
            number: int = piece["index"]
            found += self._piece(calls[number], piece["function"]["arguments"])
        return [*found, *self._advance()]

    def end(self) -> list[Json]:
        """Return the chunks for all that waits, at the end of the stream."""
        found: list[Json] = []
        for call in sorted(self._calls(), key=_order):
            if call.number not in self._begun:
                # A call without arguments has none, unless the answer was cut off before them.
                found.append(self._begin(call, call.arguments or ("" if self._finish_reason == "length" else "{}")))
        return [*found, *self._release()]

    def _calls(self) -> list[StreamedCall]:
        return [] if self._choice_index is None else self._reader.calls(self._choice_index)

    def _waiting(self) -> bool:
        return any(not call.complete or call.number not in self._begun for call in self._calls())

    def _piece(self, call: StreamedCall, arguments: str) -> list[Json]:
        """Return the chunk for a piece of a call that the client has seen; none for another."""
        if call.number not in self._begun or not arguments:
            return []
        if call is not self._open:
            if not arguments.strip():
                return []
            raise Untranslatable(
                "delta.tool_calls", f"goes on with call {call.number} after its arguments were complete"
            )
        return [
            self._chunk({"tool_calls": [{"index": self._begun[call.number], "function": {"arguments": arguments}}]})
        ]

    def _advance(self) -> list[Json]:
        """Return the chunks for calls that may begin now, and for deltas that need not wait."""
        found: list[Json] = []
        waiting = sorted((call for call in self._calls() if call.number not in self._begun), key=_order)
        for call in waiting:
            ready = call.id and call.arguments.strip() and call.index <= len(self._begun)
            if not ready or (self._open is not None and not self._open.complete):
                return found
            found.append(self._begin(call, call.arguments))
        return found if not self._held or self._waiting() else [*found, *self._release()]

    def _begin(self, call: StreamedCall, arguments: str) -> Json:
        self._open = call
        index = self._begun[call.number] = len(self._begun)
        if "custom" in call.fields:
            raise Untranslatable("delta.tool_calls", "has a custom tool call, which this API cannot express")
        function = {"name": call.name, "arguments": arguments}
        call_id = call.id or made_call_id(self._head, index)
        return self._chunk({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})

    def _release(self) -> list[Json]:
        held, self._held = self._held, []
        return [self._chunk(each["delta"], logprobs=each["logprobs"]) for each in held]

    def _chunk(self, delta: Json, **fields: object) -> Json:
        return {
            **self._head,
            "choices": [{"index": self._choice_index, "delta": delta, "finish_reason": None, **fields}],
        }


def _order(call: StreamedCall) -> tuple[int, int]:
    return call.index, call.number
