"""Translate requests of Anthropic's messages API to chat and back.

A field without a counterpart raises `Untranslatable`. Unknown fields stay as they are, at their level.

A chat message has its reasoning in `reasoning_content` (and in `reasoning`, vLLM's name for it). It also has the
thinking blocks in `thinking_blocks` if they hold more than one text: if they are signed, redacted or several.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from leyden._lib.json import Json, is_object
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
from leyden.dialects.sampling import OPTIONS, check_neutral, stop_strings
from leyden.errors import Untranslatable

DEFAULT_MAX_TOKENS = 8192
"""The limit for a chat request without one, because Anthropic's API requires a limit."""

_INVALID_JSON = "INVALID_JSON"
"""The key under which arguments that are no JSON object are wrapped in one, as Anthropic advises, so that the model can
see them again."""

_DATA_URL = re.compile(r"data:([\w.+/-]+);base64,(.*)", re.DOTALL)


# ---- to chat -------------------------------------------------------------------------------------


def request_to_chat(request: Json) -> Json:
    """Return the request as a chat request. Raise Untranslatable if chat cannot express it."""
    check_neutral(request, {"container": (), "mcp_servers": ([],)}, "chat")
    if request.get("stream"):
        check_neutral(request, NOT_IN_EVENTS, "a stream of this API")
    chat = without(
        request,
        {
            *("system", "messages", "stop_sequences", "tools", "tool_choice", "output_config", "service_tier"),
            *("container", "mcp_servers"),
        },
    )
    messages: list[Json] = []
    if request.get("system"):
        messages.append({"role": "system", "content": _chat_text(request["system"], "system")})
    for index, message in enumerate(a_list(request.get("messages"), "messages")):
        field = f"messages[{index}]"
        messages += _chat_turn(an_object(message, field), field)
    chat["messages"] = messages
    if stops := stop_strings(request.get("stop_sequences")):
        chat["stop"] = stops
    if request.get("tools") is not None:
        tools = a_list(request["tools"], "tools")
        chat["tools"] = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if request.get("tool_choice") is not None:
        chat |= _chat_tool_choice(an_object(request["tool_choice"], "tool_choice"))
    if request.get("output_config") is not None:
        chat |= _chat_output(an_object(request["output_config"], "output_config"))
    if tier := request.get("service_tier"):
        chat["service_tier"] = "default" if tier == "standard_only" else tier
    if request.get("stream"):
        chat["stream_options"] = {"include_usage": True}  # every answer of this API has its usage
    return chat


def _chat_turn(message: Json, field: str) -> list[Json]:
    """Return a message of Anthropic's API as chat messages; a user's turn with tool results becomes several.

    field: the message's path in the request, for error messages.
    """
    role, content, where = message.get("role"), message.get("content"), f"{field}.content"
    rest = without(message, ("role", "content"))
    if role == "system":
        return [{"role": "system", "content": _chat_text(content, where), **rest}]
    readers: dict[Any, Callable[[list[Json], str], list[Json]]] = {"user": _chat_user, "assistant": _chat_assistant}
    if role not in readers:
        raise Untranslatable(f"{field}.role", f"is {shown(role)}; this API has user, assistant and system")
    if isinstance(content, str):
        return [{"role": role, "content": content, **rest}]
    blocks = [an_object(block, f"{where}[{index}]") for index, block in enumerate(a_list(content, where))]
    return [{**turn, **rest} for turn in readers[role](blocks, where)]


def _chat_text(content: Any, field: str) -> str | list[Json]:
    """Return content that holds only text blocks in chat's form. Raise Untranslatable for others."""
    if isinstance(content, str):
        return content
    blocks = [an_object(block, f"{field}[{index}]") for index, block in enumerate(a_list(content, field))]
    for index, block in enumerate(blocks):
        if block.get("type") != "text":
            raise Untranslatable(f"{field}[{index}].type", f"is {shown(block.get('type'))}; only text is possible here")
    return single_text(blocks)


def _chat_user(blocks: list[Json], field: str) -> list[Json]:
    """Return a user's blocks as chat messages. Each tool result is one message; the other blocks between two of them
    are one message.
    """
    turns: list[Json] = []
    parts: list[Json] = []
    for index, block in enumerate(blocks):
        where = f"{field}[{index}]"
        if block.get("type") != "tool_result":
            parts.append(_chat_part(block, where))
            continue
        if parts:
            turns.append({"role": "user", "content": single_text(parts)})
            parts = []
        turns.append(_chat_tool_result(block, where))
    if parts or not turns:
        turns.append({"role": "user", "content": single_text(parts)})
    return turns


def _chat_tool_result(block: Json, field: str) -> Json:
    content: Any = block.get("content")
    if not isinstance(content, str):
        found = enumerate(a_list(content, f"{field}.content"))
        content = single_text(
            [_chat_part(an_object(item, field), f"{field}.content[{index}]") for index, item in found]
        )
    call_id = a_text(block.get("tool_use_id"), f"{field}.tool_use_id")
    rest = without(block, ("type", "tool_use_id", "content"))
    return {"role": "tool", "tool_call_id": call_id, "content": content, **rest}


def _chat_part(block: Json, field: str) -> Json:
    """Return a text, image or document block of Anthropic's API as a part of a chat message's content."""
    match block.get("type"):
        case "text":
            return block
        case "image":
            url = _chat_url(an_object(block.get("source"), f"{field}.source"), f"{field}.source")
            return {"type": "image_url", "image_url": {"url": url}, **without(block, ("type", "source"))}
        case "document":
            source = an_object(block.get("source"), f"{field}.source")
            if source.get("type") != "base64":
                raise Untranslatable(f"{field}.source.type", f"is {shown(source.get('type'))}; chat takes only base64")
            file = {"filename": block.get("title") or "document.pdf", "file_data": _chat_url(source, field)}
            return {"type": "file", "file": file, **without(block, ("type", "source", "title"))}
        case kind:
            raise Untranslatable(f"{field}.type", f"is {shown(kind)}, which chat cannot express")


def _chat_url(source: Json, field: str) -> str:
    """Return the URL of an image's source, a data URL for base64. Raise Untranslatable for another kind."""
    if source.get("type") == "url":
        return a_text(source.get("url"), f"{field}.url")
    if source.get("type") == "base64":
        media_type = a_text(source.get("media_type"), f"{field}.media_type")
        return f"data:{media_type};base64,{a_text(source.get('data'), f'{field}.data')}"
    raise Untranslatable(f"{field}.type", f"is {shown(source.get('type'))}, which chat cannot express")


_STAGES = {"thinking": 0, "redacted_thinking": 0, "text": 1, "tool_use": 2}
"""The index of each kind of block in the order of a chat message: reasoning, content, tool calls."""


def _chat_assistant(blocks: list[Json], field: str) -> list[Json]:
    """Return the assistant's blocks as one chat message; as several if their order is not that of a chat message
    (reasoning, content, tool calls).
    """
    groups: list[list[tuple[Json, str]]] = [[]]
    stage = 0
    for index, block in enumerate(blocks):
        where, kind = f"{field}[{index}]", block.get("type")
        if kind not in _STAGES:
            raise Untranslatable(f"{where}.type", f"is {shown(kind)}, which chat cannot express")
        if _STAGES[kind] < stage:
            groups.append([])
        stage = _STAGES[kind]
        groups[-1].append((block, where))
    return [_chat_assistant_message(group) for group in groups]


def _chat_assistant_message(group: list[tuple[Json, str]]) -> Json:
    """Return blocks of the assistant, which are in a chat message's order (thinking, text, tool calls), as one chat
    message.

    group: each block with its path in the request, for error messages.
    """
    message: Json = {"role": "assistant"}
    with_thinking(message, [block for block, _ in group if _STAGES[block["type"]] == 0])
    parts = [block for block, _ in group if block["type"] == "text"]
    calls = [_chat_call(block, where) for block, where in group if block["type"] == "tool_use"]
    message["content"] = single_text(parts) if parts or not calls else None
    if calls:
        message["tool_calls"] = calls
    return message


def with_thinking(message: Json, blocks: list[Json]) -> None:
    """Add thinking blocks to a chat message: their text as reasoning, and the blocks themselves if they hold more than
    one text. Do nothing without blocks.
    """
    if not blocks:
        return
    text = "".join(str(block.get("thinking") or "") for block in blocks)
    if text:
        message |= dict.fromkeys(REASONING, text)
    if len(blocks) > 1 or blocks[0].get("type") != "thinking" or blocks[0].get("signature"):
        message["thinking_blocks"] = blocks


def _chat_call(block: Json, field: str) -> Json:
    function = {
        "name": a_text(block.get("name"), f"{field}.name"),
        "arguments": arguments_of(an_object(block.get("input"), f"{field}.input")),
    }
    rest = without(block, ("type", "id", "name", "input"))
    return {"id": a_text(block.get("id"), f"{field}.id"), "type": "function", "function": function, **rest}


def arguments_of(value: Json) -> str:
    """Return a tool call's input as chat's `arguments`, a JSON text. What `input_of` has wrapped is unwrapped."""
    if value.keys() == {_INVALID_JSON}:
        return str(value[_INVALID_JSON])
    return json.dumps(value, ensure_ascii=False)


def _chat_tool(tool: Any, field: str) -> Json:
    """Return Anthropic's definition of a tool in chat's form. Raise Untranslatable for one of Anthropic's servers."""
    tool = an_object(tool, field)
    if tool.get("type") not in (None, "custom"):
        raise Untranslatable(f"{field}.type", f"is {shown(tool['type'])}: a tool of Anthropic's servers")
    function: Json = {"name": a_text(tool.get("name"), f"{field}.name")}
    for name, theirs in (("description", "description"), ("input_schema", "parameters"), ("strict", "strict")):
        if tool.get(name) is not None:
            function[theirs] = tool[name]
    rest = without(tool, ("type", "name", "description", "input_schema", "strict"))
    return {"type": "function", "function": function, **rest}


def _chat_tool_choice(choice: Json) -> Json:
    """Return Anthropic's tool choice as the chat fields `tool_choice` and `parallel_tool_calls`."""
    chat: Json = {}
    match choice.get("type"):
        case "auto" | "none" as same:
            chat["tool_choice"] = same
        case "any":
            chat["tool_choice"] = "required"
        case "tool":
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        case kind:
            raise Untranslatable("tool_choice.type", f"is {shown(kind)}; possible: auto, any, tool, none")
    if choice.get("disable_parallel_tool_use") is not None:
        chat["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return chat


def _chat_output(config: Json) -> Json:
    """Return Anthropic's `output_config` as the chat fields `reasoning_effort` and `response_format`."""
    if unknown := sorted(
        name for name, value in config.items() if name not in ("effort", "format") and value is not None
    ):
        raise Untranslatable(f"output_config.{unknown[0]}", "has no counterpart in chat")
    chat: Json = {}
    if config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    if config.get("format") is not None:
        wished = an_object(config["format"], "output_config.format")
        if wished.get("type") != "json_schema":
            raise Untranslatable("output_config.format.type", f"is {shown(wished.get('type'))}; possible: json_schema")
        schema = {"name": "answer", "schema": wished.get("schema"), "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


# ---- from chat -----------------------------------------------------------------------------------

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: OPTIONS[name] for name in ("n", "logprobs", "top_logprobs", "return_token_ids", "modalities")},
    **{name: OPTIONS[name] for name in ("verbosity", "truncation", "functions", "function_call", "seed", "audio")},
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "logit_bias", "best_of"), ()),
    "store": (False,),
    **dict.fromkeys(("web_search_options", "moderation"), ()),
}
_TRANSLATED = {
    *("messages", "max_tokens", "max_completion_tokens", "stop", "tools", "tool_choice", "parallel_tool_calls"),
    *("response_format", "reasoning_effort", "service_tier", "user", "stream_options", *_NEUTRAL),
    *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
}


def request_from_chat(chat: Json) -> Json:
    """Return a chat request as a request of Anthropic's API. Raise Untranslatable if it cannot be expressed."""
    check_neutral(chat, _NEUTRAL, "Anthropic's API")
    request = without(chat, _TRANSLATED)
    request["max_tokens"] = chat.get("max_completion_tokens") or chat.get("max_tokens") or DEFAULT_MAX_TOKENS
    request |= _conversation(a_list(chat.get("messages"), "messages"))
    if stops := stop_strings(chat.get("stop")):
        request["stop_sequences"] = stops
    if chat.get("tools") is not None:
        tools = a_list(chat["tools"], "tools")
        request["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if choice := _tool_choice(chat):
        request["tool_choice"] = choice
    if config := _output_config(chat):
        request["output_config"] = config
    if chat.get("reasoning_effort") == "none":
        request["thinking"] = {"type": "disabled"}
    if tier := chat.get("service_tier"):
        if tier not in ("auto", "default"):
            raise Untranslatable("service_tier", f"is {shown(tier)}; possible: auto, default")
        request["service_tier"] = "standard_only" if tier == "default" else tier
    if user := chat.get("user"):
        request["metadata"] = {**(chat.get("metadata") or {}), "user_id": user}
    return request


def _conversation(messages: list[Any]) -> Json:
    """Return chat messages as Anthropic's `system` and `messages`. Tool results and the user's text that follows them
    become one message of the user.
    """
    system: list[Json] = []
    turns: list[Json] = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        message = an_object(message, field)
        match message.get("role"):
            case "system" | "developer":
                content = _chat_text(message.get("content"), f"{field}.content")
                if not turns:
                    system += [{"type": "text", "text": content}] if isinstance(content, str) else content
                else:
                    turns.append({"role": "system", "content": content})
            case "user":
                turn = {"role": "user", "content": _content(message, field), **without(message, ("role", "content"))}
                _join(turns, turn, joins=_has_tool_results(turns))
            case "tool":
                call_id = a_text(message.get("tool_call_id"), f"{field}.tool_call_id")
                rest = without(message, ("role", "tool_call_id", "content"))
                block = {"type": "tool_result", "tool_use_id": call_id, "content": _content(message, field), **rest}
                _join(turns, {"role": "user", "content": [block]}, joins=_has_tool_results(turns))
            case "assistant":
                _join(turns, _assistant(message, field), joins=bool(turns) and turns[-1]["role"] == "assistant")
            case role:
                raise Untranslatable(f"{field}.role", f"is {shown(role)}, which Anthropic's API cannot express")
    found: Json = {"messages": turns}
    if system:
        found["system"] = single_text(system)
    return found


def _has_tool_results(turns: list[Json]) -> bool:
    if not turns or turns[-1]["role"] != "user" or isinstance(turns[-1]["content"], str):
        return False
    return bool(turns[-1]["content"]) and turns[-1]["content"][-1]["type"] == "tool_result"


def _join(turns: list[Json], turn: Json, *, joins: bool) -> None:
    """Append a turn, or merge it into the last turn if `joins`, because Anthropic's roles alternate."""
    if not joins:
        turns.append(turn)
        return
    before, after = (
        [{"type": "text", "text": content}] if isinstance(content, str) else content
        for content in (turns[-1]["content"], turn["content"])
    )
    turns[-1] = {**turns[-1], **turn, "content": [*before, *after]}


def _content(message: Json, field: str) -> str | list[Json]:
    """Return a chat message's content as a text or as blocks."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = enumerate(a_list(content, f"{field}.content"))
    return [_block(an_object(part, field), f"{field}.content[{index}]") for index, part in parts]


def _assistant(message: Json, field: str) -> Json:
    """Return a chat message of the assistant in Anthropic's form: thinking blocks, then content, then tool uses."""
    check_neutral(message, {"refusal": (), "audio": (), "function_call": (), "annotations": ([],)}, "Anthropic's API")
    blocks = thinking_blocks(message)
    content = _content(message, field)
    if content:
        blocks += [{"type": "text", "text": content}] if isinstance(content, str) else content
    calls = enumerate(a_list(message.get("tool_calls"), f"{field}.tool_calls"))
    blocks += [_tool_use(an_object(call, field), f"{field}.tool_calls[{index}]") for index, call in calls]
    known = ("role", "content", "tool_calls", "thinking_blocks", "refusal", "audio", "function_call", "annotations")
    return {"role": "assistant", "content": single_text(blocks), **without(message, (*known, *REASONING))}


def thinking_blocks(message: Json) -> list[Json]:
    """Return the thinking blocks of a chat message; one block without a signature if the message has only the
    reasoning's text.
    """
    if blocks := a_list(message.get("thinking_blocks"), "thinking_blocks"):
        return [*blocks]
    text = reasoning_of(message)
    return [{"type": "thinking", "thinking": text, "signature": ""}] if text else []


def _block(part: Json, field: str) -> Json:
    """Return a part of a chat message's content as a text, image or document block of Anthropic's API."""
    match part.get("type"):
        case "text":
            return part
        case "image_url":
            image = an_object(part.get("image_url"), f"{field}.image_url")
            check_neutral(image, {"detail": ("auto",)}, "Anthropic's API")
            source = _source(a_text(image.get("url"), f"{field}.image_url.url"))
            return {"type": "image", "source": source, **without(part, ("type", "image_url"))}
        case "file":
            file = an_object(part.get("file"), f"{field}.file")
            if not isinstance(file.get("file_data"), str):
                raise Untranslatable(
                    f"{field}.file", "has no file_data; Anthropic's API cannot read files that OpenAI keeps"
                )
            block = {"type": "document", "source": _source(file["file_data"]), **without(part, ("type", "file"))}
            if file.get("filename") not in (None, "document.pdf"):
                block["title"] = file["filename"]
            return block
        case kind:
            raise Untranslatable(f"{field}.type", f"is {shown(kind)}, which Anthropic's API cannot express")


def _source(url: str) -> Json:
    if found := _DATA_URL.fullmatch(url):
        return {"type": "base64", "media_type": found[1], "data": found[2]}
    return {"type": "url", "url": url}


def _tool_use(call: Json, field: str) -> Json:
    if call.get("type", "function") != "function":
        raise Untranslatable(f"{field}.type", f"is {shown(call['type'])}; Anthropic's API has functions only")
    function = an_object(call.get("function"), f"{field}.function")
    return {
        "type": "tool_use",
        "id": call.get("id"),
        "name": function.get("name"),
        "input": input_of(function.get("arguments")),
        **without(call, ("id", "type", "function", "index")),
    }


def input_of(arguments: Any) -> Json:
    """Return chat's `arguments` as a tool call's input. Text that is no JSON object is wrapped in one, which
    `arguments_of` unwraps.
    """
    try:
        value: Any = json.loads(arguments or "{}")
    except (TypeError, ValueError, RecursionError):
        value = None
    return value if is_object(value) else {_INVALID_JSON: arguments}


def _tool(tool: Any, field: str) -> Json:
    tool = an_object(tool, field)
    if tool.get("type", "function") != "function":
        raise Untranslatable(f"{field}.type", f"is {shown(tool['type'])}; Anthropic's API has functions only")
    function = an_object(tool.get("function"), f"{field}.function")
    found: Json = {"name": function.get("name")}
    if function.get("description") is not None:
        found["description"] = function["description"]
    found["input_schema"] = function.get("parameters") or {"type": "object", "properties": {}}
    if function.get("strict") is not None:
        found["strict"] = function["strict"]
    known = ("name", "description", "parameters", "strict")
    return {**found, **without(function, known), **without(tool, ("type", "function"))}


def _tool_choice(chat: Json) -> Json | None:
    """Return the chat fields `tool_choice` and `parallel_tool_calls` as Anthropic's tool choice; None if the API's
    default means the same.
    """
    choice: Any = chat.get("tool_choice")
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*allowed]}}:
            tools = [an_object(tool, "tools") for tool in a_list(chat.get("tools"), "tools")]
            names = [an_object(tool.get("function"), "tools").get("name") for tool in tools]
            if all({"type": "function", "function": {"name": name}} in allowed for name in names):
                choice = mode
        case _:
            pass
    parallel = chat.get("parallel_tool_calls")
    found: Json
    match choice:
        case None if parallel is None or not chat.get("tools"):
            return None
        case None | "auto":
            found = {"type": "auto"}
        case "none":
            return {"type": "none"}
        case "required":
            found = {"type": "any"}
        case {"type": "function", "function": {"name": name}}:
            found = {"type": "tool", "name": name}
        case _:
            raise Untranslatable("tool_choice", f"is {shown(choice)}, which Anthropic's API cannot express")
    if parallel is not None:
        found["disable_parallel_tool_use"] = not parallel
    return found


def _output_config(chat: Json) -> Json:
    """Return the chat fields `reasoning_effort` and `response_format` as Anthropic's `output_config`."""
    config: Json = {}
    effort = chat.get("reasoning_effort")
    if effort == "minimal":
        raise Untranslatable("reasoning_effort", "is 'minimal'; Anthropic's API has low, medium, high, xhigh and max")
    if effort not in (None, "none"):
        config["effort"] = effort
    wished = an_object(chat.get("response_format") or {"type": "text"}, "response_format")
    if wished.get("type") == "json_schema":
        schema = an_object(wished.get("json_schema"), "response_format.json_schema")
        config["format"] = {"type": "json_schema", "schema": schema.get("schema")}
    elif wished.get("type") != "text":
        raise Untranslatable("response_format.type", f"is {shown(wished.get('type'))}; possible: text, json_schema")
    return config
