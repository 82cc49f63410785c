"""Relay one call to a model, and the response back to the agent.

The module knows dialects only through `Translation` and servers only through `Transport`. Routes and admission are in
`gateway_app`; the form of a call's record is in `record`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from typing import Any, cast

from leyden._lib.host.http import Refusal, parsed, send_reply
from leyden._lib.json import is_list, is_object
from leyden.dialects import (
    CHAT,
    Translation,
    WrongType,
    check_types,
    dump,
    parse,
    parse_request,
    split_events,
)
from leyden.dialects.pinned_sampling import pin
from leyden.errors import StoreError, Untranslatable
from leyden.gateway.asgi import Headers, send_refusal
from leyden.gateway.attempts import AttemptKey
from leyden.gateway.balance import Balancer
from leyden.gateway.buffering import Buffering
from leyden.gateway.call_replay import Diverged, RecordedAnswer, compared_fields, compared_request, replay_translation
from leyden.gateway.exchange import BrokenOff, Exchange
from leyden.gateway.gate import Gate
from leyden.gateway.limits import AttemptLimits
from leyden.gateway.recorder import Recorder
from leyden.gateway.responses import KeptResponses
from leyden.gateway.retries import Retries
from leyden.gateway.transport import ServerGone, Transport, UpstreamResponse
from leyden.gateway.turns import Turns
from leyden.gateway.upstream import UpstreamModel
from leyden.gateway.upstream_metrics import UpstreamFailure, UpstreamMetrics

logger = logging.getLogger(__name__)

_ERROR_TEXT_LIMIT = 2000
"""The most bytes of a server's body that a message shows."""
_JSON_TYPE = (b"content-type", b"application/json")
_EVENT_STREAM: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_RETRY_SECONDS = 0.05
"""The base of the pause before a call is sent again, which doubles each time."""
_NO_ROUTE = {404, 405, 501}
"""Statuses of a server without a route."""
_TOKENIZE = "/tokenize"
"""vLLM's route, which returns the tokens of a chat prompt and their count."""
_TOO_BUSY = {429, 502, 503, 504}
"""Statuses of a server that cannot take the call now."""
_OF_THE_SERVER = {
    *("upstream_unreachable", "upstream_incomplete", "upstream_timeout", "upstream_garbage", "upstream_failed"),
    "upstream_too_large",
}
"""Codes of refusals for which the server is to blame."""
_MAY_BE_BILLED = {
    *("upstream_incomplete", "upstream_timeout", "client_disconnected", "attempt_ended", "gateway_stopped"),
}
"""Codes of refusals of calls that a server may have worked on, although it was not heard to the end."""
_COMMENT = b": keep-alive\n\n"
"""A comment of server-sent events, which clients skip."""


def seed_for(deterministic_seed: int, sampling_key: str, call_index: int) -> int:
    """Return the sampling seed of a call (31 bits), derived from the run's seed, the attempt's sampling key and the
    call's number in its attempt.
    """
    digest = sha256(f"{deterministic_seed}\x1f{sampling_key}\x1f{call_index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """The options of `LLMProxy` that the relay reads. `LLMProxy` describes each."""

    deterministic_seed: int | None
    timeout_seconds: float
    keep_alive_seconds: float
    upstream_retries: int
    limits: AttemptLimits
    sampling_overrides: Mapping[str, Mapping[str, Any]]
    dropped_tools: Sequence[str]
    durable: bool
    on_spent: Callable[[float | None], None]
    """Called with the cost of each call that may be billed, None if it is unknown."""


@dataclass(frozen=True, slots=True)
class _RetryOptions:
    """Whether a call may be sent again if the server that is tried now fails it."""

    again: bool
    """Whether the call may be sent once more if the server has not begun to answer."""
    elsewhere: bool
    """Whether there is another server to take the call, also if this one is too busy."""


class Relay:
    """Sends calls to the models, and their responses to the agents. Everything runs in the gateway's event loop."""

    def __init__(
        self,
        *,
        models: Callable[[], dict[str, tuple[UpstreamModel, ...]]],
        transport: Callable[[UpstreamModel], Transport],
        recorder: Recorder,
        gate: Gate,
        options: RelayOptions,
        policy_version: Callable[[str], int | None],
    ) -> None:
        self._models = models
        self._transport = transport
        self._recorder = recorder
        self._gate = gate
        self._options = options
        self._policy_version = policy_version
        self._balancer = Balancer()
        self._buffering = Buffering()
        self.upstream_metrics = UpstreamMetrics()
        self.unread_calls = 0
        """Calls whose record could not read all of the answer."""
        self.kept = KeptResponses()
        self.retries = Retries()
        self._turns = Turns()

    @property
    def remembers(self) -> bool:
        """Whether `end_attempt` may find state to drop. Safe from any thread."""
        return bool(self.kept) or bool(self.retries) or bool(self._balancer) or bool(self._turns)

    def end_attempt(self, key: AttemptKey) -> None:
        """Drop the state of an attempt that is over."""
        self.kept.end(key)
        self.retries.end(key)
        self._balancer.end_attempt(key)
        self._turns.end(key)

    async def take(self, exchange: Exchange) -> None:
        """Reply to a call and record it. Every error becomes a reply, also the cancellation of the running task, which
        this method undoes.
        """
        call = exchange.call
        try:
            await self._take(exchange)
        except Refusal as refusal:
            await self._fail(exchange, refusal)
        except asyncio.CancelledError:
            cast("asyncio.Task[Any]", asyncio.current_task()).uncancel()
            await self._fail(exchange, _cancelled(exchange))
        except StoreError as error:
            refusal = Refusal(503, "not_recorded", f"the answer could not be recorded (durable=True): {error}")
            await self._fail(exchange, refusal)
        except Exception as error:
            logger.exception("call %s of rollout %r, attempt %r", call.call_index, call.rollout_id, call.attempt_id)
            message = f"the gateway failed with {type(error).__name__}; its log has the traceback"
            await self._fail(exchange, Refusal(500, "gateway_error", message))

    async def _take(self, exchange: Exchange) -> None:
        """Validate a call's body, then respond with a replayed response or relay the call to a model server once the
        gate is open.

        If the engine that serves the model has died, wait until the run cancels the call. Raise Refusal if the call
        cannot be served.
        """
        call = exchange.call
        call.request = exchange.request = await _checked_request(exchange)
        self._options.limits.check(call.call_index or 0, exchange.spent)
        call.fields = compared_fields(exchange.request)
        if await self._replay(exchange):
            return
        overrides = self._overrides(exchange)
        if (overrides or exchange.pins) and call.operation != "embeddings":
            pinned = pin(exchange.request, exchange.pins, exchange.dialect.path) if exchange.pins else exchange.request
            call.request = exchange.request = {**pinned, **overrides}
            exchange.raw = dump(exchange.request)
        await self._gate.enter()
        try:
            await self._ask_until_answered(exchange, self._servers(exchange.request))
        except _EngineLost as lost:
            refusal = lost.refusal
        else:
            return
        finally:
            self._gate.leave()
        # The run ends and cancels the call meanwhile, unless the engine's death goes unnoticed.
        await asyncio.sleep(self._options.timeout_seconds)
        raise refusal

    def _overrides(self, exchange: Exchange) -> Mapping[str, Any]:
        return self._options.sampling_overrides.get(exchange.mode or "", {})

    async def count(self, exchange: Exchange) -> tuple[int, bytes]:
        """Return the status and the body of the answer to a request that counts the tokens of its prompt.

        The server counts, by the route of the client's API or by vLLM's `/tokenize`. Raise Refusal (404) if it cannot:
        an estimate would be wrong.
        """
        client = exchange.dialect
        exchange.request = {**await _checked_request(exchange), **self._overrides(exchange)}
        exchange.raw = dump(exchange.request)
        model = self._balancer.choose(self._servers(exchange.request), exchange.key, but=[])
        translation = self._translation(exchange, model)
        if model.litellm_params is not None or translation.upstream not in (client, CHAT):
            raise _not_counted(
                model, f"calls of {client.path} are sent to {translation.upstream.path}, without a count"
            )
        if not translation.verbatim and not model.part_of_run and translation.chat.get("reasoning_effort") is not None:
            raise _not_counted(model, "/tokenize does not know the effort, which changes the prompt of some models")
        route = client.count_path if translation.verbatim else _TOKENIZE
        await self._gate.enter()
        try:
            async with (
                asyncio.timeout(self._options.timeout_seconds),
                self._transport(model).ask(model, translation, translation.body, exchange.scope, route=route) as answer,
            ):
                raw = await answer.read()
        except ServerGone as gone:
            raise _unreachable(model, gone) from gone
        except TimeoutError as error:
            raise Refusal(504, "upstream_timeout", f"{model.address} did not count in time") from error
        finally:
            self._gate.leave()
        if answer.status in _NO_ROUTE:
            raise _not_counted(model, f"it answered {answer.status} to {route}")
        if answer.status >= 300:
            return answer.status, translation.error(answer.status, raw)
        if translation.verbatim:
            return answer.status, raw
        try:
            count: Any = parse(raw)["count"]
        except (ValueError, LookupError, TypeError, RecursionError):
            count = None
        if type(count) is not int:
            raise _not_counted(model, f"its answer to {route} has no count")
        return 200, dump(client.count_answer(count))

    async def _replay(self, exchange: Exchange) -> bool:
        """Answer a call from the record that its attempt repeats. Return whether it is answered."""
        call, client = exchange.call, exchange.dialect
        if exchange.replay is None or exchange.replay.over or call.operation == "embeddings":
            return False
        whole = exchange.request
        try:
            if client.conversations is not None:
                with contextlib.suppress(Refusal):  # the model's server may keep a response that the gateway does not
                    whole = self.kept.whole(exchange.key, whole, client.conversations)
            translation = replay_translation(
                client, exchange.raw, exchange.request, whole=whole, dropped_tools=self._options.dropped_tools
            )
            requests = [compared_request(call.operation, translation.chat, call.fields)]
            # To a server that keeps responses only the new turn was sent, and so recorded.
            if whole is not exchange.request:
                requests.append(compared_request(call.operation, exchange.request, call.fields))
            model = exchange.request.get("model")
            recorded = exchange.replay.take(*requests, model=model if isinstance(model, str) else None)
        except (Diverged, Untranslatable, WrongType) as difference:
            call.replay_diverged = str(difference)
            exchange.replay.end()
            logger.info("the replay of rollout %r ends at call %d: %s", call.rollout_id, call.call_index, difference)
            return False
        if recorded is None:
            return False
        call.replayed, call.request, call.dropped_tools = recorded, translation.chat, translation.dropped_tools
        exchange.keep = whole if client.conversations is not None else None
        with_token_ids = exchange.request.get("return_token_ids") is True
        await self._relay_whole(exchange, translation, RecordedAnswer(recorded, with_token_ids=with_token_ids))
        return True

    def _servers(self, request: dict[str, Any]) -> tuple[UpstreamModel, ...]:
        """Return the servers of the requested model. Raise Refusal (404) for an unknown model."""
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

    # ---- which server ----------------------------------------------------------------------------

    async def _ask_until_answered(self, exchange: Exchange, servers: tuple[UpstreamModel, ...]) -> None:
        """Relay the call, trying up to `upstream_retries` more servers. Servers that have not failed this call come
        first; back off only if there is none.
        """
        call = exchange.call
        tried: list[UpstreamModel] = []
        while True:
            model = self._balancer.choose(servers, exchange.key, but=tried)
            tried.append(model)
            left = self._options.upstream_retries - len(tried) + 1
            others = [server for server in servers if server not in tried]
            try:
                return await self._try(exchange, model, _RetryOptions(left > 0, left > 0 and bool(others)))
            except _Retry as again:
                logger.info("call %s of attempt %r is tried again: %s", call.call_index, call.attempt_id, again)
                if not others:
                    await asyncio.sleep(_RETRY_SECONDS * 2 ** len(tried) * random.uniform(0.5, 1.5))

    async def _try(self, exchange: Exchange, model: UpstreamModel, retry: _RetryOptions) -> None:
        """Try one server and record its health. Raise _Retry if the call may be sent once more."""
        exchange.status = exchange.fault = healthy = failure = None
        exchange.price = model.price
        exchange.model_name = model.model_name
        exchange.call.policy_version = self._policy_version(model.model_name)
        self._balancer.begin(model)
        began = self.upstream_metrics.begin(model)
        try:
            await self._ask(exchange, model, retry)
            failure = exchange.fault
            if exchange.status not in (None, HTTPStatus.TOO_MANY_REQUESTS):  # 429 limits the rate of calls, no more
                healthy = exchange.status < 500 and failure is None
            if healthy is False and failure is None:
                failure = UpstreamFailure("failed", exchange.call.error or f"it answered {exchange.status}")
        except _Retry as again:
            if again.status != HTTPStatus.TOO_MANY_REQUESTS:
                healthy = False
                failure = UpstreamFailure("unreachable" if again.status is None else "failed", str(again))
            raise
        except _EngineLost as lost:
            healthy, failure = False, _failure(lost.refusal)
            raise
        except Refusal as refusal:
            if refusal.code in _OF_THE_SERVER:
                healthy, failure = False, _failure(refusal)
            raise
        finally:
            self._balancer.end(model, healthy=healthy)
            self.upstream_metrics.end(model, began, healthy=healthy, failure=failure)

    async def _ask(self, exchange: Exchange, model: UpstreamModel, retry: _RetryOptions) -> None:
        """Send the call to one server and pass its response on. Raise _Retry if it may be sent again."""
        call = exchange.call
        translation = self._translation(exchange, model)
        call.request = translation.chat if translation.seed is None else {**translation.chat, "seed": translation.seed}
        call.restored, call.dropped_tools = translation.restored, translation.dropped_tools
        buffered = translation.streams and translation.asks_for_tokens and self._buffering.wanted(model)
        body = translation.unstreamed() if buffered else translation.body
        beat = asyncio.create_task(self._keep_alive(exchange, early=buffered)) if translation.streams else None
        try:
            # The transport's own limit does not run while the agent reads, or does not.
            async with (
                asyncio.timeout(self._options.timeout_seconds),
                self._transport(model).ask(model, translation, body, exchange.scope) as answer,
            ):
                exchange.status = answer.status
                if retry.elsewhere and answer.status in _TOO_BUSY and not exchange.streaming:
                    raise _Retry(f"{model.address} answered {answer.status}", answer.status)
                await self._relay(exchange, model, translation, answer)
            if translation.asks_for_tokens and not call.error and call.response:
                self._buffering.learn(model, call.response, streamed=translation.streams and not buffered)
        except ServerGone as gone:
            if retry.again and not gone.began and (retry.elsewhere or not gone.timed_out):
                raise _Retry(_unreachable(model, gone).message) from gone
            if model.part_of_run and not await self._transport(model).is_up(model):
                raise _EngineLost(_unreachable(model, gone)) from gone
            raise _unreachable(model, gone) from gone
        except TimeoutError as error:
            raise Refusal(
                504,
                "upstream_timeout",
                f"{model.address} did not answer within {self._options.timeout_seconds:g} s "
                "(LLMProxy's timeout_seconds); is the model overloaded?",
            ) from error
        finally:
            if beat is not None:
                beat.cancel()

    async def _keep_alive(self, exchange: Exchange, *, early: bool) -> None:
        """Send a comment whenever a stream has been silent for a while, so that no proxy closes it.

        early: send it even before the upstream has begun to answer, and begin the stream for it.
        """
        loop, longest = asyncio.get_running_loop(), self._options.keep_alive_seconds
        exchange.written_at = loop.time()
        while not exchange.disconnected:
            await asyncio.sleep(exchange.written_at + longest - loop.time())
            if early:
                await exchange.begin_stream(_EVENT_STREAM)
            if exchange.written_at + longest <= loop.time():
                if exchange.streaming:
                    await exchange.write_between_events(_COMMENT)
                exchange.written_at = loop.time()

    def _translation(self, exchange: Exchange, model: UpstreamModel) -> Translation:
        """Return the translation of a call to a model server's dialect and back. Raise Refusal if the server speaks no
        dialect that can express the call.
        """
        call, client, request = exchange.call, exchange.dialect, exchange.request
        upstream = model.dialect_for(client)
        if upstream is None:
            raise Refusal(
                404,
                "dialect_not_served",
                f"model {model.model_name!r} speaks {', '.join(model.dialects) or 'nothing'}, and a call of {client.path} "
                "cannot be translated to that; if its server has the route, say so in UpstreamModel's dialects",
            )
        seed = None
        if self._options.deterministic_seed is not None:
            seed = seed_for(self._options.deterministic_seed, exchange.sampling_key, call.call_index or 0)
        try:
            whole = request
            if client is not upstream and client.conversations is not None:
                whole = self.kept.whole(exchange.key, request, client.conversations)
                exchange.keep = whole
            return Translation(
                client,
                upstream,
                exchange.raw,
                request,
                whole=whole,
                model=model.name_there,
                record_tokens=bool(model.record_tokens),
                seed=seed,
                dropped_tools=self._options.dropped_tools,
                restore=partial(self._turns.restore, exchange.key),
            )
        except WrongType as error:
            raise _wrong_type(error) from error
        except Untranslatable as error:
            tool = re.fullmatch(r"tools\[(\d+)\]\.type", error.field)
            name = request["tools"][int(tool[1])].get("type") if tool else None
            remedy = f"; to leave the tool out, give the gateway dropped_tools=[{name!r}]" if name else ""
            raise Refusal(
                400,
                "untranslatable",
                f"{error}; model {model.model_name!r} is asked in {upstream.path}, to which {client.path} is translated{remedy}",
                param=error.field,
            ) from error

    # ---- the answer ------------------------------------------------------------------------------

    async def _relay(
        self, exchange: Exchange, model: UpstreamModel, translation: Translation, answer: UpstreamResponse
    ) -> None:
        """Send an upstream's response to the client, as a stream or whole.

        A response that needs no translation passes as it comes, also one of a form that was not requested.
        """
        is_stream = answer.content_type == "text/event-stream"
        unchanged = translation.verbatim and not translation.hidden
        # Some servers send their stream as another type.
        is_stream |= unchanged and translation.streams and answer.content_type != "application/json"
        if answer.status != 200 or not is_stream:
            return await self._relay_whole(exchange, translation, answer)
        if not translation.streams and not translation.verbatim:
            raise Refusal(
                502,
                "upstream_garbage",
                f"{model.address} answered with a stream that was not requested; is the model's endpoint right?",
            )
        exchange.mid_event = answer.content_type != "text/event-stream"  # until an event shows that it is one
        await self._relay_stream(exchange, answer.headers, translation, answer.pieces())

    async def _relay_whole(self, exchange: Exchange, translation: Translation, answer: UpstreamResponse) -> None:
        """Record the model server's complete response, then send it to the client in the client's dialect.

        A stream that came in one piece is relayed as a stream, because the client expects events.
        """
        try:
            raw = await answer.read()
        except ServerGone as gone:
            if translation.verbatim and not exchange.streaming:
                got = b"" if translation.hidden else gone.got
                exchange.broken_off = BrokenOff(answer.status, answer.headers, got)
            raise
        call = exchange.call
        if answer.status == 200 and translation.streams and (events := await parsed(raw, translation.events_of)):
            return await self._relay_stream(exchange, _EVENT_STREAM, translation, _one(events))
        if exchange.streaming:
            raise Refusal(502, "upstream_failed", f"the upstream answered {answer.status}: {_excerpt(raw)}")
        if answer.status >= 300:
            call.error = f"the upstream answered {answer.status}: {_excerpt(raw)}"
            body = translation.error(answer.status, raw)
        else:
            call.response, body, call.unread = await parsed(raw, lambda raw: _read_answer(translation, raw))
            if call.response is None:
                _fault(
                    exchange,
                    "garbage",
                    f"the upstream answered {answer.status} without a JSON object (is the model's endpoint right?): {_excerpt(raw)}",
                )
            self._keep(exchange, translation)
        await self._record(exchange)
        headers = answer.headers
        if body is not raw:
            headers = [*((name, value) for name, value in headers if name != b"content-type"), _JSON_TYPE]
        if exchange.tried is not None and call.error is None:
            self.retries.answered(exchange.tried, headers, body)
        elif exchange.tried is not None:
            exchange.tried.state = "failed"
        await send_reply(exchange.send, body, status=answer.status, headers=headers)

    async def _relay_stream(
        self, exchange: Exchange, headers: Headers, translation: Translation, pieces: AsyncIterator[bytes]
    ) -> None:
        """Relay a streamed response, and record the whole of it before the client sees its end. A stream that needs no
        change passes piece by piece, any other event by event.

        pieces: bytes as they arrive, split anywhere.
        Raise Refusal if a stream to translate cannot be read, or ends before the response does.
        """
        call = exchange.call
        stream = translation.stream()
        buffer = bytearray()
        sent: list[bytes] = []
        await exchange.begin_stream(headers)
        try:
            async for piece in pieces:
                buffer += piece
                shown: list[bytes] = []
                unreadable: Untranslatable | None = None
                for event, data in split_events(buffer, new_bytes=len(piece)):
                    try:
                        shown.append(stream.feed(event, data))
                    except Untranslatable as error:
                        unreadable = error
                        break
                    if stream.error is not None and call.error is None:
                        call.error = f"the upstream answered in the stream: {stream.error[:_ERROR_TEXT_LIMIT]}"
                    if stream.ended and not exchange.recorded:
                        call.response, call.unread = stream.answer(), stream.unread
                        if stream.finished:
                            self._keep(exchange, translation)
                        await self._record(exchange)
                if stream.finished:
                    exchange.answered = True
                if part := piece if stream.unchanged else b"".join(shown):
                    if exchange.tried is not None:
                        sent.append(part)
                    await exchange.write(part, mid_event=stream.unchanged and bool(buffer))
                exchange.ended = stream.ended
                if unreadable is not None:
                    raise Refusal(
                        502, "upstream_garbage", f"the upstream's stream cannot be read: {unreadable}"
                    ) from unreadable
        except ServerGone:
            if translation.verbatim:
                exchange.broken_off = BrokenOff(200, headers)
            raise
        finally:
            if call.response is None:
                call.response, call.unread = stream.answer(), stream.unread
        if not stream.finished and call.error is None:
            problem = "the upstream ended its stream before the answer was finished"
            if not translation.verbatim:
                raise Refusal(502, "upstream_incomplete", problem)
            _fault(exchange, "incomplete", f"{problem}: {_excerpt(buffer)}" if buffer else problem)
        last = b"" if stream.unchanged else stream.close(bytes(buffer))
        self._keep(exchange, translation)
        await self._record(exchange)
        if exchange.tried is not None and call.error is None:
            self.retries.answered(exchange.tried, headers, b"".join(sent) + last)
        elif exchange.tried is not None:
            exchange.tried.state = "failed"
        await exchange.write(last, more=False)

    def _keep(self, exchange: Exchange, translation: Translation) -> None:
        """Keep a complete response for a later request that continues it, by its id or by its messages. Do nothing for
        a call whose response is not to be kept.
        """
        call, request = exchange.call, exchange.keep
        if call.error is None and call.response is not None and (translation.asks_for_tokens or call.replayed):
            for choice in call.response.get("choices") or ():
                if is_object(choice.get("message")) and is_list(messages := call.request.get("messages")):
                    self._turns.add(exchange.key, messages, choice["message"])
        exchange.keep = None
        conversations = translation.client.conversations
        if request is None or conversations is None or call.error is not None or call.response is None:
            return
        try:
            response = translation.client.answer_from_chat(call.response, translation.request)
        except Untranslatable:  # a stream without a message: the client has had all that came
            return
        n_bytes = len(translation.body) + len(dump(response["output"]))
        self.kept.keep(exchange.key, request, response, conversations, n_bytes=n_bytes)

    # ---- how a call ends -------------------------------------------------------------------------

    async def _record(self, exchange: Exchange) -> None:
        """Complete the call's record and queue it, once, before the agent sees the end of the answer.

        A durable gateway waits until the record is in the store, and raises StoreError if it is not.
        """
        exchange.answered = True
        if not exchange.recorded:
            exchange.recorded = True
            exchange.call.end_time = time.time()
            self.unread_calls += exchange.call.unread is not None
            if exchange.model_name is not None:
                exchange.call.policy_version_at_end = self._policy_version(exchange.model_name)
            if exchange.call.replayed is None:
                self._count(exchange)
            await (self._recorder.put_durably if self._options.durable else self._recorder.put)(exchange.call)

    def _count(self, exchange: Exchange) -> None:
        """Set the cost of a call that a server has answered, or why it is unknown, and add it to what the attempt has
        spent.
        """
        call, price = exchange.call, exchange.price
        usage = (call.response or {}).get("usage")
        call.cost = None if price is None else price.cost(usage)
        if call.cost is None and (200 <= (exchange.status or 0) < 300 or exchange.may_be_billed):
            name = exchange.model_name
            no_price = f"model {name!r} has no price; give it one in prices= or in its price_per_million"
            no_usage = (
                f"model {name!r} has sent no usage; a stream has one with stream_options={{'include_usage': True}}"
            )
            call.cost_unknown = no_price if price is None else no_usage
        exchange.spent.add(usage, call.cost, call.cost_unknown)
        if call.cost is not None or call.cost_unknown is not None:
            self._options.on_spent(call.cost)

    async def _fail(self, exchange: Exchange, refusal: Refusal) -> None:
        """Record a failed call and send the refusal: as a response, or as an event of a stream that has begun. A stream
        without its end is then broken off, so that no client takes it for a whole one. If the upstream's response
        passed as it came, the client gets no refusal: its connection breaks as the upstream's did.
        """
        call = exchange.call
        if call.error is None and not exchange.recorded:
            call.error = refusal.message
        exchange.may_be_billed = exchange.model_name is not None and refusal.code in _MAY_BE_BILLED
        if exchange.tried is not None:
            exchange.tried.state = "failed"
        # The agent gets an error anyway, and `flush` reports a durable record that failed.
        with contextlib.suppress(StoreError):
            await self._record(exchange)
        if exchange.disconnected:
            return
        if exchange.broken_off is None and not exchange.streaming:
            return await send_refusal(exchange.send, refusal, exchange.dialect)
        if exchange.broken_off is None and exchange.ended:
            return await exchange.write(b"", more=False)
        error = exchange.dialect.error_event(refusal.status, refusal.message, code=refusal.code, param=refusal.param)
        if exchange.broken_off is not None or not await exchange.write_between_events(error):
            logger.warning(
                "the answer to call %s of rollout %r broke off: %s", call.call_index, call.rollout_id, refusal.message
            )
        await exchange.break_off()


class _Retry(Exception):
    """Raised when a server did not answer, or was too busy, and the call may be sent again."""

    def __init__(self, why: str, status: int | None = None) -> None:
        """status: the HTTP status that the server answered; None: it did not answer."""
        super().__init__(why)
        self.status = status


class _EngineLost(Exception):
    """Raised when the run's own engine has died during the call."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _failure(refusal: Refusal) -> UpstreamFailure:
    return UpstreamFailure(refusal.code.removeprefix("upstream_"), refusal.message)


async def _one(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


def _cancelled(exchange: Exchange) -> Refusal:
    if exchange.attempt_over:
        return Refusal(
            410, "attempt_ended", "the attempt ended before the answer was whole: the agent did not wait for it"
        )
    if exchange.disconnected:
        return Refusal(499, "client_disconnected", "the client disconnected before the answer was whole")
    return Refusal(503, "gateway_stopped", "the gateway was stopped before the answer was whole; send the call again")


def _unreachable(model: UpstreamModel, gone: ServerGone) -> Refusal:
    if gone.began:
        return Refusal(502, "upstream_incomplete", f"{model.address} broke off in the middle of its answer ({gone})")
    return Refusal(502, "upstream_unreachable", f"cannot reach {model.address} for model {model.model_name!r} ({gone})")


def _parse_request(raw: bytes) -> dict[str, Any]:
    try:
        return parse_request(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "invalid_json", f"the request body cannot be read as JSON: {error}") from error


async def _checked_request(exchange: Exchange) -> dict[str, Any]:
    """Return the parsed request. Raise Refusal (400) for one that is no JSON object or has a field of a wrong type."""
    request = await parsed(exchange.raw, _parse_request)
    try:
        check_types(request, exchange.dialect.field_types)
    except WrongType as error:
        raise _wrong_type(error) from error
    return request


def _not_counted(model: UpstreamModel, reason: str) -> Refusal:
    return Refusal(
        404,
        "tokens_not_counted",
        f"the server of model {model.model_name!r} cannot count this prompt: {reason}; the gateway does not estimate",
    )


def _wrong_type(error: WrongType) -> Refusal:
    return Refusal(400, "invalid_type", str(error), param=error.field)


def _read_answer(translation: Translation, raw: bytes) -> tuple[dict[str, Any] | None, bytes, str | None]:
    """Return a model server's response in chat form for the record, the body for the client, and what the record lacks.
    Raise Refusal (502) if it cannot be translated.
    """
    try:
        return translation.answer(raw)
    except Untranslatable as error:
        raise Refusal(
            502,
            "upstream_untranslatable",
            f"the model's answer cannot be expressed in {translation.client.path}: {error}: {_excerpt(raw)}",
        ) from error


def _fault(exchange: Exchange, reason: str, message: str) -> None:
    exchange.call.error = message
    exchange.fault = UpstreamFailure(reason, message)


def _excerpt(raw: bytes | bytearray) -> str:
    return raw[:_ERROR_TEXT_LIMIT].decode("utf-8", "replace")
