"""Headers and error replies of the gateway: which pass in either direction, and what they say of the sender.

It knows HTTP and the dialects, and no attempt, model or upstream.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable
from typing import cast
from urllib.parse import unquote

import aiohttp

from leyden import semconv
from leyden.dialects import DIALECTS, Dialect
from leyden.host.http import JSON, Receive, Refusal, Scope, Send, bearer_token, header, read_body, send_reply

Headers = list[tuple[bytes, bytes]]

_ONE_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"),
    *("upgrade", "host", "content-length", "expect"),
}
_HOP_BY_HOP = _ONE_HOP | {"content-encoding"}
"""Of bodies that are read on the way."""
_OF_THE_GATEWAY = {
    "authorization",
    "api-key",
    "x-api-key",
    "cookie",
    "origin",
    "sec-fetch-dest",
    "sec-fetch-mode",
    "sec-fetch-site",
    "accept-encoding",
    "x-leyden-rollout",
    "x-leyden-attempt",
    "x-leyden-sent",
}
"""What the agent tells the gateway, not the model's server; the connection to the latter chooses its own
compression."""
_NOT_UPSTREAM = frozenset(name.encode() for name in _HOP_BY_HOP | _OF_THE_GATEWAY)
_NOT_DOWNSTREAM = frozenset(_HOP_BY_HOP)
_ONE_HOP_BYTES = frozenset(name.encode() for name in _ONE_HOP)
_ANTHROPIC_VERSION = "2023-06-01"
"""The only one there is; a client of OpenAI's does not say it."""
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


def trace_parent(scope: Scope) -> tuple[str, str] | None:
    """W3C trace context: (trace id, the caller's span id)."""
    found = _TRACEPARENT.fullmatch(header(scope, b"traceparent") or b"")
    return (found[1].decode(), found[2].decode()) if found else None


def sent_time(scope: Scope, arrived: float) -> float | None:
    """Return when the agent's process sent the call, in Unix seconds by its clock, or None.

    arrived: when the call came in, by this machine's clock. A client on this machine has the same
    clock, so it need not say when it sent the call.
    """
    if header(scope, b"x-leyden-sent") is None and _is_near(scope.get("client")):
        return arrived
    try:
        sent = float(header(scope, b"x-leyden-sent") or b"nan")
    except ValueError:
        return None
    return sent if math.isfinite(sent) else None


def _is_near(client: tuple[str, int] | None) -> bool:
    return client is not None and client[0] in ("127.0.0.1", "::1")


def attempt_of_headers(scope: Scope) -> tuple[str, str] | None:
    """(rollout id, attempt id), percent-encoded in `x-leyden-rollout` and `x-leyden-attempt`, else in W3C's `baggage`."""
    rollout, attempt = header(scope, b"x-leyden-rollout"), header(scope, b"x-leyden-attempt")
    if not (rollout and attempt):
        members = (
            member.partition(b";")[0].partition(b"=") for member in (header(scope, b"baggage") or b"").split(b",")
        )
        carried = {name.strip(): value.strip() for name, _, value in members}
        rollout, attempt = carried.get(semconv.ROLLOUT_ID.encode()), carried.get(semconv.ATTEMPT_ID.encode())
    return (unquote(_text(rollout)), unquote(_text(attempt))) if rollout and attempt else None


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a client of Anthropic's asks; all of them say the version of the API that they speak."""
    return header(scope, b"anthropic-version") is not None


def given_key(scope: Scope) -> bytes:
    """Return the API key that the client sent, in the header of OpenAI's clients or of Anthropic's."""
    return bearer_token(header(scope, b"authorization")) or header(scope, b"x-api-key") or b""


def upstream_headers(scope: Scope, api_key: str | None, dialect: Dialect) -> list[tuple[str, str]]:
    """The agent's headers as the upstream gets them. dialect: the one that the upstream is spoken to in."""
    given = cast(Iterable[tuple[bytes, bytes]], scope["headers"])
    headers = as_text((name, value) for name, value in given if name not in _NOT_UPSTREAM)
    if dialect is DIALECTS["messages"]:
        if not speaks_anthropic(scope):
            headers.append(("anthropic-version", _ANTHROPIC_VERSION))
        return headers if api_key is None else [*headers, ("x-api-key", api_key)]
    return headers if api_key is None else [*headers, ("authorization", f"Bearer {api_key}")]


def downstream_headers(response: aiohttp.ClientResponse) -> Headers:
    """The upstream's headers as the agent gets them; the length and framing of the body are its new server's matter."""
    return [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.decode("latin-1").lower() not in _NOT_DOWNSTREAM
    ]


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """All that one hop does not keep to itself, for what goes on as it is."""
    return [(name, value) for name, value in headers if name.lower() not in _ONE_HOP_BYTES]


def as_text(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Headers as aiohttp takes them, which writes UTF-8."""
    return [(_text(name), _text(value)) for name, value in headers]


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


async def read_request(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Return the body of the request as the client sent it, compressed or not. Raise Refusal or ClientGone."""
    option = "max_body_bytes (--max-body-mb)"
    return await read_body(dict(scope["headers"]), receive, max_bytes=max_bytes, option=option, unpack=False)


async def send_refusal(send: Send, refusal: Refusal, dialect: Dialect) -> None:
    """Reply with an error as clients of `dialect` read it, and tell them not to repeat a request that cannot succeed."""
    body = dialect.error(refusal.status, refusal.message, code=refusal.code, param=refusal.param)
    is_final = refusal.status < 500 and refusal.retry_after_seconds is None
    headers = [JSON, *refusal.headers, *([(b"x-should-retry", b"false")] if is_final else [])]
    with contextlib.suppress(OSError):
        await send_reply(send, body, status=refusal.status, headers=headers)
