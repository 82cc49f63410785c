"""Keep the answers of the attempts under way as their models wrote them, and put them back into later requests.

An agent that parses a tool call and writes it again sends other text than the model sampled: compact JSON, another
order of keys, ids of its own. A server that writes this text into its prompt then continues no earlier call, and every
turn is a separate sequence to train on. `Turns` puts the model's own text back where the conversation before it is the
same, to the letter, and the message says the same (`leyden.dialects.turns`). What differs in meaning stays as the agent
sent it, as does reasoning that it left out.

Only calls whose tokens are recorded are changed. The answers of one attempt are kept until it ends, `LIMIT_BYTES` in
all; the attempt without a call for the longest time is dropped first, and its later requests pass as they are.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from leyden._lib.json import Json
from leyden.dialects import dump
from leyden.dialects.turns import calls_of, function_of, text_of, turn_of
from leyden.gateway.attempts import AttemptKey

LIMIT_BYTES = 64 * 2**20
"""The most bytes of answers that one gateway process keeps."""


class Turns:
    """The answers of the attempts under way, by the conversation that each of them ends."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._n_bytes = 0
        self._answers: OrderedDict[AttemptKey, dict[bytes, list[Json]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, key: AttemptKey, messages: list[Json], answer: Json) -> None:
        """Keep the answer to a request.

        messages: those of the request, in chat form, as the agent sent them.
        answer: the message of the answer.
        """
        conversation = blake2b(digest_size=16)
        for message in [*messages, answer]:
            conversation.update(_told(message))
        kept = {name: answer[name] for name in ("content", "tool_calls") if answer.get(name)}
        ends = self._answers.setdefault(key, {})
        self._answers.move_to_end(key)
        same = ends.setdefault(conversation.digest(), [])
        if kept and kept not in same:
            same.append(kept)
            self._n_bytes += len(dump(kept))
        while self._n_bytes > self._limit_bytes:
            self.end(next(iter(self._answers)))

    def restore(self, key: AttemptKey, messages: list[Json]) -> tuple[list[Json], list[str]]:
        """Return the messages of a request with the answers in them as the model wrote them, and the paths of the
        fields that were changed.
        """
        ends = self._answers.get(key)
        if ends is None:
            return messages, []
        found: list[Json] = []
        changed: list[str] = []
        ids: dict[str, str] = {}
        """The model's ids of calls, by those that the agent made for them."""
        conversation = blake2b(digest_size=16)
        for index, message in enumerate(messages):
            conversation.update(_told(message))
            restored: Json = {}
            if message.get("role") == "assistant":
                if same := ends.get(conversation.digest()):
                    restored = _restored(message, same, ids)
            elif isinstance(sent := message.get("tool_call_id"), str) and ids.get(sent, sent) != sent:
                restored = {"tool_call_id": ids[sent]}
            changed += [f"messages[{index}].{name}" for name in restored]
            found.append({**message, **restored} if restored else message)
        return found, changed

    def end(self, key: AttemptKey) -> None:
        """Drop the answers of an attempt that is over."""
        ends = self._answers.pop(key, {})
        self._n_bytes -= sum(len(dump(kept)) for same in ends.values() for kept in same)


def _told(message: Json) -> bytes:
    """Return a message as bytes that are the same for messages which say the same."""
    return turn_of(message).encode() if message.get("role") == "assistant" else dump(message)


def _restored(message: Json, same: list[Json], ids: dict[str, str]) -> Json:
    """Return the fields of an assistant's message that the model wrote in another way.

    same: the answers that say the same, newest last. The one with the message's ids is chosen, else the newest.
    ids: gets the ids that change.
    """
    calls = calls_of(message)
    sent = [call.get("id") for call in calls]
    answer = next((each for each in same if [call.get("id") for call in calls_of(each)] == sent), same[-1])
    fields: Json = {}
    content, text = message.get("content"), answer.get("content")
    if isinstance(text, str) and text_of(content) != text:
        fields["content"] = text
    written = [_call(call, own, ids) for call, own in zip(calls, calls_of(answer), strict=True)]
    if written != calls:
        fields["tool_calls"] = written
    return fields


def _call(call: Json, own: Json, ids: dict[str, str]) -> Json:
    """Return a call of the agent's message with the model's arguments and id. Servers refuse arguments that are empty,
    so `{}` stays.
    """
    function, arguments = function_of(call), function_of(own).get("arguments")
    changes: Json = {}
    if isinstance(arguments, str) and arguments.strip() and arguments != function.get("arguments"):
        changes["function"] = {**function, "arguments": arguments}
    sent: Any = call.get("id")
    given: Any = own.get("id")
    if isinstance(sent, str) and sent and isinstance(given, str) and given:
        ids[sent] = given
        if sent != given:
            changes["id"] = given
    return {**call, **changes}
