"""Encode and decode text: responses, single tokens, stop strings, text that arrives in pieces.

The module knows a tokenizer of transformers and nothing else. `Text` may be used by several
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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
        self._decode_directly = self._backend is not None and not getattr(
            tokenizer, "clean_up_tokenization_spaces", False
        )

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text. special: whether to add the tokens that the tokenizer
        puts around a plain text, such as a begin-of-text token.
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
        for place, token in enumerate(ids):
            if token in kept:
                parts += [self._decode(ids[start:place]), self.piece(token)[0]]
                start = place + 1
        return "".join([*parts, self._decode(ids[start:])])

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special ones. It uses the tokenizer's Rust backend
        where that gives the same.
        """
        if self._decode_directly:
            return self._backend.decode(ids, skip_special_tokens=True)
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def piece(self, token_id: int) -> tuple[str, list[int]]:
        """Return one token as text, with special tokens written out, and as UTF-8 bytes.

        A token that is part of a character shows as U+FFFD; its id is exact.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            text = self.tokenizer.decode([token_id], skip_special_tokens=False)
            piece = self._pieces[token_id] = (text, list(text.encode()))
        return piece

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
        """stops: strings at which the text ends. kept: special tokens that are part of the text."""
        self._text = text
        self._stops = stops
        self._kept = kept
        self._sent = 0
        """The number of characters that have been returned."""

    def advance(self, ids: Sequence[int], *, final: bool) -> str:
        """Return the text that is new since the last call and certain: an unfinished character, and
        text that may begin a stop string, are held back.

        ids: all ids so far. final: whether no more ids will come, so that nothing is held back.
        """
        whole = cut_at_stop(self._text.decode(ids, self._kept), self._stops)
        end = len(whole) if final else self._safe_end(whole)
        piece = whole[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _safe_end(self, whole: str) -> int:
        """Return the number of certain characters: without an incomplete character at the end, and
        without the beginning of a stop string.
        """
        end = len(whole)
        while end and whole[end - 1] == _REPLACEMENT:
            end -= 1
        return end - begun_length(whole[:end], self._stops)


def begun_length(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of a text with which one of the marks may begin."""
    longest = max(map(len, marks), default=1) - 1
    ends = ((length, text[-length:]) for length in range(min(longest, len(text)), 0, -1))
    return next((n for n, end in ends if any(len(mark) > n and mark.startswith(end) for mark in marks)), 0)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return `text` up to the first stop string in it; all of it if there is none."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
