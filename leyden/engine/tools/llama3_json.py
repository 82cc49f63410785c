"""Llama's form: the whole response is `{"name": ..., "parameters": {...}}`, or several of them between semicolons.

Models that write it: Llama 3.1, 3.2 and 3.3, sometimes after `<|python_tag|>`. Code for the built-in interpreter, which
follows that token too, is content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from leyden.engine.tools.tool_parser import (
    Found,
    Outcome,
    Schemas,
    ToolCall,
    ToolParser,
    call_of,
    decode_json,
    json_calls,
)

_PYTHON_TAG = "<|python_tag|>"


class Llama3Json(ToolParser):
    """Reads Llama 3's tool calls: a response that consists only of JSON objects."""

    name = "llama3_json"
    markers = (_PYTHON_TAG, "{")
    tokens = (_PYTHON_TAG,)
    end = "}"
    at_start_only = True

    def read(self, text: str, schemas: Schemas, *, final: bool) -> Outcome:
        """Read all calls, once the response has ended. If other text follows them, the whole response is content."""
        if not final:
            return "unfinished"
        calls: list[ToolCall] = []
        at = len(_PYTHON_TAG) if text.startswith(_PYTHON_TAG) else 0
        while (found := decode_json(text, at)) is not None:
            value, at = found
            call = call_of(value, "parameters", "arguments")
            if call is None:
                return "not a call"
            calls.append(call)
            rest = text[at:].lstrip()
            if not rest:
                return Found(tuple(calls), len(text))
            at = len(text) - len(rest.removeprefix(";"))
        return "not a call"

    def grammar(self, arguments: Mapping[str, str], literal: Callable[[str], str], *, many: bool) -> dict[str, str]:
        """Return Lark rules for one call, whatever `many` says, because Llama's templates take only one in a message.
        `ToolParser.grammar` describes the parameters.
        """
        return {"calls": "call", **json_calls(arguments, "parameters")}
