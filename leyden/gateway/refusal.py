"""Errors in the shape that OpenAI clients read.

It knows HTTP statuses and OpenAI's error object, not why anything is refused.
"""

from __future__ import annotations

import json

__all__ = ["Refusal", "error_body"]


class Refusal(Exception):
    """The gateway's own answer in place of the model's."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    @property
    def kind(self) -> str:
        """OpenAI's `error.type`."""
        if self.status == 401:
            return "authentication_error"
        return "invalid_request_error" if self.status < 500 else "api_error"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """A refusal of the request itself is final: no client should send it again."""
        return [(b"x-should-retry", b"false")] if self.status < 500 else []

    def body(self) -> bytes:
        """OpenAI's error object."""
        return error_body(self.message, kind=self.kind, code=self.code, param=self.param)


def error_body(message: str, *, kind: str, code: str, param: str | None = None) -> bytes:
    """OpenAI's error object as JSON."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}, ensure_ascii=False).encode()
