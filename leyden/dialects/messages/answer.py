"""Translate answers of Anthropic's messages API to chat and back.

The id of an answer stays the same in every dialect, so that the agent's own spans find the record.
"""

from __future__ import annotations

from typing import Any

from leyden._lib.json import Json
from leyden.dialects.fields import a_list, a_text, an_object, function_calls, shown, the_choice, without
from leyden.dialects.messages.request import arguments_of, input_of, thinking_blocks, with_thinking
from leyden.errors import Untranslatable

_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}
_STOP_REASONS = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "length": "max_tokens",
    "content_filter": "refusal",
}


def answer_from_chat(answer: Json, request: Json) -> Json:
    """Return a chat answer as a message of Anthropic's API. Unknown fields are kept at the top level. Raise
    Untranslatable unless the answer has one choice.

    request: the client's request, which this API's answers do not repeat.
    """
    choice = the_choice(answer)
    message = an_object(choice.get("message"), "choices[0].message")
    content: list[Json] = [*thinking_blocks(message)]
    text = message.get("content") or message.get("refusal")
    if text:
        content.append({"type": "text", "text": a_text(text, "choices[0].message.content")})
    calls = function_calls(answer, choice)
    for call_id, name, arguments in calls:
        content.append({"type": "tool_use", "id": call_id, "name": name, "input": input_of(arguments)})
    stop_reason, stop_sequence = stop_of(choice, calls=bool(calls))
    return {
        **without(answer, ("id", "object", "created", "model", "choices", "usage")),
        **without(choice, ("index", "message", "finish_reason", "stop_reason", "logprobs")),
        **({"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}),
        "id": answer.get("id"),
        "type": "message",
        "role": "assistant",
        "model": answer.get("model"),
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": usage_of(answer.get("usage")),
    }


def stop_of(choice: Json, *, calls: bool) -> tuple[str | None, str | None]:
    """Return (stop_reason, stop_sequence) of a chat choice.

    calls: whether the choice has tool calls. vLLM's field `stop_reason` holds the stop string that ended the choice.
    """
    reason = choice.get("finish_reason")
    if reason is None:
        return None, None
    if reason == "stop" and calls:  # servers report "stop" if the request forced this tool call
        return "tool_use", None
    if reason == "stop" and isinstance(sequence := choice.get("stop_reason"), str):
        return "stop_sequence", sequence
    return _STOP_REASONS.get(reason, reason), None


def usage_of(usage: Any) -> Json:
    """Return chat's usage in Anthropic's form, where `input_tokens` does not include the tokens that were read from the
    cache or written to it.
    """
    counted = an_object(usage or {}, "usage")
    prompt = an_object(counted.get("prompt_tokens_details") or {}, "usage")
    response = an_object(counted.get("completion_tokens_details") or {}, "usage")
    read, written = prompt.get("cached_tokens"), prompt.get("cache_write_tokens")
    found: Json = {
        "input_tokens": max(0, (counted.get("prompt_tokens") or 0) - (read or 0) - (written or 0)),
        "output_tokens": counted.get("completion_tokens") or 0,
        "cache_read_input_tokens": read or 0,
        "cache_creation_input_tokens": written or 0,
    }
    if response.get("reasoning_tokens") is not None:
        found["output_tokens_details"] = {"thinking_tokens": response["reasoning_tokens"]}
    return found


def answer_to_chat(message: Json) -> Json:
    """Return a message as a chat answer. Raise Untranslatable if chat cannot express it."""
    found: Json = {"role": "assistant", "content": None}
    blocks = [an_object(block, "content") for block in a_list(message.get("content"), "content")]
    thinking, calls = list[Json](), list[Json]()
    texts, citations = list[str](), list[Any]()
    for index, block in enumerate(blocks):
        match block.get("type"):
            case "thinking" | "redacted_thinking":
                thinking.append(block)
            case "text":
                texts.append(a_text(block.get("text"), f"content[{index}].text"))
                citations += a_list(block.get("citations"), f"content[{index}].citations")
            case "tool_use":
                arguments = arguments_of(an_object(block.get("input"), f"content[{index}].input"))
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case kind:
                raise Untranslatable(f"content[{index}].type", f"is {shown(kind)}, which chat cannot express")
    with_thinking(found, thinking)
    if texts:
        found["content"] = "".join(texts)
    if citations:
        found["citations"] = citations
    if calls:
        found["tool_calls"] = calls
    choice: Json = {"index": 0, "message": found, "finish_reason": finish_reason(message.get("stop_reason"))}
    if message.get("stop_sequence") is not None:
        choice["stop_reason"] = message["stop_sequence"]
    known = ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")
    return {
        **without(message, known),
        "id": message.get("id"),
        "object": "chat.completion",
        "created": 0,
        "model": message.get("model"),
        "choices": [choice],
        "usage": chat_usage(message.get("usage")),
    }


def finish_reason(stop_reason: Any) -> Any:
    """Return chat's finish reason for a stop reason; an unknown one is returned as it is."""
    return _FINISH_REASONS.get(stop_reason, stop_reason)


def chat_usage(usage: Any) -> Json:
    """Return Anthropic's usage in chat's form, where `prompt_tokens` includes the cache's tokens."""
    counted = an_object(usage or {}, "usage")
    read, written = counted.get("cache_read_input_tokens") or 0, counted.get("cache_creation_input_tokens") or 0
    n_prompt = (counted.get("input_tokens") or 0) + read + written
    n_response = counted.get("output_tokens") or 0
    found: Json = {"prompt_tokens": n_prompt, "completion_tokens": n_response, "total_tokens": n_prompt + n_response}
    if read or written:
        found["prompt_tokens_details"] = {"cached_tokens": read, "cache_write_tokens": written}
    details = an_object(counted.get("output_tokens_details") or {}, "usage")
    if details.get("thinking_tokens") is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": details["thinking_tokens"]}
    return found
