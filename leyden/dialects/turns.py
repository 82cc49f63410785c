"""Whether a message of the assistant that came back is the answer that the model gave, however it is written.

Agents parse a tool call and write it again. This module has the one rule for what may differ; the engine, the gateway
and the count of merged turns all follow it:

- Arguments are one value: white space, the order of keys, escapes and the spelling of a number do not count. Of a name
  that an object has twice, the last value counts. No arguments are an empty object. Numbers are compared exactly, and
  text that is no JSON is equal to itself alone.
- Text is equal but for white space at its ends. Parts are one text; null, "" and no parts are no text.
- The ids of calls, and the reasoning, do not count. The calls' order does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from leyden._lib.json import Json, is_list, is_object


def spelled(value: Any) -> str:
    """Return a parsed JSON value as text, which is the same for equal values and for no others."""
    if is_object(value):
        return f"{{{','.join(f'{json.dumps(name)}:{spelled(value[name])}' for name in sorted(value))}}}"
    if is_list(value):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, float):
        value = Decimal(repr(value))
    if isinstance(value, int) and not isinstance(value, bool):
        value = Decimal(value)
    if not isinstance(value, Decimal):
        return json.dumps(value)
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    rounded = text.rstrip("0")
    if not isinstance(exponent, int):  # not finite
        return str(value)
    if not rounded:
        return "0"
    return f"{'-' * sign}{rounded}e{exponent + len(text) - len(rounded)}"


def arguments_value(arguments: Any) -> str:
    """Return the arguments of a tool call, as JSON text or parsed, in the spelling of their value."""
    if not isinstance(arguments, str):
        return spelled(arguments)
    try:
        return spelled(
            json.loads(arguments.strip() or "{}", parse_int=Decimal, parse_float=Decimal, parse_constant=_refused)
        )
    except (ValueError, ArithmeticError, RecursionError):
        return f"no JSON: {arguments}"


def said(text: str, calls: Iterable[tuple[Any, Any]]) -> str:
    """Return what the assistant said, as text that is the same for messages that are the same turn.

    calls: the name and the arguments of each tool call.
    """
    return json.dumps([text.strip(), [[name, arguments_value(arguments)] for name, arguments in calls]])


def turn_of(message: Json) -> str:
    """Return what an assistant's chat message says (`said`). Content that is no text counts as it is written."""
    functions = map(function_of, calls_of(message))
    content = message.get("content")
    text = text_of(content)
    calls = [(function.get("name"), function.get("arguments")) for function in functions]
    return said(json.dumps(content, sort_keys=True) if text is None else text, calls)


def calls_of(message: Json) -> list[Json]:
    calls = message.get("tool_calls")
    return [call for call in calls if is_object(call)] if is_list(calls) else []


def function_of(call: Json) -> Json:
    function = call.get("function")
    return function if is_object(function) else {}


def text_of(content: Any) -> str | None:
    """Return the content of a chat message if it is text, in one piece or in parts; None for any other content."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = content if is_list(content) else [None]
    texts = [text for part in parts if is_object(part) and isinstance(text := part.get("text"), str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")
