"""Anthropic's messages API as a `Dialect`: its fields, errors, key and list of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from leyden._lib.json import Json
from leyden.dialects.dialect import Dialect
from leyden.dialects.encoding import dump, named_event
from leyden.dialects.messages.answer import answer_from_chat, answer_to_chat
from leyden.dialects.messages.messages_stream import EventsFromChat, EventsToChat
from leyden.dialects.messages.request import request_from_chat, request_to_chat
from leyden.dialects.request_checks import INTEGER, LIST, OBJECT, TEXT_OR_LIST, FieldTypes
from leyden.dialects.sampling import FIELD_TYPES as SAMPLING_TYPES

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_FIELD_TYPES: FieldTypes = {
    **SAMPLING_TYPES,
    "messages": LIST,
    "system": TEXT_OR_LIST,
    "max_tokens": INTEGER,
    "stop_sequences": LIST,
    "tools": LIST,
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "output_config": OBJECT,
}


def anthropic_error(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """Return Anthropic's error object as JSON. It has no fields for `code` and `param`, which are ignored."""
    return dump(_error(status, message))


def anthropic_error_event(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """Return Anthropic's `error` event. `code` and `param` are ignored."""
    return named_event(_error(status, message))


def _error(status: int, message: str) -> Json:
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _models_page(names: Sequence[str]) -> Json:
    about = {"type": "model", "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    models = [{"id": name, "display_name": name, **about} for name in names]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"data": models, "has_more": False, **ends}


MESSAGES: Final = Dialect(
    name="messages",
    path="messages",
    operation="chat",
    request_to_chat=request_to_chat,
    request_from_chat=request_from_chat,
    answer_to_chat=answer_to_chat,
    answer_from_chat=answer_from_chat,
    events_to_chat=EventsToChat,
    events_from_chat=EventsFromChat,
    error=anthropic_error,
    error_event=anthropic_error_event,
    models_page=_models_page,
    field_types=_FIELD_TYPES,
    count_path="messages/count_tokens",
    key_header="x-api-key",
    key_scheme="",
    mark=("anthropic-version", "2023-06-01"),
)
