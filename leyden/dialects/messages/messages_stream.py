"""Translate streams of Anthropic's messages API to chat's chunks and back, event by event."""

from __future__ import annotations

from typing import Any

from leyden._lib.json import Json, is_list
from leyden.dialects.encoding import named_event
from leyden.dialects.fields import REASONING, a_list, a_text, an_object, reasoning_of, shown, the_choice
from leyden.dialects.messages.answer import chat_usage, finish_reason, stop_of, usage_of
from leyden.dialects.messages.request import arguments_of
from leyden.errors import Untranslatable


class EventsFromChat:
    """Converts chat's chunks to the events that an Anthropic client reads. One content block is open at a time."""

    def __init__(self, request: Json) -> None:
        """request: the client's request, which this API's events do not repeat."""
        self._started = False
        self._n_blocks = 0
        self._open: str | int | None = None
        """The kind of the block that is open; for a tool call, its index in chat; None: no block."""
        self._signature = ""
        """The signature of the open thinking block, which is sent at the block's end."""
        self._calls = 0
        """The number of tool calls that have begun."""
        self._choice: Json = {}
        """The finish reason and stop reason, once they have arrived."""
        self._usage: Any = None

    def feed(self, chunk: Json) -> list[bytes]:
        """Return Anthropic's events for one chunk of a chat stream. Raise Untranslatable if it has no such events."""
        events: list[Json] = [] if self._started else [self._start(chunk)]
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        if chunk.get("choices"):
            choice = the_choice(chunk)
            self._choice |= {name: choice[name] for name in ("finish_reason", "stop_reason") if choice.get(name)}
            events += self._delta(an_object(choice.get("delta") or {}, "delta"))
        return [named_event(event) for event in events]

    def end(self) -> list[bytes]:
        """Return the events that end the message."""
        events = [] if self._started else [self._start({})]
        events += self._close()
        stop_reason, stop_sequence = stop_of(self._choice, calls=self._calls > 0)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        events.append({"type": "message_delta", "delta": delta, "usage": usage_of(self._usage)})
        events.append({"type": "message_stop"})
        return [named_event(event) for event in events]

    def _start(self, chunk: Json) -> Json:
        self._started = True
        prompt_ids = chunk.get("prompt_token_ids")
        n_prompt = len(prompt_ids) if is_list(prompt_ids) else 0
        message: Json = {
            "id": chunk.get("id"),
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model"),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of({"prompt_tokens": n_prompt, "completion_tokens": 0}),
        }
        return {"type": "message_start", "message": message}

    def _delta(self, delta: Json) -> list[Json]:
        """Return Anthropic's events for one delta of a chat stream. A new kind of content closes the open block and
        begins another.
        """
        events: list[Json] = []
        blocks = a_list(delta.get("thinking_blocks"), "thinking_blocks")
        if text := reasoning_of(delta):
            events += self._to("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._in_block({"type": "thinking_delta", "thinking": text}))
        for block in blocks:
            events += self._whole_thinking(block)
        if text := delta.get("content") or delta.get("refusal"):
            events += self._to("text", {"type": "text", "text": ""})
            events.append(self._in_block({"type": "text_delta", "text": a_text(text, "delta.content")}))
        for call in a_list(delta.get("tool_calls"), "delta.tool_calls"):
            events += self._call(an_object(call, "delta.tool_calls"))
        return events

    def _whole_thinking(self, block: Any) -> list[Json]:
        """Return the events for a block of `thinking_blocks`: a redacted block whole, or the signature of a thinking
        block, with its text if that has not arrived as reasoning.
        """
        if block.get("type") == "redacted_thinking":
            return [*self._close(), self._begin("redacted", block), *self._close()]
        came_as_text = self._open == "thinking"
        events = self._to("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        if block.get("thinking") and not came_as_text:
            events.append(self._in_block({"type": "thinking_delta", "thinking": block["thinking"]}))
        self._signature = block.get("signature") or ""
        return [*events, *self._close()]

    def _call(self, part: Json) -> list[Json]:
        """Return the events for one piece of a tool call. Raise Untranslatable if it continues a call whose block is
        already closed.
        """
        index = int(part.get("index", self._calls))
        function = an_object(part.get("function") or {}, "delta.tool_calls.function")
        events: list[Json] = []
        if self._open != index:
            if index < self._calls:
                raise Untranslatable("delta.tool_calls", f"goes on with call {index} after a later one began")
            self._calls = index + 1
            block: Json = {"type": "tool_use", "id": part.get("id"), "name": function.get("name"), "input": {}}
            events += [*self._close(), self._begin(index, block)]
        if arguments := function.get("arguments"):
            events.append(self._in_block({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _to(self, kind: str, block: Json) -> list[Json]:
        return [] if self._open == kind else [*self._close(), self._begin(kind, block)]

    def _begin(self, kind: str | int, block: Json) -> Json:
        self._open = kind
        self._n_blocks += 1
        return {"type": "content_block_start", "index": self._n_blocks - 1, "content_block": block}

    def _in_block(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._n_blocks - 1, "delta": delta}

    def _close(self) -> list[Json]:
        """Return the events that end the open block; none if no block is open."""
        if self._open is None:
            return []
        events: list[Json] = []
        if self._open == "thinking":
            events.append(self._in_block({"type": "signature_delta", "signature": self._signature}))
            self._signature = ""
        self._open = None
        return [*events, {"type": "content_block_stop", "index": self._n_blocks - 1}]


class EventsToChat:
    """Converts an Anthropic server's events to chat's chunks."""

    def __init__(self) -> None:
        self.ended = False
        """Whether the server has sent its last event."""
        self._head: Json = {}
        self._blocks: dict[int, Json] = {}
        """The open content blocks by index, each with its parts assembled."""
        self._calls: dict[int, int] = {}
        """The index of each tool call in chat, by the index of its block."""
        self._usage: Json = {}

    def feed(self, event: Json) -> list[Json]:
        """Return the chat chunks for one event of Anthropic's stream, often none. Raise Untranslatable for an event
        that chat cannot express.
        """
        match event.get("type"):
            case "message_start":
                message = an_object(event.get("message"), "message")
                self._usage |= message.get("usage") or {}
                self._head = {"id": message.get("id"), "object": "chat.completion.chunk", "created": 0}
                self._head["model"] = message.get("model")
                return [self._chunk({"role": "assistant", "content": ""})]
            case "content_block_start":
                return self._begin(event["index"], an_object(event.get("content_block"), "content_block"))
            case "content_block_delta":
                return self._delta(event["index"], an_object(event.get("delta"), "delta"))
            case "content_block_stop":
                return self._stop_block(event["index"])
            case "message_delta":
                delta = an_object(event.get("delta"), "delta")
                counted = an_object(event.get("usage") or {}, "usage")
                self._usage |= {name: value for name, value in counted.items() if value is not None}
                end: Json = {"finish_reason": finish_reason(delta.get("stop_reason"))}
                if delta.get("stop_sequence") is not None:
                    end["stop_reason"] = delta["stop_sequence"]
                return [self._chunk({}, **end)]
            case "message_stop":
                self.ended = True
                return [{**self._head, "choices": [], "usage": chat_usage(self._usage)}]
            case "error":
                return [{"error": event.get("error")}]
            case "ping":
                return []
            case kind:
                raise Untranslatable("type", f"is {shown(kind)}, an event that chat cannot express")

    def _chunk(self, delta: Json, **fields: Any) -> Json:
        """Return a chat chunk.

        fields: of its choice.
        """
        return {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **fields}]}

    def _begin(self, index: int, block: Json) -> list[Json]:
        """Return the chat chunks for the begin of a content block, and keep the block to assemble it."""
        self._blocks[index] = dict(block)
        match block.get("type"):
            case "text":
                return [self._chunk({"content": block["text"]})] if block.get("text") else []
            case "thinking" | "redacted_thinking":
                return [self._thinking(block["thinking"])] if block.get("thinking") else []
            case "tool_use":
                number = self._calls[index] = len(self._calls)
                function = {"name": block.get("name"), "arguments": ""}
                self._blocks[index]["arguments"] = ""
                call = {"index": number, "id": block.get("id"), "type": "function", "function": function}
                return [self._chunk({"tool_calls": [call]})]
            case kind:
                raise Untranslatable("content_block.type", f"is {shown(kind)}, which chat cannot express")

    def _delta(self, index: int, delta: Json) -> list[Json]:
        """Return the chat chunks for one delta of a content block. A signature waits for the end of its block."""
        block = self._blocks[index]
        match delta.get("type"):
            case "text_delta":
                return [self._chunk({"content": delta["text"]})]
            case "thinking_delta":
                block["thinking"] = block.get("thinking", "") + delta["thinking"]
                return [self._thinking(delta["thinking"])]
            case "signature_delta":
                block["signature"] = block.get("signature", "") + delta["signature"]
                return []
            case "input_json_delta":
                return self._arguments(index, delta["partial_json"])
            case "citations_delta":
                return [self._chunk({"citations": [delta.get("citation")]})]
            case kind:
                raise Untranslatable("delta.type", f"is {shown(kind)}, which chat cannot express")

    def _thinking(self, text: str) -> Json:
        return self._chunk(dict.fromkeys(REASONING, text))

    def _arguments(self, index: int, text: str) -> list[Json]:
        self._blocks[index]["arguments"] += text
        return [self._chunk({"tool_calls": [{"index": self._calls[index], "function": {"arguments": text}}]})]

    def _stop_block(self, index: int) -> list[Json]:
        """Return the chat chunks for the end of a content block: the arguments of a tool call that had no deltas, or
        the whole block of signed or redacted thinking.
        """
        block = self._blocks.pop(index)
        if block["type"] == "tool_use" and not block["arguments"]:
            self._blocks[index] = block
            return self._arguments(index, arguments_of(an_object(block.get("input") or {}, "input")))
        if block["type"] == "redacted_thinking" or block.get("signature"):
            return [self._chunk({"thinking_blocks": [block]})]
        return []
