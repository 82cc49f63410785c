"""`FakeUpstream`: a small truthful server that speaks OpenAI's APIs and Anthropic's messages.

An answer depends on the request and its `seed` alone. It has real token ids and log-probabilities in vLLM's convention
where the API has room for them, streamed or not. The server keeps each answer as a `ServedCall` to compare with. On
demand it misbehaves as real servers do.

It knows nothing of the gateway. The module `requests` parses requests, `api_answers` writes answers. To add a way to
misbehave, add a field to `Misbehaviour` and honour it there or here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast

from aiohttp import web

from leyden._lib.json import Json
from leyden.dialects import anthropic_error, openai_error
from leyden.errors import ConfigError
from leyden.testing.api_answers import ANSWERS, ApiAnswer, Misbehaviour, ServedCall
from leyden.testing.fake_tokens import ChatTurn, Piece, ToolCall, pieces_of, response_ids_of
from leyden.testing.requests import request_prompt_ids
from leyden.types import LLM

_WORDS = ("lightning", "jar", "Größe", "left", "42", "higher", "雷", "no", "perhaps", "🌩", "yes", "run")
_MAX_KEPT = 100_000
"""How many calls, and how many requests, a server remembers."""
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)
"""Errors that reading a malformed request raises."""
_COUNTED = {
    "/tokenize": "chat/completions",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses/input_tokens": "responses",
}
"""Routes that count the tokens of a prompt, and the API of its request."""
_IDS = {"chat/completions": "chatcmpl-", "completions": "cmpl-", "messages": "msg_", "responses": "resp_"}


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of `FakeUpstream` with text, reasoning and tool calls, all optional. Its reply function returns one if a
    plain text is not enough.

    `Reply(calls=(ToolCall("get_weather", '{"city": "Paris"}'),))` calls a tool. The server writes it in the form of the
    API that was requested.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class FakeUpstream:
    """A local model server for tests: OpenAI's chat, completions and responses, and Anthropic's messages.

    It listens on a loopback port in the running event loop, between `start` and `stop` or in `async with`. `reply`
    decides what it says: a text, or a `Reply` with reasoning and tool calls, whichever API is used.

        def reply(body):
            if body["messages"][-1]["role"] == "tool":
                return "It is sunny."
            return Reply(calls=(ToolCall("get_weather", '{"city": "Paris"}'),))

        async with FakeUpstream(reply=reply) as server:
            client = openai.AsyncOpenAI(base_url=server.endpoint, api_key="any")
    """

    def __init__(
        self,
        *,
        model: str | Sequence[str] | None = "fake",
        reply: Callable[[Json], str | Reply] | None = None,
        delay_seconds: float = 0.0,
        policy_version: int | None = None,
        fault: Callable[[Json], Misbehaviour | None] | None = None,
    ) -> None:
        """model: the name that is served, or several; a request for another one gets status 404. None: every name is
        served.
        reply: a function of a request's body (its JSON, a dict) that returns a str or a `Reply`. None: a few words that
            depend on the prompt and the seed.
        delay_seconds: how long each answer takes.
        policy_version: claimed for every token, if given.
        fault: a function of a request's body that returns its fault, or None. Faults that were given to `misbehave` go
            first.
        Raise ConfigError for a name that is no text, or for no name at all.
        """
        self.models = () if model is None else (model,) if isinstance(model, str) else tuple(model)
        """The names that are served; empty for every name."""
        wrong = [name for name in self.models if not isinstance(cast(object, name), str) or not name]
        if wrong or (model is not None and not self.models):
            raise ConfigError(f"model is {model!r}; give a name, a list of names, or None for every name")
        self.model = self.models[0] if self.models else "fake"
        """The first of these names, which `llm` names."""
        self.calls: deque[ServedCall] = deque(maxlen=_MAX_KEPT)
        """The calls that were answered, newest last."""
        self.requests: deque[Json] = deque(maxlen=_MAX_KEPT)
        """The body of each request that was JSON, answered or not, newest last."""
        self.cancelled = 0
        """How many requests the client dropped before their answer was complete."""
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

    def llm(self, model: str | None = None) -> LLM:
        """Return a model as a resource; None: the first one that is served."""
        return LLM(endpoint=self.endpoint, model=model or self.model, api_key="upstream-key")

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
        """Start to serve. Calling it again does nothing.

        port: 0 chooses a free one.
        """
        if self._runner is not None:
            return
        app = web.Application(client_max_size=2**30)
        for path in ANSWERS:
            app.router.add_post(f"/v1/{path}", self._answer)
        for path, api in _COUNTED.items():
            app.router.add_post(path, partial(self._count, api))
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, backlog=2048)
        await site.start()
        self._port = runner.addresses[0][1]
        self._runner = runner

    async def stop(self) -> None:
        """Close the port and every connection. Calling it again does nothing."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ---- routes ----------------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        names = self.models or (self.model,)
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

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

    async def _count(self, api: str, request: web.Request) -> web.Response:
        """Respond with the number of tokens of a prompt, as vLLM's `/tokenize` and the routes of both APIs do.

        api: the API of the prompt, a key of `ANSWERS`.
        """
        try:
            body: Json = json.loads(await request.read())
            ids = request_prompt_ids(api, body)
        except _UNREADABLE as error:
            return _error(api, 400, f"this request cannot be read: {type(error).__name__}: {error}")
        self.requests.append(body)
        if api == "chat/completions":
            return web.json_response({"count": len(ids), "max_model_len": 2**20, "tokens": ids})
        kind = {"object": "response.input_tokens"} if api == "responses" else {}
        return web.json_response({**kind, "input_tokens": len(ids)})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Respond to a request; count it in `cancelled` if the client leaves before the end."""
        try:
            return await self._answer_or_fail(request, request.path.removeprefix("/v1/"))
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled += 1
            raise

    async def _answer_or_fail(self, request: web.Request, path: str) -> web.StreamResponse:
        """Respond to a request as the next fault says, or with a generated response.

        path: the API, a key of `ANSWERS`.
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
        asked: Any = body.get("model")
        if not isinstance(asked, str) or (self.models and asked not in self.models):
            return _error(path, 404, f"The model `{asked}` does not exist.")
        try:
            answer = ANSWERS[path](self._serve(request, body, path), fault, policy_version=self._policy_version)
        except ConfigError as error:  # of the reply function; a 400, because clients retry a 500
            return _error(path, 400, str(error))
        except _UNREADABLE as error:
            return _error(path, 400, f"this request cannot be read: {type(error).__name__}: {error}")
        if body.get("stream"):
            return await _stream(request, answer, fault)
        if fault.close_after_chunks is not None or fault.close_after_bytes is not None:
            return await _break_off(request, answer, fault.close_after_bytes)
        return web.json_response(answer.whole())

    def _serve(self, request: web.Request, body: Json, path: str) -> ServedCall:
        """Generate the response to a request and append the call to `calls`.

        Without a reply function, equal prompts with an equal seed get equal responses. Raise ConfigError if the reply
        function fails.
        """
        prompt_ids = request_prompt_ids(path, body)
        draw = hashlib.sha256(f"{prompt_ids}\x1f{body.get('seed')}".encode()).digest()
        words = [_WORDS[byte % len(_WORDS)] for byte in draw[: 2 + draw[0] % 4]]  # two to five
        reply = _replied(self._reply, body) if self._reply else Reply(" ".join(words))
        calls = tuple(
            call if call.call_id else replace(call, call_id=f"call_{draw[:6].hex()}_{index}")
            for index, call in enumerate(reply.calls)
        )
        ids = response_ids_of(ChatTurn("assistant", reply.text, reply.reasoning, calls))
        limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
        limit = next((limit for limit in limits if limit), len(ids))
        whole = len(ids) <= limit
        ids = ids[:limit]
        pieces = list(pieces_of(ids))
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
            calls=calls if whole else _begun_calls(pieces),
        )
        self.calls.append(call)
        return call


def _replied(reply: Callable[[Json], str | Reply], body: Json) -> Reply:
    """Return what a reply function says to a request's body. Raise ConfigError if the function raises, or returns
    something else than text or a `Reply` with `ToolCall`s.
    """
    try:
        replied: Any = reply(body)
    except Exception as error:  # a user's function may raise anything, and its client must learn what
        raise ConfigError(f"reply raised {type(error).__name__}: {error}") from error
    replied = Reply(replied) if isinstance(replied, str) else replied
    if not isinstance(replied, Reply):
        raise ConfigError(f"reply returned {_a(replied)}; return a str or leyden.testing.Reply")
    if wrong := next((call for call in replied.calls if not isinstance(cast(object, call), ToolCall)), None):
        raise ConfigError(f"reply returned a Reply whose calls hold {_a(wrong)}; use leyden.testing.ToolCall")
    return replied


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _begun_calls(pieces: list[Piece]) -> tuple[ToolCall, ...]:
    """Return the tool calls of an answer that was cut short. The last one's arguments may be incomplete."""
    calls: list[ToolCall] = []
    for piece in pieces:
        if piece.kind == "call":
            id_, _, name = piece.text.partition("\n")
            calls.append(ToolCall(name, "", id_))
        elif piece.kind == "arguments":
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + piece.text)
    return tuple(calls)


async def _stream(request: web.Request, answer: ApiAnswer, fault: Misbehaviour) -> web.StreamResponse:
    """Send the response's events, and stop where the fault says: disconnect, end the stream early, or stall."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    left = fault.close_after_bytes
    for sent, event in enumerate(answer.events()):
        if fault.chunk_delay_seconds:
            await asyncio.sleep(fault.chunk_delay_seconds)
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
    await response.write_eof()
    return response


async def _break_off(request: web.Request, answer: ApiAnswer, after_bytes: int | None) -> web.StreamResponse:
    """Send the first bytes of an answer that is not streamed, then break the connection.

    after_bytes: how many; None: half of them. A shorter answer is sent completely.
    """
    body = json.dumps(answer.whole()).encode()
    if after_bytes is not None and after_bytes >= len(body):
        return web.Response(body=body, content_type="application/json")
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2 if after_bytes is None else after_bytes])
    return _cut(request, response)


def _cut(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return response


def _error(path: str, status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = (anthropic_error if path == "messages" else openai_error)(status, message)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
