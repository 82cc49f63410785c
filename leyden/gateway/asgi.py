"""Headers and error replies of the gateway.

The module decides which headers pass to the server and to the agent, and reads the key, the attempt and the trace from
a request's headers. It knows HTTP and the dialects, and no model.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable
from typing import cast
from urllib.parse import unquote

from leyden._lib.host.http import JSON, Receive, Refusal, Scope, Send, header, read_body, send_reply
from leyden.dialects import DIALECTS, Dialect, dialect_of_client
from leyden.dialects.pinned_sampling import KEY_MARK
from leyden.types import semconv

Headers = list[tuple[bytes, bytes]]

_ONE_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"),
    *("upgrade", "host", "content-length", "expect"),
}
"""Headers that HTTP defines for one connection only."""
_HOP_BY_HOP = _ONE_HOP | {"content-encoding"}
"""Headers that the gateway does not pass on if it reads, and may change, the body."""
_OF_THE_GATEWAY = {
    "api-key",
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
"""Headers of an agent's request that the model's server does not get. `accept-encoding` is among them, because the
gateway's connection to the server chooses its own compression.
"""
_KEY_HEADERS = tuple(
    dict.fromkeys((each.key_header.encode(), each.key_scheme.lower().encode()) for each in DIALECTS.values())
)
"""The headers in which clients send their key, each with the scheme before the key."""
_NOT_UPSTREAM = frozenset(name.encode() for name in _HOP_BY_HOP | _OF_THE_GATEWAY) | {name for name, _ in _KEY_HEADERS}
_NOT_DOWNSTREAM = frozenset(_HOP_BY_HOP)
_ONE_HOP_BYTES = frozenset(name.encode() for name in _ONE_HOP)
_USER_AGENT_CHARACTERS = 200
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


def trace_parent(scope: Scope) -> tuple[str, str] | None:
    """Return the request's W3C trace context as (trace id, the caller's span id); None unless it is valid."""
    found = _TRACEPARENT.fullmatch(header(scope, b"traceparent") or b"")
    return (found[1].decode(), found[2].decode()) if found else None


def sent_time(scope: Scope, arrived: float) -> float | None:
    """Return when the agent's process sent the call, in Unix seconds by that process's clock: the header
    `x-leyden-sent`.

    arrived: when the call arrived, by this machine's clock. It is returned for a client on this machine that sends no
        header. For another client without a valid header: None.
    """
    given, client = header(scope, b"x-leyden-sent"), scope.get("client")
    if given is None and client is not None and client[0] in ("127.0.0.1", "::1"):
        return arrived
    try:
        sent = float(given or b"nan")
    except ValueError:
        return None
    return sent if math.isfinite(sent) else None


def user_agent(scope: Scope) -> str | None:
    """Return the client's name for itself, cut to 200 characters; None if it sends none."""
    return None if (given := header(scope, b"user-agent")) is None else _text(given)[:_USER_AGENT_CHARACTERS]


def attempt_of_headers(scope: Scope) -> tuple[str, str] | None:
    """Return (rollout id, attempt id) from the headers; None if they name no attempt.

    The ids are percent-encoded in `x-leyden-rollout` and `x-leyden-attempt`, or in W3C's `baggage`.
    """
    rollout, attempt = header(scope, b"x-leyden-rollout"), header(scope, b"x-leyden-attempt")
    if not (rollout and attempt):
        members = (
            member.partition(b";")[0].partition(b"=") for member in (header(scope, b"baggage") or b"").split(b",")
        )
        carried = {name.strip(): value.strip() for name, _, value in members}
        rollout, attempt = carried.get(semconv.ROLLOUT_ID.encode()), carried.get(semconv.ATTEMPT_ID.encode())
    return (unquote(_text(rollout)), unquote(_text(attempt))) if rollout and attempt else None


def given_key(scope: Scope) -> bytes:
    """Return the API key that the client sent, in any dialect's header; empty if it sent none. Pins are left out."""
    return _key_and_pins(scope).partition(KEY_MARK)[0]


def pins_of_key(scope: Scope) -> str:
    """Return what the client's key says of the sampling (`dialects.pinned_sampling`); "" if it says nothing."""
    _, mark, pins = _key_and_pins(scope).partition(KEY_MARK)
    return (mark[1:] + pins).decode("latin-1")


def _key_and_pins(scope: Scope) -> bytes:
    for name, scheme in _KEY_HEADERS:
        value = header(scope, name)
        if value is not None and value[: len(scheme)].lower() == scheme and (key := value[len(scheme) :].strip()):
            return key
    return b""


def upstream_headers(scope: Scope, api_key: str | None, dialect: Dialect) -> list[tuple[str, str]]:
    """Return the agent's headers as the upstream gets them, and the upstream's key.

    dialect: the dialect in which the upstream is called.
    """
    given = cast(Iterable[tuple[bytes, bytes]], scope["headers"])
    headers = as_text((name, value) for name, value in given if name not in _NOT_UPSTREAM)
    if dialect.mark is not None and header(scope, dialect.mark[0].encode()) is None:
        headers.append(dialect.mark)
    return [*headers, *dialect.auth_headers(api_key)]


def client_dialect(scope: Scope) -> Dialect:
    """Return the dialect of the client, by its headers, for a reply that does not depend on the route."""
    return dialect_of_client(name for name, _ in cast(Iterable[tuple[bytes, bytes]], scope["headers"]))


def downstream(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the upstream's headers for the agent, in lower case, without those that describe the connection or the
    encoding of the body, because the gateway encodes the body again.
    """
    return [(name.lower(), value) for name, value in headers if name.decode("latin-1").lower() not in _NOT_DOWNSTREAM]


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers without those that HTTP defines for one connection, because the body passes unchanged."""
    return [(name, value) for name, value in headers if name.lower() not in _ONE_HOP_BYTES]


def as_text(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Decode header bytes for aiohttp, which encodes them as UTF-8 again; as Latin-1 if they are not UTF-8."""
    return [(_text(name), _text(value)) for name, value in headers]


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


async def read_request(scope: Scope, receive: Receive, max_bytes: int, *, is_json: bool = True) -> bytes:
    """Return the body of the request as the client sent it, compressed or not.

    is_json: refuse a body that takes too much work to parse; False if it is only passed on.
    Raise Refusal (413) for a body above `max_bytes` or of too much work, ClientGone if the client leaves before its
    end.
    """
    option = "max_body_bytes (--max-body-mb)"
    return await read_body(
        dict(scope["headers"]), receive, max_bytes=max_bytes, option=option, unpack=False, is_json=is_json
    )


async def send_refusal(send: Send, refusal: Refusal, dialect: Dialect) -> None:
    """Reply with an error in the client's dialect. Do nothing if the connection is lost.

    For an error that a repetition does not cure (below 500, without Retry-After), the header `x-should-retry: false`
    tells OpenAI's and Anthropic's clients not to retry.
    """
    body = dialect.error(refusal.status, refusal.message, code=refusal.code, param=refusal.param)
    is_final = refusal.status < 500 and refusal.retry_after_seconds is None
    headers = [JSON, *refusal.headers, *([(b"x-should-retry", b"false")] if is_final else [])]
    with contextlib.suppress(OSError):
        await send_reply(send, body, status=refusal.status, headers=headers)
