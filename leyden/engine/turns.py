"""The exact token ids of responses that called tools, so that the next turn of their conversation
continues them.

A client sends a tool call back as JSON, and the chat template writes it anew: other white space,
another order of keys, other tokens than the policy sampled. A prompt with other tokens would be a
new sequence to train on, and nothing that the prefix cache holds. `Turns` puts the sampled ids back
where it can prove that they are the message: the calls have the ids that they were given, the text
before them is the prompt that they answered, and the template's text of the turn holds the content
and calls that were sampled. Anything else stays as the template writes it.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from leyden.engine.tools.base import Call

MAX_TOKENS = 2**23
"""Ids that are remembered, four bytes each; the longest unused responses are forgotten first."""

Read = Callable[[str], tuple[str, list[Call]]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and the response to it, up to its tool calls. P + R tokens."""

    prompt_length: int
    """Characters of the prompt, as the chat template wrote it."""
    prompt_digest: bytes
    meaning: str
    token_ids: array[int]
    """Shape (P + R,)."""
    end: str
    """The text of the end-of-turn token that was sampled; empty if the response ended without one.
    """


class Turns:
    """The newest turns, by the ids of their tool calls. Used by one event loop."""

    def __init__(self, ends: Sequence[str], max_tokens: int = MAX_TOKENS) -> None:
        """Keep the turns of recent conversations.

        ends: the texts of the tokens that end a turn.
        """
        self._ends = ends
        self._max_tokens = max_tokens
        self._turns: OrderedDict[tuple[str, ...], Turn] = OrderedDict()
        self._n_tokens = 0

    def add(
        self,
        call_ids: Sequence[str],
        prompt: str,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        answer: tuple[str, list[Call]],
        end: str,
    ) -> None:
        """Remember a response. answer: its content and calls. end: the text of its end-of-turn
        token, if it has one.
        """
        token_ids = array("i", [*prompt_ids, *response_ids])
        turn = Turn(len(prompt), _digest(prompt), _meaning(*answer), token_ids, end)
        if (earlier := self._turns.pop(tuple(call_ids), None)) is not None:
            self._n_tokens -= len(earlier.token_ids)
        self._turns[tuple(call_ids)] = turn
        self._n_tokens += len(token_ids)
        while self._n_tokens > self._max_tokens:
            self._n_tokens -= len(self._turns.popitem(last=False)[1].token_ids)

    def longest(
        self, text: str, calls_of_turns: Sequence[tuple[str, ...]], read: Read
    ) -> tuple[array[int], int] | None:
        """Find the longest beginning of a prompt whose exact ids are known; return them and where
        in `text` they end.

        text: the prompt as the chat template writes it. calls_of_turns: the ids of the calls in
            each message of the
        assistant that has some, in order. read: content and calls of a response's text.
        """
        for call_ids in reversed(calls_of_turns):
            turn = self._turns.get(call_ids)
            if turn is None or (place := self._end_of(turn, call_ids, text, read)) is None:
                continue
            self._turns.move_to_end(call_ids)
            return turn.token_ids, place
        return None

    def _end_of(self, turn: Turn, call_ids: tuple[str, ...], text: str, read: Read) -> int | None:
        """Return the place in the template's text at which the turn ends.

        None if the text differs from the sampled turn. A template that shows the ids of calls adds
        text that the model did not sample.
        """
        if turn.prompt_digest != _digest(text[: turn.prompt_length]):
            return None
        found = [(at, end) for end in self._ends if (at := text.find(end, turn.prompt_length)) >= 0]
        if not found:
            return None
        at, end = min(found)
        written = text[turn.prompt_length : at]
        if turn.end not in ("", end) or any(call_id in written for call_id in call_ids):
            return None
        if turn.meaning != _meaning(*read(written)):
            return None
        return at + len(turn.end)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _meaning(content: str, calls: Sequence[Call]) -> str:
    """Return the content and the calls in a form that two ways of writing them share."""
    described = [[call.name, call.arguments] for call in calls]
    return json.dumps([" ".join(content.split()), described], sort_keys=True)
