"""Where other processes send the spans of a trace: one small HTTP server on the loopback address for this process, one secret path for each
receiver.

| request | does |
|---|---|
| `POST /<secret>/v1/traces` | records spans, OTLP/HTTP in protobuf or JSON |
| `POST /<secret>/spans` | records spans as JSON, the way of Leyden's own processes (`remote.py`) |

A path answers while its receiver is open. Spans go the way of the attempt's other spans, so that they are in the store when the attempt is
reported. The server starts with the first receiver and ends with the process. It knows one trace for each path and not who sends; whoever
opens a receiver may add routes of its own.
"""

from __future__ import annotations

import atexit
import contextvars
import json
import os
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence

from pydantic import TypeAdapter, ValidationError

from leyden.errors import UnknownAttempt
from leyden.host.asgi import AsgiThread, Receive, Scope, Send
from leyden.host.http import ClientGone, RequestRefused, read_body
from leyden.host.listening import listen, netloc
from leyden.store.otlp import TRACES, receive
from leyden.tracer.trace import SPANS, Trace
from leyden.types import Span
from leyden.utils.text import storable

_HOST = "127.0.0.1"
_BODY_BYTES = 16 * 2**20
"""The most of one request, unpacked."""

Answer = tuple[int, str, bytes]
"""Status, content type, body."""
Route = Callable[[bytes, Mapping[bytes, bytes]], Awaitable[Answer]]
"""Answers a request from its body and its headers (in lower case)."""


class Receiver:
    """The address of one trace for the time between making this and `close`."""

    def __init__(self, trace: Trace, routes: Mapping[str, Route] | None = None) -> None:
        """routes: further ones, by path."""
        self.trace = trace
        self._routes: dict[str, Route] = {TRACES: self._take_otlp, SPANS: self._take_spans, **(routes or {})}
        self._seen: set[str] = set()
        self._server = _Server.of_this_process()
        self._secret = secrets.token_urlsafe(24)
        self.url = f"{self._server.url}/{self._secret}"
        """Without a path; OTEL_EXPORTER_OTLP_ENDPOINT takes it as it is."""
        self._server.open[self._secret] = self

    def close(self) -> None:
        """Take nothing more. May be called again, and from any thread."""
        self._server.open.pop(self._secret, None)

    async def add_many_spans(self, spans: Sequence[Span]) -> None:
        """Take spans of the attempt, each once: exporters send again what was not answered in time.

        Raises UnknownAttempt, and takes none, when one is of another.
        """
        place = (self.trace.rollout_id, self.trace.attempt_id)
        for span in spans:
            if (span.rollout_id, span.attempt_id) != place:
                raise UnknownAttempt(
                    f"attempt {span.attempt_id!r} of rollout {span.rollout_id!r} is not the one that this address is for"
                )
        for span in spans:
            if span.span_id not in self._seen:
                self._seen.add(span.span_id)
                self.trace.add(span)

    async def answer(self, path: str, method: str, headers: Mapping[bytes, bytes], read: Receive) -> Answer:
        """Answer one request to a path below the secret."""
        route = self._routes.get(path)
        if route is None:
            return refusal(404, f"there is nothing at this path of the attempt; possible: {', '.join(self._routes)}")
        if method != "POST":
            return refusal(405, f"send it with POST, not {method}")
        try:
            body = await read_body(headers, read, max_bytes=_BODY_BYTES)
        except RequestRefused as error:
            return refusal(error.status, str(error))
        except ClientGone:
            return refusal(400, "the request ended before it was whole")
        return await route(body, headers)

    async def _take_otlp(self, body: bytes, headers: Mapping[bytes, bytes]) -> Answer:
        answer = await receive(self, body, headers.get(b"content-type", b"").decode("latin-1"))
        return answer.status, answer.content_type, answer.body

    async def _take_spans(self, body: bytes, headers: Mapping[bytes, bytes]) -> Answer:
        try:
            await self.add_many_spans(_SPANS.validate_json(body))
        except ValidationError as error:
            return refusal(400, f"the body is no list of spans: {storable(str(error), limit=500)}")
        except UnknownAttempt as error:
            return refusal(400, str(error))
        return 200, "application/json", b"{}\n"


_SPANS = TypeAdapter(list[Span])


class _Server:
    """The one of this process."""

    _current: _Server | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.open: dict[str, Receiver] = {}
        """By their secrets."""
        listener = listen(_HOST, 0)
        self.url = f"http://{netloc(_HOST, listener.getsockname()[1])}"
        thread = AsgiThread(self, name="leyden-receiver", grace_seconds=0.1)
        contextvars.Context().run(thread.start, listener)  # from an empty context: the thread belongs to no trace
        atexit.register(self._finish, thread)

    @classmethod
    def of_this_process(cls) -> _Server:
        """Started by whoever asks first; a forked child gets its own."""
        with cls._lock:
            if cls._current is None or cls._current.pid != os.getpid():
                cls._current = cls()
            return cls._current

    def _finish(self, thread: AsgiThread) -> None:
        if self.pid == os.getpid():
            thread.stop()

    async def __call__(self, scope: Scope, read: Receive, send: Send) -> None:
        status, kind, body = await self._answer(scope, read)
        head = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, read: Receive) -> Answer:
        secret, slash, rest = scope["path"].removeprefix("/").partition("/")
        receiver = self.open.get(secret)
        if receiver is None:
            return refusal(404, "no attempt is running at this address: it is over, or the address is not whole")
        return await receiver.answer(slash + rest, scope["method"], dict(scope["headers"]), read)


def refusal(status: int, message: str) -> Answer:
    """An answer that says what is wrong with a request."""
    return status, "application/json", json.dumps({"error": message}).encode() + b"\n"
