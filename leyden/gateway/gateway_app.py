"""The gateway's ASGI application: its routes, and the check of each caller's key.

It knows HTTP. `attempts` admits calls, and `relay` sends them to a model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from leyden._lib.attempt_key import PREFIX, read_attempt_key
from leyden._lib.host import pages
from leyden._lib.host.http import (
    ClientGone,
    HttpReply,
    Receive,
    Refusal,
    Scope,
    Send,
    SiteGuard,
    bearer_token,
    check_method,
    header,
    is_secret,
    on_disconnect,
    raw_path,
    send_reply,
)
from leyden.dialects import DIALECTS, Dialect, dump
from leyden.dialects.pinned_sampling import read_pinned
from leyden.errors import StoreError
from leyden.gateway.asgi import (
    attempt_of_headers,
    client_dialect,
    given_key,
    pins_of_key,
    read_request,
    send_refusal,
    sent_time,
    trace_parent,
    user_agent,
)
from leyden.gateway.attempts import AttemptKey, Attempts, trace_id_of
from leyden.gateway.control import Control
from leyden.gateway.exchange import Exchange
from leyden.gateway.record import ModelCall
from leyden.gateway.recorder import Recorder
from leyden.gateway.relay import Relay
from leyden.monitor.prometheus import of_gateways, of_requests
from leyden.store.request_metrics import RequestMetrics
from leyden.types import LIVE_KEY_PREFIX, LiveClaim, read_claim

logger = logging.getLogger(__name__)

_REST_SECONDS = 2.0
"""The seconds that the end of a stream may take after its finish reason if its client has left."""


@dataclass(frozen=True, slots=True)
class _SignedClaim:
    """The claim of a live rollout, and the signed text that it was read from."""

    claim: LiveClaim
    text: str

    @property
    def key(self) -> AttemptKey:
        return self.claim.rollout_id, self.claim.attempt_id


class GatewayApp:
    """The ASGI application. Everything runs in the gateway's event loop."""

    def __init__(
        self,
        *,
        attempts: Attempts,
        recorder: Recorder,
        relay: Relay,
        control: Control,
        model_names: Callable[[], list[str]],
        token: str | None,
        live_key: str | None,
        unrecorded: bool,
        control_key: Callable[[], str],
        guard: SiteGuard,
        max_body_bytes: int,
        connections: Callable[[], int],
    ) -> None:
        """token: the key that clients must send; None admits any key.
        live_key: the secret with which serving sessions sign live rollouts; None: no live rollouts.
        unrecorded: answer calls that name no attempt, without a record, instead of refusing them.
        control_key: returns the key with which runners end attempts, and operators control the gateway.
        connections: returns the number of open connections.
        """
        self._attempts = attempts
        self._recorder = recorder
        self._relay = relay
        self._control = control
        self._model_names = model_names
        self._token = None if token is None else token.encode()
        self._live_key = live_key
        self._unrecorded = unrecorded
        self._control_key = control_key
        self._guard = guard
        self._max_body_bytes = max_body_bytes
        self._calls: dict[asyncio.Task[Any], Exchange] = {}
        self._warned: set[AttemptKey] = set()
        """Attempts under way to which the code of others sent calls."""
        self._misdirected_calls = 0
        self._requests = RequestMetrics(connections)
        self._routes = {dialect.path: dialect for dialect in DIALECTS.values()}
        self._count_routes = {dialect.count_path: dialect for dialect in DIALECTS.values() if dialect.count_path}
        self._kept_routes = {f"{dialect.path}/": dialect for dialect in DIALECTS.values() if dialect.conversations}
        """Prefixes of the routes of single responses that are kept."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with pages.counting(scope, send, self._requests.add) as send:
            try:
                await self._route(scope, receive, send)
            except ClientGone:
                return
            except Refusal as refusal:
                await send_refusal(send, refusal, client_dialect(scope))

    def _metrics(self) -> Iterator[Metric]:
        state = self._control.state()
        for name, about, value in (
            ("calls_waiting", "Calls that wait because the gateway is paused.", state["calls_waiting"]),
            ("calls_at_models", "Calls that a model is answering.", state["calls_at_models"]),
            ("records_pending", "Calls whose record is not in the store yet.", state["records_pending"]),
            ("paused", "1 while the gateway is paused.", state["paused"]),
        ):
            yield GaugeMetricFamily(f"leyden_gateway_{name}", about, value)
        about = "Calls with an answer that passed although the record could not read all of it."
        yield CounterMetricFamily("leyden_gateway_unread_calls", about, self._relay.unread_calls)
        about = "Calls that the code of one attempt sent with the address of another."
        yield CounterMetricFamily("leyden_gateway_misdirected_calls", about, self._misdirected_calls)
        yield from of_gateways(self._relay.upstream_metrics.all_samples())
        yield from of_requests(self._requests)

    @property
    def remembers(self) -> bool:
        """Whether `end_attempt` may find state to drop. Safe from any thread."""
        return self._relay.remembers or self._recorder.remembers or bool(self._warned)

    def cancel_calls(self) -> None:
        """Cancel the calls under way. Each is recorded and gets an error as its reply."""
        for task in self._calls:
            task.cancel()

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Drop the attempt's state, and cancel the calls that its agent left under way, so that the attempt's record is
        complete when it is flushed.
        """
        self._warned.discard((rollout_id, attempt_id))
        self._relay.end_attempt((rollout_id, attempt_id))
        self._recorder.end_attempt((rollout_id, attempt_id))
        for task, exchange in self._calls.items():
            if exchange.key == (rollout_id, attempt_id):
                exchange.attempt_over = True
                _cancel_unwanted(exchange, task)

    # ---- routes ----------------------------------------------------------------------------------

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Dispatch a request by its path: health, the end of an attempt, control commands, model calls, kept responses,
        the list of models. Raise Refusal for any other path.

        A call's attempt comes from a live rollout's signed claim, the URL, the key or the headers. With a token or a
        claim, the key must agree with the URL, so that an agent cannot call in another attempt's name.
        """
        self._guard.check(scope)
        path = raw_path(scope).strip("/")
        method = scope["method"]
        if f"/{path}" == pages.HEALTH:
            scope["asked"] = path
            return await _send(send, pages.health())
        if f"/{path}" == pages.METRICS:
            scope["asked"] = path
            # An attempt's key is not enough.
            if self._token is not None and not is_secret(given_key(scope), self._token):
                raise Refusal(401, "invalid_api_key", f"{pages.METRICS} needs this gateway's token as the bearer token")
            check_method(scope, "GET")
            return await _send(send, pages.metrics(self._metrics()))
        parts = path.split("/", 4)
        match parts:
            case ["rollout", rollout_id, "attempt", attempt_id, "end"]:
                check_method(scope, "POST")
                return await self._finish(scope, send, unquote(rollout_id), unquote(attempt_id))
            case ["control", command]:
                scope["asked"] = "control"
                self._check_control_key(scope)
                body = await read_request(scope, receive, self._max_body_bytes)
                return await send_reply(send, dump(await self._control.handle(command, method, body)))
            case _:
                claim = self._claim(scope, parts)
                key_of = self._authenticate(scope) if claim is None else claim.key
        if parts[0] == "live":
            path = path.split("/", 2)[-1]
            parts = path.split("/", 4)
        match parts:
            case ["rollout", rollout_id, "attempt", attempt_id, rest] if found := _route_and_pins(rest):
                route, pins = found
                key = unquote(rollout_id), unquote(attempt_id)
                # Without a token a key proves nothing, and the URL of each call counts.
                if claim is not None or self._token is not None:
                    _check_same(key, key_of)
            case _:
                route, pins = path.removeprefix("v1/"), {}
                key = key_of or attempt_of_headers(scope)
        kept = next((prefix for prefix in self._kept_routes if route.startswith(prefix) and route != prefix), None)
        recorded = key is not None
        if key is None and (route in self._routes or kept or route in self._count_routes):
            if not self._unrecorded:
                raise _no_attempt(path)
            key = _caller(scope)
        if key is not None and (dialect := self._count_routes.get(route)):
            scope["asked"] = route
            check_method(scope, "POST")
            return await self._count(scope, receive, send, key, dialect, claim, recorded=recorded)
        if key is not None and (dialect := self._routes.get(route)):
            scope["asked"] = route
            check_method(scope, "POST")
            if not recorded:
                return await self._call_unrecorded(scope, receive, send, key, dialect)
            # With a token, an attempt's key proves whose call it is, whatever its headers say.
            proven = claim is not None or (self._token is not None and key_of is not None)
            sender = None if proven else attempt_of_headers(scope)
            pins = pins or _pins(pins_of_key(scope)) or {}
            return await self._call(scope, receive, send, *key, dialect, claim, sender, pins)
        if key is not None and kept:
            return await self._kept_response(
                scope, send, key, unquote(route.removeprefix(kept)), self._kept_routes[kept]
            )
        if route == "models":
            scope["asked"] = route
            check_method(scope, "GET")
            return await send_reply(send, dump(client_dialect(scope).models_page(self._model_names())))
        raise Refusal(
            404,
            "route_not_found",
            f"the gateway has no route {method} /{path}; it serves /rollout/{{id}}/attempt/{{id}}/v1/ with "
            f"{', '.join([*self._routes, *self._count_routes])} and models",
        )

    def _claim(self, scope: Scope, parts: list[str]) -> _SignedClaim | None:
        """Return the claim of a live rollout in the URL or in the key; None if there is none.

        Raise Refusal (401) for a claim that was not signed with this gateway's live key.
        """
        given = given_key(scope).decode("latin-1")
        if parts[0] == "live" and len(parts) > 1:
            text = parts[1]
        elif given.startswith(LIVE_KEY_PREFIX):
            text = given.removeprefix(LIVE_KEY_PREFIX)
        else:
            return None
        claim = None if self._live_key is None else read_claim(self._live_key, text)
        if claim is None:
            raise Refusal(
                401,
                "invalid_live_claim",
                "this live rollout was not signed with this gateway's live key; give the gateway and the sessions the same "
                "LEYDEN_LIVE_KEY (LLMProxy's live_key, OnlineSession's live_key)",
            )
        return _SignedClaim(claim, text)

    def _authenticate(self, scope: Scope) -> AttemptKey | None:
        """Return the attempt that the client's key names; None for the gateway's token, which is valid for every
        attempt, and for any key if the gateway has no token.

        Raise Refusal (401) for any other key.
        """
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
        if self._token is not None and not is_secret(given, self._token):
            raise Refusal(
                401, "invalid_api_key", "this gateway needs its token as the API key; the `llm` resource carries it"
            )
        return None

    async def _finish(self, scope: Scope, send: Send, rollout_id: str, attempt_id: str) -> None:
        """End an attempt for a runner in another process (`remote.py`), and reply when its record is in the store."""
        self._check_control_key(scope)
        await self._attempts.end_if_known(rollout_id, attempt_id)
        self.end_attempt(rollout_id, attempt_id)
        try:
            await self._recorder.flush((rollout_id, attempt_id))
        except StoreError as error:
            return await send_reply(send, str(error).encode(), status=500)
        await send_reply(send, b"{}")

    def _check_control_key(self, scope: Scope) -> None:
        """Raise Refusal (401) unless the request has the gateway's control key."""
        if not is_secret(bearer_token(header(scope, b"authorization")), self._control_key().encode()):
            raise Refusal(
                401,
                "invalid_control_key",
                "only this gateway's own runners may end an attempt, and only its operator may control it; give those on other "
                "machines the gateway's LEYDEN_STORE_TOKEN, or if it has none, its token as the api_key of their ProxyLLM; a gateway "
                "with neither obeys its own user on its own machine",
            )

    async def _kept_response(
        self, scope: Scope, send: Send, key: AttemptKey, response_id: str, dialect: Dialect
    ) -> None:
        """Return or delete a response that the gateway has kept for an attempt, as the Responses API does."""
        assert dialect.conversations is not None
        kept = self._relay.kept.get(key, response_id)
        check_method(scope, "GET", "DELETE")
        if scope["method"] == "DELETE":
            self._relay.kept.drop(key, response_id)
            return await send_reply(send, dump(dialect.conversations.deleted(response_id)))
        await send_reply(send, dump(kept.response))

    async def _count(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        key: AttemptKey,
        dialect: Dialect,
        claim: _SignedClaim | None,
        *,
        recorded: bool,
    ) -> None:
        """Return how many tokens a prompt has. It is no call: it has no number and no record."""
        raw = await read_request(scope, receive, self._max_body_bytes)
        live, mode = None if claim is None else claim.claim, None
        if recorded:
            mode = (await self._attempts.admit(*key, call_index=0, claim=live)).mode  # takes no number
        call = _unnumbered(key, dialect)
        status, body = await self._relay.count(Exchange(call, dialect, scope, send, raw, mode=mode))
        await send_reply(send, body, status=status)

    # ---- one call --------------------------------------------------------------------------------

    async def _call_unrecorded(
        self, scope: Scope, receive: Receive, send: Send, caller: AttemptKey, dialect: Dialect
    ) -> None:
        """Relay a call that belongs to no attempt."""
        raw = await read_request(scope, receive, self._max_body_bytes)
        exchange = Exchange(_unnumbered(caller, dialect), dialect, scope, send, raw, recorded=True)
        await self._take(exchange, receive)

    async def _call(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        rollout_id: str,
        attempt_id: str,
        dialect: Dialect,
        claim: _SignedClaim | None,
        sender: AttemptKey | None,
        pins: dict[str, float],
    ) -> None:
        """Admit one model call to its attempt, relay it to a model server and record it. A retry of a finished call
        gets the recorded response again.

        claim: the signed permission of a live rollout that the store may not have yet; None for other rollouts.
        sender: the attempt whose code sent the call, by its headers; None if they do not say.
        pins: the sampling that the address pins.
        """
        start_time = time.time()
        raw = await read_request(scope, receive, self._max_body_bytes)
        earlier = self._relay.retries.earlier((rollout_id, attempt_id), dialect.path, raw, scope)
        known_index = None if earlier is None else earlier.call_index
        if claim is not None and not self._recorder.has_room_for(rollout_id):
            raise Refusal(
                503,
                "too_many_live_rollouts",
                "too many live rollouts of this gateway are not in the store yet, because it is away or too slow; check the "
                "store, and try again",
            )
        try:
            live = None if claim is None else claim.claim
            admission = await self._attempts.admit(rollout_id, attempt_id, call_index=known_index, claim=live)
        except Refusal as refusal:
            if refusal.status == HTTPStatus.GONE and self._attempts.note_late_call(rollout_id, attempt_id):
                await self._record_late(rollout_id, attempt_id, dialect, refusal)
            raise
        if earlier is not None and earlier.headers is not None:
            self._relay.retries.replayed(earlier)
            return await send_reply(send, earlier.body, headers=earlier.headers)
        trace_id, parent_id = trace_parent(scope) or (admission.trace_id, None)
        misdirected = None
        if sender not in (None, (rollout_id, attempt_id)):
            misdirected = await self._misdirected((rollout_id, attempt_id), sender, dialect, start_time)
        call = ModelCall(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            trace_id=trace_id,
            parent_id=parent_id,
            call_index=admission.call_index,
            operation=dialect.operation,
            start_time=start_time,
            live_claim=None if claim is None else claim.text,
            retry_of=None if earlier is None else earlier.span_id,
            sent_time=sent_time(scope, start_time),
            misdirected=misdirected,
            user_agent=user_agent(scope),
        )
        tried = self._relay.retries.begin(
            (rollout_id, attempt_id),
            dialect.path,
            raw,
            scope,
            call_index=admission.call_index,
            span_id=call.span_id,
        )
        exchange = Exchange(
            call,
            dialect,
            scope,
            send,
            raw,
            mode=admission.mode,
            pins=pins,
            sampling_key=admission.sampling_key,
            replay=admission.replay,
            spent=admission.spent,
            tried=tried,
        )
        self._recorder.begin((rollout_id, attempt_id), is_live=claim is not None)
        await self._take(exchange, receive)

    async def _take(self, exchange: Exchange, receive: Receive) -> None:
        """Relay a call, and cancel it if its client leaves."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._calls[task] = exchange

        def leave() -> None:
            exchange.disconnected = True
            _cancel_unwanted(exchange, task)

        try:
            with on_disconnect(receive, leave):
                await self._relay.take(exchange)
        finally:
            del self._calls[task]

    async def _misdirected(
        self, addressed: AttemptKey, sender: AttemptKey, dialect: Dialect, start_time: float
    ) -> str | None:
        """Return why a call cannot be counted as one of the attempt that its address names: its headers say that the
        code of another attempt sent it, and that attempt is under way. Record a failed call there, too. Return None if
        the other attempt is over or unknown: threads may outlive the attempt whose context they carry.
        """
        try:
            admission = await self._attempts.admit(*sender, call_index=0)  # takes no number
        except Refusal:
            return None
        cause = "a client that is made in one rollout and kept for others sends their calls to the first; make one in each rollout"
        self._misdirected_calls += 1
        if addressed not in self._warned:
            self._warned.add(addressed)
            logger.warning(
                "code of rollout %r calls the model with the address of rollout %r, and the calls train neither: %s",
                *(sender[0], addressed[0], cause),
            )
        self._recorder.begin(sender)
        await self._recorder.put(
            ModelCall(
                *sender,
                trace_id=admission.trace_id,
                parent_id=None,
                call_index=None,
                operation=dialect.operation,
                start_time=start_time,
                end_time=time.time(),
                error=f"the call went to the address of rollout {addressed[0]!r}: {cause}",
            )
        )
        return f"the call came from the code of rollout {sender[0]!r}: {cause}"

    async def _record_late(self, rollout_id: str, attempt_id: str, dialect: Dialect, refusal: Refusal) -> None:
        """Record a call that came after the end of its attempt, as an error."""
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


def _caller(scope: Scope) -> AttemptKey:
    """Return the key of a client's calls that belong to no attempt. No attempt has it: a rollout's id is not empty."""
    client = scope.get("client")
    return "", str(client[0]) if client else ""


def _unnumbered(key: AttemptKey, dialect: Dialect) -> ModelCall:
    """Return the beginning of a call that has no number in its attempt."""
    return ModelCall(
        *key,
        trace_id=trace_id_of(key),
        parent_id=None,
        call_index=None,
        operation=dialect.operation,
        start_time=time.time(),
    )


async def _send(send: Send, reply: HttpReply) -> None:
    await send_reply(send, reply.body, status=reply.status, headers=reply.headers)


def _cancel_unwanted(exchange: Exchange, task: asyncio.Task[Any]) -> None:
    """Cancel a call whose client has left.

    A call whose response is already complete continues for up to 2 seconds, because the rest of its stream may hold the
    token counts that prove its tokens.
    """
    if not exchange.answered:
        task.cancel()
    elif not exchange.recorded:
        asyncio.get_running_loop().call_later(_REST_SECONDS, lambda: exchange.recorded or task.cancel())


def _route_and_pins(rest: str) -> tuple[str, dict[str, float]] | None:
    """Return the route that follows an attempt's ids in a path, with the sampling that it pins; None without a route.

    Raise Refusal for pins that cannot be read.
    """
    first, slash, route = rest.partition("/")
    if first == "v1" and slash:
        return route, {}
    pins = _pins(unquote(first))
    return None if pins is None or not route.startswith("v1/") else (route.removeprefix("v1/"), pins)


def _pins(part: str) -> dict[str, float] | None:
    try:
        return read_pinned(part)
    except ValueError as error:
        raise Refusal(404, "route_not_found", f"the address pins sampling that cannot be read: {error}") from error


def _check_same(of_url: AttemptKey, of_key: AttemptKey | None) -> None:
    """Raise Refusal (403) if the API key is of another attempt than the URL."""
    if of_key is not None and of_key != of_url:
        raise Refusal(
            403,
            "wrong_attempt",
            f"the API key is for rollout {of_key[0]!r}, attempt {of_key[1]!r}, the URL is of rollout {of_url[0]!r}, attempt "
            f"{of_url[1]!r}; give both from the same `llm`, and make the client in each rollout instead of keeping one",
        )


def _no_attempt(path: str) -> Refusal:
    return Refusal(
        404,
        "attempt_missing",
        f"/{path} carries no ids, so the call could not be recorded; use the base URL of one attempt, "
        "ProxyLLM.get_base_url(rollout_id, attempt_id), or its key, ProxyLLM.get_api_key(rollout_id, attempt_id), or the "
        "headers x-leyden-rollout and x-leyden-attempt",
    )
