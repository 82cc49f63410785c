"""Keep the answers of the attempts under way as their models wrote them, and put them back into later requests.

An agent that parses a tool call and writes it again sends other text than the model sampled: compact JSON, another
order of keys, ids of its own. A server that writes this text into its prompt then continues no earlier call, and every
turn is a separate sequence to train on. `Turns` puts the model's own text back where the conversation before it is the
same, and the message says the same (`leyden.dialects.turns`). What differs in meaning stays as the agent sent it, as
does reasoning that it left out.

Only calls whose tokens are recorded are changed. The answers of one attempt, and its last request, are kept until it
ends, `LIMIT_BYTES` in all; the attempt without a call for the longest time is dropped first, and its later requests
pass as they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from leyden._lib.json import Json, is_list, is_object
from leyden.dialects import dump
from leyden.dialects.fields import without
from leyden.dialects.turns import calls_of, function_of, text_of, turn_of
from leyden.gateway.attempts import AttemptKey

LIMIT_BYTES = 256 * 2**20
"""The most bytes of messages that one gateway process keeps."""
_MARKS = ("cache_control",)
"""Fields that are not written into a prompt."""


@dataclass(slots=True)
class _Read:
    """A message of a request, and what is known after it."""

    message: Json
    conversation: Any
    """The hash of the conversation up to here. Messages that say the same have one hash."""
    n_bytes: int
    restored: Json
    """The message's fields as the model wrote them, if that is otherwise."""
    ids: Mapping[str, str]
    """The model's ids of the last answer's calls, by those that the agent sent. Results follow their calls."""


@dataclass(slots=True)
class _Attempt:
    answers: dict[bytes, list[Json]] = field(default_factory=dict[bytes, list[Json]])
    """The answers that say the same after the same conversation, newest last, by that conversation's hash."""
    request: list[_Read] = field(default_factory=list[_Read])
    """The last request. The next one begins with its messages, as a rule, which then are not read again."""
    n_bytes: int = 0


class Turns:
    """The answers of the attempts under way, by the conversation that each of them ends."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._n_bytes = 0
        self._attempts: OrderedDict[AttemptKey, _Attempt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._attempts)

    def add(self, key: AttemptKey, messages: list[Json], answer: Json) -> None:
        """Keep the answer to a request.

        messages: those of the request, in chat form, as the agent sent them.
        answer: the message of the answer.
        """
        attempt = self._attempts.setdefault(key, _Attempt())
        self._attempts.move_to_end(key)
        read = self._read(attempt, messages)
        conversation = read[-1].conversation.copy() if read else blake2b(digest_size=16)
        conversation.update(turn_of(answer).encode())
        kept = {name: answer[name] for name in ("content", "tool_calls") if answer.get(name)}
        same = attempt.answers.setdefault(conversation.digest(), [])
        if kept and kept not in same:
            same.append(kept)
            self._grow(attempt, len(dump(kept)))
        while self._n_bytes > self._limit_bytes:
            self.end(next(iter(self._attempts)))

    def restore(self, key: AttemptKey, messages: list[Json]) -> tuple[list[Json], list[str]]:
        """Return the messages of a request with the answers in them as the model wrote them, and the paths of the
        fields that were changed.
        """
        if (attempt := self._attempts.get(key)) is None:
            return messages, []
        read = self._read(attempt, messages)
        changed = [f"messages[{index}].{name}" for index, each in enumerate(read) for name in each.restored]
        return [{**each.message, **each.restored} if each.restored else each.message for each in read], changed

    def end(self, key: AttemptKey) -> None:
        """Drop the answers of an attempt that is over."""
        if (attempt := self._attempts.pop(key, None)) is not None:
            self._n_bytes -= attempt.n_bytes

    def _grow(self, attempt: _Attempt, n_bytes: int) -> None:
        attempt.n_bytes += n_bytes
        self._n_bytes += n_bytes

    def _read(self, attempt: _Attempt, messages: list[Json]) -> list[_Read]:
        """Return the messages of a request, read, and keep them as the attempt's last request."""
        last, read = attempt.request, list[_Read]()
        for before, message in zip(last, messages, strict=False):
            if before.message != message:
                break
            read.append(before)
        for message in messages[len(read) :]:
            conversation = read[-1].conversation.copy() if read else blake2b(digest_size=16)
            ids: Mapping[str, str] = read[-1].ids if read else {}
            is_answer = message.get("role") == "assistant"
            told = turn_of(message).encode() if is_answer else _message_bytes(message)
            conversation.update(told)
            restored: Json = {}
            if is_answer:
                sent = [call.get("id") for call in calls_of(message)]
                ids = changed = dict[str, str]()
                if same := _candidates(attempt.answers.get(conversation.digest(), []), sent):
                    restored = _restored(message, same, sent, changed)
            elif isinstance(sent := message.get("tool_call_id"), str) and sent in ids:
                restored = {"tool_call_id": ids[sent]}
            read.append(_Read(message, conversation, len(told), restored, ids))
        self._grow(attempt, sum(each.n_bytes for each in read) - sum(each.n_bytes for each in last))
        attempt.request = read
        return read


def _message_bytes(message: Json) -> bytes:
    """Return a message that is no answer as bytes.

    Claude Code marks its last messages for a cache (`cache_control`), so they have other fields and parts in each call.
    """
    content: Any = message.get("content")
    if (text := text_of(content)) is not None:
        content = text
    elif is_list(content):
        content = [without(part, _MARKS) if is_object(part) else part for part in content]
    return dump({**without(message, _MARKS), "content": content})


def _candidates(same: list[Json], sent: list[Any]) -> list[Json]:
    """Return the answers that a message may repeat: all but those that have its call ids in another order, because
    there the agent has exchanged equal calls together with their results.
    """
    given = [[call.get("id") for call in calls_of(answer)] for answer in same]
    return [
        a for a, ids in zip(same, given, strict=True) if ids == sent or sorted(map(str, ids)) != sorted(map(str, sent))
    ]


def _restored(message: Json, same: list[Json], sent: list[Any], ids: dict[str, str]) -> Json:
    """Return the fields of an assistant's message that the model wrote in another way.

    same: the answers that say the same, newest last. The one with the message's ids is chosen, else the newest.
    sent: the ids of the message's calls.
    ids: gets the ids that change.
    """
    calls = calls_of(message)
    answer = next((each for each in same if [call.get("id") for call in calls_of(each)] == sent), same[-1])
    fields: Json = {}
    content, text = message.get("content"), answer.get("content")
    if isinstance(text, str) and text_of(content) != text:
        fields["content"] = text
    # Only ids that tell the calls apart can be exchanged.
    exchangeable = len({*map(str, sent)}) == len(sent)
    written = [_call(call, own, ids, exchangeable) for call, own in zip(calls, calls_of(answer), strict=True)]
    if written != calls:
        fields["tool_calls"] = written
    return fields


def _call(call: Json, own: Json, ids: dict[str, str], exchangeable: bool) -> Json:
    """Return a call of the agent's message with the model's arguments, and with the model's id if ids are exchangeable.
    Servers refuse empty arguments, so `{}` stays.
    """
    function, arguments = function_of(call), function_of(own).get("arguments")
    changes: Json = {}
    if isinstance(arguments, str) and arguments.strip() and arguments != function.get("arguments"):
        changes["function"] = {**function, "arguments": arguments}
    sent: Any = call.get("id")
    given: Any = own.get("id")
    if exchangeable and isinstance(sent, str) and sent and isinstance(given, str) and given and sent != given:
        ids[sent] = changes["id"] = given
    return {**call, **changes}
