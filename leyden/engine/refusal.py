"""A request that the engine's endpoint refuses."""

from __future__ import annotations

import json
from typing import Any


class RequestError(Exception):
    """A refused request: the status, and the fields of OpenAI's error object."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def shown(value: Any) -> str:
    """A JSON value as an error message can hold it."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
