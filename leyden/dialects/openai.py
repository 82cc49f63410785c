"""OpenAI's chat, completions and embeddings APIs.

Chat is the form that all dialects are translated to, so its own translations change nothing. Completions and embeddings
are passed on as they are and never translated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from leyden._lib.json import Json
from leyden.dialects.dialect import Dialect
from leyden.dialects.encoding import DONE, dump, sse_event
from leyden.dialects.request_checks import (
    BOOLEAN,
    INTEGER,
    LIST,
    OBJECT,
    STRING,
    TEXT_OR_LIST,
    TEXT_OR_OBJECT,
    FieldTypes,
)
from leyden.dialects.sampling import FIELD_TYPES as SAMPLING_TYPES

_OPENAI: FieldTypes = {
    **SAMPLING_TYPES,
    "n": INTEGER,
    "seed": INTEGER,
    "max_tokens": INTEGER,
    "stop": TEXT_OR_LIST,
    "return_token_ids": BOOLEAN,
}
_CHAT: FieldTypes = {
    **_OPENAI,
    "messages": LIST,
    "max_completion_tokens": INTEGER,
    "logprobs": BOOLEAN,
    "top_logprobs": INTEGER,
    "tools": LIST,
    "tool_choice": TEXT_OR_OBJECT,
    "parallel_tool_calls": BOOLEAN,
    "response_format": OBJECT,
    "reasoning_effort": STRING,
    "store": BOOLEAN,
}
_COMPLETIONS: FieldTypes = {
    **_OPENAI,
    "prompt": TEXT_OR_LIST,
    "suffix": STRING,
    "echo": BOOLEAN,
    "logprobs": (bool, int),
}
_EMBEDDINGS: FieldTypes = {
    "input": TEXT_OR_LIST,
    "encoding_format": STRING,
    "dimensions": INTEGER,
    "user": STRING,
}


def openai_error_kind(status: int) -> str:
    """Return OpenAI's `error.type` for an HTTP status."""
    if status == 401:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "api_error"


def openai_error(
    status: int, message: str, *, kind: str | None = None, code: str | None = None, param: str | None = None
) -> bytes:
    """Return OpenAI's error object as JSON.

    kind: `error.type`; None: the one that fits the status.
    """
    error = {"message": message, "type": kind or openai_error_kind(status), "param": param, "code": code}
    return dump({"error": error})


def openai_error_event(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """Return OpenAI's error object as an event of a stream of chunks."""
    return sse_event(openai_error(status, message, code=code, param=param))


def openai_models_page(names: Sequence[str]) -> Json:
    """Return OpenAI's list of models."""
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "leyden"} for name in names]
    return {"object": "list", "data": models}


class _Chunks:
    """Turns chat's chunks into server-sent events, without a translation."""

    def __init__(self, request: Json) -> None: ...

    def feed(self, chunk: Json) -> list[bytes]:
        return [sse_event(dump(chunk))]

    def end(self) -> list[bytes]:
        return [sse_event(DONE)]


class _Events:
    """Returns the events of a chat stream as chunks, without a translation."""

    ended = False
    """Always False: a stream ends by `[DONE]`, which is no JSON and is never fed."""

    def feed(self, event: Json) -> list[Json]:
        return [event]


def _unchanged(value: Json) -> Json:
    return value


def _openai(
    name: str,
    path: str,
    operation: str,
    field_types: Mapping[str, tuple[type, ...]],
    *,
    translates: bool,
    logprobs: bool | int | None,
) -> Dialect:
    """Return one of OpenAI's own dialects, whose requests need no translation to chat."""
    return Dialect(
        name=name,
        path=path,
        operation=operation,
        request_to_chat=_unchanged,
        request_from_chat=_unchanged,
        answer_to_chat=_unchanged,
        answer_from_chat=lambda answer, request: answer,
        events_to_chat=_Events,
        events_from_chat=_Chunks,
        error=openai_error,
        error_event=openai_error_event,
        models_page=openai_models_page,
        field_types=field_types,
        translates=translates,
        logprobs=logprobs,
    )


CHAT: Final = _openai("chat", "chat/completions", "chat", _CHAT, translates=True, logprobs=True)
COMPLETIONS: Final = _openai(
    "completions", "completions", "text_completion", _COMPLETIONS, translates=False, logprobs=0
)
EMBEDDINGS: Final = _openai("embeddings", "embeddings", "embeddings", _EMBEDDINGS, translates=False, logprobs=None)
