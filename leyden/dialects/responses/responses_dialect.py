"""OpenAI's Responses API as a `Dialect`: its fields, errors and kept responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from leyden._lib.json import Json
from leyden.dialects.dialect import Dialect
from leyden.dialects.encoding import named_event
from leyden.dialects.openai import openai_error, openai_models_page
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
from leyden.dialects.responses.answer import answer_from_chat, answer_to_chat
from leyden.dialects.responses.request import input_items, request_from_chat, request_to_chat
from leyden.dialects.responses.responses_stream import EventsFromChat, EventsToChat
from leyden.dialects.sampling import FIELD_TYPES as SAMPLING_TYPES

_FIELD_TYPES: FieldTypes = {
    **SAMPLING_TYPES,
    "input": TEXT_OR_LIST,
    "instructions": STRING,
    "max_output_tokens": INTEGER,
    "previous_response_id": STRING,
    "store": BOOLEAN,
    "include": LIST,
    "reasoning": OBJECT,
    "text": OBJECT,
    "tools": LIST,
    "tool_choice": TEXT_OR_OBJECT,
    "parallel_tool_calls": BOOLEAN,
    "top_logprobs": INTEGER,
    "background": BOOLEAN,
    "truncation": STRING,
}


def _error_event(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """Return the `error` event. It also holds the error object, because OpenAI's clients raise that."""
    error = json.loads(openai_error(status, message, code=code, param=param))
    body = {"type": "error", "sequence_number": 0, "code": code, "message": message, "param": param, **error}
    return named_event(body)


class _Conversations:
    """Responses that are continued with `previous_response_id`."""

    def previous(self, request: Json) -> str | None:
        return request.get("previous_response_id")

    def with_history(self, request: Json, items: Sequence[Json]) -> Json:
        return {**request, "previous_response_id": None, "input": [*items, *input_items(request)]}

    def items(self, request: Json, response: Json) -> list[Json] | None:
        return None if request.get("store") is False else [*input_items(request), *response["output"]]

    def deleted(self, response_id: str) -> Json:
        return {"id": response_id, "object": "response", "deleted": True}


RESPONSES: Final = Dialect(
    name="responses",
    path="responses",
    operation="chat",
    request_to_chat=request_to_chat,
    request_from_chat=request_from_chat,
    answer_to_chat=answer_to_chat,
    answer_from_chat=answer_from_chat,
    events_to_chat=EventsToChat,
    events_from_chat=EventsFromChat,
    error=openai_error,
    error_event=_error_event,
    models_page=openai_models_page,
    field_types=_FIELD_TYPES,
    count_path="responses/input_tokens",
    count_answer=lambda count: {"object": "response.input_tokens", "input_tokens": count},
    conversations=_Conversations(),
)
