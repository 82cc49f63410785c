"""The tokens of `FakeUpstream`: one for each byte of UTF-8, and a few that no text contains.

Small, total and reversible, with the trap that real tokenizers have: a character can be several
tokens. The tokens that no text contains stand where chat templates have theirs: around reasoning
and calls, and at the end of an answer. So the prompt of the next turn begins with this turn's
prompt and answer, as long as the agent sends the answer back unchanged.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

END = 2
"""Ends an answer that is whole."""
_THINK, _THOUGHT, _CALL, _NAME, _ARGUMENTS, _CALLED = range(3, 9)
_FIRST_BYTE = 16


def encode(text: str) -> list[int]:
    """Return the token ids of `text`."""
    return [byte + _FIRST_BYTE for byte in text.encode()]


def decode(ids: Sequence[int]) -> str:
    """Return the text of token ids.

    Special ids have none; an unfinished character becomes U+FFFD.
    """
    return bytes(id_ - _FIRST_BYTE for id_ in ids if id_ >= _FIRST_BYTE).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model calls."""

    name: str
    arguments: str = "{}"
    """The arguments as the model writes them: JSON, unless the model makes a mistake."""
    call_id: str = ""
    """Empty in a reply: the server makes one up."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation. Only an assistant has reasoning and tool calls."""

    role: str
    """`tool` and the id of its call, for a result."""
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def prompt_ids_of(turns: Sequence[ChatTurn], tools: str = "") -> list[int]:
    """Return the prompt's token ids by the chat template: tools and turns, then the
    assistant's begin.
    """
    ids = encode(f"<tools>{tools}</>") if tools else []
    for turn in turns:
        ids += encode(f"<{turn.role}>")
        ids += response_ids_of(turn) if turn.role == "assistant" else encode(f"{turn.text}</>")
    return ids + encode("<assistant>")


def response_ids_of(turn: ChatTurn) -> list[int]:
    """Return the token ids that the model samples for this turn."""
    ids = [_THINK, *encode(turn.reasoning), _THOUGHT] if turn.reasoning else []
    ids += encode(turn.text)
    for call in turn.calls:
        ids += [_CALL, *encode(call.call_id), _NAME, *encode(call.name)]
        ids += [_ARGUMENTS, *encode(call.arguments), _CALLED]
    return [*ids, END]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of an answer that one token adds."""

    kind: Literal["text", "reasoning", "call", "arguments", "nothing"]
    text: str = ""
    """A character belongs to its last token. Of a `call`: the id and the name, with a
    line between them."""


def spoken(ids: Sequence[int]) -> Iterator[Piece]:
    """Yield the part of the answer that each token adds; an unfinished character is left out."""
    kind: Literal["text", "reasoning", "call", "arguments"] = "text"
    head = ""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    for id_ in ids:
        text = decoder.decode(bytes([id_ - _FIRST_BYTE])) if id_ >= _FIRST_BYTE else ""
        if id_ in (_THINK, _THOUGHT, _CALLED, END):
            kind = "reasoning" if id_ == _THINK else "text"
            yield Piece("nothing")
        elif id_ == _CALL:
            kind, head = "call", ""
            yield Piece("nothing")
        elif id_ == _ARGUMENTS:
            kind = "arguments"
            yield Piece("call", head)
        elif kind == "call":
            head += "\n" if id_ == _NAME else text
            yield Piece("nothing")
        else:
            yield Piece(kind, text) if text else Piece("nothing")
