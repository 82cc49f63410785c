"""Requests in OpenAI's wire format, checked and read. Pure functions; they know no model and no server.

`return_token_ids` is vLLM's convention. To accept a new field, add its check to `_FIELDS` and read it in `_request`.
Messages and tools have a module of their own, `conversation`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from leyden.dialects import Json
from leyden.engine.conversation import read_messages, read_response_format, read_tool_choice, read_tools
from leyden.engine.refusal import bad_request, shown

Kind = Literal["chat.completion", "text_completion"]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A chat or text completion that was asked for."""

    kind: Kind
    model: str
    messages: list[Json]
    """As chat templates take them; empty for a text completion."""
    tools: list[Json]
    """As chat templates take them."""
    tool_choice: Literal["none", "auto", "required"]
    callable_tools: tuple[str, ...]
    """The names of the tools that may be called; one if the request named it."""
    parallel_tool_calls: bool
    json_schema: Json | None
    """The schema that the content must follow; None if the content is free."""
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

    @property
    def may_call(self) -> bool:
        """Whether the response may hold tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def may_choose(self) -> bool:
        """Whether the model chooses among the tools."""
        return len(self.callable_tools) == len(self.tools)

    @property
    def constrained(self) -> bool:
        """Whether the response must have a form."""
        return self.tool_choice == "required" or self.json_schema is not None

    @property
    def schemas(self) -> dict[str, Json]:
        """The JSON schema of each tool's arguments, by the tool's name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


def parse_request(body: bytes, kind: Kind) -> CompletionRequest:
    """Read a request's body. Raise Refusal, which names the field and its value."""
    try:
        data = json.loads(body)
        if b"\\ud" in body.lower():  # perhaps half of a surrogate pair
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise bad_request(
            f"the request body has a text with {error.object[error.start]!r}, which is half a character: no tokenizer reads it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the request body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise bad_request(f"the request body must be a JSON object, got {type(data).__name__}")
    fields = cast(Json, data)
    checks = _CHAT_FIELDS if kind == "chat.completion" else _TEXT_FIELDS
    for name, value in fields.items():
        check = checks.get(name)
        if check is None:
            raise bad_request(f"{name!r} is not supported here; remove it from the request", param=name)
        if value is not None and (wanted := check(value)):
            raise bad_request(f"{name!r} must be {wanted}, got {shown(value)}", param=name)
    required = ("model", "messages" if kind == "chat.completion" else "prompt")
    for name in required:
        if fields.get(name) is None:
            raise bad_request(f"{name!r} is missing", param=name)
    return _request(fields, kind)


def _request(fields: Json, kind: Kind) -> CompletionRequest:
    def get(name: str, default: Any) -> Any:
        value = fields.get(name)
        return default if value is None else value

    chat = kind == "chat.completion"
    stop: str | list[str] = get("stop", [])
    logprobs = get("logprobs", False)
    tools = read_tools(get("tools", []))
    tool_choice, callable_tools = read_tool_choice(get("tool_choice", "auto"), tools)
    return CompletionRequest(
        kind=kind,
        model=fields["model"],
        messages=read_messages(fields["messages"]) if chat else [],
        tools=tools,
        tool_choice=tool_choice,
        callable_tools=callable_tools,
        parallel_tool_calls=get("parallel_tool_calls", True),
        json_schema=None
        if tool_choice == "required"
        else read_response_format(get("response_format", {"type": "text"})),
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


def _list(value: Any) -> str | None:
    """A list; what it holds is checked where it is read."""
    return None if isinstance(value, list) else "a list"


def _object(value: Any) -> str | None:
    """An object; what it holds is checked where it is read."""
    return None if isinstance(value, dict) else "an object"


def _string(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "a string"


def _only(*values: Any) -> Check:
    """A field that is understood, of which only the values that change nothing are supported."""

    def check(value: Any) -> str | None:
        return None if value in values else f"{' or '.join(map(shown, values))} (nothing else is supported)"

    return check


def _anything(_: Any) -> None:
    """A field that says nothing about the answer, or that is checked where it is read."""


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
    "messages": _list,
    "max_completion_tokens": _integer(1),
    "logprobs": _boolean,
    "top_logprobs": _only(0),
    "tools": _list,
    "tool_choice": _anything,
    "parallel_tool_calls": _boolean,
    "response_format": _object,
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
