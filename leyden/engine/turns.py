"""Keep the exact token ids of recent responses, so that the next turn of a conversation continues them.

A client sends a response back as text, and the chat template writes that text again. The tokenizer may split it in
another way than the policy sampled it, and a tool call comes back with other white space and another order of keys.
With other tokens the prompt would be a new sequence to train on, and the prefix cache would not hold it. `Turns` puts
the sampled ids back where it can prove that they are the message. All of this must hold:

- The messages before the response, and the tools, are those of its request, and the template's text
  of them is the prompt that was answered.
- A response that called tools has the ids of the calls, and the template's text of the turn holds
  the content and the calls that were sampled. White space within the content may differ.
- The template's text of any other response is the text that was sent to the client, except for
  white space at its ends, which some templates and agents trim.

Any other text is tokenized as the template writes it. Two responses to one prompt that have the same text and different
ids look alike in the next request: the newer one is put back.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from leyden._lib.json import Json
from leyden.dialects.turns import said
from leyden.engine.tools.tool_parser import ToolCall

MAX_TOKENS = 2**23
"""The most token ids that are kept, four bytes each. The last turn of each conversation is dropped last."""

Read = Callable[[str], tuple[str, list[ToolCall]]]
"""A function that returns the content and the tool calls in the text of a response."""

TurnKey = tuple[str, ...] | bytes
"""The ids of a response's tool calls; of a response without calls, a digest of the conversation up to its end."""


def turn_keys(messages: Sequence[Json], tools: Sequence[Json]) -> list[TurnKey]:
    """Return the key of each of the assistant's messages, in order.

    messages: in the form of chat templates, with arguments of calls as objects.
    """
    said = blake2b(json.dumps(tools).encode(), digest_size=16)
    keys: list[TurnKey] = []
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            keys.append(tuple(str(call["id"]) for call in message["tool_calls"]))
        elif message["role"] == "assistant":
            whole = said.copy()
            whole.update(json.dumps(["answer", message["content"].strip()]).encode())
            keys.append(whole.digest())
        said.update(json.dumps(message).encode())
    return keys


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt of P tokens and the response to it of R tokens."""

    prompt_length: int
    """The number of characters of the prompt, as the chat template wrote it."""
    prompt_digest: bytes
    """A digest of that text."""
    meaning: str
    """The response's content and calls in a form that does not depend on how they are written."""
    token_ids: array[int]
    """Shape (P + R,)."""
    end: str
    """The text of the end-of-turn token that was sampled; empty if the response ended without one."""


class Turns:
    """A cache of recent turns. Use it in one event loop."""

    def __init__(self, ends: Sequence[str], max_tokens: int = MAX_TOKENS) -> None:
        """ends: the texts of the tokens that end a turn.
        max_tokens: the most token ids to keep.
        """
        self._ends = ends
        self._max_tokens = max_tokens
        self._turns: OrderedDict[TurnKey, Turn] = OrderedDict()
        self._n_tokens = 0

    def __contains__(self, key: TurnKey) -> bool:
        return key in self._turns

    def add(
        self,
        key: TurnKey,
        prompt: str,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        answer: tuple[str, list[ToolCall]],
        end: str,
        *,
        before: TurnKey | None = None,
    ) -> None:
        """Keep the token ids of a prompt and its response, so that the next turn's prompt continues them. The oldest
        turns are dropped if there are more than `max_tokens` ids.

        key: the response's key (`turn_keys`).
        prompt: the prompt's text, as the template wrote it.
        answer: the content and the calls of the response.
        end: the text of the response's end-of-turn token; empty without one.
        before: the key of the previous turn of the conversation. It becomes the first to be dropped, because only a
            branch of the conversation can still use it.
        """
        if before in self._turns:
            self._turns.move_to_end(before, last=False)
        token_ids = array("i", [*prompt_ids, *response_ids])
        turn = Turn(len(prompt), _digest(prompt), _canonical(*answer), token_ids, end)
        if (earlier := self._turns.pop(key, None)) is not None:
            self._n_tokens -= len(earlier.token_ids)
        self._turns[key] = turn
        self._n_tokens += len(token_ids)
        while self._n_tokens > self._max_tokens:
            self._n_tokens -= len(self._turns.popitem(last=False)[1].token_ids)

    def longest(self, text: str, keys: Sequence[TurnKey], read: Read) -> tuple[array[int], int] | None:
        """Return the ids of the longest beginning of a prompt whose exact ids are known, and the index in `text` at
        which it ends; None if there is none.

        text: the prompt as the chat template writes it.
        keys: the keys of the assistant's messages, in order.
        read: reads the text of a response that called tools.
        """
        for key in reversed(keys):
            turn = self._turns.get(key)
            if turn is None or (end := self._end_of(turn, key, text, read)) is None:
                continue
            self._turns.move_to_end(key)
            return turn.token_ids, end
        return None

    def _end_of(self, turn: Turn, key: TurnKey, text: str, read: Read) -> int | None:
        """Return the index in the template's text at which a turn ends; None if the text differs from the sampled turn.

        A template that writes the ids of calls adds text that the model did not sample, so its turns always differ.
        """
        if turn.prompt_digest != _digest(text[: turn.prompt_length]):
            return None
        found = [(at, end) for end in self._ends if (at := text.find(end, turn.prompt_length)) >= 0]
        if not found:
            return None
        at, end = min(found)
        written = text[turn.prompt_length : at]
        if turn.end not in ("", end):
            return None
        if isinstance(key, bytes):
            meaning = _canonical(written, [])
        elif any(call_id in written for call_id in key):
            return None
        else:
            meaning = _canonical(*read(written))
        return at + len(turn.end) if meaning == turn.meaning else None


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _canonical(content: str, calls: Sequence[ToolCall]) -> str:
    """Return the content and the calls in a form that does not depend on how they are written. White space within the
    content of a turn with calls does not count, because templates put calls apart from it in their own way.
    """
    if not calls:
        return content.strip()
    return said(" ".join(content.split()), [(call.name, call.arguments) for call in calls])
