"""The answers of `FakeUpstream` in the format of each API, whole or as a stream.

The module is independent of `leyden.dialects`, so that it can judge the dialects' translations. To add an API, write
its class and put it into `ANSWERS`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from leyden._lib.json import Json
from leyden.testing.fake_tokens import Piece, ToolCall, pieces_of

_CREATED = 1_700_000_000
"""The time of every answer, always the same so that answers can be compared."""


@dataclass(frozen=True, slots=True)
class Misbehaviour:
    """How one response of a fake server deviates from a good one: its status, delays, breaks and missing fields."""

    status: int | None = None
    """Answer with this HTTP status and an error object."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Headers of that error."""
    body: bytes | None = None
    """Answer 200 with these bytes, whatever they are."""
    content_type: str = "application/json"
    """The content type of `body`."""
    delay_seconds: float = 0.0
    """Be silent for this many seconds before the first byte."""
    close_after_chunks: int | None = None
    """Break the connection after this many chunks of a stream, or, whatever the number, in the middle of an answer that
    is not streamed."""
    close_after_bytes: int | None = None
    """Break the connection after this many bytes of the answer's body, unless it is shorter."""
    end_after_chunks: int | None = None
    """End a stream properly after this many chunks, as if it were complete."""
    stall_after_chunks: int | None = None
    """Send no more after this many chunks of a stream, and keep the connection open."""
    no_token_ids: bool = False
    """Ignore `return_token_ids`."""
    lost_response_ids: int = 0
    """Leave out the ids of this many response tokens, but count them in the usage."""
    lost_logprobs: int = 0
    """Leave out this many log-probabilities."""
    no_usage: bool = False
    chunk_delay_seconds: float = 0.0
    """Wait this many seconds before each chunk of a stream."""


@dataclass(frozen=True, slots=True)
class ServedCall:
    """One request and its true answer, as `FakeUpstream` remembers them. P prompt tokens, R response tokens."""

    response_id: str
    path: str
    headers: dict[str, str]
    request: Json
    prompt_ids: list[int]
    """Shape (P,)."""
    response_ids: list[int]
    """Shape (R,)."""
    logprobs: list[float]
    """Shape (R,); multiples of 1/64, which 32-bit floats hold exactly."""
    text: str
    finish_reason: str
    """The reason in the vocabulary of chat completions: stop, length or tool_calls."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class ApiAnswer(Protocol):
    """One answer in the format of one API."""

    def __init__(self, call: ServedCall, fault: Misbehaviour, *, policy_version: int | None) -> None: ...

    def whole(self) -> Json:
        """Return the answer to a request without `stream`."""
        ...

    def events(self) -> list[bytes]:
        """Return the server-sent events of the answer to a request with `stream`."""
        ...


class _OpenAIAnswer:
    """Chat completions and completions, with token ids where vLLM puts them."""

    def __init__(self, call: ServedCall, fault: Misbehaviour, *, policy_version: int | None) -> None:
        request = call.request
        self._call = call
        self._fault = fault
        self._chat = chat = call.path.endswith("chat/completions")
        self._with_ids = bool(request.get("return_token_ids")) and not fault.no_token_ids
        wished = request.get("logprobs")
        self._with_logprobs = wished is not None and wished is not False
        self._echo = str(request.get("prompt")) if request.get("echo") and not (chat or self._with_ids) else ""
        """The echoed prompt. Like vLLM, an answer with token ids leaves it out."""
        self._with_usage = bool(cast(Json, request.get("stream_options") or {}).get("include_usage"))
        self._policy_version = policy_version
        self._head = {
            "id": call.response_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": _CREATED,
            "model": request["model"],
        }

    def whole(self) -> Json:
        """Return the complete response in the form of the chat or the text-completions API."""
        call = self._call
        choice: Json = {"index": 0, "finish_reason": call.finish_reason, "logprobs": None}
        if self._chat:
            choice["message"] = self._message()
        else:
            choice["text"] = self._echo + call.text
        n_tokens = len(call.response_ids)
        answer: Json = {**self._head, "choices": [choice]}
        self._add_tokens(choice, 0, n_tokens)
        self._add_prompt_ids(answer, choice)
        if not self._fault.no_usage:
            answer["usage"] = self._usage()
        return answer

    def events(self) -> list[bytes]:
        """Return the server-sent events: for a chat the role, then a chunk for each token, and the usage if the request
        asks for it.
        """
        events = [b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n" for chunk in self._chunks()]
        return [*events, b"data: [DONE]\n\n"]

    def _message(self) -> Json:
        """Return the assistant's message of a chat."""
        call = self._call
        message: Json = {"role": "assistant", "content": call.text if call.text or not call.calls else None}
        if call.reasoning:
            message["reasoning"] = call.reasoning
        if call.calls:
            message["tool_calls"] = [
                {"id": tool.call_id, "type": "function", "function": {"name": tool.name, "arguments": tool.arguments}}
                for tool in call.calls
            ]
        return message

    def _chunks(self) -> list[Json]:
        """Return the stream's chunks: for a chat the role, then one per token, and one with the usage if the request
        asks for it.
        """
        call = self._call
        chunks: list[Json] = []
        if self._chat:
            chunks.append(self._chunk({"delta": {"role": "assistant", "content": ""}}, first=True))
        n_calls = 0
        for index, piece in enumerate(pieces_of(call.response_ids)):
            n_calls += piece.kind == "call"
            text = piece.text if index else self._echo + piece.text
            choice: Json = {"delta": _delta(piece, n_calls - 1)} if self._chat else {"text": text}
            if index == len(call.response_ids) - 1:
                choice["finish_reason"] = call.finish_reason
            self._add_tokens(choice, index, index + 1)
            chunks.append(self._chunk(choice, first=not chunks))
        if self._with_usage and not self._fault.no_usage:
            chunks.append({**self._chunk_head(), "choices": [], "usage": self._usage()})
        return chunks

    def _chunk_head(self) -> Json:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def _chunk(self, choice: Json, *, first: bool) -> Json:
        """Return a stream's chunk with one choice; the first also has the prompt's token ids."""
        choice = {"index": 0, "finish_reason": None, "logprobs": None, **choice}
        chunk: Json = {**self._chunk_head(), "choices": [choice]}
        if first:
            self._add_prompt_ids(chunk, choice)
        if self._with_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> Json:
        n_prompt, n_response = len(self._call.prompt_ids), len(self._call.response_ids)
        return {"prompt_tokens": n_prompt, "completion_tokens": n_response, "total_tokens": n_prompt + n_response}

    def _add_prompt_ids(self, answer: Json, choice: Json) -> None:
        """Add the prompt's ids where vLLM has them: in a chat's answer, in a completion's choice."""
        if self._with_ids:
            (answer if self._chat else choice)["prompt_token_ids"] = self._call.prompt_ids

    def _add_tokens(self, choice: Json, start: int, stop: int) -> None:
        """Add the ids and log-probabilities of the tokens `start` to `stop` to a choice, as far as the request asks for
        them. A fault may leave out the last ones.
        """
        call, n_tokens = self._call, len(self._call.response_ids)
        if self._with_ids:
            choice["token_ids"] = call.response_ids[start : min(stop, n_tokens - self._fault.lost_response_ids)]
            if self._policy_version is not None:
                choice["policy_versions"] = [self._policy_version] * len(choice["token_ids"])
        if not self._with_logprobs:
            return
        stop = min(stop, n_tokens - self._fault.lost_logprobs)
        drawn = list(zip(call.response_ids[start:stop], call.logprobs[start:stop], strict=True))
        if self._chat:
            choice["logprobs"] = {
                "content": [
                    {"token": f"token_id:{id_}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                    for id_, logprob in drawn
                ]
            }
        else:
            choice["logprobs"] = {
                "tokens": [f"token_id:{id_}" for id_, _ in drawn],
                "token_logprobs": [logprob for _, logprob in drawn],
                "top_logprobs": [],
                "text_offset": [0 for _ in drawn],
            }


def _delta(piece: Piece, call_index: int) -> Json:
    """Return the delta of a chat stream for one piece of the response.

    call_index: index of the tool call that the piece belongs to.
    """
    match piece.kind:
        case "text":
            return {"content": piece.text}
        case "reasoning":
            return {"reasoning": piece.text}
        case "call":
            id_, _, name = piece.text.partition("\n")
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": call_index, "id": id_, "type": "function", "function": function}]}
        case "arguments":
            return {"tool_calls": [{"index": call_index, "function": {"arguments": piece.text}}]}
        case "nothing":
            return {"content": ""}


class _MessagesAnswer:
    """Anthropic's messages. Reasoning has a signature, as from a server that checks reasoning when it is sent back."""

    def __init__(self, call: ServedCall, fault: Misbehaviour, *, policy_version: int | None) -> None:
        self._call = call

    def whole(self) -> Json:
        """Return the complete response in the form of Anthropic's API."""
        call = self._call
        content: list[Json] = []
        if call.reasoning:
            content.append({"type": "thinking", "thinking": call.reasoning, "signature": self._signature()})
        if call.text:
            content.append({"type": "text", "text": call.text})
        for tool in call.calls:
            content.append(
                {"type": "tool_use", "id": tool.call_id, "name": tool.name, "input": _parsed(tool.arguments)}
            )
        return self._message(content, self._stop_reason(), len(call.response_ids))

    def events(self) -> list[bytes]:
        """Return the response as Anthropic's events: a content block for each run of text, reasoning or a call."""
        call = self._call
        bodies: list[Json] = [{"type": "message_start", "message": self._message([], None, 1)}, {"type": "ping"}]
        index, kind = -1, ""
        for piece in pieces_of(call.response_ids):
            if piece.kind == "nothing":
                continue
            # A "call" piece (id and name) opens a block. The pieces after it are the arguments.
            wanted = "arguments" if piece.kind == "call" else piece.kind
            if kind and (kind != wanted or piece.kind == "call"):
                bodies += self._stop(index, kind)
            if kind != wanted or piece.kind == "call":
                index, kind = index + 1, wanted
                bodies.append({"type": "content_block_start", "index": index, "content_block": _block(piece)})
            if piece.kind != "call":
                types = {
                    "arguments": ("input_json_delta", "partial_json"),
                    "reasoning": ("thinking_delta", "thinking"),
                }
                name, field = types.get(piece.kind, ("text_delta", "text"))
                delta: Json = {"type": name, field: piece.text}
                bodies.append({"type": "content_block_delta", "index": index, "delta": delta})
        if kind:
            bodies += self._stop(index, kind)
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        bodies.append(
            {"type": "message_delta", "delta": delta, "usage": {"output_tokens": len(call.response_ids)}},
        )
        return [_named(body) for body in [*bodies, {"type": "message_stop"}]]

    def _stop(self, index: int, kind: str) -> list[Json]:
        signed: list[Json] = []
        if kind == "reasoning":
            delta = {"type": "signature_delta", "signature": self._signature()}
            signed.append({"type": "content_block_delta", "index": index, "delta": delta})
        return [*signed, {"type": "content_block_stop", "index": index}]

    def _message(self, content: list[Json], stop_reason: str | None, n_response: int) -> Json:
        """Return Anthropic's message object.

        n_response: the output tokens that its usage reports.
        """
        call = self._call
        usage = {"input_tokens": len(call.prompt_ids), "output_tokens": n_response}
        head = {"id": call.response_id, "type": "message", "role": "assistant", "model": call.request["model"]}
        return {**head, "content": content, "stop_reason": stop_reason, "stop_sequence": None, "usage": usage}

    def _stop_reason(self) -> str:
        return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[self._call.finish_reason]

    def _signature(self) -> str:
        return f"signed:{self._call.response_id}"


def _block(piece: Piece) -> Json:
    """Return the empty content block that a piece opens."""
    if piece.kind == "call":
        id_, _, name = piece.text.partition("\n")
        return {"type": "tool_use", "id": id_, "name": name, "input": {}}
    if piece.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


class _ResponsesAnswer:
    """OpenAI's responses. Reasoning comes with an `encrypted_content`, as from OpenAI's servers."""

    def __init__(self, call: ServedCall, fault: Misbehaviour, *, policy_version: int | None) -> None:
        self._call = call

    def whole(self) -> Json:
        reason = "incomplete" if self._call.finish_reason == "length" else "completed"
        return self._response(self._items(), reason)

    def events(self) -> list[bytes]:
        """Return the response as server-sent events of the Responses API: an output item for each run of text,
        reasoning or a call.
        """
        whole = self.whole()
        items = whole["output"]
        bodies: list[Json] = [
            {"type": f"response.{name}", "response": self._response([], "in_progress")}
            for name in ("created", "in_progress")
        ]
        index, kind = -1, ""
        for piece in pieces_of(self._call.response_ids):
            if piece.kind == "nothing":
                continue
            # A "call" piece (id and name) opens an item. The pieces after it are the arguments.
            wanted = "arguments" if piece.kind == "call" else piece.kind
            if kind != wanted or piece.kind == "call":
                bodies += _item_done(items[index], index) if kind else []
                index, kind = index + 1, wanted
                bodies += _item_added(items[index], index)
            if piece.kind != "call":
                event = {"arguments": "function_call_arguments", "reasoning": "reasoning_text"}.get(kind, "output_text")
                place = {"item_id": items[index]["id"], "output_index": index, "delta": piece.text}
                content: Json = {} if kind == "arguments" else {"content_index": 0}
                content |= {"logprobs": []} if kind == "text" else {}
                bodies.append({"type": f"response.{event}.delta", **place, **content})
        bodies += _item_done(items[index], index) if kind else []
        bodies.append({"type": f"response.{whole['status']}", "response": whole})
        return [_named({**body, "sequence_number": number}) for number, body in enumerate(bodies)]

    def _items(self) -> list[Json]:
        """Return the output items of the response: reasoning, message and function calls, if any."""
        call = self._call
        items: list[Json] = []
        if call.reasoning:
            thoughts = [{"type": "reasoning_text", "text": call.reasoning}]
            encrypted = f"encrypted:{call.response_id}"
            items.append({"type": "reasoning", "summary": [], "content": thoughts, "encrypted_content": encrypted})
        if call.text:
            content: list[Json] = [{"type": "output_text", "text": call.text, "annotations": [], "logprobs": []}]
            items.append({"type": "message", "role": "assistant", "status": "completed", "content": content})
        for tool in call.calls:
            head = {"type": "function_call", "call_id": tool.call_id, "status": "completed"}
            items.append({**head, **_named_function(call.request, tool.name), "arguments": tool.arguments})
        return [{**item, "id": f"{item['type'][:2]}_{call.response_id}_{n}"} for n, item in enumerate(items)]

    def _response(self, items: list[Json], status: str) -> Json:
        """Return the response object of the Responses API. Only a finished one has a usage."""
        call = self._call
        n_prompt, n_response = len(call.prompt_ids), len(call.response_ids)
        counted = {"input_tokens": n_prompt, "output_tokens": n_response, "total_tokens": n_prompt + n_response}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        head = {"id": call.response_id, "object": "response", "created_at": _CREATED, "status": status}
        fixed: Json = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None}
        return {
            **head,
            **fixed,
            "model": call.request["model"],
            "output": items,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if status == "in_progress" else {**counted, **details},
        }


def _named_function(request: Json, name: str) -> Json:
    """Return the fields of the function that the model calls `name`: a function of a namespace has two."""
    for tool in request.get("tools") or ():
        if tool.get("type") == "namespace" and name.startswith(f"{tool['name']}__"):
            short = name.removeprefix(f"{tool['name']}__")
            if any(each["name"] == short for each in tool["tools"]):
                return {"name": short, "namespace": tool["name"]}
    return {"name": name}


def _item_added(item: Json, index: int) -> list[Json]:
    """Return the events that begin an output item, still empty."""
    empty: Json = {"content": []} if "content" in item else {"arguments": ""}
    shown = {name: value for name, value in item.items() if name != "encrypted_content"}  # sent when the item ends
    begun = {**shown, **empty, "status": "in_progress"}
    added: list[Json] = [{"type": "response.output_item.added", "output_index": index, "item": begun}]
    if "content" in item:
        part = {**item["content"][0], "text": ""}
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        added.append({"type": "response.content_part.added", **place, "part": part})
    return added


def _item_done(item: Json, index: int) -> list[Json]:
    """Return the events that complete an output item."""
    place: Json = {"item_id": item["id"], "output_index": index}
    done: list[Json] = []
    if "content" in item:
        part = item["content"][0]
        logprobs: Json = {"logprobs": []} if part["type"] == "output_text" else {}
        place["content_index"] = 0
        done.append({"type": f"response.{part['type']}.done", **place, "text": part["text"], **logprobs})
        done.append({"type": "response.content_part.done", **place, "part": part})
    else:
        done.append({"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]})
    return [*done, {"type": "response.output_item.done", "output_index": index, "item": item}]


def _named(body: Json) -> bytes:
    return f"event: {body['type']}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"INVALID_JSON": arguments}


ANSWERS: dict[str, type[ApiAnswer]] = {
    "chat/completions": _OpenAIAnswer,
    "completions": _OpenAIAnswer,
    "messages": _MessagesAnswer,
    "responses": _ResponsesAnswer,
}
"""The class of answers for each route."""
