"""Check the messages and tools of a chat request, and bring them into the form of chat templates.

Pure functions. Chat templates of Hugging Face want the arguments of a call as an object where OpenAI's wire format has
JSON text, one string of content where it allows parts, and no fields that are null.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, cast

from leyden._lib.host.http import Refusal
from leyden._lib.json import Json
from leyden.engine.refusal import bad_request, shown

_OF_FUNCTIONS = ("name", "description", "parameters")
"""The fields of a function, in the order in which templates get them."""
_NOT_FOR_TEMPLATES = ("strict",)
"""Fields of a function that are options for the server, and are not shown to the model."""


def read_messages(given: list[Any]) -> list[Json]:
    """Return the messages in the form of chat templates. Raise Refusal, with message and field, for an invalid one."""
    if not given:
        raise bad_request("'messages' must be a list of at least one message, got []", param="messages")
    messages: list[Json] = []
    names: dict[str, str] = {}
    for index, item in enumerate(given):
        message = _message(item, f"messages[{index}]")
        for call in cast(list[Json], message.get("tool_calls", [])):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])  # some templates show it
        messages.append(message)
    return messages


def _message(item: Any, where: str) -> Json:
    """Return a validated message in the form of chat templates: `developer` becomes `system`, and the content one text.
    Raise Refusal for a message that this engine cannot read.

    where: the message's path in the request, for error messages.
    """
    given = _object(item, where)
    role = given.get("role")
    if not isinstance(role, str):
        raise _wrong(f"{where}.role", "a string", role)
    if role == "function" or given.get("function_call") is not None:
        raise bad_request(
            f"{where} is in OpenAI's old form of function calls; use 'tool_calls' and the role 'tool'", param="messages"
        )
    message = {name: value for name, value in given.items() if value is not None}
    message["role"] = "system" if role == "developer" else role  # templates know no developer
    message["content"] = _content(given.get("content"), f"{where}.content")
    if (refusal := message.pop("refusal", "")) and not message["content"]:
        message["content"] = _content(refusal, f"{where}.refusal")  # what the assistant said in place of a content
    if message.get("audio"):
        raise _wrong(f"{where}.audio", "left out (this engine reads only text)", message["audio"])
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls", "a list", calls)
    if calls:
        if role != "assistant":
            raise _wrong(f"{where}.role", "'assistant', because the message has tool_calls", role)
        numbered = enumerate(cast(list[Any], calls))
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]") for number, call in numbered]
    return message


def _content(value: Any, where: str) -> str:
    """Return a message's content as one text; "" for None. Raise Refusal for parts that are not text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(where, "a string or a list of text parts", value)
    texts: list[str] = []
    for number, item in enumerate(cast(list[Any], value)):
        part = _object(item, f"{where}[{number}]")
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if not isinstance(text, str):
            raise _wrong(f"{where}[{number}]", "a text part (this engine reads only text)", item)
        texts.append(text)
    return "".join(texts)


def _call(item: Any, where: str) -> Json:
    """Return a validated tool call of an earlier response, with its arguments parsed from JSON."""
    given = _object(item, where)
    if given.get("type", "function") != "function":
        raise _wrong(f"{where}.type", "'function'", given["type"])
    function, name = _function(given, where)
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    call_id = given.get("id") or ""
    if not isinstance(call_id, str):
        raise _wrong(f"{where}.id", "a string", call_id)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _function(given: Json, where: str) -> tuple[Json, str]:
    function = _object(given.get("function"), f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _wrong(f"{where}.function.name", "a string that is not empty", name)
    return function, name


def _arguments(value: Any, where: str) -> Json:
    """Return the arguments of a tool call as an object; {} if they are missing or empty. Raise Refusal unless JSON."""
    if value is None or value == "":
        return {}
    try:
        parsed: Any = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{where} is not JSON ({error}): {shown(value)}", param="messages") from error
    if not isinstance(parsed, dict):
        raise _wrong(where, "the JSON text of an object", value)
    return cast(Json, parsed)


def read_tools(given: list[Any]) -> list[Json]:
    """Return the tools in the form of chat templates. Raise Refusal, with tool and field, for an invalid one."""
    tools = [_tool(item, f"tools[{index}]") for index, item in enumerate(given)]
    names = [tool["function"]["name"] for tool in tools]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise bad_request(f"'tools' has two functions with the name {doubled!r}", param="tools")
    return tools


def _tool(item: Any, where: str) -> Json:
    """Return the validated definition of a function that the model may call, its fields in a fixed order."""
    given = _object(item, where)
    if given.get("type") != "function":
        raise _wrong(f"{where}.type", "'function' (the engine knows no other tools)", given.get("type"))
    function, _ = _function(given, where)
    description = function.get("description")
    if not (description is None or isinstance(description, str)):
        raise _wrong(f"{where}.function.description", "a string", description)
    if function.get("parameters") is not None:
        _object(function["parameters"], f"{where}.function.parameters")  # raises if it is none
    # One order, so that one tool has one rendering.
    known = {field: function[field] for field in _OF_FUNCTIONS if function.get(field) is not None}
    others = {field: value for field, value in function.items() if field not in (*_OF_FUNCTIONS, *_NOT_FOR_TEMPLATES)}
    return {"type": "function", "function": {**known, **others}}


def read_tool_choice(given: Any, tools: list[Json]) -> tuple[Literal["none", "auto", "required"], tuple[str, ...]]:
    """Return whether tools may or must be called, and the names of the tools that may be called.

    Raise Refusal for an unknown choice, or one of a tool that the request does not have.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    match given:
        case "none" | "auto":
            return given, names
        case "required":
            chosen = names
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise bad_request(
                    f"tool_choice names {name!r}, which is not among the tools: {', '.join(names) or '(none)'}",
                    param="tool_choice",
                )
            chosen = (name,)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": [*allowed]},
        } if allowed:
            each = [read_tool_choice(_object(tool, "tool_choice.allowed_tools.tools[]"), tools)[1] for tool in allowed]
            chosen = tuple(name for name in names if (name,) in each)
            if mode == "auto" and set(chosen) == set(names):
                return "auto", names
            if mode == "auto":
                raise bad_request(
                    "tool_choice allows some of the tools with the mode 'auto', which cannot be enforced here; send these tools "
                    "alone in 'tools', or the mode 'required'",
                    param="tool_choice",
                )
        case _:
            raise _wrong(
                "tool_choice", "'none', 'auto', 'required', or an object that names a function or allowed tools", given
            )
    if not names:
        raise bad_request("tool_choice='required' needs 'tools'", param="tool_choice")
    return "required", chosen


def read_response_format(given: Json) -> Json | None:
    """Return the JSON schema that the content must follow; None if the content is free. Raise Refusal for an unknown
    type or a missing schema.
    """
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            described = _object(given.get("json_schema"), "response_format.json_schema")
            return _object(described.get("schema"), "response_format.json_schema.schema")
        case kind:
            raise _wrong("response_format.type", "'text', 'json_object' or 'json_schema'", kind)


def _object(value: Any, where: str) -> Json:
    """Return the value if it is a JSON object, and raise Refusal otherwise.

    where: its name for the message.
    """
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    return cast(Json, value)


def _wrong(where: str, wanted: str, got: Any) -> Refusal:
    """Return the refusal of a field that is not what it must be.

    where: the field's path in the request.
    """
    return bad_request(f"{where} must be {wanted}, got {shown(got)}", param=re.split(r"[.\[]", where)[0])
