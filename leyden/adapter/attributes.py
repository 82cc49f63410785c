"""Read structure from attributes: rebuild objects that were flattened to dotted names, and parse text that is JSON.

The module knows no convention. `normalise` knows what attributes mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from leyden._lib.json import Json


def unflatten(attributes: Mapping[str, Any], prefix: str) -> Any:
    """Return the object that was flattened under `prefix`: `a.0.x` and `a.1.x` are `[{"x": ...}, {"x": ...}]` for the
    prefix `a`.

    Names that are numbers make a list, in their order; other names beside them are left out. None if no attribute has
    the prefix.
    """
    tree: Json = {}
    for name, value in attributes.items():
        if name == prefix:
            return value
        if not name.startswith(prefix) or name[len(prefix)] != ".":
            continue
        at, *rest = name[len(prefix) + 1 :].split(".")
        here = tree
        for step in rest:
            below = here.setdefault(at, {})
            if not isinstance(below, dict):  # `a` has a value and `a.b`, too: `a.b` is kept
                below = here[at] = {}
            here, at = cast(Json, below), step
        here.setdefault(at, value)  # `a.b` came before `a`: it is kept
    return _with_lists(tree) if tree else None


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    tree = cast(Json, value)
    numbers = sorted((name for name in tree if name.isdecimal()), key=int)
    if numbers:
        return [_with_lists(tree[name]) for name in numbers]
    return {name: _with_lists(below) for name, below in tree.items()}


def parsed(value: Any) -> Any:
    """Return the value of text that is JSON, and any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def as_dict(value: Any) -> Json:
    """Return the value if it is a dict, else an empty dict."""
    return cast(Json, value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty list."""
    return cast(list[Any], value) if isinstance(value, list) else []
