"""Qwen3-Coder's form: XML with the arguments' text as it is.

    <tool_call> <function=get_weather> <parameter=city> Paris </parameter> </function> </tool_call>

The text of an argument becomes a value by the type that the tool's schema gives it.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from leyden._lib.json import Json
from leyden.engine.schema import resolved
from leyden.engine.tools.tool_parser import Found, Outcome, Schemas, ToolParser, call_of

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_WRAPPED = re.compile(r"<tool_call>\s*<function=([^>\n]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_BARE = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
_PYTHON = {"True": True, "False": False, "None": None}
"""Values as a template's `string` filter writes them."""


class Qwen3Coder(ToolParser):
    """Reads Qwen3-Coder's tool calls: a tag for the function and one for each argument."""

    name = "qwen3_coder"
    markers = (_BEGIN, _FUNCTION)
    tokens = (_BEGIN, _END)
    end = _FUNCTION_END

    def read(self, text: str, schemas: Schemas, *, final: bool) -> Outcome:
        """Read one call. The tag <tool_call> may be missing; </tool_call> only at the end of a response."""
        if _FUNCTION_END not in text:  # a cheap test, because this is called after each token of a long response
            return "not a call" if final else "unfinished"
        is_bare = final or text.startswith(_FUNCTION)
        found = _WRAPPED.match(text) or (_BARE.match(text) if is_bare else None)
        if found is None:
            return "not a call" if final else "unfinished"
        name, body = found[1], found[2]
        root = schemas.get(name) or {}
        described: Any = cast(Any, resolved(root, root) or {}).get("properties")
        properties = cast(Json, described) if isinstance(described, dict) else {}
        arguments: Json = {}
        end = 0
        for parameter in _PARAMETER.finditer(body):
            if body[end : parameter.start()].strip():
                return "not a call"
            end = parameter.end()
            arguments[parameter[1]] = _value(parameter[2], _types(properties.get(parameter[1]), root))
        call = call_of({"name": name, "arguments": arguments}, "arguments")
        return "not a call" if call is None or body[end:].strip() else Found((call,), found.end())


def _value(text: str, types: set[str]) -> Any:
    """Return the value of an argument, given its text and the types that its schema names. The text itself is the value
    if these are none or only strings, or if the text is not JSON.
    """
    if not types or types == {"string"}:
        return text
    try:
        value = _PYTHON[text] if text in _PYTHON else json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if "string" in types and value is not None else value  # of a string or null: `5` is a string


def _types(schema: Any, root: Json, depth: int = 8) -> set[str]:
    """Return the JSON types that a schema names, also by its values, by a reference to `root`, and within `anyOf`,
    `oneOf` and `allOf`.
    """
    found = resolved(root, schema)
    if not isinstance(found, dict) or not depth:
        return set()
    described = cast(Json, found)
    named = described.get("type")
    listed_types = cast(list[Any], named) if isinstance(named, list) else [named]
    types: set[str] = {each for each in listed_types if isinstance(each, str)}
    listed: Any = [described["const"]] if "const" in described else described.get("enum")
    if not types and isinstance(listed, list):
        types = {_NAMES[type(value)] for value in cast(list[Any], listed)}
    for word in ("anyOf", "oneOf", "allOf"):
        parts: Any = described.get(word)
        for part in cast(list[Any], parts) if isinstance(parts, list) else []:
            types |= _types(part, root, depth - 1)
    return types


_NAMES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
"""The JSON type of a Python value."""
