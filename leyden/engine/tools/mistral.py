"""Mistral's forms: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and `[TOOL_CALLS]name[ARGS]{...}`.

Models up to Mistral Nemo and Small 3 write a list after one marker, newer ones a marker for each call. The ids that a
model writes are not read: each call gets a new id of nine letters and digits, which Mistral's templates require.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from leyden.engine.tools.tool_parser import Found, Outcome, Schemas, ToolParser, call_of, decode_json, json_calls

_MARKER, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


class Mistral(ToolParser):
    """Reads Mistral's tool calls: JSON after a special token."""

    name = "mistral"
    markers = (_MARKER,)
    tokens = (_MARKER, _ARGUMENTS, _CALL_ID)
    end = "}"
    call_id_length = 9

    def read(self, text: str, schemas: Schemas, *, final: bool) -> Outcome:
        """Read a list of calls, or one call. A list may lack its end where the response ends."""
        named = _NAME.match(text, len(_MARKER))
        is_list = text[len(_MARKER) :].lstrip().startswith("[")
        found = decode_json(text, named.end() if named else len(_MARKER)) if named or is_list else None
        if found is None and is_list and final:
            closed = text.rstrip().removesuffix(",") + "]"  # a response that may hold one call ends after it
            if (found := decode_json(closed, len(_MARKER))) is not None:
                found = found[0], len(text)
        if found is None:
            return "not a call" if final else "unfinished"
        value, end = found
        if named:
            call = call_of({"name": named[1], "arguments": value}, "arguments")
            return "not a call" if call is None else Found((call,), end)
        calls = [call_of(item, "arguments") for item in cast(list[Any], value)]
        known = tuple(call for call in calls if call is not None)
        return Found(known, end) if known and len(known) == len(calls) else "not a call"

    def grammar(self, arguments: Mapping[str, str], literal: Callable[[str], str], *, many: bool) -> dict[str, str]:
        """Return the grammar of the older form, a list of calls, which old and new models can write."""
        calls = 'call (", " call)*' if many else "call"
        return {"calls": f'{literal(_MARKER)} "[" {calls} "]"', **json_calls(arguments, "arguments")}
