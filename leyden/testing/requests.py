"""Parse requests as the servers of each API read them.

The module is independent of `leyden.dialects`, so that it can judge the dialects' translations: a request and its
translation mean the same if they become the same turns, and so the same tokens. Requests are not validated; a malformed
one raises AttributeError, KeyError or TypeError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leyden._lib.json import Json, is_list
from leyden.testing.fake_tokens import ChatTurn, ToolCall, encode, prompt_ids_of


def prompt_ids(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
    """Return the token ids that `FakeUpstream` gives to a chat prompt.

    messages, tools: as in a request to OpenAI's chat API.
    """
    return request_prompt_ids("chat/completions", {"messages": messages, "tools": tools})


def request_prompt_ids(path: str, request: Mapping[str, Any]) -> list[int]:
    """Return the token ids that `FakeUpstream` gives to the prompt of a request to any of its APIs.

    path: the API's route below `/v1/`, such as `chat/completions`. Raise KeyError for another.
    """
    if path == "completions":
        prompt = request["prompt"]
        return list(prompt) if is_list(prompt) else encode(str(prompt))
    turns = {"chat/completions": _chat_turns, "messages": _messages_turns, "responses": _responses_turns}[path]
    tools = [each for tool in request.get("tools") or () for each in _tools(tool, path)]
    return prompt_ids_of(turns(request), json.dumps(tools, sort_keys=True) if tools else "")


def _tools(tool: Any, path: str) -> list[Json]:
    """Return a tool as the functions that the template writes. The functions of a namespace have its name before theirs
    and its description above theirs; a tool that the server itself runs is one function.
    """
    kind = tool.get("type") if path == "responses" else None
    if kind == "namespace":
        found = [_tool(each) for each in tool["tools"]]
        for each in found:
            each["name"] = f"{tool['name']}__{each['name']}"
            each["description"] = "\n\n".join(filter(None, (tool.get("description"), each["description"]))) or None
        return found
    return [_tool(tool if kind in (None, "function") else {"name": kind, **tool})]


def _tool(tool: Any) -> Json:
    function = tool.get("function") or tool  # chat nests what the others have at the top
    schema: Any = function.get("input_schema") or function.get("parameters") or {"type": "object", "properties": {}}
    return {"name": function["name"], "description": function.get("description"), "parameters": schema}


def _chat_turns(request: Mapping[str, Any]) -> list[ChatTurn]:
    turns: list[ChatTurn] = []
    for message in request["messages"]:
        aliases = {"developer": "system", "tool": f"tool {message.get('tool_call_id')}"}
        role = aliases.get(message["role"]) or str(message["role"])
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        calls = tuple(ToolCall(function["name"], function["arguments"], id_) for id_, function in functions)
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        turns.append(ChatTurn(role, _text(message.get("content"), _chat_part), reasoning, calls))
    return turns


def _chat_part(part: Any) -> str:
    match part["type"]:
        case "image_url":
            return f"[image {part['image_url']['url']}]"
        case "file":
            return f"[file {part['file']['file_data']}]"
        case _:
            return part["text"]


def _messages_turns(request: Mapping[str, Any]) -> list[ChatTurn]:
    turns = [ChatTurn("system", _text(request["system"], _anthropic_part))] if request.get("system") else []
    for message in request["messages"]:
        role, content = message["role"], message["content"]
        if isinstance(content, str):
            turns.append(ChatTurn(role, content))
        else:
            turns += (_assistant_turns if role == "assistant" else _user_turns)(role, content)
    return turns


def _user_turns(role: str, content: Any) -> list[ChatTurn]:
    """Return the turns of a user's message: each tool result is a turn of the role `tool ID`, and other neighbouring
    blocks are one turn.
    """
    turns: list[ChatTurn] = []
    for block in content:
        if block["type"] == "tool_result":
            turns.append(ChatTurn(f"tool {block['tool_use_id']}", _text(block.get("content"), _anthropic_part)))
        elif turns and turns[-1].role == role:
            turns[-1] = ChatTurn(role, turns[-1].text + _anthropic_part(block))
        else:
            turns.append(ChatTurn(role, _anthropic_part(block)))
    return turns


def _assistant_turns(role: str, content: Any) -> list[ChatTurn]:
    """Return the turns of an assistant's message. A turn has reasoning, then text, then tool calls, so a block that
    comes out of this order begins a new turn.
    """
    turns = [ChatTurn(role)]
    for block in content:
        last = turns[-1]
        match block["type"]:
            case "thinking" | "redacted_thinking":
                if last.text or last.calls:
                    turns.append(last := ChatTurn(role))
                turns[-1] = ChatTurn(role, "", last.reasoning + block.get("thinking", ""))
            case "text":
                if last.calls:
                    turns.append(last := ChatTurn(role))
                turns[-1] = ChatTurn(role, last.text + block["text"], last.reasoning)
            case _:
                call = ToolCall(block["name"], json.dumps(block["input"], ensure_ascii=False), block["id"])
                turns[-1] = ChatTurn(role, last.text, last.reasoning, (*last.calls, call))
    return turns


def _anthropic_part(block: Any) -> str:
    if block["type"] == "text":
        return block["text"]
    source = block["source"]
    url = source["url"] if source["type"] == "url" else f"data:{source['media_type']};base64,{source['data']}"
    return f"[{'file' if block['type'] == 'document' else 'image'} {url}]"


def _responses_turns(request: Mapping[str, Any]) -> list[ChatTurn]:
    """Return the turns of a request to the Responses API. Consecutive items of the assistant are one turn, as long as
    reasoning and text come before calls.
    """
    turns = [ChatTurn("system", request["instructions"])] if request.get("instructions") else []
    given: Any = request["input"]
    items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for item in items:
        last = turns[-1] if turns and turns[-1].role == "assistant" else None
        match item.get("type", "message"):
            case "function_call_output":
                turns.append(ChatTurn(f"tool {item['call_id']}", _text(item["output"], _responses_part)))
            case "function_call":
                name = f"{item['namespace']}__{item['name']}" if item.get("namespace") else item["name"]
                call = ToolCall(name, item["arguments"], item["call_id"])
                _add_to_turn(turns, last, ChatTurn("assistant", "", "", (call,)))
            case "reasoning":
                text = "".join(part["text"] for part in item.get("content") or item["summary"])
                _add_to_turn(
                    turns, None if last and (last.text or last.calls) else last, ChatTurn("assistant", "", text)
                )
            case _ if item["role"] == "assistant":
                turn = ChatTurn("assistant", _text(item["content"], _responses_part))
                _add_to_turn(turns, None if last and (last.text or last.calls) else last, turn)
            case _:
                role = "system" if item["role"] == "developer" else item["role"]
                turns.append(ChatTurn(role, _text(item["content"], _responses_part)))
    return turns


def _add_to_turn(turns: list[ChatTurn], last: ChatTurn | None, more: ChatTurn) -> None:
    if last is None:  # nothing to add to: `more` is a turn of its own
        turns.append(more)
    else:
        text, reasoning = last.text + more.text, last.reasoning + more.reasoning
        turns[-1] = ChatTurn("assistant", text, reasoning, (*last.calls, *more.calls))


def _responses_part(part: Any) -> str:
    match part["type"]:
        case "input_image":
            return f"[image {part['image_url']}]"
        case "input_file":
            return f"[file {part['file_data']}]"
        case "refusal":
            return part["refusal"]
        case _:
            return part["text"]


def _text(content: Any, read: Callable[[Any], str]) -> str:
    """Return a message's content as text.

    read: returns the text of one part of a list.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(read(part) for part in content)
