"""Markup that recorded text cannot get into: every text that is no `Html` is escaped, wherever it is put."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, cast

from leyden._lib.formatting import harmless


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def html(content: Any) -> Html:
    """Return content as markup: `Html` as it is, None as nothing, lists item by item, any other value as its text.

    Control characters and marks that reverse the direction of text are shown as the terminal shows them.
    """
    if isinstance(content, Html):
        return content
    if isinstance(content, list | tuple):
        return Html("".join(map(html, cast("Sequence[Any]", content))))
    return Html("" if content is None else escape(harmless(str(content))))


def tag(name: str, *content: Any, **attributes: Any) -> Html:
    """Return an element. Attributes that are None or empty are left out; `class_` is `class`."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value not in (None, "")}
    opening = "".join([name, *(f' {key}="{html(value)}"' for key, value in given.items())])
    return Html(f"<{opening}>{html(content)}</{name}>")
