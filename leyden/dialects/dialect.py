"""`Dialect`: everything that the gateway and the fakes need to know of one route of a model server's API.

Chat is the hub: a dialect translates its requests, answers and streams to chat and back, and so to every other dialect.
A dialect also defines how its clients are recognised, where they put their key, what an error and a list of models look
like, and whether the server keeps responses. It is data and pure functions; it knows no HTTP server and no agent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from leyden._lib.json import Json
from leyden.dialects.request_checks import FieldTypes, Types


class ErrorBody(Protocol):
    """A function that returns an error's body in the form that the dialect's clients read."""

    def __call__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes: ...


class ChunksToEvents(Protocol):
    """Translates the chunks of one chat stream to the events of another API."""

    def feed(self, chunk: Json) -> list[bytes]:
        """Return the server-sent events of this API for one chunk of a chat stream. Raise Untranslatable for a chunk
        that the API cannot express.
        """
        ...

    def end(self) -> list[bytes]:
        """Return the server-sent events that close the client's stream."""
        ...


class EventsToChunks(Protocol):
    """Translates the events of one stream of another API to chat's chunks."""

    ended: bool
    """Whether the last event has arrived."""

    def feed(self, event: Json) -> list[Json]:
        """Return the chat chunks for one event of this API's stream, often none. Raise Untranslatable for an event that
        chat cannot express.
        """
        ...


class Conversations(Protocol):
    """Continues responses that the server keeps, so that a client sends only its new turn."""

    def previous(self, request: Json) -> str | None:
        """Return the id of the response that a request continues; None if it continues none."""
        ...

    def with_history(self, request: Json, items: Sequence[Json]) -> Json:
        """Return the request with the earlier conversation's items in place of the id of its last response. Raise
        Untranslatable for a request that cannot be extended.
        """
        ...

    def items(self, request: Json, response: Json) -> list[Json] | None:
        """Return the items of a request and its response, to be kept for the next turn; None if the client asked not to
        keep them. The request has its history already.
        """
        ...

    def deleted(self, response_id: str) -> Json:
        """Return the answer to a client that deletes a kept response."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One route of an API. The translations are pure functions, which raise Untranslatable for a field that the other
    side cannot express.
    """

    name: str
    """The key in the table of dialects."""
    path: str
    """The route below the base URL, such as `chat/completions`."""
    operation: str
    """OpenTelemetry's `gen_ai.operation.name`."""
    request_to_chat: Callable[[Json], Json]
    request_from_chat: Callable[[Json], Json]
    answer_to_chat: Callable[[Json], Json]
    answer_from_chat: Callable[[Json, Json], Json]
    """Takes the answer and the client's request."""
    events_to_chat: Callable[[], EventsToChunks]
    events_from_chat: Callable[[Json], ChunksToEvents]
    """Takes the client's request."""
    error: ErrorBody
    """Returns the body of an error response."""
    error_event: ErrorBody
    """Returns an error event of a stream."""
    models_page: Callable[[Sequence[str]], Json]
    """Returns the response to GET `models`, given the models' names."""
    field_types: FieldTypes = field(default_factory=dict[str, Types])
    """The JSON types of the fields that the API defines."""
    translates: bool = True
    """Whether its calls can be translated to chat. A completion's prompt has no turns, and an
    embedding has no answer."""
    logprobs: bool | int | None = None
    """The value of the request's `logprobs` that requests the log-probability of each sampled token and of no other
    token.

    None: the route returns no tokens."""
    key_header: str = "authorization"
    """The header, in lower case, in which clients send their key and servers expect it."""
    key_scheme: str = "Bearer "
    """The text before the key in that header, such as `Bearer `."""
    mark: tuple[str, str] | None = None
    """A header that every client of this dialect sends and no other client does, with the value that servers expect;
    None if there is none."""
    count_path: str | None = None
    """The route that counts the tokens of a request's prompt; None if the API has none."""
    count_answer: Callable[[int], Json] = lambda count: {"input_tokens": count}
    """Returns the response to `count_path`, given the number of tokens."""
    conversations: Conversations | None = None
    """Continues kept responses; None if the API keeps none."""

    def auth_headers(self, key: str | None) -> list[tuple[str, str]]:
        """Return the headers that carry a key to a server; none without a key."""
        return [] if key is None else [(self.key_header, f"{self.key_scheme}{key}")]
