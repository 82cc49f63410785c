"""Check a request before any model sees it: its JSON, and the types of its fields.

A server would reject a malformed request with another error, or read it differently than the gateway's record says.
Each dialect has a table of the fields that its API defines, with the JSON types that they take; null is the same as
leaving a field out. The server checks all other fields, and the values themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from pydantic_core import from_json

from leyden._lib.json import Json
from leyden.dialects.fields import shown

Types = tuple[type, ...]
"""The Python types of the JSON values that a field takes."""
FieldTypes = Mapping[str, Types]
"""Types by the field's name."""

STRING: Types = (str,)
BOOLEAN: Types = (bool,)
INTEGER: Types = (int,)
NUMBER: Types = (int, float)
OBJECT: Types = (dict,)
LIST: Types = (list,)
TEXT_OR_LIST: Types = (str, list)
TEXT_OR_OBJECT: Types = (str, dict)

_NAMES: Mapping[Types, str] = {
    STRING: "a string",
    BOOLEAN: "true or false",
    INTEGER: "an integer",
    NUMBER: "a number",
    OBJECT: "an object",
    LIST: "a list",
    TEXT_OR_LIST: "a string or a list",
    TEXT_OR_OBJECT: "a string or an object",
    (bool, int): "true, false or an integer",
}
"""The types in words, for messages."""
_OF_OBJECTS = ("messages", "tools")
"""Fields whose lists hold only objects."""


class WrongType(ValueError):
    """A field of a request has a type that its API does not take."""

    def __init__(self, field: str, wanted: str, value: Any) -> None:
        """field: the path of the field, such as `messages[2]`.
        wanted: its types in words.
        """
        super().__init__(f"{field} must be {wanted}, got {shown(value)}")
        self.field = field


def parse_request(raw: bytes) -> Json:
    """Parse the body of a request. Raise ValueError or RecursionError unless it is a JSON object of finite numbers."""
    try:
        request: Any = from_json(raw, allow_inf_nan=False, cache_strings="keys")
    except ValueError:
        # pydantic's parser is fast but refuses half a surrogate pair, other encodings than UTF-8
        # and deep nesting, which Python's accepts. It raises again for NaN and for no JSON at all.
        request = json.loads(raw, parse_constant=_refused)
    if not isinstance(request, dict):
        raise ValueError(f"it is a JSON {type(request).__name__}; it must be an object")
    _check_finite(cast(Json, request))
    return cast(Json, request)


def check_types(request: Json, fields: FieldTypes) -> None:
    """Raise WrongType for the first field whose value has none of the field's types.

    null and unknown fields pass. A whole float such as 3.0 passes as an integer.
    """
    for name, value in request.items():
        types = fields.get(name)
        if types is None or value is None:
            continue
        if not (type(value) in types or (int in types and isinstance(value, float) and value.is_integer())):
            raise WrongType(name, _NAMES[types], value)
        if name in _OF_OBJECTS:
            for index, item in enumerate(cast(list[Any], value)):
                if not isinstance(item, dict):
                    raise WrongType(f"{name}[{index}]", "an object", item)


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def _check_finite(request: Json) -> None:
    """Raise ValueError for a number that is too large for a float, such as 1e999, which parsers read as infinity."""
    left: list[Any] = [request]
    while left:
        value: Any = left.pop()
        items: Iterable[Any] = cast(Json, value).values() if type(value) is dict else value
        for item in items:
            if isinstance(item, dict | list):
                left.append(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise ValueError("a number is too large for a float (such as 1e999)")
