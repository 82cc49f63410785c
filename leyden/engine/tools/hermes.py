"""Hermes's form: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call.

Models that write it: Nous Hermes 2 Pro and 3, Qwen2.5, Qwen3, and many that were tuned on their data.
"""

from __future__ import annotations

from leyden.engine.tools.base import Found, Outcome, Schemas, ToolParser, call_of, json_object

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes(ToolParser):
    """A JSON object between two tags."""

    name = "hermes"
    markers = (_BEGIN,)
    tokens = (_BEGIN, _END)
    end = _END

    def read(self, text: str, schemas: Schemas, *, final: bool) -> Outcome:
        """Read one call. A response that ends after the object may lack the closing tag."""
        end = text.find(_END)
        while end >= 0:
            call = call_of(json_object(text[len(_BEGIN) : end]), "arguments")
            if call is not None:
                return Found((call,), end + len(_END))
            end = text.find(_END, end + 1)  # this one may stand within a string of the arguments
        if not final:
            return "unfinished"
        call = call_of(json_object(text[len(_BEGIN) :]), "arguments")
        return "not a call" if call is None else Found((call,), len(text))
