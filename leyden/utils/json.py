"""Types of parsed JSON, checks that narrow a value to them, and lines of JSON."""

from __future__ import annotations

import json
import math
from typing import Any, TypeAlias

from typing_extensions import TypeIs

Json: TypeAlias = dict[str, Any]
"""A parsed JSON object."""


def is_object(value: object) -> TypeIs[Json]:
    """Return whether a parsed value is a JSON object."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeIs[list[Any]]:
    """Return whether a parsed value is a JSON array."""
    return isinstance(value, list)


def json_line(content: Json) -> str:
    """Return an object as a line of JSON. NaN and infinity become null, because JSON lacks them.
    Other objects become their `str`.
    """
    return json.dumps(_finite(content), allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    """Return the value with None in place of NaN and infinity, also inside containers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_object(value):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if is_list(value) else value
