"""`FakeUpstream`: a small truthful server that speaks OpenAI's APIs and Anthropic's messages.

Its answers follow from the request alone (and its `seed`), with real token ids and
log-probabilities in vLLM's convention where the API has room for them, streamed or not, and it
keeps the truth of every answer to compare with. On demand it misbehaves as real servers do.

It knows nothing of the gateway. What a request says is read in `requests`, what an answer
looks like is in `answers`. To add a way to misbehave, add a field to `Misbehaviour` and
honour it there or here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from aiohttp import web

from leyden.dialects import anthropic_error, openai_error
from leyden.testing.answers import ANSWERS, ApiAnswer, Misbehaviour, ServedCall
from leyden.testing.requests import request_prompt_ids
from leyden.testing.tokens import ChatTurn, Piece, ToolCall, response_ids_of, spoken
from leyden.types import LLM

Json = dict[str, Any]

_WORDS = ("lightning", "jar", "Größe", "left", "42", "higher", "雷", "no", "perhaps", "🌩", "yes", "run")
_KEPT = 100_000
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)
"""Errors that reading a malformed request raises."""
_IDS = {"chat/completions": "chatcmpl-", "completions": "cmpl-", "messages": "msg_", "responses": "resp_"}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer for `FakeUpstream(reply=...)` to give, where a plain text is not enough."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class FakeUpstream:
    """Serves on a free loopback port of the running event loop, between `start` and `stop`
    (or in `async with`).
    """

    def __init__(
        self,
        *,
        model: str = "fake",
        reply: Callable[[Json], str | Reply] | None = None,
        delay_seconds: float = 0.0,
        policy_version: int | None = None,
        fault: Callable[[Json], Misbehaviour | None] | None = None,
    ) -> None:
        """reply: returns the response to a request's body; without it, text derived from prompt and
        seed.

        delay_seconds: how long each answer takes.
        policy_version: claimed for every token, if given.
        fault: returns the fault for a request's body, if `misbehave` has none for it.
        """
        self.model = model
        self.calls: deque[ServedCall] = deque(maxlen=_KEPT)
        """The calls that were answered, newest last."""
        self.requests: deque[Json] = deque(maxlen=_KEPT)
        """The body of each request that was JSON, answered or not, newest last."""
        self.cancelled = 0
        """How many answers the client did not wait for."""
        self._reply = reply
        self._delay_seconds = delay_seconds
        self._policy_version = policy_version
        self._fault = fault
        self._next: deque[Misbehaviour] = deque()
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._served = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def endpoint(self) -> str:
        """The base URL for OpenAI's clients; Anthropic's add `/v1` themselves."""
        return f"http://127.0.0.1:{self._port}/v1"

    def llm(self) -> LLM:
        """Return the model as a resource."""
        return LLM(endpoint=self.endpoint, model=self.model, api_key="upstream-key")

    def misbehave(self, *misbehaviours: Misbehaviour) -> None:
        """Apply these faults to the next answers, one fault to each answer."""
        self._next.extend(misbehaviours)

    def truth(self, response_id: str) -> ServedCall:
        """Return the call that was answered under this id. Raise KeyError for an unknown id."""
        for call in reversed(self.calls):
            if call.response_id == response_id:
                return call
        raise KeyError(response_id)

    async def start(self, *, port: int = 0) -> None:
        """Take requests. Calling it again does nothing."""
        if self._runner is not None:
            return
        app = web.Application(client_max_size=2**30)
        for path in ANSWERS:
            app.router.add_post(f"/v1/{path}", self._answer)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, backlog=2048)
        await site.start()
        self._port = runner.addresses[0][1]
        self._runner = runner

    async def stop(self) -> None:
        """Refuse further requests. Calling it again does nothing."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ---- routes ----------------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _embeddings(self, request: web.Request) -> web.Response:
        """Respond to an embeddings request with 8 numbers per text, derived from its SHA-256."""
        try:
            body: Json = json.loads(await request.read())
            given: Any = body["input"]
        except _UNREADABLE as error:
            return _error("embeddings", 400, f"this request cannot be read: {type(error).__name__}: {error}")
        self.requests.append(body)
        inputs = cast(list[Any], given if isinstance(given, list) else [given])
        vectors = [[byte / 256 for byte in hashlib.sha256(repr(text).encode()).digest()[:8]] for text in inputs]
        data = [{"object": "embedding", "index": n, "embedding": vector} for n, vector in enumerate(vectors)]
        n_tokens = sum(len(str(text)) for text in inputs)
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return web.json_response({"object": "list", "model": body.get("model"), "data": data, "usage": usage})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer_or_fail(request, request.path.removeprefix("/v1/"))
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled += 1
            raise

    async def _answer_or_fail(self, request: web.Request, path: str) -> web.StreamResponse:
        """Respond to a request as the next fault says, or with a generated response. path: the API,
        a key of `ANSWERS`.
        """
        try:
            body: Json = json.loads(await request.read())
        except ValueError as error:
            return _error(path, 400, f"not JSON: {error}")
        if not isinstance(cast(object, body), dict):
            return _error(path, 400, "the body is no JSON object")
        self.requests.append(body)
        decided = self._next.popleft() if self._next else self._fault and self._fault(body)
        fault = decided or Misbehaviour()
        if delay := fault.delay_seconds or self._delay_seconds:
            await asyncio.sleep(delay)
        if fault.status is not None:
            return _error(path, fault.status, f"this answer was set to fail with status {fault.status}", fault.headers)
        if fault.body is not None:
            return web.Response(body=fault.body, content_type=fault.content_type)
        if body.get("model") != self.model:
            return _error(path, 404, f"The model `{body.get('model')}` does not exist.")
        try:
            answer = ANSWERS[path](self._serve(request, body, path), fault, policy_version=self._policy_version)
        except _UNREADABLE as error:
            return _error(path, 400, f"this request cannot be read: {type(error).__name__}: {error}")
        if body.get("stream"):
            return await _stream(request, answer, fault)
        if fault.close_after_chunks is not None or fault.close_after_bytes is not None:
            return await _break_off(request, answer, fault.close_after_bytes)
        return web.json_response(answer.whole())

    def _serve(self, request: web.Request, body: Json, path: str) -> ServedCall:
        """Generate the response to a request and remember the call. Equal prompts with an equal
        seed get equal responses.
        """
        prompt_ids = request_prompt_ids(path, body)
        draw = hashlib.sha256(f"{prompt_ids}\x1f{body.get('seed')}".encode()).digest()
        reply = self._reply(body) if self._reply else " ".join(_WORDS[byte % 12] for byte in draw[: 2 + draw[0] % 4])
        reply = Reply(reply) if isinstance(reply, str) else reply
        calls = tuple(
            call if call.call_id else replace(call, call_id=f"call_{draw[:6].hex()}_{index}")
            for index, call in enumerate(reply.calls)
        )
        ids = response_ids_of(ChatTurn("assistant", reply.text, reply.reasoning, calls))
        limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
        limit = next((limit for limit in limits if limit), len(ids))
        whole = len(ids) <= limit
        ids = ids[:limit]
        pieces = list(spoken(ids))
        self._served += 1
        call = ServedCall(
            response_id=f"{_IDS[path]}{self._served:08d}",
            path=request.path,
            headers=dict(request.headers),
            request=body,
            prompt_ids=prompt_ids,
            response_ids=ids,
            logprobs=[-(draw[index % 32] + index) / 64 for index in range(len(ids))],
            text="".join(piece.text for piece in pieces if piece.kind == "text"),
            finish_reason="length" if not whole else "tool_calls" if calls else "stop",
            reasoning="".join(piece.text for piece in pieces if piece.kind == "reasoning"),
            calls=calls if whole else _begun(pieces),
        )
        self.calls.append(call)
        return call


def _begun(pieces: list[Piece]) -> tuple[ToolCall, ...]:
    """Return the calls of an answer that was cut short.

    The last one may have only the beginning of its arguments.
    """
    calls: list[ToolCall] = []
    for piece in pieces:
        if piece.kind == "call":
            id_, _, name = piece.text.partition("\n")
            calls.append(ToolCall(name, "", id_))
        elif piece.kind == "arguments":
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + piece.text)
    return tuple(calls)


async def _stream(request: web.Request, answer: ApiAnswer, fault: Misbehaviour) -> web.StreamResponse:
    """Send the response's events, and stop where the fault says: close the connection, end the
    stream early, or stall for ever.
    """
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    sent, left = 0, fault.close_after_bytes
    async for event in _paced(answer.events(), fault.chunk_delay_seconds):
        if sent == fault.close_after_chunks:
            return _cut(request, response)
        if sent == fault.end_after_chunks:
            await response.write_eof()
            return response
        if sent == fault.stall_after_chunks:
            await asyncio.Event().wait()
        if left is not None:
            if left < len(event):
                await response.write(event[:left])
                return _cut(request, response)
            left -= len(event)
        await response.write(event)
        sent += 1
    await response.write_eof()
    return response


async def _paced(events: list[bytes], delay_seconds: float) -> AsyncIterator[bytes]:
    for event in events:
        if delay_seconds:
            await asyncio.sleep(delay_seconds)
        yield event


async def _break_off(request: web.Request, answer: ApiAnswer, after_bytes: int | None) -> web.StreamResponse:
    """Break the connection after this many bytes of a whole answer, or in its middle."""
    body = json.dumps(answer.whole()).encode()
    if after_bytes is not None and after_bytes >= len(body):
        return web.Response(body=body, content_type="application/json")
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2 if after_bytes is None else after_bytes])
    return _cut(request, response)


def _cut(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Break the connection as a dying server does."""
    if request.transport is not None:
        request.transport.abort()
    return response


def _error(path: str, status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = (anthropic_error if path == "messages" else openai_error)(status, message)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
