"""Translate answers of the Responses API to chat and back.

The id of an answer stays the same in every dialect, so that the agent's own spans find the record. The ids of its items
are made from the answer's id.
"""

from __future__ import annotations

from typing import Any

from leyden._lib.json import Json
from leyden.dialects.fields import a_list, an_object, function_calls, shown, the_choice, without
from leyden.dialects.responses.namespaces import ToolNames
from leyden.dialects.responses.request import reasoning_items, with_reasoning
from leyden.errors import Untranslatable

_ECHOED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "store": True,
    "temperature": None,
    "text": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that an answer repeats, with their values if the request lacks them."""


def envelope(head: Json, request: Json, output: list[Json], *, status: str, **fields: Any) -> Json:
    """Return a response object with these output items, and with the request's options, which a response repeats.

    head: an answer in chat form, whose id, created and model are read.
    fields: further fields of the response, which replace the defaults.
    """
    echoed = {name: default if (given := request.get(name)) is None else given for name, default in _ECHOED.items()}
    return {
        **echoed,
        "id": head.get("id"),
        "object": "response",
        "created_at": head.get("created") or 0,
        "model": head.get("model"),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": output,
        "usage": None,
        **fields,
    }


def answer_from_chat(answer: Json, request: Json) -> Json:
    """Return a chat answer as a response of the Responses API. Unknown fields are kept at the top level. Raise
    Untranslatable unless the answer has one choice.
    """
    choice = the_choice(answer)
    message = an_object(choice.get("message"), "choices[0].message")
    answer_id = answer.get("id")
    output = [{**item, "status": "completed"} for item in reasoning_items(message, prefix=f"rs_{answer_id}")]
    text, refusal = message.get("content"), message.get("refusal")
    if text or refusal:
        item = message_item(answer_id)
        if text:
            logprobs = output_logprobs(choice.get("logprobs"))
            item["content"].append({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
        if refusal:
            item["content"].append({"type": "refusal", "refusal": refusal})
        output.append({**item, "status": "completed"})
    names = ToolNames(request.get("tools"))
    for index, (call_id, name, arguments) in enumerate(function_calls(answer, choice)):
        item = call_item(answer_id, index, call_id, names.named(name))
        output.append({**item, "arguments": arguments, "status": "completed"})
    status, details = status_of(choice.get("finish_reason"))
    extra = {
        **without(answer, ("id", "object", "created", "model", "choices", "usage")),
        **without(choice, ("index", "message", "finish_reason", "stop_reason", "logprobs")),
    }
    usage = _usage(answer.get("usage"))
    return {**extra, **envelope(answer, request, output, status=status, incomplete_details=details, usage=usage)}


def reasoning_item(answer_id: Any, index: int) -> Json:
    """Return an empty reasoning item, as it is sent when it begins."""
    return {"type": "reasoning", "id": f"rs_{answer_id}_{index}", "summary": [], "content": [], "status": "in_progress"}


def message_item(answer_id: Any) -> Json:
    """Return an empty message item, as it is sent when it begins."""
    item = {"type": "message", "id": f"msg_{answer_id}", "role": "assistant", "status": "in_progress"}
    return {**item, "content": list[Any]()}


def call_item(answer_id: Any, index: int, call_id: Any, named: Json) -> Json:
    """Return a tool call's item without arguments, as it is sent when it begins.

    index: of the call among the answer's calls.
    call_id: its id in chat.
    named: the fields of its name (`ToolNames.named`).
    """
    head = {"type": "function_call", "id": f"fc_{answer_id}_{index}", "call_id": call_id, **named}
    return {**head, "arguments": "", "status": "in_progress"}


def output_logprobs(logprobs: Any) -> list[Json]:
    """Return chat's log-probabilities in the form of an `output_text` part, one entry per token."""
    entries = a_list(an_object(logprobs or {}, "logprobs").get("content"), "logprobs.content")
    return [
        {
            "token": entry.get("token"),
            "bytes": entry.get("bytes") or [],
            "logprob": entry.get("logprob"),
            "top_logprobs": entry.get("top_logprobs") or [],
        }
        for entry in entries
    ]


def status_of(reason: Any) -> tuple[str, Json | None]:
    """Return `status` and `incomplete_details` for chat's finish reason."""
    if reason == "length":
        return "incomplete", {"reason": "max_output_tokens"}
    if reason == "content_filter":
        return "incomplete", {"reason": "content_filter"}
    return "completed", None


def _usage(usage: Any) -> Json:
    """Return chat token counts in the form of the Responses API. Missing counts are 0."""
    counted = an_object(usage or {}, "usage")
    prompt = an_object(counted.get("prompt_tokens_details") or {}, "usage")
    response = an_object(counted.get("completion_tokens_details") or {}, "usage")
    n_prompt, n_response = counted.get("prompt_tokens") or 0, counted.get("completion_tokens") or 0
    return {
        "input_tokens": n_prompt,
        "input_tokens_details": {
            "cached_tokens": prompt.get("cached_tokens") or 0,
            "cache_write_tokens": prompt.get("cache_write_tokens") or 0,
        },
        "output_tokens": n_response,
        "output_tokens_details": {"reasoning_tokens": response.get("reasoning_tokens") or 0},
        "total_tokens": counted.get("total_tokens") or n_prompt + n_response,
    }


def answer_to_chat(response: Json) -> Json:
    """Return a response as a chat answer. Raise Untranslatable if chat cannot express it."""
    message: Json = {"role": "assistant", "content": None}
    logprobs: list[Any] = []
    names = ToolNames(response.get("tools"))
    for index, item in enumerate(a_list(response.get("output"), "output")):
        match item.get("type"):
            case "reasoning":
                with_reasoning(message, item, f"output[{index}]")
            case "message":
                _add_message(message, logprobs, item, f"output[{index}]")
            case "function_call":
                name = names.in_chat(item.get("name"), item.get("namespace"))
                function = {"name": name, "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case kind:
                raise Untranslatable(f"output[{index}].type", f"is {shown(kind)}, which chat cannot express")
    choice = {"index": 0, "message": message, "finish_reason": finish_reason(response, bool(message.get("tool_calls")))}
    if logprobs:
        choice["logprobs"] = {"content": logprobs}
    return {
        "id": response.get("id"),
        "object": "chat.completion",
        "created": int(response.get("created_at") or 0),
        "model": response.get("model"),
        "choices": [choice],
        "usage": chat_usage(response.get("usage")),
    }


def _add_message(message: Json, logprobs: list[Any], item: Json, field: str) -> None:
    """Append the texts, annotations and refusal of a Responses message item to a chat message, and its
    log-probabilities to `logprobs`.
    """
    for part in a_list(item.get("content"), f"{field}.content"):
        match part.get("type"):
            case "output_text":
                message["content"] = (message["content"] or "") + part["text"]
                logprobs += part.get("logprobs") or []
                if part.get("annotations"):
                    message.setdefault("annotations", []).extend(part["annotations"])
            case "refusal":
                message["refusal"] = part.get("refusal")
            case kind:
                raise Untranslatable(f"{field}.content.type", f"is {shown(kind)}, which chat cannot express")


def finish_reason(response: Json, calls: bool) -> str:
    """Return chat's finish reason for a response that has ended. Raise Untranslatable if it failed.

    calls: whether the response has tool calls.
    """
    if response.get("status") == "incomplete":
        details = an_object(response.get("incomplete_details") or {}, "incomplete_details")
        return "content_filter" if details.get("reason") == "content_filter" else "length"
    if response.get("status") not in ("completed", None):
        raise Untranslatable("status", f"is {shown(response.get('status'))}: {shown(response.get('error'))}")
    return "tool_calls" if calls else "stop"


def chat_usage(usage: Any) -> Json:
    """Return the usage of the Responses API in chat's form."""
    counted = an_object(usage or {}, "usage")
    n_prompt, n_response = counted.get("input_tokens") or 0, counted.get("output_tokens") or 0
    found: Json = {"prompt_tokens": n_prompt, "completion_tokens": n_response, "total_tokens": n_prompt + n_response}
    prompt = an_object(counted.get("input_tokens_details") or {}, "usage")
    if any(prompt.values()):
        found["prompt_tokens_details"] = prompt
    response = an_object(counted.get("output_tokens_details") or {}, "usage")
    if any(response.values()):
        found["completion_tokens_details"] = response
    return found
