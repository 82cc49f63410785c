"""The tokens of `FakeUpstream`: one for each byte of UTF-8, and a few that no text contains.

Small, total and reversible, with the trap that real tokenizers have: a character can be several tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["END", "decode", "encode", "prompt_text"]

END = 2
"""Ends an answer that is whole."""
_FIRST_BYTE = 16


def encode(text: str) -> list[int]:
    """The ids of `text`."""
    return [byte + _FIRST_BYTE for byte in text.encode()]


def decode(ids: Sequence[int]) -> str:
    """The text of `ids`; special ids have none, and an unfinished character becomes U+FFFD."""
    return bytes(id_ - _FIRST_BYTE for id_ in ids if id_ >= _FIRST_BYTE).decode("utf-8", "replace")


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The chat template: messages as text, ready for the assistant to go on."""
    turns = [f"<{message.get('role')}>{_content(message.get('content'))}</>" for message in messages]
    return "".join(turns) + "<assistant>"


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType] -- parts of a message are untyped JSON
    return "" if content is None else str(content)
