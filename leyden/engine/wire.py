"""OpenAI's wire format: request bodies to requests, results to response bodies. Pure functions.

Conventions beyond OpenAI's are vLLM's: `return_token_ids` puts `prompt_token_ids` at the top and `token_ids` in each
choice. Ours alone: `policy_versions` in each choice, one for each token. It knows no model and no server.
To accept a new field, add its check to `_FIELDS` and read it in `parse_request`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from leyden.dialects import Json, sse_event, usage

__all__ = ["Choice", "CompletionRequest", "RequestError", "chunk", "parse_request", "response"]

Kind = Literal["chat.completion", "text_completion"]


class RequestError(Exception):
    """A request that is refused: status, and what OpenAI's error object says."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A chat or text completion that was asked for."""

    kind: Kind
    model: str
    messages: list[Json]
    """Empty for a text completion."""
    prompt: str | list[int]
    """Empty for a chat completion."""
    max_tokens: int | None
    temperature: float
    top_p: float
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int | None
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool


def parse_request(body: bytes, kind: Kind) -> CompletionRequest:
    """Raises RequestError that names the field and its value."""
    try:
        data = json.loads(body)
    except ValueError as error:
        raise RequestError(f"the request body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(f"the request body must be a JSON object, got {type(data).__name__}")
    fields = cast(Json, data)
    checks = _CHAT_FIELDS if kind == "chat.completion" else _TEXT_FIELDS
    for name, value in fields.items():
        check = checks.get(name)
        if check is None:
            raise RequestError(f"{name!r} is not supported here; remove it from the request", param=name)
        if value is not None and (wanted := check(value)):
            raise RequestError(f"{name!r} must be {wanted}, got {_shown(value)}", param=name)
    required = ("model", "messages" if kind == "chat.completion" else "prompt")
    for name in required:
        if fields.get(name) is None:
            raise RequestError(f"{name!r} is missing", param=name)
    return _request(fields, kind)


def _request(fields: Json, kind: Kind) -> CompletionRequest:
    def get(name: str, default: Any) -> Any:
        value = fields.get(name)
        return default if value is None else value

    chat = kind == "chat.completion"
    stop: str | list[str] = get("stop", [])
    logprobs = get("logprobs", False)
    return CompletionRequest(
        kind=kind,
        model=fields["model"],
        messages=[_plain_message(message) for message in fields["messages"]] if chat else [],
        prompt="" if chat else fields["prompt"],
        max_tokens=get("max_completion_tokens", get("max_tokens", None if chat else 16)),
        temperature=float(get("temperature", 1.0)),
        top_p=float(get("top_p", 1.0)),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(get("stop_token_ids", ())),
        seed=fields.get("seed"),
        n=get("n", 1),
        stream=get("stream", False),
        include_usage=bool(get("stream_options", {}).get("include_usage")),
        logprobs=logprobs is not False,
        return_token_ids=get("return_token_ids", False),
    )


def _plain_message(message: Json) -> Json:
    """Content given as text parts becomes one string, which every chat template takes."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "".join(cast(str, part["text"]) for part in cast(list[Json], content))}
    return message


# Checks return what the value must be, or None when it is right.
Check = Callable[[Any], str | None]


def _number(low: float, high: float) -> Check:
    def check(value: Any) -> str | None:
        right = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        return None if right and math.isfinite(value) else f"a number from {low} to {high}"

    return check


def _integer(low: int, high: int | None = None) -> Check:
    def check(value: Any) -> str | None:
        right = (
            isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
        )
        return (
            None if right else f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        )

    return check


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _string(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "a string"


def _only(*values: Any) -> Check:
    """A field that is understood, of which only the values that change nothing are supported."""

    def check(value: Any) -> str | None:
        return None if value in values else f"{' or '.join(map(_shown, values))} (nothing else is supported)"

    return check


def _anything(_: Any) -> None:
    """A field that says nothing about the answer."""


def _messages(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "a list of at least one message"
    for message in cast(list[Any], value):
        if not isinstance(message, dict) or not isinstance(cast(Json, message).get("role"), str):
            return "a list of messages, each an object with a 'role'"
        content = cast(Json, message).get("content")
        if not (content is None or isinstance(content, str) or _text_parts(content)):
            return "a list of messages whose 'content' is a string or a list of text parts"
    return None


def _text_parts(content: Any) -> bool:
    if not isinstance(content, list):
        return False
    parts = cast(list[Any], content)
    return all(isinstance(part, dict) and isinstance(cast(Json, part).get("text"), str) for part in parts)


def _prompt(value: Any) -> str | None:
    if isinstance(value, str) and value:
        return None
    return None if value and _token_ids(value) is None else "a string or a list of token ids"


def _token_ids(value: Any) -> str | None:
    right = isinstance(value, list) and all(type(token) is int and token >= 0 for token in cast(list[Any], value))
    return None if right else "a list of token ids"


def _stop(value: Any) -> str | None:
    if _string(value) is None:
        return None
    right = isinstance(value, list) and all(_string(item) is None for item in cast(list[Any], value))
    return None if right else "a string or a list of strings"


def _stream_options(value: Any) -> str | None:
    right = isinstance(value, dict) and set(cast(Json, value)) <= {"include_usage", "include_obfuscation"}
    return None if right else "an object with 'include_usage'"


_FIELDS: dict[str, Check] = {
    "model": _string,
    "max_tokens": _integer(1),
    "temperature": _number(0, 1000),
    "top_p": _number(1e-6, 1),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "seed": _integer(-(2**63), 2**64),
    "n": _integer(1, 128),
    "stream": _boolean,
    "stream_options": _stream_options,
    "return_token_ids": _boolean,
    "frequency_penalty": _only(0),
    "presence_penalty": _only(0),
    "logit_bias": _only({}),
    "user": _anything,
}
_CHAT_FIELDS: dict[str, Check] = {
    **_FIELDS,
    "messages": _messages,
    "max_completion_tokens": _integer(1),
    "logprobs": _boolean,
    "top_logprobs": _only(0),
    "tools": _only([]),
    "tool_choice": _only("none", "auto"),
    "parallel_tool_calls": _boolean,
    "response_format": _only({"type": "text"}),
    "metadata": _anything,
    "store": _only(False),
    "service_tier": _anything,
    "safety_identifier": _anything,
    "prompt_cache_key": _anything,
}
_TEXT_FIELDS: dict[str, Check] = {
    **_FIELDS,
    "prompt": _prompt,
    "logprobs": _only(0),
    "echo": _only(False),
    "best_of": _only(1),
}


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer, whole or the part that one chunk carries."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    finish_reason: str | None
    begins: bool = True
    """It is the first chunk of its choice."""


Pieces = Callable[[int], tuple[str, list[int]]]


def response(
    request: CompletionRequest, response_id: str, prompt_ids: list[int], choices: list[Choice], pieces: Pieces
) -> bytes:
    """The body of an answer that is not streamed."""
    body = _head(request, response_id, request.kind)
    if request.return_token_ids:
        body["prompt_token_ids"] = prompt_ids
    body["choices"] = [_choice(request, choice, pieces, chunked=False) for choice in choices]
    body["usage"] = usage(len(prompt_ids), sum(len(choice.token_ids) for choice in choices))
    return json.dumps(body).encode()


def chunk(
    request: CompletionRequest,
    response_id: str,
    choice: Choice | None,
    pieces: Pieces,
    *,
    prompt_ids: list[int] | None = None,
    counted: Json | None = None,
) -> bytes:
    """One server-sent event. prompt_ids: it is the answer's first. counted: the usage, where there is no choice."""
    body = _head(request, response_id, f"{request.kind}.chunk" if request.kind == "chat.completion" else request.kind)
    if prompt_ids is not None and request.return_token_ids:
        body["prompt_token_ids"] = prompt_ids
    body["choices"] = [] if choice is None else [_choice(request, choice, pieces, chunked=True)]
    if request.include_usage:
        body["usage"] = counted
    return sse_event(json.dumps(body).encode())


def _head(request: CompletionRequest, response_id: str, kind: str) -> Json:
    return {"id": response_id, "object": kind, "created": int(time.time()), "model": request.model}


def _choice(request: CompletionRequest, choice: Choice, pieces: Pieces, *, chunked: bool) -> Json:
    body: Json = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": None}
    if request.kind == "text_completion":
        body["text"] = choice.text
    elif chunked:
        body["delta"] = {"role": "assistant", "content": choice.text} if choice.begins else {"content": choice.text}
    else:
        body["message"] = {"role": "assistant", "content": choice.text}
    if request.logprobs:
        body["logprobs"] = _logprobs(request, choice, pieces)
    if request.return_token_ids:
        body["token_ids"] = choice.token_ids
        body["policy_versions"] = choice.policy_versions
    return body


def _logprobs(request: CompletionRequest, choice: Choice, pieces: Pieces) -> Json:
    tokens = [pieces(token) for token in choice.token_ids]
    if request.kind == "text_completion":
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": choice.logprobs,
            "top_logprobs": None,
            "text_offset": [],
        }
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": raw, "top_logprobs": []}
            for (text, raw), logprob in zip(tokens, choice.logprobs, strict=True)
        ]
    }
