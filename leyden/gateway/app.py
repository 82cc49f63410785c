"""The routes of the gateway, and the way of one call from the agent to the model and back.

A raw ASGI application: it knows HTTP, and leaves formats to `leyden.dialects`, admission to `attempts` and what is written
down to `record`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import aiohttp

from leyden.dialects import DIALECTS, Dialect, Passage, PassageStream, dump, split_events
from leyden.errors import StoreError, Untranslatable
from leyden.gateway.asgi import (
    Headers,
    Receive,
    Scope,
    Send,
    attempt_of_headers,
    downstream_headers,
    given_key,
    header,
    read_body,
    send_json,
    send_refusal,
    speaks_anthropic,
    trace_parent,
    upstream_headers,
)
from leyden.gateway.attempts import AttemptKey, Attempts, trace_id_of
from leyden.gateway.balance import Balancer
from leyden.gateway.buffering import Buffering
from leyden.gateway.gate import Gate
from leyden.gateway.limits import AttemptLimits, Spent
from leyden.gateway.record import ModelCall
from leyden.gateway.recorder import Recorder
from leyden.gateway.refusal import Refusal
from leyden.gateway.responses import KeptResponses
from leyden.gateway.retries import Retries, Try
from leyden.gateway.upstream import UpstreamModel
from leyden.utils.attempt_key import PREFIX, read_attempt_key

__all__ = ["GatewayApp", "seed_for"]

logger = logging.getLogger(__name__)

_ROUTES = {dialect.path: dialect for dialect in DIALECTS.values()}
_ERROR_TEXT_LIMIT = 2000
_JSON_TYPE = (b"content-type", b"application/json")
_EVENT_STREAM: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_RETRY_SECONDS = 0.05
_TOO_BUSY = {429, 502, 503, 504}
_OF_THE_SERVER = {
    *("upstream_unreachable", "upstream_incomplete", "upstream_timeout", "upstream_garbage", "upstream_failed")
}
"""Refusals that say something about the server's health."""
_COMMENT = b": keep-alive\n\n"


def seed_for(deterministic_seed: int, rollout_id: str, call_index: int) -> int:
    """The sampling seed of one call, 31 bits. Attempts of one rollout share it, so that a rerun samples the same."""
    digest = sha256(f"{deterministic_seed}\x1f{rollout_id}\x1f{call_index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


@dataclass(slots=True)
class _Exchange:
    """One call under way: what is recorded of it, and how far the answer is."""

    call: ModelCall
    dialect: Dialect
    """The agent's."""
    send: Send
    answered: bool = False
    """The upstream's answer is whole, or an error stands in its place."""
    recorded: bool = False
    streaming: bool = False
    """The head of a streamed answer has been sent: an error can only be one more event."""
    disconnected: bool = False
    attempt_over: bool = False
    keep: dict[str, Any] | None = None
    """The request of a response that its client may refer to later."""
    mode: str | None = None
    """Of the rollout."""
    spent: Spent = field(default_factory=Spent)
    """By the attempt."""
    price_per_million: tuple[float, float] | None = None
    status: int | None = None
    """Of the upstream's answer."""
    tried: Try | None = None
    """For the time that the client sends the call again."""
    said_at: float = 0.0
    """When something was last sent to the agent, in the event loop's time."""
    saying: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def begin_stream(self, headers: Headers) -> None:
        """Send the head of a streamed answer, unless it has been."""
        async with self.saying:
            if not self.streaming:
                self.streaming = True
                await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def say(self, part: bytes, *, more: bool = True) -> None:
        """Send a part of a streamed answer: whole events, or a comment."""
        async with self.saying:
            self.said_at = asyncio.get_running_loop().time()
            await self.send({"type": "http.response.body", "body": part, "more_body": more})


class GatewayApp:
    """The ASGI application. Everything runs in the gateway's event loop."""

    def __init__(
        self,
        *,
        session: aiohttp.ClientSession,
        attempts: Attempts,
        recorder: Recorder,
        models: Callable[[], dict[str, tuple[UpstreamModel, ...]]],
        token: str | None,
        control_key: Callable[[], str],
        deterministic_seed: int | None,
        timeout_seconds: float,
        keep_alive_seconds: float,
        upstream_retries: int,
        gate: Gate,
        limits: AttemptLimits,
        sampling_overrides: Mapping[str, Mapping[str, Any]],
        durable: bool,
    ) -> None:
        self._session = session
        self._attempts = attempts
        self._recorder = recorder
        self._models = models
        self._token = None if token is None else token.encode()
        self._control_key = control_key
        self._deterministic_seed = deterministic_seed
        self._timeout_seconds = timeout_seconds
        self._keep_alive_seconds = keep_alive_seconds
        self._upstream_retries = upstream_retries
        self._gate = gate
        self._limits = limits
        self._sampling_overrides = sampling_overrides
        self._durable = durable
        self._balancer = Balancer()
        self._buffering = Buffering()
        self._calls: dict[asyncio.Task[Any], _Exchange] = {}
        self._kept = KeptResponses()
        self._retries = Retries()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._route(scope, receive, send)
        except Refusal as refusal:
            await send_refusal(send, refusal, DIALECTS["messages" if speaks_anthropic(scope) else "chat"])

    @property
    def remembers(self) -> bool:
        """Whether `end_attempt` may have something to forget. May be asked from any thread."""
        return bool(self._kept) or bool(self._retries) or bool(self._balancer)

    def cancel_calls(self) -> None:
        """Give up the calls under way: each is recorded and answered with an error."""
        for task in self._calls:
            task.cancel()

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Give up the calls that the agent left under way, so that the attempt's record is complete when it is flushed."""
        self._kept.end((rollout_id, attempt_id))
        self._retries.end((rollout_id, attempt_id))
        self._balancer.end_attempt((rollout_id, attempt_id))
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
        parts = path.split("/", 4)
        match parts:
            case ["rollout", rollout_id, "attempt", attempt_id, "end"]:
                _require(method, "POST", path)
                return await self._finish(scope, send, unquote(rollout_id), unquote(attempt_id))
            case _:
                key_of = self._authenticate(scope)
        match parts:
            case ["rollout", rollout_id, "attempt", attempt_id, rest] if rest.startswith("v1/"):
                route = rest.removeprefix("v1/")
                key = unquote(rollout_id), unquote(attempt_id)
                if self._token is not None:  # else a key proves nothing, and the URL is said anew with each call
                    _check_same(key, key_of)
            case _:
                route = path.removeprefix("v1/")
                key = key_of or attempt_of_headers(scope)
        kept_id = route.removeprefix("responses/") if route.startswith("responses/") else None
        if key is None and (route in _ROUTES or kept_id):
            raise _no_attempt(path)
        if key is not None and (dialect := _ROUTES.get(route)):
            _require(method, "POST", path)
            return await self._call(scope, receive, send, *key, dialect)
        if key is not None and kept_id:
            return await self._kept_response(send, method, path, key, unquote(kept_id))
        if route == "models":
            _require(method, "GET", path)
            return await send_json(send, self._model_list(anthropic=speaks_anthropic(scope)))
        raise Refusal(
            404,
            "route_not_found",
            f"the gateway has no route {method} /{path}; it serves /rollout/{{id}}/attempt/{{id}}/v1/ with "
            f"{', '.join(_ROUTES)} and models",
        )

    def _authenticate(self, scope: Scope) -> AttemptKey | None:
        """The attempt that the client's key names, and opens; None for the token, which opens them all."""
        given = given_key(scope)
        if given.startswith(PREFIX.encode()):
            token = None if self._token is None else self._token.decode()
            if found := read_attempt_key(token, given.decode("latin-1")):
                return found
            raise Refusal(
                401,
                "invalid_api_key",
                f"this key ({PREFIX}...) was not made with this gateway's token; LLMProxy.make_key(rollout_id, attempt_id) makes "
                "one, and the `llm` of the attempt carries it",
            )
        if self._token is not None and not hmac.compare_digest(given, self._token):
            raise Refusal(
                401, "invalid_api_key", "this gateway needs its token as the API key; the `llm` resource carries it"
            )
        return None

    async def _finish(self, scope: Scope, send: Send, rollout_id: str, attempt_id: str) -> None:
        """End an attempt that a runner in another process (`remote.py`) made, and answer when its record is whole."""
        if not hmac.compare_digest(header(scope, b"authorization") or b"", f"Bearer {self._control_key()}".encode()):
            raise Refusal(
                401,
                "invalid_control_key",
                "only this gateway's own runners may end an attempt; give those on other machines the LEYDEN_STORE_TOKEN of this run",
            )
        self._attempts.end(rollout_id, attempt_id)
        self.end_attempt(rollout_id, attempt_id)
        try:
            await self._recorder.flush((rollout_id, attempt_id))
        except StoreError as error:
            return await send_json(send, str(error).encode(), status=500)
        await send_json(send, b"{}")

    async def _kept_response(self, send: Send, method: str, path: str, key: tuple[str, str], response_id: str) -> None:
        kept = self._kept.get(key, response_id)
        if method == "DELETE":
            self._kept.forget(key, response_id)
            return await send_json(send, dump({"id": response_id, "object": "response", "deleted": True}))
        _require(method, "GET", path)
        await send_json(send, dump(kept.response))

    def _model_list(self, *, anthropic: bool) -> bytes:
        names = list(self._models())
        if anthropic:
            about = {"type": "model", "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
            models = [{"id": name, "display_name": name, **about} for name in names]
            ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
            return dump({"data": models, "has_more": False, **ends})
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "leyden"} for name in names]
        return dump({"object": "list", "data": models})

    # ---- one call ----------------------------------------------------------------------------------------------------

    async def _call(
        self, scope: Scope, receive: Receive, send: Send, rollout_id: str, attempt_id: str, dialect: Dialect
    ) -> None:
        start_time = time.time()
        raw = await read_body(receive)
        earlier = self._retries.earlier((rollout_id, attempt_id), dialect.path, raw, scope)
        known_index = None if earlier is None else earlier.call_index
        try:
            admission = await self._attempts.admit(rollout_id, attempt_id, call_index=known_index)
        except Refusal as refusal:
            if refusal.status == HTTPStatus.GONE and self._attempts.note_late_call(rollout_id, attempt_id):
                await self._record_late(rollout_id, attempt_id, dialect, refusal)
            raise
        if earlier is not None and earlier.headers is not None:
            self._retries.replayed(earlier)
            return await send_json(send, earlier.body, headers=earlier.headers)
        trace_id, parent_id = trace_parent(scope) or (admission.trace_id, None)
        call = ModelCall(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            trace_id=trace_id,
            parent_id=parent_id,
            call_index=admission.call_index,
            operation=dialect.operation,
            start_time=start_time,
            retry_of=None if earlier is None else earlier.span_id,
        )
        exchange = _Exchange(call, dialect, send, mode=admission.mode, spent=admission.spent)
        exchange.tried = self._retries.begin(
            (rollout_id, attempt_id),
            dialect.path,
            raw,
            scope,
            call_index=admission.call_index,
            span_id=call.span_id,
        )
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._calls[task] = exchange
        self._recorder.begin((rollout_id, attempt_id))
        watcher = asyncio.create_task(_watch(exchange, receive, task))
        try:
            await self._exchange(exchange, scope, raw)
        except Refusal as refusal:
            await self._fail(exchange, refusal)
        except asyncio.CancelledError:
            task.uncancel()
            await self._fail(exchange, _cancelled(exchange))
        except StoreError as error:
            await self._fail(
                exchange, Refusal(503, "not_recorded", f"the answer could not be recorded (durable=True): {error}")
            )
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

    async def _exchange(self, exchange: _Exchange, scope: Scope, raw: bytes) -> None:
        call = exchange.call
        call.request = request = _parse_request(raw)
        self._limits.check(call.call_index or 0, exchange.spent)
        if (overrides := self._sampling_overrides.get(exchange.mode or "")) and call.operation != "embeddings":
            call.request = request = {**request, **overrides}
            raw = dump(request)
        servers = self._servers(request)
        await self._gate.enter()
        try:
            await self._ask_until_answered(exchange, scope, raw, request, servers)
        finally:
            self._gate.leave()

    async def _ask_until_answered(
        self,
        exchange: _Exchange,
        scope: Scope,
        raw: bytes,
        request: dict[str, Any],
        servers: tuple[UpstreamModel, ...],
    ) -> None:
        call = exchange.call
        tried: list[UpstreamModel] = []
        while True:
            model = self._balancer.choose(servers, (call.rollout_id, call.attempt_id), but=tried)
            tried.append(model)
            left = self._upstream_retries - len(tried) + 1
            others = [server for server in servers if server not in tried]
            try:
                return await self._try(
                    exchange, scope, raw, request, model, again=left > 0, elsewhere=left > 0 and bool(others)
                )
            except _Again as again:
                logger.info("call %d of attempt %r is tried again: %s", call.call_index, call.attempt_id, again)
                if not others:
                    await asyncio.sleep(_RETRY_SECONDS * 2 ** len(tried) * random.uniform(0.5, 1.5))

    async def _try(
        self,
        exchange: _Exchange,
        scope: Scope,
        raw: bytes,
        request: dict[str, Any],
        model: UpstreamModel,
        *,
        again: bool,
        elsewhere: bool,
    ) -> None:
        """Ask one server, and see how it is. Raises _Again."""
        exchange.status, well = None, None
        exchange.price_per_million = model.price_per_million
        self._balancer.begin(model)
        try:
            await self._ask(exchange, scope, raw, request, model, again=again, elsewhere=elsewhere)
            well = _well(exchange)
        except _Again as failure:
            well = None if failure.status == HTTPStatus.TOO_MANY_REQUESTS else False
            raise
        except Refusal as refusal:
            well = False if refusal.code in _OF_THE_SERVER else None
            raise
        finally:
            self._balancer.end(model, well=well)

    async def _ask(
        self,
        exchange: _Exchange,
        scope: Scope,
        raw: bytes,
        request: dict[str, Any],
        model: UpstreamModel,
        *,
        again: bool,
        elsewhere: bool,
    ) -> None:
        """Send the call to one server and pass its answer on.

        again: raise _Again if the server cannot be reached. elsewhere: do so if it is too busy, too.
        """
        call = exchange.call
        passage = self._passage(exchange, raw, request, model)
        call.request = passage.chat if passage.seed is None else {**passage.chat, "seed": passage.seed}
        buffered = passage.streams and passage.upstream.logprobs is not None and self._buffering.wanted(model)
        beat = asyncio.create_task(self._keep_alive(exchange, early=buffered)) if passage.streams else None
        try:
            async with self._session.post(
                model.url(passage.upstream.path),
                data=passage.unstreamed() if buffered else passage.body,
                headers=upstream_headers(scope, model.api_key, passage.upstream),
                allow_redirects=False,
            ) as response:
                exchange.status = response.status
                if elsewhere and response.status in _TOO_BUSY and not exchange.streaming:
                    raise _Again(f"{model.endpoint} answered {response.status}", response.status)
                if response.status == 200 and response.content_type == "text/event-stream":
                    if not passage.streams:
                        raise Refusal(
                            502,
                            "upstream_garbage",
                            f"{model.endpoint} answered with a stream, but was asked for no stream",
                        )
                    await self._relay_stream(
                        exchange, downstream_headers(response), passage, response.content.iter_any()
                    )
                else:
                    await self._relay_whole(exchange, response, passage)
            if model.record_tokens and passage.upstream.logprobs is not None and not call.error and call.response:
                self._buffering.learn(model, call.response, streamed=passage.streams and not buffered)
        except aiohttp.ClientError as error:
            refusal = _unreachable(exchange, model, error)
            if again and refusal.code == "upstream_unreachable" and not isinstance(error, TimeoutError):
                raise _Again(refusal.message) from error
            raise refusal from error
        except TimeoutError as error:
            raise Refusal(
                504,
                "upstream_timeout",
                f"{model.endpoint} did not answer within {self._timeout_seconds:g} s "
                "(LLMProxy's timeout_seconds); is the model overloaded?",
            ) from error
        except OSError as error:
            raise _unreachable(exchange, model, error) from error
        finally:
            if beat is not None:
                beat.cancel()

    async def _keep_alive(self, exchange: _Exchange, *, early: bool) -> None:
        """Send a comment whenever a stream has been silent for a while, so that nobody on the way takes it for dead.

        early: before the upstream has begun to answer, too.
        """
        loop = asyncio.get_running_loop()
        exchange.said_at = loop.time()
        while not exchange.disconnected:
            await asyncio.sleep(exchange.said_at + self._keep_alive_seconds - loop.time())
            if early:
                await exchange.begin_stream(_EVENT_STREAM)
            if exchange.said_at + self._keep_alive_seconds <= loop.time():
                if exchange.streaming:
                    await exchange.say(_COMMENT)
                exchange.said_at = loop.time()

    def _passage(self, exchange: _Exchange, raw: bytes, request: dict[str, Any], model: UpstreamModel) -> Passage:
        call, client = exchange.call, exchange.dialect
        upstream = model.dialect_for(client)
        if upstream is None:
            raise Refusal(
                404,
                "dialect_not_served",
                f"model {model.model_name!r} speaks {', '.join(model.dialects) or 'nothing'}, and a call of {client.path} "
                "cannot be translated to that; if its server has the route, say so in UpstreamModel's dialects",
            )
        seed = None
        if self._deterministic_seed is not None:
            seed = seed_for(self._deterministic_seed, call.rollout_id, call.call_index or 0)
        name = model.upstream_model or model.model_name
        try:
            whole = request
            if client is not upstream and client is DIALECTS["responses"]:
                whole = self._kept.whole((call.rollout_id, call.attempt_id), request)
                exchange.keep = whole
            return Passage(
                client, upstream, raw, request, whole=whole, model=name, record_tokens=model.record_tokens, seed=seed
            )
        except Untranslatable as error:
            raise Refusal(
                400,
                "untranslatable",
                f"{error}; model {model.model_name!r} is asked in {upstream.path}, to which {client.path} is translated",
                param=error.field,
            ) from error

    def _servers(self, request: dict[str, Any]) -> tuple[UpstreamModel, ...]:
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

    async def _relay_whole(self, exchange: _Exchange, response: aiohttp.ClientResponse, passage: Passage) -> None:
        raw = await response.read()
        call = exchange.call
        if response.status == 200 and passage.streams and (events := passage.events_of(raw)):
            return await self._relay_stream(exchange, _EVENT_STREAM, passage, _one(events))
        if exchange.streaming:
            raise Refusal(502, "upstream_failed", f"the upstream answered {response.status}: {_excerpt(raw)}")
        if response.status >= 300:
            call.error = f"the upstream answered {response.status}: {_excerpt(raw)}"
            body = passage.error(response.status, raw)
        else:
            call.response, body = _read_answer(passage, raw)
            self._keep(exchange, passage)
        await self._record(exchange)
        headers = downstream_headers(response)
        if body is not raw:
            headers = [*((name, value) for name, value in headers if name != b"content-type"), _JSON_TYPE]
        if exchange.tried is not None and call.error is None:
            self._retries.answered(exchange.tried, headers, body)
        elif exchange.tried is not None:
            exchange.tried.state = "failed"
        await send_json(exchange.send, body, status=response.status, headers=headers)

    async def _relay_stream(
        self, exchange: _Exchange, headers: Headers, passage: Passage, pieces: AsyncIterator[bytes]
    ) -> None:
        call = exchange.call
        stream = passage.stream()
        buffer = bytearray()
        sent: list[bytes] = []
        await exchange.begin_stream(headers)
        try:
            async for piece in pieces:
                buffer += piece
                shown: list[bytes] = []
                for event, data in split_events(buffer):
                    shown.append(_shown_event(stream, event, data))
                    if stream.error is not None and call.error is None:
                        call.error = f"the upstream answered in the stream: {stream.error[:_ERROR_TEXT_LIMIT]}"
                    if stream.ended and not exchange.recorded:
                        call.response = stream.answer()
                        if stream.finished:
                            self._keep(exchange, passage)
                        await self._record(exchange)
                if stream.finished:
                    exchange.answered = True
                if part := b"".join(shown):
                    if exchange.tried is not None:
                        sent.append(part)
                    await exchange.say(part)
        finally:
            if call.response is None:
                call.response = stream.answer()
        if not stream.finished and call.error is None:
            raise Refusal(502, "upstream_incomplete", "the upstream ended its stream before the answer was finished")
        last = stream.close(bytes(buffer))
        self._keep(exchange, passage)
        await self._record(exchange)
        if exchange.tried is not None and call.error is None:
            self._retries.answered(exchange.tried, headers, b"".join(sent) + last)
        await exchange.say(last, more=False)

    def _keep(self, exchange: _Exchange, passage: Passage) -> None:
        """Keep a response whose client may refer to it."""
        call, request = exchange.call, exchange.keep
        exchange.keep = None
        if request is None or call.error is not None or call.response is None:
            return
        response = passage.client.answer_from_chat(call.response, passage.request)
        n_bytes = len(passage.body) + len(dump(response["output"]))
        self._kept.keep((call.rollout_id, call.attempt_id), request, response, n_bytes=n_bytes)

    # ---- how a call ends ---------------------------------------------------------------------------------------------

    async def _record(self, exchange: _Exchange) -> None:
        """Queue the record, once, before the agent can see that the answer is whole."""
        exchange.answered = True
        if not exchange.recorded:
            exchange.recorded = True
            exchange.call.end_time = time.time()
            exchange.spent.add((exchange.call.response or {}).get("usage"), exchange.price_per_million)
            await (self._recorder.put_durably if self._durable else self._recorder.put)(exchange.call)

    async def _fail(self, exchange: _Exchange, refusal: Refusal) -> None:
        if exchange.call.error is None:
            exchange.call.error = refusal.message
        if exchange.tried is not None:
            exchange.tried.state = "failed"
        with contextlib.suppress(
            StoreError
        ):  # of a durable record: the agent is told of the failure already, and flush tells the runner
            await self._record(exchange)
        if exchange.disconnected:
            return
        if exchange.streaming:
            await exchange.say(refusal.event(exchange.dialect), more=False)
        else:
            await send_refusal(exchange.send, refusal, exchange.dialect)


class _Again(Exception):
    """A server that did not begin to answer: the call may be sent again."""

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


def _well(exchange: _Exchange) -> bool | None:
    """What an answer that has been passed on says about its server."""
    if exchange.status is None or exchange.status == HTTPStatus.TOO_MANY_REQUESTS:
        return None
    return exchange.status < 500


async def _one(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


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
    if exchange.status is not None:
        return Refusal(502, "upstream_incomplete", f"{model.endpoint} broke off in the middle of its answer ({what})")
    return Refusal(
        502, "upstream_unreachable", f"cannot reach {model.endpoint} for model {model.model_name!r} ({what})"
    )


def _shown_event(stream: PassageStream, event: bytes, data: bytes) -> bytes:
    """The event as the agent sees it."""
    try:
        return stream.feed(event, data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Refusal(
            502,
            "upstream_garbage",
            f"the upstream's stream cannot be read ({type(error).__name__}: {error}): {_excerpt(data)}",
        ) from error


def _parse_request(raw: bytes) -> dict[str, Any]:
    try:
        request: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "invalid_json", f"the request body is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise Refusal(400, "invalid_json", f"the request body is a JSON {type(request).__name__}; it must be an object")
    return cast(dict[str, Any], request)


def _read_answer(passage: Passage, raw: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        return passage.answer(raw)
    except Untranslatable as error:
        raise Refusal(
            502,
            "upstream_untranslatable",
            f"the model's answer cannot be told in {passage.client.path}: {error}",
        ) from error
    except (ValueError, RecursionError) as error:
        raise Refusal(
            502, "upstream_garbage", f"the upstream answered 200 with something that is no JSON object: {_excerpt(raw)}"
        ) from error


def _excerpt(raw: bytes) -> str:
    return raw[:_ERROR_TEXT_LIMIT].decode("utf-8", "replace")


def _check_same(of_url: AttemptKey, of_key: AttemptKey | None) -> None:
    if of_key is not None and of_key != of_url:
        raise Refusal(
            403,
            "wrong_attempt",
            f"the API key is for rollout {of_key[0]!r}, attempt {of_key[1]!r}, the URL is of rollout {of_url[0]!r}, attempt "
            f"{of_url[1]!r}; give both from the same `llm`",
        )


def _no_attempt(path: str) -> Refusal:
    return Refusal(
        404,
        "attempt_missing",
        f"/{path} carries no ids, so the call could not be recorded; use the base URL of one attempt, "
        "ProxyLLM.get_base_url(rollout_id, attempt_id), or its key, ProxyLLM.get_api_key(rollout_id, attempt_id), or say "
        "x-leyden-rollout and x-leyden-attempt",
    )


def _require(method: str, wanted: str, path: str) -> None:
    if method != wanted:
        raise Refusal(405, "method_not_allowed", f"/{path} takes {wanted}, not {method}")
