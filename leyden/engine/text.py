"""Encode and decode text: responses, single tokens, stop strings, text that arrives in pieces.

The module knows a tokenizer of transformers and nothing else. `Text` may be used by several threads.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character for a space in the names of SentencePiece's tokens."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level() -> dict[str, int]:
    """Return the byte for each character of the byte-level alphabet (GPT-2): printable characters of Latin-1 are
    themselves, and the other bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_level()


class Text:
    """Encodes text and decodes token ids with a model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._pieces: dict[int, tuple[str, list[int]]] = {}
        """The text and the UTF-8 bytes of each token id that was decoded alone."""
        # The Rust tokenizer does not clean up spaces, and is called ten times as fast.
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        decoder = (
            b"" if self._backend is None else bytes(getattr(self._backend.decoder, "__getstate__", bytes)() or b"")
        )
        self._is_byte_level = b'"ByteLevel"' in decoder
        """Whether each character of a token's name stands for one byte."""
        self._has_byte_tokens = b'"ByteFallback"' in decoder or self._backend is None
        """Whether a token such as <0x0A> is one byte."""
        self._decode_directly = self._backend is not None and not getattr(
            tokenizer, "clean_up_tokenization_spaces", False
        )

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text.

        special: whether to add the tokens that the tokenizer puts around a plain text, such as a begin-of-text token.
        """
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=special).ids
        return self.tokenizer.encode(text, add_special_tokens=special)

    def decode(self, ids: Sequence[int], kept: AbstractSet[int] = frozenset()) -> str:
        """Return the text of token ids without special tokens, except those in `kept`."""
        if kept.isdisjoint(ids):
            return self._decode(ids)
        parts: list[str] = []
        start = 0
        for index, token in enumerate(ids):
            if token in kept:
                parts += [self._decode(ids[start:index]), self.piece(token)[0]]
                start = index + 1
        return "".join([*parts, self._decode(ids[start:])])

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special ones, by the tokenizer's Rust backend where that gives the same."""
        if self._decode_directly:
            return self._backend.decode(ids, skip_special_tokens=True)
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def piece(self, token_id: int) -> tuple[str, list[int]]:
        """Return one token as text, with special tokens written out, and its bytes.

        A token that is part of a character shows as U+FFFD; its bytes are exact.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            raw = self._bytes_of(token_id)
            piece = self._pieces[token_id] = (raw.decode(errors="replace"), list(raw))
        return piece

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is no part of a decoded text."""
        added: Any = self.tokenizer.added_tokens_decoder.get(token_id)
        return added is not None and bool(added.special)

    def _bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text: those of its name, which the tokenizer's decoder writes."""
        added: Any = self.tokenizer.added_tokens_decoder.get(token_id)
        if added is not None:
            return str(added.content).encode()
        name: Any = self.tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(name, bytes):
            return name
        if isinstance(name, str):
            if self._is_byte_level and all(character in _BYTES for character in name):
                return bytes(_BYTES[character] for character in name)
            if self._has_byte_tokens and (found := _BYTE_TOKEN.fullmatch(name)):
                return bytes([int(found[1], 16)])
            if self._has_byte_tokens or _SPACE in name:
                return name.replace(_SPACE, " ").encode()  # decoded alone, it would lose its space
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False)).encode()

    def ends_with_stop(self, stops: Sequence[str], ids: Sequence[int]) -> bool:
        """Return whether the last of `ids` completes one of the stop strings.

        Only as many tokens are decoded as a stop string can consist of.
        """
        # A character has at most four bytes, and so tokens. Four more: the text may begin within
        # one.
        text = self.decode(ids[-(4 * max(map(len, stops)) + 4) :])
        return any(stop in text for stop in stops)


class StreamedText:
    """Decodes a growing list of ids, in pieces of text that no later id can change."""

    def __init__(self, text: Text, stops: Sequence[str], kept: AbstractSet[int] = frozenset()) -> None:
        """stops: strings at which the text ends.
        kept: special tokens that are part of the text.
        """
        self._text = text
        self._stops = stops
        self._kept = kept
        self._sent = 0
        """The number of characters that have been returned."""

    def advance(self, ids: Sequence[int], *, final: bool) -> str:
        """Return the text that is new since the last call and certain: an unfinished character, and text that may begin
        a stop string, are held back.

        ids: all ids so far.
        final: whether no more ids will come, so that nothing is held back.
        """
        whole = cut_at_stop(self._text.decode(ids, self._kept), self._stops)
        end = len(whole) if final else self._safe_end(whole)
        piece = whole[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _safe_end(self, whole: str) -> int:
        """Return the number of certain characters: without an incomplete character at the end, and without the
        beginning of a stop string.
        """
        end = len(whole)
        while end and whole[end - 1] == _REPLACEMENT:
            end -= 1
        return end - begun_length(whole[:end], self._stops)


class Offsets:
    """Counts the characters of a response before each of its tokens."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n: int | None = None
        """The number of complete characters so far; None before the first token."""

    def of(self, ids: Sequence[int]) -> list[int]:
        """Return the offset of each of the next tokens in the response's text. All tokens of a character have its
        offset; special tokens, which the text lacks, add nothing.
        """
        offsets: list[int] = []
        for token in ids:
            piece, raw = self._text.piece(token)
            if self._n is None:  # some tokenizers drop the space at the beginning of a text
                self._n = -1 if piece.startswith(" ") and not self._text.decode([token]).startswith(" ") else 0
            offsets.append(max(self._n, 0))
            self._n += 0 if self._text.is_special(token) else len(self._decoder.decode(bytes(raw)))
        return offsets


def begun_length(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of a text with which one of the marks may begin."""
    longest = max(map(len, marks), default=1) - 1
    ends = ((length, text[-length:]) for length in range(min(longest, len(text)), 0, -1))
    return next((n for n, end in ends if any(len(mark) > n and mark.startswith(end) for mark in marks)), 0)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return `text` up to the first stop string in it; all of it if there is none."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
