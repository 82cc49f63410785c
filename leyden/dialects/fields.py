"""Read the fields of a request or an answer that is to be translated.

A wrong field raises `Untranslatable`, which names it: `messages[2].content[0].source`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

from leyden._lib.json import Json
from leyden.errors import Untranslatable

REASONING = ("reasoning_content", "reasoning")
"""Fields that hold a message's reasoning: DeepSeek and older servers use the first name, vLLM the second."""

NOT_IN_EVENTS: dict[str, tuple[Any, ...]] = {"return_token_ids": (False,), "logprobs": (False,), "n": (1,)}
"""Options of a chat request whose results the events of other APIs cannot express, with the values
that change nothing."""


def shown(value: Any) -> str:
    """Return a value as JSON for an error message, cut to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def an_object(value: Any, field: str) -> Json:
    """Return the value if it is a JSON object. Raise Untranslatable, which names the field, if not."""
    if not isinstance(value, dict):
        raise Untranslatable(field, f"must be an object, got {shown(value)}")
    return cast(Json, value)


def a_list(value: Any, field: str) -> list[Any]:
    """Return the value if it is a list; an empty one for None. Raise Untranslatable, which names the field, if not."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise Untranslatable(field, f"must be a list, got {shown(value)}")
    return cast(list[Any], value)


def a_text(value: Any, field: str) -> str:
    """Return the value if it is a string. Raise Untranslatable, which names the field, if not."""
    if not isinstance(value, str):
        raise Untranslatable(field, f"must be a string, got {shown(value)}")
    return value


def without(fields: Json, names: Iterable[str]) -> Json:
    """Return the fields except those in `names`. A translation keeps the fields that it does not read."""
    return {name: value for name, value in fields.items() if name not in names}


def reasoning_of(message: Json) -> str:
    """Return the reasoning of a chat message or delta; empty if there is none."""
    return next((text for name in REASONING if isinstance(text := message.get(name), str) and text), "")


def function_calls(answer: Json, choice: Json) -> list[tuple[str, str | None, str]]:
    """Return the tool calls of a chat answer, each as its id, name and arguments. A call without an id gets one,
    because the other APIs' clients repeat it with the call's result.

    A call without arguments has none, unless the answer was cut off before them.
    """
    message = an_object(choice.get("message"), "choices[0].message")
    where = "choices[0].message.tool_calls"
    calls = [an_object(call, where) for call in a_list(message.get("tool_calls"), where)]
    if message.get("function_call"):
        calls.append({"function": message["function_call"]})
    found: list[tuple[str, str | None, str]] = []
    for number, call in enumerate(calls):
        function = an_object(call.get("function"), where)
        arguments = function.get("arguments") or ("" if choice.get("finish_reason") == "length" else "{}")
        found.append((call.get("id") or made_call_id(answer, number), function.get("name"), arguments))
    return found


def made_call_id(answer: Json, number: int) -> str:
    """Return the id of a tool call to which the server gave none."""
    return f"call_{answer.get('id')}_{number}"


def single_text(parts: list[Json]) -> str | list[Json]:
    """Return the parts as a chat message's content: a string if they are one plain text or none, else the list."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        return cast(str, parts[0]["text"])
    return parts


def the_choice(answer: Json) -> Json:
    """Return the only choice of a chat answer. Raise Untranslatable if there is none or more than one."""
    choices = a_list(answer.get("choices"), "choices")
    if len(choices) != 1:
        raise Untranslatable("choices", f"must be one for this API, got {len(choices)}")
    return an_object(choices[0], "choices[0]")
