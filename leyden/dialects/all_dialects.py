"""The table of dialects. To add one, write its package and add it here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from leyden.dialects.dialect import Dialect
from leyden.dialects.messages import MESSAGES
from leyden.dialects.openai import CHAT, COMPLETIONS, EMBEDDINGS
from leyden.dialects.responses import RESPONSES

DIALECTS: Final[dict[str, Dialect]] = {
    dialect.name: dialect for dialect in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES)
}
"""Dialects by name. `chat` is the hub."""


def dialect_of_client(header_names: Iterable[bytes]) -> Dialect:
    """Return the dialect of a client by a header that only clients of that dialect send; chat if there is none.

    For requests whose route belongs to several dialects, such as `models`, and for refusals.
    header_names: the names of the request's headers, in lower case.
    """
    sent = set(header_names)
    marked = (dialect for dialect in DIALECTS.values() if dialect.mark and dialect.mark[0].encode() in sent)
    return next(marked, CHAT)
