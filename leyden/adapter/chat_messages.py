"""Convert messages and tools of any convention to the form of OpenAI's chat completions, which all adapters use. It is
called *chat* here.

The module reads chat messages themselves, OpenTelemetry's `parts`, OpenInference's `message` objects, and the flat tool
calls of AgentOps and Traceloop. Content that has no place in a chat message stays as it is. To read another form, add
it to `chat_message`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

from leyden._lib.json import Json
from leyden.adapter.attributes import as_dict, as_list, parsed
from leyden.dialects.turns import arguments_value

_ROLES = {"human": "user", "ai": "assistant", "model": "assistant"}
"""Roles of LangChain and Google, and chat's names for them."""


def chat_messages(value: Any, *, role: str = "user") -> list[Json]:
    """Return messages of any convention as chat messages.

    value: a list of messages, or one.
    role: the role of a message that names none, unless it is a tool's answer or has tool calls.
    """
    given = as_list(value) if isinstance(value, list) or not value else [value]
    return [
        message
        for item in given
        for message in (
            chat_message(as_dict(item), role) if isinstance(item, dict) else [{"role": role, "content": _as_text(item)}]
        )
    ]


def chat_message(message: Json, role: str) -> list[Json]:
    """Return one message of any convention as chat messages, with the `role` of `chat_messages`. One that answers
    several tool calls becomes several.
    """
    if _is_plain(message):
        return [message]
    if "message" in message and isinstance(message["message"], dict):
        nested = as_dict(message["message"])
        message = {name: value for name, value in nested.items() if name != "contents"}
        if contents := as_list(nested.get("contents")):
            message["content"] = parts = [as_dict(as_dict(part).get("message_content")) for part in contents]
            for index, part in enumerate(parts):
                if (url := as_dict(as_dict(part.get("image")).get("image")).get("url")) is not None:
                    parts[index] = {"type": "image_url", "image_url": {"url": url}}
    if isinstance(message.get("parts"), list):
        return _from_parts(message, role)
    chat = {name: value for name, value in message.items() if name not in ("tool_calls", "role")}
    calls = [tool_call(as_dict(call)) for call in as_list(message.get("tool_calls"))]
    chat = {"role": _role(message, calls, role), **chat}
    if calls:
        chat = {"role": chat.pop("role"), "content": chat.pop("content", None), **chat, "tool_calls": calls}
    if isinstance(content := chat.get("content"), str) and content.startswith('[{"'):  # a list as JSON text
        parts = parsed(content)
        if all("type" in as_dict(part) for part in as_list(parts)):
            chat["content"] = parts
    return [chat]


def _is_plain(message: Json) -> bool:
    """Return whether a message is a chat message already, as nearly all are."""
    content = message.get("content")
    return (
        message.get("role") in ("user", "assistant", "system", "tool", "developer")
        and (not isinstance(content, str) or not content.startswith('[{"'))
        and message.keys().isdisjoint(("tool_calls", "parts", "message", "contents"))
    )


def tool_call(call: Json) -> Json:
    """Return a tool call of any supported API in the form of OpenAI's chat completions; its arguments are JSON text."""
    call = as_dict(call.get("tool_call")) or call  # OpenInference nests it
    function = as_dict(call.get("function")) or call  # AgentOps and OpenTelemetry write it flat
    arguments = function.get("arguments")
    if function is not call and isinstance(arguments, str) and {"id", "type"} <= call.keys():
        return call
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function.get("name") or "", "arguments": _as_text(arguments, missing="{}")},
    }


def chat_tool(tool: Any) -> Json:
    """Return a tool definition of any supported API in the form of OpenAI's chat completions."""
    # OpenInference writes the definition as JSON text: `llm.tools.N.tool.json_schema`.
    tool = as_dict(parsed(as_dict(as_dict(tool).get("tool")).get("json_schema"))) or as_dict(parsed(tool))
    if "function" in tool:
        return tool
    function = {name: value for name, value in tool.items() if name not in ("type", "input_schema")}
    parameters = parsed(tool.get("parameters", tool.get("input_schema")))
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def message_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(_part_text(as_dict(part)) for part in cast(list[Any], content))
    return "" if content is None else _as_text(content)


def image_urls(messages: Iterable[Json]) -> list[str]:
    """Return the URLs of the images in chat messages, in order."""
    parts = (as_dict(part) for message in messages for part in as_list(message.get("content")))
    urls = (as_dict(part.get("image_url")).get("url") for part in parts if part.get("type") == "image_url")
    return [url for url in urls if isinstance(url, str)]


def comparable(message: Json) -> list[Any]:
    """Return what every convention records of a message, in a form that can be compared: role, text, images, and the
    names and arguments of tool calls.
    """
    functions = [as_dict(as_dict(call).get("function")) for call in as_list(message.get("tool_calls"))]
    calls = [[function.get("name"), arguments_value(function.get("arguments"))] for function in functions]
    return [message.get("role"), message_text(message.get("content")), image_urls([message]), calls]


def _role(message: Json, calls: list[Json], otherwise: str) -> str:
    """Return chat's name for a message's role, or `otherwise` for a message that neither has one nor shows it."""
    role = message.get("role")
    if isinstance(role, str) and role:
        return _ROLES.get(role, role)
    if message.get("tool_call_id"):
        return "tool"
    return "assistant" if calls else otherwise


def _from_parts(message: Json, role: str) -> list[Json]:
    """Return OpenTelemetry's message (parts: text, tool calls and answers, images, reasoning) as chat messages."""
    parts = [as_dict(part) for part in as_list(message["parts"])]
    answers = [
        {
            "role": "tool",
            "tool_call_id": part.get("id") or "",
            "content": _as_text(part.get("response", part.get("result"))),
        }
        for part in parts
        if part.get("type") == "tool_call_response"
    ]
    calls = [tool_call(part) for part in parts if part.get("type") == "tool_call"]
    reasoning = "".join(_part_text(part) for part in parts if part.get("type") == "reasoning")
    content = [
        _content_part(part)
        for part in parts
        if part.get("type") not in ("tool_call", "tool_call_response", "reasoning")
    ]
    if answers and not content and not calls:
        return answers
    is_text = all("text" in part and part.get("type", "text") == "text" for part in content)
    text = "".join(part["text"] for part in content) if is_text else None
    chat: Json = {"role": _role(message, calls, role), "content": (text if content else None) if is_text else content}
    if message.get("name"):
        chat["name"] = message["name"]
    if reasoning:
        chat["reasoning_content"] = reasoning
    if calls:
        chat["tool_calls"] = calls
    return [*answers, chat]


def _content_part(part: Json) -> Json:
    """Return OpenTelemetry's part as a content part of chat. One of an unknown kind stays as it is."""
    if part.get("type") == "text":
        return {"type": "text", "text": _part_text(part)}
    if part.get("modality") == "image" and part.get("type") in ("uri", "blob"):
        data = f"data:{part.get('mime_type') or 'image/png'};base64,{part.get('content')}"
        return {"type": "image_url", "image_url": {"url": part.get("uri") or data}}
    return part


def _part_text(part: Json) -> str:
    text = part.get("text", part.get("content"))
    return text if isinstance(text, str) else ""


def _as_text(value: Any, *, missing: str = "") -> str:
    if value is None:
        return missing
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
