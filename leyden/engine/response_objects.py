"""Write responses in OpenAI's wire format, whole and in chunks.

Pure functions; they know no model and no server. As in vLLM, `return_token_ids` adds `prompt_token_ids` at the top and
`token_ids` in each choice. Leyden adds `policy_versions` in each choice, one for each token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leyden._lib.json import Json
from leyden.dialects import sse_event, usage
from leyden.engine.wire import CompletionRequest


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the responses to a request, or the part of it in one chunk of a stream."""

    index: int
    """The index among the responses to the request."""
    text: str
    token_ids: list[int]
    logprobs: list[float]
    """The log-probability of each token."""
    policy_versions: list[int]
    """The policy's version when each token was sampled."""
    finish_reason: str | None
    text_offsets: Sequence[int] = ()
    """The offset of each token in the text of the whole response."""
    calls: Sequence[Json] = ()
    """Tool calls, as the wire format has them."""
    begins: bool = True
    """Whether this is the first chunk of its choice."""
    first_call: int = 0
    """The number of the first of `calls` within its choice."""


Pieces = Callable[[int], tuple[str, list[int]]]
"""A function that returns a token's text and its bytes (`Text.piece`)."""


def response(
    request: CompletionRequest, response_id: str, prompt_ids: list[int], choices: list[Choice], pieces: Pieces
) -> bytes:
    """Return the body of an answer that is not streamed, with all choices."""
    body = _body(request, response_id, choices, pieces, prompt_ids, chunked=False)
    body["usage"] = usage(len(prompt_ids), sum(len(choice.token_ids) for choice in choices))
    return json.dumps(body).encode()


def chunk(
    request: CompletionRequest,
    response_id: str,
    choice: Choice | None,
    pieces: Pieces,
    *,
    prompt_ids: list[int] | None = None,
    counted: Json | None = None,
) -> bytes:
    """Return one server-sent event with a part of one choice.

    choice: None for the last event, which has only the usage.
    prompt_ids: the prompt's ids, for the first event of an answer; None for the others.
    counted: the usage, for the last event.
    """
    body = _body(request, response_id, [] if choice is None else [choice], pieces, prompt_ids, chunked=True)
    if request.include_usage:
        body["usage"] = counted
    return sse_event(json.dumps(body).encode())


def _body(
    request: CompletionRequest,
    response_id: str,
    choices: Sequence[Choice],
    pieces: Pieces,
    prompt_ids: list[int] | None,
    *,
    chunked: bool,
) -> Json:
    """Return a response, or a chunk of a stream, without the usage."""
    kind = f"{request.kind}.chunk" if chunked and request.kind == "chat.completion" else request.kind
    body: Json = {"id": response_id, "object": kind, "created": int(time.time()), "model": request.model}
    if prompt_ids is not None and request.return_token_ids:
        body["prompt_token_ids"] = prompt_ids
    body["choices"] = [_choice(request, choice, pieces, chunked=chunked) for choice in choices]
    return body


def _choice(request: CompletionRequest, choice: Choice, pieces: Pieces, *, chunked: bool) -> Json:
    """Return one choice in the form of the chat or the text-completions API, with token ids and policy versions if the
    request has `return_token_ids`.

    chunked: whether the choice is part of a stream, where its message is called `delta`.
    """
    body: Json = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": None}
    if request.kind == "text_completion":
        body["text"] = choice.text
    else:
        body["delta" if chunked else "message"] = _message(choice, chunked=chunked)
    if request.logprobs:
        body["logprobs"] = _logprobs(request, choice, pieces)
    if request.return_token_ids:
        body["token_ids"] = choice.token_ids
        body["policy_versions"] = choice.policy_versions
    return body


def _message(choice: Choice, *, chunked: bool) -> Json:
    """Return a message, or the part of it that a chunk of a stream adds."""
    message: Json = {"role": "assistant"} if choice.begins else {}
    message["content"] = choice.text
    if choice.calls:
        numbered = enumerate(choice.calls, choice.first_call)
        calls = [{"index": index, **call} for index, call in numbered] if chunked else list(choice.calls)
        message |= {"content": choice.text or None, "tool_calls": calls}
    return message


def _logprobs(request: CompletionRequest, choice: Choice, pieces: Pieces) -> Json:
    """Return a choice's `logprobs` object: the log-probabilities of the sampled tokens, without alternatives."""
    tokens = [pieces(token) for token in choice.token_ids]
    if request.kind == "text_completion":
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": choice.logprobs,
            "top_logprobs": None,
            "text_offset": list(choice.text_offsets),
        }
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": raw, "top_logprobs": []}
            for (text, raw), logprob in zip(tokens, choice.logprobs, strict=True)
        ]
    }
