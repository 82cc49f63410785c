"""Translate streams of the Responses API to chat's chunks and back, event by event."""

from __future__ import annotations

from typing import Any

from leyden._lib.json import Json, is_list
from leyden.dialects.encoding import named_event
from leyden.dialects.fields import REASONING, a_list, a_text, an_object, reasoning_of, shown, the_choice
from leyden.dialects.responses.answer import (
    answer_from_chat,
    call_item,
    chat_usage,
    envelope,
    finish_reason,
    message_item,
    output_logprobs,
    reasoning_item,
)
from leyden.dialects.responses.namespaces import ToolNames
from leyden.dialects.responses.request import reasoning_items, thinking_block
from leyden.errors import Untranslatable


class EventsFromChat:
    """Converts chat's chunks to the events that a client of the Responses API reads. One item is open at a time."""

    def __init__(self, request: Json) -> None:
        """request: the client's request, whose options the response repeats."""
        self._request = request
        included = a_list(request.get("include"), "include")
        self._wants_logprobs = bool(request.get("top_logprobs") or "message.output_text.logprobs" in included)
        self._names = ToolNames(request.get("tools"))
        self._head: Json = {}
        """The first chunk's id, time and model; empty before that chunk."""
        self._n_events = 0
        self._output: list[Json] = []
        """The items so far. Only the last one may be open."""
        self._open: str | int | None = None
        """The kind of the item that is open; for a tool call, its index in chat; None: no item."""
        self._calls = 0
        """The number of tool calls that have begun."""
        self._reasoning = 0
        """The number of reasoning items that have begun."""
        self._finish_reason: Any = None
        self._usage: Any = None

    def feed(self, chunk: Json) -> list[bytes]:
        """Return the events of the Responses API for one chunk of a chat stream, often none. Raise Untranslatable for a
        chunk that the API cannot express.
        """
        events = [] if self._head else self._start(chunk)
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        if chunk.get("choices"):
            choice = the_choice(chunk)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            delta = an_object(choice.get("delta") or {}, "delta")
            wished = output_logprobs(choice.get("logprobs")) if self._wants_logprobs else []
            events += self._delta(delta, wished)
        return [self._event(event) for event in events]

    def end(self) -> list[bytes]:
        """Return the events that end the response."""
        events = [] if self._head else self._start({})
        events += self._close()
        choice = {"message": {"role": "assistant"}, "finish_reason": self._finish_reason}
        response = answer_from_chat({**self._head, "choices": [choice], "usage": self._usage}, self._request)
        response["output"] = self._output
        events.append({"type": f"response.{response['status']}", "response": response})
        return [self._event(event) for event in events]

    def _event(self, event: Json) -> bytes:
        """Return an event as bytes, with the next sequence number."""
        self._n_events += 1
        return named_event({**event, "sequence_number": self._n_events - 1})

    def _start(self, chunk: Json) -> list[Json]:
        self._head = {name: chunk.get(name) for name in ("id", "created", "model")}
        response = envelope(self._head, self._request, [], status="in_progress")
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _delta(self, delta: Json, logprobs: list[Json]) -> list[Json]:
        """Return the Responses events for one delta of a chat stream. A new kind of content closes the open item and
        begins another.

        logprobs: the log-probabilities of the tokens of the delta's content; the API has none for other kinds of
            content.
        """
        events: list[Json] = []
        if text := reasoning_of(delta):
            events += self._to("reasoning", reasoning_item(self._head["id"], self._reasoning), "reasoning_text")
            events += self._text("response.reasoning_text.delta", text)
        for block in a_list(delta.get("thinking_blocks"), "thinking_blocks"):
            events += self._encrypted(block)
        if text := delta.get("content"):
            part: Json = {"annotations": [], "logprobs": []}
            events += self._to("message", message_item(self._head["id"]), "output_text", **part)
            self._output[-1]["content"][0]["logprobs"] += logprobs
            events += self._text("response.output_text.delta", a_text(text, "delta.content"), logprobs=logprobs)
        if text := delta.get("refusal"):
            events += self._to("refusal", message_item(self._head["id"]), "refusal")
            events += self._text("response.refusal.delta", a_text(text, "delta.refusal"))
        for call in a_list(delta.get("tool_calls"), "delta.tool_calls"):
            events += self._call(an_object(call, "delta.tool_calls"))
        return events

    def _encrypted(self, block: Json) -> list[Json]:
        """Return the events for one of chat's `thinking_blocks`. Its encrypted content is added to the open reasoning
        item; if none is open, or the block is redacted, it begins another item.
        """
        events: list[Json] = []
        if self._open != "reasoning" or block.get("type") == "redacted_thinking":
            item = reasoning_item(self._head["id"], self._reasoning)
            events += [*self._close(), self._begin("reasoning", item)]
            if text := block.get("thinking"):
                events += [self._part("reasoning_text"), *self._text("response.reasoning_text.delta", text)]
        (whole,) = reasoning_items({"thinking_blocks": [block]}, prefix="")
        if encrypted := whole.get("encrypted_content"):
            self._output[-1]["encrypted_content"] = encrypted
        return [*events, *self._close()]

    def _call(self, part: Json) -> list[Json]:
        """Return the events for one piece of a tool call. Raise Untranslatable if it continues a call whose item is
        already closed.
        """
        index = int(part.get("index", self._calls))
        function = an_object(part.get("function") or {}, "delta.tool_calls.function")
        events: list[Json] = []
        if self._open != index:
            if index < self._calls:
                raise Untranslatable("delta.tool_calls", f"goes on with call {index} after a later one began")
            self._calls = index + 1
            item = call_item(self._head["id"], index, part.get("id"), self._names.named(function.get("name")))
            events += [*self._close(), self._begin(index, item)]
        if arguments := function.get("arguments"):
            self._output[-1]["arguments"] += arguments
            events.append({"type": "response.function_call_arguments.delta", **self._place(), "delta": arguments})
        return events

    def _to(self, kind: str, item: Json, part: str, **fields: Any) -> list[Json]:
        if self._open == kind:
            return []
        return [*self._close(), self._begin(kind, item), self._part(part, **fields)]

    def _begin(self, kind: str | int, item: Json) -> Json:
        self._open = kind
        self._reasoning += kind == "reasoning"
        self._output.append(item)
        return {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": _copy(item)}

    def _part(self, kind: str, **fields: Any) -> Json:
        part = {"type": kind, "refusal" if kind == "refusal" else "text": "", **fields}
        self._output[-1]["content"].append(part)
        return {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": _copy(part)}

    def _text(self, kind: str, text: str, **fields: Any) -> list[Json]:
        part = self._output[-1]["content"][0]
        part["refusal" if part["type"] == "refusal" else "text"] += text
        return [{"type": kind, **self._place(), "content_index": 0, "delta": text, **fields}]

    def _place(self) -> Json:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _close(self) -> list[Json]:
        """Return the events that complete the open output item; none if no item is open."""
        if self._open is None:
            return []
        self._open = None
        item = self._output[-1]
        item["status"] = "completed"
        events: list[Json] = []
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append({"type": "response.function_call_arguments.done", **self._place(), **done})
        elif item["content"]:
            place = {**self._place(), "content_index": 0}
            part = item["content"][0]
            name = "refusal" if part["type"] == "refusal" else "text"
            extra = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            events.append({"type": f"response.{part['type']}.done", **place, name: part[name], **extra})
            events.append({"type": "response.content_part.done", **place, "part": _copy(part)})
        place = {"output_index": len(self._output) - 1}
        return [*events, {"type": "response.output_item.done", **place, "item": _copy(item)}]


def _copy(item: Json) -> Json:
    """Return a copy for an event, because the original still changes."""
    return {name: list(value) if is_list(value) else value for name, value in item.items()}


class EventsToChat:
    """Converts the events of a server of the Responses API to chat's chunks."""

    def __init__(self) -> None:
        self.ended = False
        """Whether the server has sent its last event."""
        self._head: Json = {}
        self._names = ToolNames(None)
        self._calls: dict[int, int] = {}
        """The index of each tool call in chat, by the index of its item."""
        self._reasoning = ""
        """The text of the current reasoning item so far."""

    def feed(self, event: Json) -> list[Json]:
        """Return the chat chunks for one event, often none. Raise Untranslatable if chat cannot express the event."""
        kind = str(event.get("type"))
        match kind:
            case "response.created":
                response = an_object(event.get("response"), "response")
                self._names = ToolNames(response.get("tools"))
                self._head = {"id": response.get("id"), "object": "chat.completion.chunk"}
                self._head |= {"created": int(response.get("created_at") or 0), "model": response.get("model")}
                return [self._chunk({"role": "assistant", "content": ""})]
            case "response.output_item.added":
                return self._begin(event["output_index"], an_object(event.get("item"), "item"))
            case "response.output_item.done":
                item = an_object(event.get("item"), "item")
                if item.get("type") != "reasoning" or not item.get("encrypted_content"):
                    return []  # its content has arrived in deltas
                return [self._chunk({"thinking_blocks": [thinking_block(self._reasoning, item["encrypted_content"])]})]
            case "response.output_text.delta":
                entries = event.get("logprobs")
                return [
                    self._chunk({"content": event["delta"]}, **({"logprobs": {"content": entries}} if entries else {}))
                ]
            case "response.refusal.delta":
                return [self._chunk({"refusal": event["delta"]})]
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                self._reasoning += event["delta"]
                return [self._chunk(dict.fromkeys(REASONING, event["delta"]))]
            case "response.function_call_arguments.delta":
                call = {"index": self._calls[event["output_index"]], "function": {"arguments": event["delta"]}}
                return [self._chunk({"tool_calls": [call]})]
            case "response.completed" | "response.incomplete":
                self.ended = True
                response = an_object(event.get("response"), "response")
                reason = finish_reason(response, bool(self._calls))
                usage: Json = {**self._head, "choices": [], "usage": chat_usage(response.get("usage"))}
                return [self._chunk({}, finish_reason=reason), usage]
            case "response.failed":
                self.ended = True
                return [{"error": an_object(event.get("response"), "response").get("error")}]
            case "error":
                return [{"error": {"message": event.get("message"), "code": event.get("code")}}]
            case "response.in_progress" | "response.queued":
                return []
            case _ if kind.endswith((".done", ".part.added", "_part.added")):
                return []  # its content has arrived in deltas
            case _:
                raise Untranslatable("type", f"is {shown(kind)}, an event that chat cannot express")

    def _chunk(self, delta: Json, **fields: Any) -> Json:
        """Return a chat chunk.

        fields: of its choice.
        """
        return {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **fields}]}

    def _begin(self, index: int, item: Json) -> list[Json]:
        """Return the chat chunks for the start of an output item. Only a function call makes one; text comes later."""
        match item.get("type"):
            case "function_call":
                number = self._calls[index] = len(self._calls)
                name = self._names.in_chat(item.get("name"), item.get("namespace"))
                function = {"name": name, "arguments": item.get("arguments") or ""}
                call = {"index": number, "id": item.get("call_id"), "type": "function", "function": function}
                return [self._chunk({"tool_calls": [call]})]
            case "reasoning":
                self._reasoning = ""
                return []
            case "message":
                return []
            case kind:
                raise Untranslatable("item.type", f"is {shown(kind)}, which chat cannot express")
