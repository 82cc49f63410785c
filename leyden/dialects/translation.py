"""Translate one call from the client's dialect to the upstream's, and its answer back.

If both have the same dialect, bytes pass as they are. Otherwise the request is translated to chat and from there to the
upstream's dialect, and the answer the other way. In either case the call is also translated to chat for the record. No
I/O.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from leyden._lib.json import Json, is_list, is_object
from leyden.dialects.all_dialects import Dialect
from leyden.dialects.chat_dialect import Hidden, StreamAssembler, chunks_of, echoes, prepare, visible
from leyden.dialects.chat_reader import ChatReader, Unread
from leyden.dialects.dialect import ChunksToEvents
from leyden.dialects.encoding import DONE, dump, parse, sse_event
from leyden.dialects.fields import shown, without
from leyden.dialects.openai import CHAT
from leyden.dialects.ordering import InOrder
from leyden.dialects.request_checks import check_types
from leyden.errors import Untranslatable

T = TypeVar("T")

_MISREAD = (AttributeError, LookupError, TypeError, ValueError)
"""Errors that a translation raises for a body that breaks its API's rules, where no check names the field."""
_NO_TOOL = ("auto", "none", {"type": "auto"}, {"type": "none"})
"""Values of `tool_choice`, in any dialect, that need no tool."""


class Translation:
    """The translation of one call: its request for the upstream, and the answer for the client."""

    def __init__(
        self,
        client: Dialect,
        upstream: Dialect,
        raw: bytes,
        request: Json,
        *,
        whole: Json | None = None,
        model: str,
        record_tokens: bool,
        seed: int | None = None,
        dropped_tools: Sequence[str] = (),
        restore: Callable[[list[Json]], tuple[list[Json], list[str]]] | None = None,
    ) -> None:
        """raw, request: the agent's body, as bytes and parsed.

        whole: the request with its earlier turns, which is translated instead; None if `request` holds them itself.
        model: the upstream's name for the model.
        record_tokens: whether to request token ids and log-probabilities, if the upstream's dialect has them.
        seed: used if the upstream's dialect has seeds and the agent gave none.
        dropped_tools: the names or types of hosted tools to leave out of a request that is translated.
        restore: returns chat messages with earlier answers as the model wrote them, and the paths of the fields that it
            changed. It is called if tokens are requested of a chat server.
        Raise Untranslatable if the upstream's dialect cannot express the request, WrongType if a field that the
        client's dialect does not define has a wrong type for the upstream's.
        """
        self.client = client
        self.upstream = upstream
        self.verbatim = client is upstream
        self.request = request
        self.chat = request
        """The request in chat form, or unchanged if it has none."""
        self.dropped_tools: list[str] = []
        """The hosted tools that were left out, by the entries of `dropped_tools` that name them."""
        if self.verbatim:
            self.chat = _in_chat_if_possible(client.request_to_chat, request)
        else:
            given, self.dropped_tools = _without_hosted(whole or request, dropped_tools)
            self.chat = _translated(client.request_to_chat, given)
            request = _translated(upstream.request_from_chat, self.chat)
            # Fields that the client's API does not define were kept as they are, and not checked.
            check_types(request, upstream.field_types)
            raw = dump(request)
        self.restored: list[str] = []
        """The paths of the fields of the request in chat form that `restore` changed for the upstream."""
        if restore is not None and record_tokens and upstream is CHAT and is_list(messages := request.get("messages")):
            messages, self.restored = restore(messages)
            if self.restored:
                request = {**request, "messages": messages}
                raw = dump(request)
        self.asks_for_tokens = record_tokens and upstream.logprobs is not None and not echoes(request)
        """Whether token ids and log-probabilities are requested from the server."""
        logprobs = upstream.logprobs if self.asks_for_tokens else None
        self.seed = seed if upstream.logprobs is not None and request.get("seed") is None else None
        """The seed that was added to the request; None if none was."""
        self.body, self.hidden = prepare(raw, request, model=model, logprobs=logprobs, seed=self.seed)

    def answer(self, raw: bytes) -> tuple[Json | None, bytes, str | None]:
        """Return an answer that is no stream in two forms: in chat, for the record, and as bytes for the agent. The
        third value says what the record lacks because it could not be read; None if it is complete.

        A body that needs no translation passes whatever it is; its record is None if it is no JSON object. Raise
        Untranslatable for an answer that the agent's dialect cannot express.
        """
        reader, unread = ChatReader(), Unread()
        try:
            answer: object = parse(raw)
        except (ValueError, RecursionError) as error:
            if not self.verbatim:
                raise Untranslatable("the body", f"is no JSON ({error})") from error
            return None, raw, None
        if not is_object(answer):
            if not self.verbatim:
                raise Untranslatable("the body", f"must be an object, got {shown(answer)}")
            return None, raw, None
        if self.verbatim:
            passed = dump(visible(answer, self.hidden)) if self.hidden else raw
            try:
                chat = reader.answer(self.upstream.answer_to_chat(answer))
                unread.add(reader.problems)
            except Exception as error:  # noqa: BLE001 -- what the record cannot express must not stop the answer
                chat = answer
                unread.add([error])
            return chat, passed, unread.text
        chat = reader.answer(_translated(self.upstream.answer_to_chat, answer))
        if reader.problems:
            raise reader.problems[0]
        seen = visible(chat, self.hidden) or chat
        return chat, dump(_translated(lambda chat: self.client.answer_from_chat(chat, self.request), seen)), None

    def stream(self) -> TranslatedStream:
        """Return a translator for a response that is a stream."""
        return TranslatedStream(self.client, self.upstream, self.hidden, self.request)

    @property
    def streams(self) -> bool:
        """Whether the agent requests a stream."""
        return self.request.get("stream") is True

    def unstreamed(self) -> bytes:
        """Return `body`, changed to request the answer in one piece, for upstreams that speak chat or completions."""
        body: Json = parse(self.body)
        body.pop("stream_options", None)
        return dump({**body, "stream": False})

    def events_of(self, raw: bytes) -> bytes | None:
        """Return a whole answer of the upstream as server-sent events, to be fed to `stream()`. Used when the agent
        requested a stream and the upstream answered in one piece.

        None for a body that is no answer of chat or completions.
        """
        try:
            answer: Any = parse(raw)
            reader = ChatReader()
            read = reader.answer(answer)
            answer = answer if reader.problems else read
            options: Any = self.request.get("stream_options") or {}
            # Other dialects always have a usage, and the record wants the hidden one.
            wanted = not self.verbatim or self.hidden.usage or bool(options.get("include_usage"))
            chunks = chunks_of(answer, usage=wanted)
        except (*_MISREAD, RecursionError):
            return None
        return b"".join(sse_event(dump(chunk)) for chunk in chunks) + sse_event(DONE)

    def error(self, status: int, raw: bytes) -> bytes:
        """Return the upstream's error body as an error body of the agent's dialect."""
        same = self.verbatim or self.client.error is self.upstream.error
        return raw if same else self.client.error(status, error_message(raw))


class TranslatedStream:
    """Translates a streamed answer event by event, and assembles it for the record.

    Without a translation every event passes, also one that the record cannot read.
    """

    def __init__(self, client: Dialect, upstream: Dialect, hidden: Hidden, request: Json) -> None:
        self._client = client
        self.verbatim = client is upstream
        self._hidden = hidden
        self._chunks = upstream.events_to_chat()
        self._assembler = StreamAssembler()
        self._in_order = InOrder(self._assembler.reader)
        self._events = None if self.verbatim else client.events_from_chat(request)
        self._unread = Unread()
        self.ended = False
        """Whether the upstream has sent its last event. The record is written then, before the
        agent sees that event."""
        self._error_sent = False
        """Whether the agent has received an error event, after which no other event may follow."""

    @property
    def unchanged(self) -> bool:
        """Whether every byte passes as it comes: nothing is translated, and nothing is hidden."""
        return self.verbatim and not self._hidden

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self._assembler.finished or (self.verbatim and self.ended)

    @property
    def error(self) -> str | None:
        """The upstream's error message, if the stream contained one."""
        return self._assembler.error

    @property
    def unread(self) -> str | None:
        """How many events the record could not read, and why; None if it has read all."""
        return self._unread.text

    def answer(self) -> Json:
        """Return the answer so far, in chat form."""
        return self._assembler.answer()

    def feed(self, event: bytes, data: bytes) -> bytes:
        """Return the bytes to send to the agent for one event of the upstream; b"" if it holds only hidden fields.

        event, data: the event's bytes and its data, as `split_events` yields them.
        Raise Untranslatable for an event that cannot be translated; without a translation every event passes.
        """
        if data == DONE:
            self.ended = True
            return event if self._events is None else self._end(self._events)
        if not data:
            return event if self._events is None else b""
        if self._events is None:
            return self._untranslated(event, data)
        shown: list[bytes] = []
        for read in self._read(data):
            if read.get("error"):
                self._error_sent = True
                shown.append(self._client.error_event(500, error_message(dump(read))))
            elif not self._error_sent:
                shown += self._translate(self._events, self._in_order.feed(read))
        if self._chunks.ended:
            self.ended = True
            shown.append(self._end(self._events))
        return b"".join(shown)

    def close(self, rest: bytes) -> bytes:
        """Return the bytes that end the agent's stream when the upstream's is at its end.

        rest: the bytes of the upstream's stream that are no complete event. Without a translation they are returned as
            they are. With one they are dropped, and the closing events are returned unless the upstream has sent its
            last event.
        """
        if self._events is None or self.ended:
            return rest if self._events is None else b""
        self.ended = True
        return self._end(self._events)

    def _read(self, data: bytes) -> Iterator[Json]:
        """Yield the chunks of an event as the record reads them. Raise Untranslatable, which names the field, for an
        event that breaks the rules of its API.
        """
        try:
            found: Any = parse(data)
        except (ValueError, RecursionError) as error:
            raise Untranslatable("the event", f"is no JSON ({error})") from error
        for chunk in _translated(self._chunks.feed, found):
            read = self._assembler.feed(chunk)
            if self._assembler.reader.problems:
                raise self._assembler.reader.problems[0]
            yield read

    def _translate(self, events: ChunksToEvents, chunks: Iterable[Json]) -> list[bytes]:
        """Return the agent's events for chunks in order."""
        return [event for chunk in chunks for event in _translated(events.feed, chunk)]

    def _end(self, events: ChunksToEvents) -> bytes:
        """Return the last events as bytes; nothing after an error."""
        if self._error_sent:
            return b""
        return b"".join([*self._translate(events, self._in_order.end()), *_translated(lambda _: events.end(), {})])

    def _untranslated(self, event: bytes, data: bytes) -> bytes:
        """Return an event that needs no translation, without the hidden fields; b"" if nothing is left. Add the event
        to the record's answer.
        """
        found: Any = None
        try:
            found = parse(data)
            for chunk in self._chunks.feed(found):
                self._assembler.feed(chunk)
                if problems := self._assembler.reader.problems:
                    self._unread.add(problems)
        except Exception as error:  # noqa: BLE001 -- the record goes without an event that it cannot read
            self._unread.add([error])
        self.ended = self.ended or self._chunks.ended
        if not self._hidden or not is_object(found):
            return event
        shown = visible(found, self._hidden)
        if shown is None:
            return b""
        return event if shown == found else sse_event(dump(shown), like=event)


def _without_hosted(request: Json, names: Sequence[str]) -> tuple[Json, list[str]]:
    """Return the request without the hosted tools of these names or types, and which of the names it had. Tools that
    the agent runs itself stay, whatever their name.
    """
    tools: Any = request.get("tools")
    if not names or not is_list(tools):
        return request, []
    dropped: list[str] = []
    left: list[Any] = []
    for tool in tools:
        hosted = is_object(tool) and tool.get("type") not in (None, "function", "custom", "namespace")
        name = next((name for name in names if name in (tool.get("type"), tool.get("name"))), None) if hosted else None
        if name is None:
            left.append(tool)
        else:
            dropped.append(name)
    if not dropped or left:
        return {**request, "tools": left}, dropped
    # Servers refuse an empty list, and a choice without tools.
    without_choice = ("tools", *(("tool_choice",) if request.get("tool_choice") in _NO_TOOL else ()))
    return without(request, without_choice), dropped


def _translated(translate: Callable[[Json], T], body: Json) -> T:
    """Return the translated body. Raise Untranslatable for any error of the translation."""
    try:
        return translate(body)
    except Untranslatable:
        raise
    except _MISREAD as error:
        kind = body.get("type") or body.get("object") if is_object(body) else None
        what = "body" if kind is None else f"body of type {shown(kind)}"
        raise Untranslatable(f"the {what}", f"breaks the rules of its API: {shown(body)}") from error


def _in_chat_if_possible(translate: Callable[[Json], Json], body: Json) -> Json:
    """Return the body in chat form for the record; unchanged if it cannot be translated. A faulty body is for the
    server or the agent to refuse.
    """
    try:
        return translate(body)
    except _MISREAD:
        return body


def error_message(raw: bytes) -> str:
    """Return the message in an upstream's error body, in any dialect; the body itself if it has none."""
    try:
        body: Any = json.loads(raw)
        found: Any = body.get("error", body)
        message: Any = found if isinstance(found, str) else found.get("message")
    except (ValueError, AttributeError, RecursionError):
        message = None
    return message if isinstance(message, str) else raw.decode("utf-8", "replace")
