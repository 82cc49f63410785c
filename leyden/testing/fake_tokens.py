"""The tokens of `FakeUpstream`: one for each byte of UTF-8, and a few that no text contains.

Every text can be encoded and decoded again. As with real tokenizers, one character can be several tokens. The tokens
that no text contains stand where chat templates have theirs: around reasoning and calls, and at the end of an answer.
So the prompt of the next turn begins with this turn's prompt and answer, as long as the agent sends the answer back
unchanged.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

END = 2
"""The token that ends a complete answer."""
_THINK, _THOUGHT, _CALL, _NAME, _ARGUMENTS, _CALLED = range(3, 9)
"""Special tokens: around reasoning, then before the id, the name and the arguments of a tool call, and after it."""
_FIRST_BYTE = 16
"""The token of the byte 0. Smaller ids are special."""


def encode(text: str) -> list[int]:
    """Return the token ids of `text`."""
    return [byte + _FIRST_BYTE for byte in text.encode()]


def decode(ids: Sequence[int]) -> str:
    """Return the text of token ids. Special ids have no text; an incomplete character becomes U+FFFD."""
    return bytes(id_ - _FIRST_BYTE for id_ in ids if id_ >= _FIRST_BYTE).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a simulated model, as in `Reply(calls=(ToolCall("add", '{"a": 1}'),))`."""

    name: str
    arguments: str = "{}"
    """The arguments as the model writes them: the text of a JSON object, unless the model makes a mistake."""
    call_id: str = ""
    """The call's id. Empty in a reply: the server makes one up."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation. Only an assistant has reasoning and tool calls."""

    role: str
    """"system", "user" or "assistant"; "tool ID" for the result of the tool call ID."""
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def prompt_ids_of(turns: Sequence[ChatTurn], tools: str = "") -> list[int]:
    """Return the prompt's token ids by the chat template: the tools, the turns, and the start of an answer."""
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
    """The text that the token completes: a character of several bytes belongs to its last token. For a `call`: the id
    and the name, separated by a line feed."""


def pieces_of(ids: Sequence[int]) -> Iterator[Piece]:
    """Yield the part of an answer that each token adds. An incomplete character is left out."""
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
