"""The gateway's own answers in place of the model's.

It knows HTTP statuses, not why anything is refused, and leaves the shape to the dialect of whoever asked.
"""

from __future__ import annotations

from leyden.dialects import Dialect
from leyden.redaction import redact


class Refusal(Exception):
    """An error that the gateway tells an agent."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_seconds: int | None = None
    ) -> None:
        """retry_after_seconds: when the same request may succeed."""
        self.message = redact(message)
        super().__init__(self.message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """A refusal of the request itself is final: no client should send it again."""
        if self.retry_after_seconds is not None:
            return [(b"retry-after", str(self.retry_after_seconds).encode())]
        return [(b"x-should-retry", b"false")] if self.status < 500 else []

    def body(self, dialect: Dialect) -> bytes:
        """The error as clients of `dialect` read it."""
        return dialect.error(self.status, self.message, code=self.code, param=self.param)

    def event(self, dialect: Dialect) -> bytes:
        """The error as an event of a stream."""
        return dialect.error_event(self.status, self.message, code=self.code, param=self.param)
