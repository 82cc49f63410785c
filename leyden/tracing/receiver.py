"""Receive the spans of a trace from other processes.

This process has one HTTP server on the loopback address, with one secret path for each receiver.

| request | does |
|---|---|
| `POST /<secret>/v1/traces` | records spans, OTLP/HTTP in protobuf or JSON |
| `POST /<secret>/spans` | records spans as JSON, from processes of Leyden (`remote.py`) |

A path is served while its receiver is open. Its spans go into the trace with the attempt's other spans, so that they
are in the store when the attempt is reported. The server starts with the first receiver and ends with the process. It
knows one trace for each path, and not the sender. To serve further paths below a secret path, pass `handlers` to
`Receiver`.
"""

from __future__ import annotations

import atexit
import contextvars
import json
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from pydantic import TypeAdapter, ValidationError

from leyden._lib.host.asgi import AsgiThread
from leyden._lib.host.http import (
    JSON,
    ClientGone,
    Handler,
    HttpReply,
    Receive,
    Refusal,
    RequestHeaders,
    Scope,
    Send,
    check_method,
    content_type,
    parsed,
    read_body,
    send_reply,
)
from leyden._lib.host.listening import listen, netloc
from leyden._lib.text import storable
from leyden.errors import UnknownAttempt
from leyden.store.otlp import PROTOBUF, TRACES, handle_traces
from leyden.tracing.trace import SPANS, Trace
from leyden.types import Span

_HOST = "127.0.0.1"
_BODY_BYTES = 16 * 2**20
"""The most bytes of one request, decompressed."""


class Receiver:
    """Receives the spans of one trace from other processes, until `close`."""

    def __init__(self, trace: Trace, handlers: Mapping[str, Handler] | None = None) -> None:
        """Receive spans for `trace`.

        handlers: handlers of POST for further paths, below the trace's secret path.
        """
        self.trace = trace
        self.handlers: Mapping[str, Handler] = {
            TRACES: partial(handle_traces, self),
            SPANS: self._take_spans,
            **(handlers or {}),
        }
        """The handlers by path below the trace's secret path."""
        self._seen: set[str] = set()
        """The ids of the spans that were added."""
        self._server = _ReceiverServer.of_this_process()
        self._secret = secrets.token_urlsafe(24)
        self.url = f"{self._server.url}/{self._secret}"
        """The base URL; OTEL_EXPORTER_OTLP_ENDPOINT takes it as it is."""
        self._server.open[self._secret] = self

    def close(self) -> None:
        """Refuse further requests. Safe to repeat, and safe in any thread."""
        self._server.open.pop(self._secret, None)

    async def add_many_spans(self, spans: Sequence[Span]) -> None:
        """Add spans to the trace. A span that was added before is skipped, because an exporter repeats a request whose
        reply was lost. Raise UnknownAttempt, and add none, if one belongs to another attempt.
        """
        attempt = (self.trace.rollout_id, self.trace.attempt_id)
        for span in spans:
            if (span.rollout_id, span.attempt_id) != attempt:
                raise UnknownAttempt(
                    f"attempt {span.attempt_id!r} of rollout {span.rollout_id!r} is not the one that this address is for"
                )
        for span in spans:
            if span.span_id not in self._seen:
                self._seen.add(span.span_id)
                self.trace.add(span)

    async def _take_spans(self, body: bytes, headers: RequestHeaders) -> HttpReply:
        try:
            await self.add_many_spans(await parsed(body, _SPANS.validate_json))
        except ValidationError as error:
            raise Refusal(
                400, "bad_spans", f"the body is no list of spans: {storable(str(error), limit=500)}"
            ) from None
        except UnknownAttempt as error:
            raise Refusal(404, "unknown_attempt", str(error)) from None
        return HttpReply(200, b"{}\n", JSON)


_SPANS = TypeAdapter(list[Span])


class _ReceiverServer:
    """The HTTP server of this process, an ASGI application in its own thread."""

    _current: _ReceiverServer | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.open: dict[str, Receiver] = {}
        """Open receivers by their secrets."""
        listener = listen(_HOST, 0)
        self.url = f"http://{netloc(_HOST, listener.getsockname()[1])}"
        thread = AsgiThread(self, name="leyden-receiver", grace_seconds=0.1)
        contextvars.Context().run(thread.start, listener)  # from an empty context: the thread belongs to no trace
        atexit.register(self._stop, thread)

    @classmethod
    def of_this_process(cls) -> _ReceiverServer:
        with cls._lock:
            if cls._current is None or cls._current.pid != os.getpid():
                cls._current = cls()
            return cls._current

    def _stop(self, thread: AsgiThread) -> None:
        if self.pid == os.getpid():
            thread.stop()

    async def __call__(self, scope: Scope, read: Receive, send: Send) -> None:
        try:
            reply = await self._reply(scope, read)
        except ClientGone:
            return
        except Refusal as refusal:
            body = json.dumps({"error": refusal.message}).encode() + b"\n"
            reply = HttpReply(refusal.status, body, JSON, *refusal.headers)
        await send_reply(send, reply.body, status=reply.status, headers=reply.headers)

    async def _reply(self, scope: Scope, read: Receive) -> HttpReply:
        """Pass a request to the handler of its attempt, whose secret begins the path. Raise Refusal without one."""
        secret, slash, rest = scope["path"].removeprefix("/").partition("/")
        receiver = self.open.get(secret)
        if receiver is None:
            raise Refusal(
                404, "no_attempt", "no attempt is running at this address: it is over, or the address is incomplete"
            )
        handler = receiver.handlers.get(slash + rest)
        if handler is None:
            possible = ", ".join(receiver.handlers)
            raise Refusal(404, "no_such_path", f"there is nothing at this path of the attempt; possible: {possible}")
        check_method(scope, "POST")
        headers = dict(scope["headers"])
        is_json = slash + rest != TRACES or content_type(headers) != PROTOBUF.encode()
        return await handler(await read_body(headers, read, max_bytes=_BODY_BYTES, is_json=is_json), headers)
