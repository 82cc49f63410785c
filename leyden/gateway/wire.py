"""What the gateway knows of OpenAI's chat and completions formats.

What to ask the upstream for besides what the agent asked for, what to hide again from the answer, and how to put the
chunks of a stream together into one answer. Everything else passes through unread. Pure functions of JSON values: no
I/O.

Token ids are as vLLM gives them: with `return_token_ids` a chat answer has `prompt_token_ids` and each choice
`token_ids`; in a stream the first chunk has the former and every chunk the latter. A completion has both in the choice.
`policy_versions`, beside `token_ids`, is Leyden's own: the version of the policy that sampled each token.

To add a format, add a `Dialect` to `DIALECTS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

__all__ = [
    "DIALECTS",
    "DONE",
    "Dialect",
    "Hidden",
    "StreamAssembler",
    "dump",
    "prepare",
    "split_events",
    "sse_event",
    "visible",
]

Json = dict[str, Any]

DONE = b"[DONE]"
"""The data of the event that ends a stream."""

_OURS_IN_CHOICE = ("token_ids", "prompt_token_ids", "policy_versions")


@dataclass(frozen=True, slots=True)
class Dialect:
    """One route of OpenAI's API."""

    path: str
    """Below the base URL."""
    operation: str
    """OpenTelemetry's `gen_ai.operation.name`."""
    logprobs: bool | int
    """The value of `logprobs` that asks for the log-probability of each sampled token, and of no other."""


DIALECTS = {
    dialect.path: dialect
    for dialect in (
        Dialect(path="chat/completions", operation="chat", logprobs=True),
        Dialect(path="completions", operation="text_completion", logprobs=0),
    )
}


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the gateway asked for and the agent did not: hidden from the answer again."""

    token_ids: bool = False
    logprobs: bool = False
    usage: bool = False
    """Of a stream; other answers have their usage unasked."""

    def __bool__(self) -> bool:
        return self.token_ids or self.logprobs or self.usage


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dump(value: object) -> bytes:
    """Compact JSON in UTF-8."""
    try:
        return _encode(value).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can say and UTF-8 cannot
        return json.dumps(value, separators=(",", ":")).encode()


def prepare(
    dialect: Dialect, raw: bytes, request: Json, *, model: str, record_tokens: bool, seed: int | None
) -> tuple[bytes, Hidden]:
    """The body for the upstream, and what must be hidden from its answer.

    raw, request: the agent's body, as bytes and parsed. model: the upstream's name for the model. seed: used if the
    agent gave none. The agent's own bytes are kept where something is only added to them.
    """
    added: Json = {}
    if record_tokens:
        if request.get("return_token_ids") is not True:
            added["return_token_ids"] = True
        wished = request.get("logprobs")
        if wished is None or wished is False:  # 0 is a wish: completions take a number
            added["logprobs"] = dialect.logprobs
        options: Any = request.get("stream_options") or {}
        if request.get("stream") is True and isinstance(options, dict) and not cast(Json, options).get("include_usage"):
            added["stream_options"] = {**options, "include_usage": True}
    hidden = Hidden(
        token_ids="return_token_ids" in added, logprobs="logprobs" in added, usage="stream_options" in added
    )
    if seed is not None and request.get("seed") is None:
        added["seed"] = seed
    if request.get("model") != model:
        added["model"] = model
    return _with_fields(raw, request, added), hidden


def _with_fields(raw: bytes, request: Json, added: Json) -> bytes:
    if not added:
        return raw
    body = raw.lstrip()
    if not request or not body.startswith(b"{") or any(name in request for name in added):
        return dump({**request, **added})
    return dump(added)[:-1] + b"," + body[1:]


def visible(answer: Json, hidden: Hidden) -> Json | None:
    """`answer` (whole, or one chunk of a stream) without what is hidden; None for a chunk that has nothing else.

    `answer` itself is unchanged.
    """
    shown = dict(answer)
    if hidden.token_ids:
        shown.pop("prompt_token_ids", None)
    choices: Any = answer.get("choices")
    usage = shown.pop("usage", None) if hidden.usage else None
    if usage and not choices:
        return None
    if isinstance(choices, list) and (hidden.token_ids or hidden.logprobs):
        shown["choices"] = [_visible_choice(choice, hidden) for choice in cast(list[Any], choices)]
    return shown


def _visible_choice(choice: Any, hidden: Hidden) -> Any:
    if not isinstance(choice, dict):
        return choice
    shown = dict(cast(Json, choice))
    if hidden.token_ids:
        for name in _OURS_IN_CHOICE:
            shown.pop(name, None)
    if hidden.logprobs and "logprobs" in shown:
        shown["logprobs"] = None
    return shown


def split_events(buffer: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Take the complete server-sent events out of `buffer`: (the event as it came, its data)."""
    while True:
        end, width = buffer.find(b"\n\n"), 2
        crlf = buffer.find(b"\r\n\r\n", 0, end if end >= 0 else len(buffer))
        if crlf >= 0:
            end, width = crlf, 4
        if end < 0:
            return
        event = bytes(buffer[: end + width])
        del buffer[: end + width]
        lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
        yield event, b"\n".join(lines)


def sse_event(data: bytes, *, like: bytes = b"") -> bytes:
    """One server-sent event; with the name, id and comments of the event `like`."""
    others = [line + b"\n" for line in like.splitlines() if line and not line.startswith(b"data:")]
    return b"".join(others) + b"data: " + data + b"\n\n"


class StreamAssembler:
    """Puts the chunks of one stream together into the answer that would have come unstreamed."""

    def __init__(self) -> None:
        self._head: Json = {}
        self._choices: dict[int, Json] = {}
        self.error: str | None = None
        """What the upstream said went wrong, if it said so in the stream."""

    @property
    def finished(self) -> bool:
        """Whether every choice that began has its finish reason."""
        return bool(self._choices) and all(choice.get("finish_reason") for choice in self._choices.values())

    def feed(self, chunk: Json) -> None:
        """Add one chunk. Raises ValueError, TypeError, KeyError or AttributeError for one that is no chunk."""
        if chunk.get("error"):
            self.error = json.dumps(chunk["error"], ensure_ascii=False)
            return
        for name, value in chunk.items():
            if name != "choices" and value is not None:
                self._head.setdefault(name, value)
        if chunk.get("usage") is not None:
            self._head["usage"] = chunk[
                "usage"
            ]  # with `continuous_usage_stats` every chunk has one; the last one counts
        for part in chunk.get("choices") or ():
            self._feed_choice(part)

    def _feed_choice(self, part: Json) -> None:
        choice = self._choices.setdefault(int(part.get("index", 0)), {"finish_reason": None})
        if part.get("finish_reason"):
            choice["finish_reason"] = part["finish_reason"]
        if part.get("delta") is not None:
            _merge_delta(choice.setdefault("message", {}), part["delta"])
        if part.get("text") is not None:
            choice["text"] = choice.get("text", "") + part["text"]
        for name in ("token_ids", "policy_versions"):
            if part.get(name) is not None:
                choice.setdefault(name, []).extend(part[name])
        if part.get("prompt_token_ids") is not None:
            choice.setdefault("prompt_token_ids", part["prompt_token_ids"])
        if part.get("logprobs") is not None:
            logprobs: Json = choice.setdefault("logprobs", {})
            for name, values in part["logprobs"].items():
                if isinstance(values, list):
                    logprobs.setdefault(name, []).extend(values)

    def answer(self) -> Json:
        """The whole answer so far."""
        choices = [{"index": index, **choice} for index, choice in sorted(self._choices.items())]
        return {**self._head, "choices": choices}


def _merge_delta(message: Json, delta: Json) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            for part in value or ():
                _merge_tool_call(message.setdefault("tool_calls", []), part)
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value
        elif value is not None or name not in message:
            message[name] = value


def _merge_tool_call(calls: list[Json], part: Json) -> None:
    index = int(part.get("index", len(calls)))
    while len(calls) <= index:
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[index]
    for name in ("id", "type"):
        if part.get(name):
            call[name] = part[name]
    function: Json = part.get("function") or {}
    if function.get("name"):
        call["function"]["name"] = function["name"]
    call["function"]["arguments"] += function.get("arguments") or ""
