"""Imitate LiteLLM's spans and response fields, for programs that read them.

These are the span `raw_gen_ai_request` of each call, and the token ids in a response. The gateway and its record stay
as they are: the spans are made when a program reads spans from a store, and a response is changed on its way to the
agent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, cast

from leyden._lib.host.http import Message, Receive, Scope, Send, header
from leyden.gateway.call_replay import recorded_answer
from leyden.types import Span as NativeSpan
from leyden.types import semconv
from leyden_compat.agentlightning.types import Span

RAW_REQUEST: Final = "raw_gen_ai_request"
_MEMBER: Final = b'"return_token_ids":true'
"""The member that is put into a request's JSON object."""


def raw_request(span: NativeSpan) -> Span | None:
    """Return the span that LiteLLM would have made for a call that the gateway recorded: its request to the model's
    server.

    None for any other span, and for a call that failed.
    """
    if span.name != semconv.MODEL_CALL or span.status.status_code == "ERROR":
        return None
    answer = recorded_answer(span, with_token_ids=True)
    written = span.attributes.get(semconv.GEN_AI_INPUT_MESSAGES)
    fields: dict[str, Any] = {**answer, "messages": json.loads(written) if isinstance(written, str) else None}
    provider = "openai"
    if span.tokens is not None:
        provider, fields["extra_body"] = "hosted_vllm", {"return_token_ids": True}
    attributes = {f"llm.{provider}.{name}": str(value) for name, value in fields.items() if value is not None}
    made = span.model_copy(
        update={
            "name": RAW_REQUEST,
            "span_id": sha256(span.span_id.encode()).hexdigest()[:16],
            "parent_id": span.span_id,
            "attributes": attributes,
            "tokens": None,
        }
    )
    return Span.of(made)


class ShowsTokenIds:
    """An ASGI application before the gateway. It adds token ids to chat completions where LiteLLM has them:
    `prompt_token_ids`, and `provider_specific_fields` of a choice. Streams have them where vLLM writes them.
    """

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request: ask the gateway for token ids, and move them in its response.

        Requests for other paths, and compressed ones, are passed on unchanged.
        """
        if scope["type"] != "http" or not scope["path"].endswith("/chat/completions"):
            return await self._gateway(scope, receive, send)
        if header(scope, b"content-encoding") is not None:
            return await self._gateway(scope, receive, send)
        is_rewritten = False

        async def rewritten_request() -> Message:
            """Receive a message, and put the request for token ids (`_MEMBER`) into the JSON object at the body's
            beginning.
            """
            nonlocal is_rewritten
            message = await receive()
            body = message.get("body", b"")
            if not is_rewritten and body:
                is_rewritten = True
                start = body.lstrip()
                if start[:1] == b"{" and start[1:].lstrip()[:1] != b"}":
                    message = {**message, "body": b"{" + _MEMBER + b"," + start[1:]}
            return message

        longer = [
            (name, str(int(value) + len(_MEMBER) + 1).encode() if name == b"content-length" else value)
            for name, value in scope["headers"]
        ]
        await self._gateway({**scope, "headers": longer}, rewritten_request, _Rewritten(send))


class _Rewritten:
    """Sends a JSON response with `provider_specific_fields`, and any other response unchanged."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        """Pass a message on. A JSON response is held back until it is complete, because adding fields changes its
        Content-Length.
        """
        if message["type"] == "http.response.start":
            headers = dict(cast("list[tuple[bytes, bytes]]", message["headers"]))
            if message["status"] == 200 and headers.get(b"content-type", b"").startswith(b"application/json"):
                self._start = message
                return
        elif self._start is not None and message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            body = _with_provider_fields(self._body)
            headers = [
                (name, str(len(body)).encode() if name == b"content-length" else value)
                for name, value in self._start["headers"]
            ]
            await self._send({**self._start, "headers": headers})
            message = {**message, "body": body}
        await self._send(message)


def _with_provider_fields(body: bytes) -> bytes:
    """Return a JSON response whose choices have their token ids in `provider_specific_fields` too, where LiteLLM puts
    them. Any other body is returned as it is.
    """
    try:
        answer: Any = json.loads(body)
        choices: list[dict[str, Any]] = answer["choices"]
        for choice in choices:
            if "token_ids" in choice:
                kept: Mapping[str, Any] = choice.get("provider_specific_fields") or {}
                choice["provider_specific_fields"] = {
                    "stop_reason": choice.get("stop_reason"),
                    **kept,
                    "token_ids": choice["token_ids"],
                }
    except (ValueError, LookupError, TypeError, AttributeError):
        return body
    return json.dumps(answer, ensure_ascii=False).encode()
