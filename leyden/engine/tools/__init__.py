"""Tool calls in what a model writes: the forms that are known, and the reader of a response.

To add a form, write a module with a `ToolParser` and put it into `PARSERS`. The order matters: the first parser that
reads a call as the model's own chat template writes it is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping

from leyden.engine.tools.base import Call, Reader, Schemas, ToolParser, parse
from leyden.engine.tools.hermes import Hermes

__all__ = ["PARSERS", "Call", "Reader", "Schemas", "ToolParser", "parse"]

PARSERS: Mapping[str, ToolParser] = {parser.name: parser for parser in (Hermes(),)}
"""By name."""
