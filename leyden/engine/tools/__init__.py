"""Read the tool calls in a model's responses: a parser for each family of models, and the reader.

To add a form, write a module with a `ToolParser` and add it to `PARSERS`. The order matters: the first parser that can
read a call as the model's own chat template writes it is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping

from leyden.engine.tools.hermes import Hermes
from leyden.engine.tools.llama3_json import Llama3Json
from leyden.engine.tools.mistral import Mistral
from leyden.engine.tools.qwen3_coder import Qwen3Coder
from leyden.engine.tools.tool_parser import Reader, Schemas, ToolCall, ToolParser, parse

__all__ = ["PARSERS", "Reader", "Schemas", "ToolCall", "ToolParser", "parse"]

PARSERS: Mapping[str, ToolParser] = {
    parser.name: parser
    for parser in (
        Hermes(),
        Qwen3Coder(),
        Llama3Json(),
        Mistral(),
    )
}
"""Parsers of tool calls, by the name of their form."""
