"""Types of parsed JSON, and checks that narrow a value to them."""

from __future__ import annotations

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
