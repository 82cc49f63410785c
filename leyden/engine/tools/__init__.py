"""Tool calls in what a model writes: the forms that are known, and the reader of a response.

To add a form, write a module with a `ToolParser` and put it into `PARSERS`. The order matters: the
first parser that reads a call as the model's own chat template writes it is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping

from leyden.engine.tools.base import Reader, Schemas, ToolCall, ToolParser, parse
from leyden.engine.tools.hermes import Hermes
from leyden.engine.tools.llama3_json import Llama3Json
from leyden.engine.tools.mistral import Mistral
from leyden.engine.tools.qwen3_coder import Qwen3Coder

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
