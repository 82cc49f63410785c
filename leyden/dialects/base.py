"""What a dialect is: one route of a model server's API, and its translation to chat and back.

Chat is the hub: a dialect translates to it and from it, and every other one comes for free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from leyden.dialects import checks, errors, messages, responses
from leyden.dialects.encoding import DONE, Json, dump, sse_event

DialectName = Literal["chat", "completions", "responses", "messages", "embeddings"]


class ErrorBody(Protocol):
    """An error as the dialect's clients read it."""

    def __call__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes: ...


class ChunksToEvents(Protocol):
    """Chat's chunks to the bytes of a stream; for one answer."""

    def feed(self, chunk: Json) -> list[bytes]:
        """The events that one chunk becomes. Raises Untranslatable."""
        ...

    def end(self) -> list[bytes]:
        """The events after the last chunk."""
        ...


class EventsToChunks(Protocol):
    """The events of a stream to chat's chunks; for one answer."""

    ended: bool
    """The last event has been there."""

    def feed(self, event: Json) -> list[Json]:
        """The chunks that one event becomes. Raises Untranslatable."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One route of an API. The functions are pure; each raises Untranslatable."""

    name: DialectName
    path: str
    """Below the base URL."""
    operation: str
    """OpenTelemetry's `gen_ai.operation.name`."""
    request_to_chat: Callable[[Json], Json]
    request_from_chat: Callable[[Json], Json]
    answer_to_chat: Callable[[Json], Json]
    answer_from_chat: Callable[[Json, Json], Json]
    """Takes the client's request too."""
    events_to_chat: Callable[[], EventsToChunks]
    events_from_chat: Callable[[Json], ChunksToEvents]
    """Takes the client's request."""
    error: ErrorBody = errors.openai_error
    error_event: ErrorBody = errors.openai_error_event
    translates: bool = True
    """Whether its calls can be told in chat. A completion's prompt has no turns, and an embedding no answer."""
    logprobs: bool | int | None = None
    """The value of `logprobs` that asks for the log-probability of each sampled token, and of no other; None: the
    route gives no tokens."""
    field_types: checks.FieldTypes = field(default_factory=dict[str, checks.Types])
    """The JSON types that the API takes in the fields that it defines."""


class _Chunks:
    """A stream of chunks as it is."""

    def __init__(self, _: Json) -> None: ...

    def feed(self, chunk: Json) -> list[bytes]:
        return [sse_event(dump(chunk))]

    def end(self) -> list[bytes]:
        return [sse_event(DONE)]


class _Events:
    """A stream of chunks as it is; `[DONE]`, which ends it, is no JSON."""

    ended = False

    def feed(self, event: Json) -> list[Json]:
        return [event]


def _same(value: Json) -> Json:
    return value


def _same_answer(answer: Json, _: Json) -> Json:
    return answer


def _openai(
    name: DialectName,
    path: str,
    operation: str,
    field_types: checks.FieldTypes,
    *,
    translates: bool,
    logprobs: bool | int | None,
) -> Dialect:
    return Dialect(
        name=name,
        path=path,
        operation=operation,
        request_to_chat=_same,
        request_from_chat=_same,
        answer_to_chat=_same,
        answer_from_chat=_same_answer,
        events_to_chat=_Events,
        events_from_chat=_Chunks,
        translates=translates,
        logprobs=logprobs,
        field_types=field_types,
    )


DIALECTS: dict[DialectName, Dialect] = {
    "chat": _openai("chat", "chat/completions", "chat", checks.CHAT, translates=True, logprobs=True),
    "completions": _openai(
        "completions", "completions", "text_completion", checks.COMPLETIONS, translates=False, logprobs=0
    ),
    "embeddings": _openai("embeddings", "embeddings", "embeddings", checks.EMBEDDINGS, translates=False, logprobs=None),
    "responses": Dialect(
        name="responses",
        path="responses",
        operation="chat",
        request_to_chat=responses.request_to_chat,
        request_from_chat=responses.request_from_chat,
        answer_to_chat=responses.answer_to_chat,
        answer_from_chat=responses.answer_from_chat,
        events_to_chat=responses.EventsToChat,
        events_from_chat=responses.EventsFromChat,
        error_event=errors.responses_error_event,
        field_types=checks.RESPONSES,
    ),
    "messages": Dialect(
        name="messages",
        path="messages",
        operation="chat",
        request_to_chat=messages.request_to_chat,
        request_from_chat=messages.request_from_chat,
        answer_to_chat=messages.answer_to_chat,
        answer_from_chat=messages.answer_from_chat,
        events_to_chat=messages.EventsToChat,
        events_from_chat=messages.EventsFromChat,
        error=errors.anthropic_error,
        error_event=errors.anthropic_error_event,
        field_types=checks.MESSAGES,
    ),
}
"""Dialects, by name."""
