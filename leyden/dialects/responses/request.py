"""Translate requests of the Responses API to chat and back.

A field without a counterpart raises `Untranslatable`. Unknown fields stay as they are, at their level. Ids and states
of items (`id`, `status`) are left out, because they refer to data that OpenAI's servers keep.

Encrypted reasoning becomes `thinking_blocks` in chat, like Anthropic's signed thinking: the item's `encrypted_content`
is the block's signature.
"""

from __future__ import annotations

from typing import Any

from leyden._lib.json import Json
from leyden.dialects.fields import (
    NOT_IN_EVENTS,
    REASONING,
    a_list,
    a_text,
    an_object,
    reasoning_of,
    shown,
    single_text,
    without,
)
from leyden.dialects.responses.namespaces import ToolNames
from leyden.dialects.sampling import OPTIONS, check_neutral, stop_strings
from leyden.errors import Untranslatable

_REDACTED = "redacted_thinking:"
"""The beginning of an `encrypted_content` that holds a redacted block of Anthropic's."""

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"


# ---- to chat -------------------------------------------------------------------------------------

_UNKNOWN_TO_CHAT = {
    "background": (False,),
    "truncation": OPTIONS["truncation"],
    **dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls", "context_management"), ()),
    **dict.fromkeys(("moderation", "image", "access_programs"), ()),
}
_OF_RESPONSES = {
    *("input", "instructions", "max_output_tokens", "reasoning", "text", "tools", "tool_choice", "include", "store"),
    *("stream_options", "top_logprobs", *_UNKNOWN_TO_CHAT),
}


def request_to_chat(request: Json) -> Json:
    """Return the request as a chat request. Raise Untranslatable if chat cannot express it."""
    check_neutral(request, _UNKNOWN_TO_CHAT, "chat")
    if request.get("stream"):
        check_neutral(request, NOT_IN_EVENTS, "a stream of this API")
    chat = without(request, _OF_RESPONSES)
    names = ToolNames(request.get("tools"))
    chat["messages"] = _chat_messages(input_items(request), names)
    if instructions := request.get("instructions"):
        chat["messages"].insert(0, {"role": "system", "content": a_text(instructions, "instructions")})
    if request.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = request["max_output_tokens"]
    reasoning = an_object(request.get("reasoning") or {}, "reasoning")
    # `summary` is dropped, because chat returns the whole reasoning.
    if unknown := _unknown(reasoning, ("effort", "summary", "generate_summary")):
        raise Untranslatable(f"reasoning.{unknown[0]}", "has no counterpart in chat")
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    chat |= _chat_text_config(an_object(request.get("text") or {}, "text"))
    chat |= _chat_logprobs(request)
    if request.get("tools") is not None:
        tools = a_list(request["tools"], "tools")
        chat["tools"] = [each for n, tool in enumerate(tools) for each in _chat_tools(tool, f"tools[{n}]", names)]
    if request.get("tool_choice") is not None:
        chat["tool_choice"] = _chat_tool_choice(request["tool_choice"], names)
    if request.get("stream"):
        chat["stream_options"] = {"include_usage": True}  # every answer of this API has its usage
    return chat


def input_items(request: Json) -> list[Json]:
    """Return the items of a request's `input`. Raise Untranslatable for an invalid one."""
    given = request.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [an_object(item, f"input[{index}]") for index, item in enumerate(a_list(given, "input"))]


def _chat_messages(items: list[Json], names: ToolNames) -> list[Json]:
    """Return input items as chat messages, one for each item, except that the reasoning, answer and tool calls of one
    turn become one message of the assistant.
    """
    messages: list[Json] = []
    for index, item in enumerate(items):
        field = f"input[{index}]"
        match item.get("type", "message"):
            case "message":
                message = _chat_message(item, field)
                turn = _open_turn(messages, lacks=("content", "tool_calls")) if message["role"] == "assistant" else None
                if turn is None:
                    messages.append(message)
                else:
                    turn |= message
            case "reasoning":
                turn = _open_turn(messages, lacks=("content", "tool_calls")) or _new_turn(messages)
                with_reasoning(turn, item, field)
            case "function_call":
                turn = _open_turn(messages, lacks=()) or _new_turn(messages)
                turn.setdefault("content", None)
                arguments = a_text(item.get("arguments"), f"{field}.arguments")
                name = names.in_chat(item.get("name"), item.get("namespace"))
                function = {"name": name, "arguments": arguments}
                rest = without(item, ("type", "id", "call_id", "name", "namespace", "arguments", "status"))
                call = {"id": item.get("call_id"), "type": "function", "function": function, **rest}
                turn.setdefault("tool_calls", []).append(call)
            case "function_call_output":
                messages.append(_chat_output(item, field))
            case kind:
                raise Untranslatable(f"{field}.type", f"is {shown(kind)}, which chat cannot express")
    for message in messages:
        message.setdefault("content", "")
    return messages


def _open_turn(messages: list[Json], *, lacks: tuple[str, ...]) -> Json | None:
    """Return the last message, to be extended by the next item, if it is the assistant's and has none of the fields
    `lacks` yet; else None.
    """
    if messages and messages[-1]["role"] == "assistant" and not any(name in messages[-1] for name in lacks):
        return messages[-1]
    return None


def _new_turn(messages: list[Json]) -> Json:
    messages.append({"role": "assistant"})
    return messages[-1]


def _chat_message(item: Json, field: str) -> Json:
    """Return a message item of the Responses API as a chat message.

    field: the item's path in the request, for error messages.
    """
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "system", "developer", "assistant"):
        raise Untranslatable(f"{field}.role", f"is {shown(role)}; possible: user, assistant, system, developer")
    rest = without(item, ("type", "id", "status", "role", "content"))
    message: Json = {"role": "system" if role == "developer" else role, **rest}
    if isinstance(content, str):
        return {**message, "content": content}
    parts: list[Json] = []
    for index, part in enumerate(a_list(content, f"{field}.content")):
        where = f"{field}.content[{index}]"
        part = an_object(part, where)
        if part.get("type") == "refusal":
            message["refusal"] = part.get("refusal")
        else:
            parts.append(_chat_part(part, where))
    return {**message, "content": single_text(parts) if parts or "refusal" not in message else None}


def _chat_part(part: Json, field: str) -> Json:
    """Return a text, image or file part of the Responses API as a part of chat content."""
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            rest = without(part, ("type", "text", "annotations", "logprobs"))
            return {"type": "text", "text": a_text(part.get("text"), f"{field}.text"), **rest}
        case "input_image":
            if part.get("image_url") is None:
                raise Untranslatable(f"{field}.file_id", "names a file that OpenAI keeps; give image_url")
            image = {"url": part["image_url"], **({"detail": part["detail"]} if part.get("detail") else {})}
            return {
                "type": "image_url",
                "image_url": image,
                **without(part, ("type", "image_url", "detail", "file_id")),
            }
        case "input_file":
            if part.get("file_data") is None:
                raise Untranslatable(f"{field}.file_data", "is missing: chat takes no file_id and no file_url")
            file = {name: part[name] for name in ("filename", "file_data") if part.get(name) is not None}
            return {"type": "file", "file": file, **without(part, ("type", "file_id", *file))}
        case kind:
            raise Untranslatable(f"{field}.type", f"is {shown(kind)}, which chat cannot express")


def with_reasoning(message: Json, item: Json, field: str) -> None:
    """Add a reasoning item to a chat message. The text of a second item is appended to the first's."""
    text = _reasoning_text(item, field)
    if text:
        message |= dict.fromkeys(REASONING, reasoning_of(message) + text)
    if item.get("encrypted_content"):
        message.setdefault("thinking_blocks", []).append(thinking_block(text, item["encrypted_content"]))


def thinking_block(text: str, encrypted: str) -> Json:
    """Return a reasoning item's text and encrypted content as one of chat's `thinking_blocks`.

    Content that begins with `redacted_thinking:` is a redacted block of Anthropic's, without text.
    """
    if encrypted.startswith(_REDACTED):
        return {"type": "redacted_thinking", "data": encrypted.removeprefix(_REDACTED)}
    return {"type": "thinking", "thinking": text, "signature": encrypted}


def _reasoning_text(item: Json, field: str) -> str:
    """Return the text of a reasoning item: its content if it has some, else its summary."""
    for name in ("content", "summary"):
        if parts := a_list(item.get(name), f"{field}.{name}"):
            return "".join(a_text(an_object(part, field).get("text"), f"{field}.{name}.text") for part in parts)
    return ""


def _chat_output(item: Json, field: str) -> Json:
    output = item.get("output")
    if not isinstance(output, str):
        parts = enumerate(a_list(output, f"{field}.output"))
        output = single_text([_chat_part(an_object(part, field), f"{field}.output[{index}]") for index, part in parts])
    rest = without(item, ("type", "id", "call_id", "output", "status", "name", "namespace"))
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output, **rest}


def _unknown(options: Json, known: tuple[str, ...]) -> list[str]:
    return sorted(name for name, value in options.items() if name not in known and value is not None)


def _chat_text_config(text: Json) -> Json:
    """Return the Responses field `text` as the chat fields `verbosity` and `response_format`."""
    if unknown := _unknown(text, ("format", "verbosity")):
        raise Untranslatable(f"text.{unknown[0]}", "has no counterpart in chat")
    chat: Json = {"verbosity": text["verbosity"]} if text.get("verbosity") is not None else {}
    wished = an_object(text.get("format") or {"type": "text"}, "text.format")
    match wished.get("type"):
        case "text":
            return chat
        case "json_object":
            return {**chat, "response_format": {"type": "json_object"}}
        case "json_schema":
            return {**chat, "response_format": {"type": "json_schema", "json_schema": without(wished, ("type",))}}
        case kind:
            raise Untranslatable("text.format.type", f"is {shown(kind)}, which chat cannot express")


def _chat_logprobs(request: Json) -> Json:
    """Return the Responses fields `include` and `top_logprobs` as the chat fields for log-probabilities. Encrypted
    reasoning needs no field in chat.
    """
    include = a_list(request.get("include"), "include")
    for wish in include:
        if wish not in (_LOGPROBS, _ENCRYPTED):
            raise Untranslatable("include", f"has {shown(wish)}, which chat does not return; leave it out")
    if request.get("top_logprobs"):
        return {"logprobs": True, "top_logprobs": request["top_logprobs"]}
    return {"logprobs": True} if _LOGPROBS in include else {}


def _chat_tools(tool: Any, field: str, names: ToolNames) -> list[Json]:
    """Return a tool as chat's functions: one, or those of a namespace, each with the namespace's description."""
    tool = an_object(tool, field)
    if tool.get("type") != "namespace":
        return [_chat_tool(tool, field)]
    if unknown := _unknown(tool, ("type", "name", "description", "tools")):
        raise Untranslatable(f"{field}.{unknown[0]}", "has no counterpart in chat")
    found: list[Json] = []
    for index, each in enumerate(a_list(tool.get("tools"), f"{field}.tools")):
        function = _chat_tool(an_object(each, f"{field}.tools[{index}]"), f"{field}.tools[{index}]")
        about = [text for text in (tool.get("description"), each.get("description")) if text]
        function["function"]["name"] = names.in_chat(each.get("name"), tool.get("name"))
        if about:
            function["function"]["description"] = "\n\n".join(about)
        found.append(function)
    return found


def _chat_tool(tool: Json, field: str) -> Json:
    if tool.get("type") != "function":
        raise Untranslatable(f"{field}.type", f"is {shown(tool.get('type'))}; chat has functions only")
    known = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in known if tool.get(name) is not None}
    return {"type": "function", "function": function, **without(tool, ("type", *known))}


def _chat_tool_choice(choice: Any, names: ToolNames) -> Any:
    """Return chat's `tool_choice`. Raise Untranslatable if it names no function."""
    if isinstance(choice, str):
        return choice
    named = an_object(choice, "tool_choice")
    if named.get("type") == "allowed_tools":
        tools = a_list(named.get("tools"), "tool_choice.tools")
        allowed = {"mode": named.get("mode"), "tools": [_chat_tool_choice(tool, names) for tool in tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if named.get("type") != "function":
        raise Untranslatable("tool_choice.type", f"is {shown(named.get('type'))}; chat has functions only")
    return {"type": "function", "function": {"name": names.in_chat(named.get("name"), named.get("namespace"))}}


# ---- from chat -----------------------------------------------------------------------------------

_UNKNOWN_TO_RESPONSES: dict[str, tuple[Any, ...]] = {
    **{name: OPTIONS[name] for name in ("n", "return_token_ids", "modalities", "functions", "truncation")},
    **{name: OPTIONS[name] for name in ("seed", "function_call", "audio", "web_search_options")},
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "logit_bias", "best_of"), ()),
    "stop": ([],),
}
_OF_CHAT = {
    *("messages", "max_tokens", "max_completion_tokens", "reasoning_effort", "response_format", "verbosity", "tools"),
    *("tool_choice", "logprobs", "stream_options", "prediction", *_UNKNOWN_TO_RESPONSES),
}


def request_from_chat(chat: Json) -> Json:
    """Return a chat request as one of the Responses API, with `store: false`, so that OpenAI keeps nothing. Raise
    Untranslatable if the Responses API cannot express it.
    """
    check_neutral({**chat, "stop": stop_strings(chat.get("stop"))}, _UNKNOWN_TO_RESPONSES, "the Responses API")
    request: Json = {"store": False, **without(chat, _OF_CHAT)}
    request["input"] = _items(a_list(chat.get("messages"), "messages"))
    include = [_ENCRYPTED]
    limit = chat.get("max_completion_tokens") or chat.get("max_tokens")
    if limit is not None:
        request["max_output_tokens"] = limit
    if chat.get("reasoning_effort") is not None:
        request["reasoning"] = {"effort": chat["reasoning_effort"]}
    if text := _text_config(chat):
        request["text"] = text
    if chat.get("logprobs"):
        include.append(_LOGPROBS)
    request["include"] = include
    if chat.get("tools") is not None:
        tools = a_list(chat["tools"], "tools")
        request["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if chat.get("tool_choice") is not None:
        request["tool_choice"] = _tool_choice(chat["tool_choice"])
    return request


def _items(messages: list[Any]) -> list[Json]:
    items: list[Json] = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        message = an_object(message, field)
        match message.get("role"):
            case "system" | "developer" | "user" as role:
                content = _input_content(message.get("content"), f"{field}.content")
                rest = without(message, ("role", "content"))
                items.append({"type": "message", "role": role, "content": content, **rest})
            case "assistant":
                items += _assistant_items(message, index)
            case "tool":
                output = _input_content(message.get("content"), f"{field}.content")
                rest = without(message, ("role", "tool_call_id", "content"))
                call_id = message.get("tool_call_id")
                items.append({"type": "function_call_output", "call_id": call_id, "output": output, **rest})
            case role:
                raise Untranslatable(f"{field}.role", f"is {shown(role)}, which the Responses API cannot express")
    return items


def _input_content(content: Any, field: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    return [
        _input_part(an_object(part, f"{field}[{index}]"), f"{field}[{index}]")
        for index, part in enumerate(a_list(content, field))
    ]


def _input_part(part: Json, field: str) -> Json:
    """Return a part of a chat message's content as an input part of the Responses API."""
    match part.get("type"):
        case "text":
            return {**part, "type": "input_text"}
        case "image_url":
            image = an_object(part.get("image_url"), f"{field}.image_url")
            found: Json = {"type": "input_image", "image_url": image.get("url")}
            if image.get("detail") is not None:
                found["detail"] = image["detail"]
            return {**found, **without(part, ("type", "image_url"))}
        case "file":
            file = an_object(part.get("file"), f"{field}.file")
            return {"type": "input_file", **file, **without(part, ("type", "file"))}
        case kind:
            raise Untranslatable(f"{field}.type", f"is {shown(kind)}, which the Responses API cannot express")


def _assistant_items(message: Json, number: int) -> list[Json]:
    """Return a chat message of the assistant as items of the Responses API: reasoning, the message, then one item per
    tool call.

    number: the message's index in the request, for ids and error messages.
    """
    field = f"messages[{number}]"
    check_neutral(message, {"audio": (), "function_call": ()}, "the Responses API")
    items = reasoning_items(message, prefix=f"rs_{number}")
    content: Any = message.get("content")
    parts: list[Json] = []
    if isinstance(content, str):
        parts = [{"type": "output_text", "text": content, "annotations": []}] if content else []
    else:
        for index, part in enumerate(a_list(content, f"{field}.content")):
            if part.get("type") != "text":
                raise Untranslatable(f"{field}.content[{index}].type", f"is {shown(part.get('type'))}; possible: text")
            parts.append({**part, "type": "output_text", "annotations": []})
    if message.get("refusal") is not None:
        parts.append({"type": "refusal", "refusal": message["refusal"]})
    known = ("role", "content", "tool_calls", "thinking_blocks", "refusal", "audio", "function_call", "annotations")
    rest = without(message, (*known, *REASONING))
    calls = a_list(message.get("tool_calls"), f"{field}.tool_calls")
    if parts or not (items or calls):
        items.append({"type": "message", "role": "assistant", "content": parts or "", **rest})
    for index, call in enumerate(calls):
        if call.get("type", "function") != "function":
            raise Untranslatable(f"{field}.tool_calls[{index}].type", f"is {shown(call['type'])}; possible: function")
        function = an_object(call.get("function"), f"{field}.tool_calls[{index}].function")
        item = {"type": "function_call", "call_id": call.get("id"), **function}
        items.append({**item, **without(call, ("id", "type", "function", "index"))})
    return items


def reasoning_items(message: Json, *, prefix: str) -> list[Json]:
    """Return the reasoning of a chat message as reasoning items of the Responses API; none without reasoning.

    prefix: the beginning of the items' ids.
    """
    blocks = a_list(message.get("thinking_blocks"), "thinking_blocks")
    if not blocks and (text := reasoning_of(message)):
        blocks = [{"type": "thinking", "thinking": text}]
    items: list[Json] = []
    for index, block in enumerate(blocks):
        item: Json = {"type": "reasoning", "id": f"{prefix}_{index}", "summary": []}
        if block.get("thinking"):
            item["content"] = [{"type": "reasoning_text", "text": block["thinking"]}]
        if block.get("type") == "redacted_thinking":
            item["encrypted_content"] = f"{_REDACTED}{block.get('data')}"
        elif block.get("signature"):
            item["encrypted_content"] = block["signature"]
        items.append(item)
    return items


def _text_config(chat: Json) -> Json:
    """Return the chat fields `verbosity` and `response_format` as the Responses field `text`."""
    text: Json = {"verbosity": chat["verbosity"]} if chat.get("verbosity") is not None else {}
    if (wished := chat.get("response_format")) is not None:
        wished = an_object(wished, "response_format")
        if wished.get("type") == "json_schema":
            schema = an_object(wished.get("json_schema"), "response_format.json_schema")
            wished = {"type": "json_schema", **schema}
        text["format"] = wished
    return text


def _tool(tool: Any, field: str) -> Json:
    tool = an_object(tool, field)
    if tool.get("type") != "function":
        raise Untranslatable(f"{field}.type", f"is {shown(tool.get('type'))}; possible: function")
    function = an_object(tool.get("function"), f"{field}.function")
    defaults = {"parameters": None, "strict": False}  # this API requires both; chat's tools are not strict by default
    return {"type": "function", **defaults, **function, **without(tool, ("type", "function"))}


def _tool_choice(choice: Any) -> Any:
    """Return the `tool_choice` of the Responses API for that of a chat request."""
    match choice:
        case str():
            return choice
        case {"type": "function", "function": {"name": name}}:
            return {"type": "function", "name": name}
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}:
            return {"type": "allowed_tools", "mode": mode, "tools": list(map(_tool_choice, tools))}
        case _:
            raise Untranslatable("tool_choice", f"is {shown(choice)}, which the Responses API cannot express")
