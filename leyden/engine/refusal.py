"""Errors of a request that the engine's endpoint cannot serve."""

from __future__ import annotations

import json
from typing import Any

from leyden.host.http import Refusal


def bad_request(message: str, *, status: int = 400, param: str | None = None, code: str = "") -> Refusal:
    """Return the refusal of a request.

    param, code: the fields of OpenAI's error object; code "" leaves it null.
    """
    return Refusal(status, code, message, param=param)


def shown(value: Any) -> str:
    """Return a JSON value in the short form that an error message can hold."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
