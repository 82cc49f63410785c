"""Hermes's form: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call.

Models that write it: Nous Hermes 2 Pro and 3, Qwen2.5, Qwen3, and many that were tuned on their data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from leyden.engine.tools.tool_parser import Found, Outcome, Schemas, ToolParser, call_of, decode_json, json_calls

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes(ToolParser):
    """Tool calls in the form of Hermes: a JSON object between `<tool_call>` tags."""

    name = "hermes"
    markers = (_BEGIN,)
    tokens = (_BEGIN, _END)
    end = _END

    def read(self, text: str, schemas: Schemas, *, final: bool) -> Outcome:
        """Read one call. A response that ends after the object may lack the closing tag."""
        if not final and _END not in text:
            return "unfinished"
        found = decode_json(text, len(_BEGIN))
        call = None if found is None else call_of(found[0], "arguments")
        if found is None or call is None:
            return "not a call" if final or found else "unfinished"
        rest = text[found[1] :].lstrip()
        if rest.startswith(_END):
            return Found((call,), len(text) - len(rest) + len(_END))
        if final and not rest:
            return Found((call,), len(text))
        return "not a call" if final or not _END.startswith(rest) else "unfinished"

    def grammar(self, arguments: Mapping[str, str], literal: Callable[[str], str], *, many: bool) -> dict[str, str]:
        """Return rules for tags around each JSON object, with a line for each call."""
        return {
            "calls": 'tagged ("\\n" tagged)*' if many else "tagged",
            "tagged": f'{literal(_BEGIN)} "\\n" call "\\n" {literal(_END)}',
            **json_calls(arguments, "arguments"),
        }
