"""Errors as each dialect's clients read them: the body of an answer, and the event in a stream."""

from __future__ import annotations

import json
from typing import Any

from leyden.dialects.encoding import Json, dump, named_event, sse_event

_ANTHROPIC_TYPES = {
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


def openai_error_kind(status: int) -> str:
    """OpenAI's `error.type`."""
    if status == 401:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "api_error"


def openai_error(
    status: int, message: str, *, kind: str | None = None, code: str | None = None, param: str | None = None
) -> bytes:
    """OpenAI's error object as JSON. kind: `error.type`, if not the one of `status`."""
    error = {"message": message, "type": kind or openai_error_kind(status), "param": param, "code": code}
    return dump({"error": error})


def openai_error_event(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """OpenAI's error object as an event of a stream of chunks."""
    return sse_event(openai_error(status, message, code=code, param=param))


def responses_error_event(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """The Responses API's `error` event. It holds the error object too, on which OpenAI's clients raise."""
    error = json.loads(openai_error(status, message, code=code, param=param))
    body = {"type": "error", "sequence_number": 0, "code": code, "message": message, "param": param, **error}
    return named_event(body)


def anthropic_error(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """Anthropic's error object as JSON; it has no code and no parameter."""
    return dump(_anthropic(status, message))


def anthropic_error_event(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """Anthropic's `error` event."""
    return named_event(_anthropic(status, message))


def _anthropic(status: int, message: str) -> Json:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_message(raw: bytes) -> str:
    """What an upstream's error body says, whatever its dialect; the body itself if that cannot be seen."""
    try:
        body: Any = json.loads(raw)
        found: Any = body.get("error", body)
        message: Any = found if isinstance(found, str) else found.get("message")
    except (ValueError, AttributeError, RecursionError):
        message = None
    return message if isinstance(message, str) else raw.decode("utf-8", "replace")
