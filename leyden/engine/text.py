"""Between text and token ids: chat prompts, responses, single tokens, stop strings, text that arrives in pieces.

It knows a tokenizer of transformers and nothing else. Its methods may be called from several threads.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

__all__ = ["StreamedText", "Text"]

_REMEMBERED_PROMPTS = 4096
_REMEMBERED_LENGTH = 8192
"""Characters; longer prompts are seldom the same twice, and would fill the memory."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Text:
    """A tokenizer with its chat template, remembering recent prompts: agents repeat theirs a lot."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._prompts: OrderedDict[str, list[int]] = OrderedDict()
        self._pieces: dict[int, tuple[str, list[int]]] = {}
        # The Rust tokenizer underneath does no clean-up and is an order of magnitude quicker to call.
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._decode_directly = self._backend is not None and not getattr(
            tokenizer, "clean_up_tokenization_spaces", False
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat_prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """The ids of a conversation, ready for the assistant's turn; do not change the list.

        Raises what the template raises when it refuses the messages.
        """
        key = json.dumps(messages)
        ids = self._prompts.get(key)
        if ids is not None:
            self._prompts.move_to_end(key)
            return ids
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = self.encode(text, special=False)
        if len(key) <= _REMEMBERED_LENGTH:
            self._prompts[key] = ids
            while len(self._prompts) > _REMEMBERED_PROMPTS:
                self._prompts.popitem(last=False)
        return ids

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids. special: add the tokens that the tokenizer puts around a plain text."""
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=special).ids
        return self.tokenizer.encode(text, add_special_tokens=special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        if self._decode_directly:
            return self._backend.decode(ids, skip_special_tokens=True)
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def piece(self, token_id: int) -> tuple[str, list[int]]:
        """One token as text, special tokens written out, and as UTF-8 bytes.

        A token that is part of a character shows as U+FFFD; its id is the truth.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            text = self.tokenizer.decode([token_id], skip_special_tokens=False)
            piece = self._pieces[token_id] = (text, list(text.encode()))
        return piece

    def ends_with_stop(self, stops: Sequence[str], ids: Sequence[int]) -> bool:
        """Whether the last of `ids` completes one of `stops`; decodes only as far back as those can reach."""
        text = self.decode(ids[-(4 * max(map(len, stops)) + 4) :])
        return any(stop in text for stop in stops)


class StreamedText:
    """The text of a growing list of ids, in pieces that are final."""

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        self._text = text
        self._stops = stops
        self._sent = 0
        """Characters handed out."""

    def advance(self, ids: Sequence[int], *, final: bool) -> str:
        """What can be sent now: no unfinished character, nothing that may turn out to begin a stop string."""
        whole = cut_at_stop(self._text.decode(ids), self._stops)
        end = len(whole) if final else self._safe_end(whole)
        piece = whole[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _safe_end(self, whole: str) -> int:
        end = len(whole)
        while end and whole[end - 1] == _REPLACEMENT:
            end -= 1
        for stop in self._stops:
            for length in range(min(len(stop) - 1, end), 0, -1):
                if whole.endswith(stop[:length], 0, end):
                    end -= length
                    break
        return end


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of `stops`."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
