"""The routes of the gateway, and the way of one call from the agent to the model and back.

A raw ASGI application: it knows HTTP, and leaves formats to `wire`, admission to `attempts` and what is written down to
`record`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import aiohttp

from leyden.gateway.asgi import (
    Receive,
    Scope,
    Send,
    downstream_headers,
    header,
    read_body,
    send_json,
    send_refusal,
    trace_parent,
    upstream_headers,
)
from leyden.gateway.attempts import Attempts, trace_id_of
from leyden.gateway.record import ModelCall
from leyden.gateway.recorder import Recorder
from leyden.gateway.refusal import Refusal
from leyden.gateway.upstream import UpstreamModel
from leyden.gateway.wire import (
    DIALECTS,
    DONE,
    Dialect,
    Hidden,
    StreamAssembler,
    dump,
    prepare,
    split_events,
    sse_event,
    visible,
)

__all__ = ["GatewayApp", "seed_for"]

logger = logging.getLogger(__name__)

_ERROR_TEXT_LIMIT = 2000


def seed_for(deterministic_seed: int, rollout_id: str, call_index: int) -> int:
    """The sampling seed of one call, 31 bits. Attempts of one rollout share it, so that a rerun samples the same."""
    digest = sha256(f"{deterministic_seed}\x1f{rollout_id}\x1f{call_index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


@dataclass(slots=True)
class _Exchange:
    """One call under way: what is recorded of it, and how far the answer is."""

    call: ModelCall
    send: Send
    answered: bool = False
    """The upstream's answer is whole, or an error stands in its place."""
    recorded: bool = False
    streaming: bool = False
    """The head of a streamed answer has been sent: an error can only be one more event."""
    disconnected: bool = False
    attempt_over: bool = False


class GatewayApp:
    """The ASGI application. Everything runs in the gateway's event loop."""

    def __init__(
        self,
        *,
        session: aiohttp.ClientSession,
        attempts: Attempts,
        recorder: Recorder,
        models: Callable[[], dict[str, UpstreamModel]],
        token: str | None,
        deterministic_seed: int | None,
        timeout_seconds: float,
    ) -> None:
        self._session = session
        self._attempts = attempts
        self._recorder = recorder
        self._models = models
        self._token = None if token is None else f"Bearer {token}".encode()
        self._deterministic_seed = deterministic_seed
        self._timeout_seconds = timeout_seconds
        self._calls: dict[asyncio.Task[Any], _Exchange] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._route(scope, receive, send)
        except Refusal as refusal:
            await send_refusal(send, refusal)

    def cancel_calls(self) -> None:
        """Give up the calls under way: each is recorded and answered with an error."""
        for task in self._calls:
            task.cancel()

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Give up the calls that the agent left under way, so that the attempt's record is complete when it is flushed."""
        for task, exchange in self._calls.items():
            call = exchange.call
            if (call.rollout_id, call.attempt_id) == (rollout_id, attempt_id) and not exchange.answered:
                exchange.attempt_over = True
                task.cancel()

    # ---- routes ------------------------------------------------------------------------------------------------------

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").strip("/")
        method = scope["method"]
        if path == "health":
            return await send_json(send, b'{"status":"ok"}')
        self._authenticate(scope)
        match path.split("/", 4):
            case ["rollout", rollout_id, "attempt", attempt_id, rest] if rest.startswith("v1/"):
                route = rest.removeprefix("v1/")
                if dialect := DIALECTS.get(route):
                    _require(method, "POST", path)
                    return await self._call(scope, receive, send, unquote(rollout_id), unquote(attempt_id), dialect)
            case _:
                route = path.removeprefix("v1/")
                if route in DIALECTS:
                    raise Refusal(
                        404,
                        "attempt_missing",
                        f"/{path} carries no ids, so the call could not be recorded; use the base URL of one attempt: "
                        "ProxyLLM.get_base_url(rollout_id, attempt_id), /rollout/{id}/attempt/{id}/v1",
                    )
        if route == "models":
            _require(method, "GET", path)
            return await send_json(send, self._model_list())
        raise Refusal(
            404,
            "route_not_found",
            f"the gateway has no route {method} /{path}; it serves /rollout/{{id}}/attempt/{{id}}/v1/ with "
            f"{', '.join(DIALECTS)} and models",
        )

    def _authenticate(self, scope: Scope) -> None:
        if self._token is None:
            return
        given = header(scope, b"authorization") or b""
        if not hmac.compare_digest(given, self._token):
            raise Refusal(
                401, "invalid_api_key", "this gateway needs its token as the API key; the `llm` resource carries it"
            )

    def _model_list(self) -> bytes:
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "leyden"} for name in self._models()]
        return dump({"object": "list", "data": models})

    # ---- one call ----------------------------------------------------------------------------------------------------

    async def _call(
        self, scope: Scope, receive: Receive, send: Send, rollout_id: str, attempt_id: str, dialect: Dialect
    ) -> None:
        start_time = time.time()
        raw = await read_body(receive)
        try:
            admission = await self._attempts.admit(rollout_id, attempt_id)
        except Refusal as refusal:
            if refusal.status == HTTPStatus.GONE and self._attempts.note_late_call(rollout_id, attempt_id):
                await self._record_late(rollout_id, attempt_id, dialect, refusal)
            raise
        trace_id, parent_id = trace_parent(scope) or (admission.trace_id, None)
        call = ModelCall(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            trace_id=trace_id,
            parent_id=parent_id,
            call_index=admission.call_index,
            operation=dialect.operation,
            start_time=start_time,
        )
        exchange = _Exchange(call, send)
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._calls[task] = exchange
        self._recorder.begin((rollout_id, attempt_id))
        watcher = asyncio.create_task(_watch(exchange, receive, task))
        try:
            await self._exchange(exchange, scope, raw, dialect)
        except Refusal as refusal:
            await self._fail(exchange, refusal)
        except asyncio.CancelledError:
            task.uncancel()
            await self._fail(exchange, _cancelled(exchange))
        except Exception as error:
            logger.exception("call %d of rollout %r, attempt %r", call.call_index, rollout_id, attempt_id)
            await self._fail(exchange, Refusal(500, "gateway_error", f"the gateway failed with {type(error).__name__}"))
        finally:
            watcher.cancel()
            del self._calls[task]

    async def _record_late(self, rollout_id: str, attempt_id: str, dialect: Dialect, refusal: Refusal) -> None:
        """Leave the refused call in the record of the attempt that it came too late for."""
        now = time.time()
        call = ModelCall(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            trace_id=trace_id_of((rollout_id, attempt_id)),
            parent_id=None,
            call_index=None,
            operation=dialect.operation,
            start_time=now,
            end_time=now,
            error=refusal.message,
        )
        self._recorder.begin((rollout_id, attempt_id))
        await self._recorder.put(call)

    async def _exchange(self, exchange: _Exchange, scope: Scope, raw: bytes, dialect: Dialect) -> None:
        call = exchange.call
        call.request = _parse_request(raw)
        model = self._model(call.request)
        seed = None
        if self._deterministic_seed is not None and call.request.get("seed") is None:
            seed = seed_for(self._deterministic_seed, call.rollout_id, call.call_index or 0)
        body, hidden = prepare(
            dialect,
            raw,
            call.request,
            model=model.upstream_model or model.model_name,
            record_tokens=model.record_tokens,
            seed=seed,
        )
        if seed is not None:
            call.request["seed"] = seed
        try:
            async with self._session.post(
                model.url(dialect.path),
                data=body,
                headers=upstream_headers(scope, model.api_key),
                allow_redirects=False,
            ) as response:
                if response.status == 200 and response.content_type == "text/event-stream":
                    await self._relay_stream(exchange, response, hidden)
                else:
                    await self._relay_whole(exchange, response, hidden)
        except aiohttp.ClientError as error:
            raise _unreachable(exchange, model, error) from error
        except TimeoutError as error:
            raise Refusal(
                504,
                "upstream_timeout",
                f"{model.endpoint} did not answer within {self._timeout_seconds:g} s "
                "(LLMProxy's timeout_seconds); is the model overloaded?",
            ) from error
        except OSError as error:
            raise _unreachable(exchange, model, error) from error

    def _model(self, request: dict[str, Any]) -> UpstreamModel:
        name = request.get("model")
        models = self._models()
        if isinstance(name, str) and name in models:
            return models[name]
        raise Refusal(
            404,
            "model_not_found",
            f"the gateway has no model {name!r}; its model_list has {', '.join(map(repr, models)) or 'no model'}",
            param="model",
        )

    async def _relay_whole(self, exchange: _Exchange, response: aiohttp.ClientResponse, hidden: Hidden) -> None:
        raw = await response.read()
        call = exchange.call
        if response.status >= 300:
            call.error = f"the upstream answered {response.status}: {_excerpt(raw)}"
            body = raw
        else:
            call.response = _parse_answer(raw)
            body = dump(visible(call.response, hidden)) if hidden else raw
        await self._record(exchange)
        headers = downstream_headers(response)
        headers.append((b"content-length", str(len(body)).encode()))
        await exchange.send({"type": "http.response.start", "status": response.status, "headers": headers})
        await exchange.send({"type": "http.response.body", "body": body})

    async def _relay_stream(self, exchange: _Exchange, response: aiohttp.ClientResponse, hidden: Hidden) -> None:
        call, send = exchange.call, exchange.send
        assembler = StreamAssembler()
        buffer = bytearray()
        await send({"type": "http.response.start", "status": 200, "headers": downstream_headers(response)})
        exchange.streaming = True
        try:
            async for piece in response.content.iter_any():
                buffer += piece
                shown: list[bytes] = []
                for event, data in split_events(buffer):
                    if data == DONE:
                        call.response = assembler.answer()
                        await self._record(exchange)
                        shown.append(event)
                    elif not data:
                        shown.append(event)
                    elif part := _visible_event(event, data, assembler, hidden):
                        shown.append(part)
                if assembler.error is not None and call.error is None:
                    call.error = f"the upstream answered in the stream: {assembler.error[:_ERROR_TEXT_LIMIT]}"
                if assembler.finished:
                    exchange.answered = True
                if shown:
                    await send({"type": "http.response.body", "body": b"".join(shown), "more_body": True})
        finally:
            if call.response is None:
                call.response = assembler.answer()
        if not assembler.finished and call.error is None:
            raise Refusal(502, "upstream_incomplete", "the upstream ended its stream before the answer was finished")
        await self._record(exchange)
        await send({"type": "http.response.body", "body": bytes(buffer)})

    # ---- how a call ends ---------------------------------------------------------------------------------------------

    async def _record(self, exchange: _Exchange) -> None:
        """Queue the record, once, before the agent can see that the answer is whole."""
        exchange.answered = True
        if not exchange.recorded:
            exchange.recorded = True
            exchange.call.end_time = time.time()
            await self._recorder.put(exchange.call)

    async def _fail(self, exchange: _Exchange, refusal: Refusal) -> None:
        if exchange.call.error is None:
            exchange.call.error = refusal.message
        await self._record(exchange)
        if exchange.disconnected:
            return
        if exchange.streaming:
            await exchange.send({"type": "http.response.body", "body": sse_event(refusal.body())})
        else:
            await send_refusal(exchange.send, refusal)


async def _watch(exchange: _Exchange, receive: Receive, task: asyncio.Task[Any]) -> None:
    """Give up a call whose agent has gone; one that is answered already is only recorded."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.disconnected = True
    if not exchange.answered:
        task.cancel()


def _cancelled(exchange: _Exchange) -> Refusal:
    if exchange.attempt_over:
        return Refusal(
            410, "attempt_ended", "the attempt ended before the answer was whole: the agent did not wait for it"
        )
    if exchange.disconnected:
        return Refusal(499, "client_disconnected", "the client disconnected before the answer was whole")
    return Refusal(503, "gateway_stopped", "the gateway was stopped before the answer was whole")


def _unreachable(exchange: _Exchange, model: UpstreamModel, error: Exception) -> Refusal:
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    if exchange.streaming or isinstance(error, aiohttp.ClientPayloadError):
        return Refusal(502, "upstream_incomplete", f"{model.endpoint} broke off in the middle of its answer ({what})")
    return Refusal(
        502, "upstream_unreachable", f"cannot reach {model.endpoint} for model {model.model_name!r} ({what})"
    )


def _visible_event(event: bytes, data: bytes, assembler: StreamAssembler, hidden: Hidden) -> bytes | None:
    """The event as the agent sees it; None for one that holds only what is hidden."""
    try:
        chunk: Any = json.loads(data)
        assembler.feed(chunk)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Refusal(
            502,
            "upstream_garbage",
            f"the upstream's stream cannot be read ({type(error).__name__}: {error}): {_excerpt(data)}",
        ) from error
    if not hidden:
        return event
    shown = visible(chunk, hidden)
    if shown is None:
        return None
    return event if shown == chunk else sse_event(dump(shown), like=event)


def _parse_request(raw: bytes) -> dict[str, Any]:
    try:
        request: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "invalid_json", f"the request body is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise Refusal(400, "invalid_json", f"the request body is a JSON {type(request).__name__}; it must be an object")
    return cast(dict[str, Any], request)


def _parse_answer(raw: bytes) -> dict[str, Any]:
    try:
        answer: Any = json.loads(raw)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise Refusal(
            502, "upstream_garbage", f"the upstream answered 200 with something that is no JSON object: {_excerpt(raw)}"
        )
    return cast(dict[str, Any], answer)


def _excerpt(raw: bytes) -> str:
    return raw[:_ERROR_TEXT_LIMIT].decode("utf-8", "replace")


def _require(method: str, wanted: str, path: str) -> None:
    if method != wanted:
        raise Refusal(405, "method_not_allowed", f"/{path} takes {wanted}, not {method}")
