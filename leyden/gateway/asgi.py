"""Reading a request and writing an answer in ASGI, and which headers pass.

It knows HTTP alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, cast

import aiohttp

from leyden.gateway.refusal import Refusal

__all__ = [
    "Headers",
    "Receive",
    "Scope",
    "Send",
    "downstream_headers",
    "header",
    "read_body",
    "send_json",
    "send_refusal",
    "trace_parent",
    "upstream_headers",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"),
    *("upgrade", "host", "content-length", "content-encoding", "expect"),
}
_OF_THE_GATEWAY = {"authorization", "api-key", "x-api-key", "cookie", "accept-encoding"}
"""What the agent tells the gateway, not the model's server; the connection to the latter chooses its own
compression."""
_NOT_UPSTREAM = frozenset(name.encode() for name in _HOP_BY_HOP | _OF_THE_GATEWAY)
_NOT_DOWNSTREAM = frozenset(_HOP_BY_HOP)
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_JSON: Headers = [(b"content-type", b"application/json")]


def header(scope: Scope, wanted: bytes) -> bytes | None:
    """The first header of this name (in lower case)."""
    headers = cast(Iterable[tuple[bytes, bytes]], scope["headers"])
    return next((value for name, value in headers if name == wanted), None)


def trace_parent(scope: Scope) -> tuple[str, str] | None:
    """W3C trace context: (trace id, the caller's span id)."""
    found = _TRACEPARENT.fullmatch(header(scope, b"traceparent") or b"")
    return (found[1].decode(), found[2].decode()) if found else None


def upstream_headers(scope: Scope, api_key: str | None) -> list[tuple[str, str]]:
    """The agent's headers as the upstream gets them."""
    given = cast(Iterable[tuple[bytes, bytes]], scope["headers"])
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in given if name not in _NOT_UPSTREAM]
    if api_key is not None:
        headers.append(("authorization", f"Bearer {api_key}"))
    return headers


def downstream_headers(response: aiohttp.ClientResponse) -> Headers:
    """The upstream's headers as the agent gets them; the length and framing of the body are its new server's matter."""
    return [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.decode("latin-1").lower() not in _NOT_DOWNSTREAM
    ]


async def read_body(receive: Receive) -> bytes:
    """The whole body of the request. Raises Refusal if the client goes away before its end."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        return message["body"]
    parts: list[bytes] = []
    while message["type"] == "http.request":
        parts.append(message["body"])
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()
    raise Refusal(499, "client_disconnected", "the client disconnected before its request was whole")


async def send_json(send: Send, body: bytes, *, status: int = 200, headers: Headers = _JSON) -> None:
    """Answer with a JSON body."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_refusal(send: Send, refusal: Refusal) -> None:
    """Answer with an error in OpenAI's shape."""
    with contextlib.suppress(OSError):
        await send_json(send, refusal.body(), status=refusal.status, headers=[*_JSON, *refusal.headers])
