"""The OpenAI-compatible endpoint: an ASGI application over a decoder.

`/v1/chat/completions` and `/v1/completions` (streamed or not), `/v1/models`, `/health`. It is written against ASGI
itself: a request costs parsing, one future and one answer. It knows the decoder's queue and the wire format; no
gradients, no rollouts. A closed connection cancels its row. Routes beyond these are handed in by whoever mounts it.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from leyden.dialects import openai_error, sse_event, usage
from leyden.engine.decoder import Decoder, Generation
from leyden.engine.text import StreamedText, Text, cut_at_stop
from leyden.engine.wire import (
    Choice,
    CompletionRequest,
    Kind,
    RequestError,
    chunk,
    parse_request,
    response,
)
from leyden.errors import LeydenError
from leyden.utils.http import MAX_BODY_BYTES, ClientGone, RequestRefused, SiteGuard, read_body

__all__ = ["Endpoint", "Handler"]

logger = logging.getLogger("leyden.engine")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Handler = Callable[[bytes], Awaitable[bytes]]
"""Takes a request's body, returns the JSON of the answer."""


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """What the endpoint serves."""

    model_name: str
    max_length: int
    n_vocabulary: int
    eos_ids: frozenset[int]
    deterministic: bool
    api_key: str | None
    control_key: str | None = None
    """What the extra routes demand."""


class Endpoint:
    """The ASGI application."""

    def __init__(
        self,
        decoder: Decoder,
        text: Text | None,
        options: EndpointOptions,
        extra: Mapping[str, Handler] | None = None,
        *,
        guard: SiteGuard,
    ) -> None:
        """extra: further POST routes, for callers with the control key."""
        self._decoder = decoder
        self._text = text
        self._options = options
        self._extra = dict(extra or {})
        self._guard = guard

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._route(scope, receive, send)
        except ClientGone:
            return
        except RequestRefused as refused:
            await _answer(send, refused.status, openai_error(refused.status, str(refused), code=refused.code))
        except RequestError as error:
            await _answer(
                send, error.status, openai_error(error.status, str(error), param=error.param, code=error.code)
            )
        except LeydenError as error:
            await _answer(send, 500, openai_error(500, str(error)))

    async def _route(self, scope: Message, receive: Receive, send: Send) -> None:
        self._guard.check(scope)
        path, method = scope["path"], scope["method"]
        if path == "/health":
            await _answer(send, 200, b'{"status": "ok"}')
            return
        if path in self._extra and method == "POST":
            _check_key(scope, self._options.control_key)
            await _answer(send, 200, await self._extra[path](await _body(scope, receive, _CONTROL_BYTES)))
            return
        _check_key(scope, self._options.api_key)
        if path in _COMPLETIONS:
            if method != "POST":
                raise RequestError(f"{path} takes POST, not {method}", status=405)
            await self._complete(await _body(scope, receive, MAX_BODY_BYTES), _COMPLETIONS[path], receive, send)
        elif path == "/v1/models":
            model = {"id": self._options.model_name, "object": "model", "created": 0, "owned_by": "leyden"}
            await _answer(send, 200, json.dumps({"object": "list", "data": [model]}).encode())
        else:
            raise RequestError(f"there is nothing at {method} {path}", status=404)

    async def _complete(self, body: bytes, kind: Kind, receive: Receive, send: Send) -> None:
        request = parse_request(body, kind)
        prompt_ids = self._prompt(request)
        call = _Call(self._generations(request, prompt_ids))
        call.bind()
        self._decoder.submit(call.generations)
        gone = asyncio.ensure_future(_disconnect(receive))
        gone.add_done_callback(call.cancel)
        try:
            if request.stream:
                await self._stream(request, prompt_ids, call, send)
            else:
                await self._whole(request, prompt_ids, call, send)
        finally:
            call.cancel()
            gone.cancel()

    async def _whole(self, request: CompletionRequest, prompt_ids: list[int], call: _Call, send: Send) -> None:
        if not await call.finished():
            return
        choices = [
            Choice(index, self._answer_text(request, g), g.token_ids, g.logprobs, g.policy_versions, g.finish_reason)
            for index, g in enumerate(call.generations)
        ]
        await _answer(send, 200, response(request, _response_id(request), prompt_ids, choices, self._piece))

    async def _stream(self, request: CompletionRequest, prompt_ids: list[int], call: _Call, send: Send) -> None:
        """One chunk for each token as it is sampled; the text may lag behind its tokens by an unfinished character."""
        response_id = _response_id(request)
        streams = [
            _Stream(g, StreamedText(self._text, request.stops) if self._text else None) for g in call.generations
        ]
        first: list[int] | None = prompt_ids
        started = False
        try:
            while not all(stream.ended for stream in streams):
                if not await call.news():
                    return
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    started = True
                for index, stream in enumerate(streams):
                    choice = stream.take(index)
                    if choice is not None:
                        data = chunk(request, response_id, choice, self._piece, prompt_ids=first)
                        first = None
                        await send({"type": "http.response.body", "body": data, "more_body": True})
        except LeydenError as error:
            if not started:
                raise
            await send(_sse(openai_error(500, str(error))))
        if request.include_usage:
            counted = usage(len(prompt_ids), sum(len(g.token_ids) for g in call.generations))
            data = chunk(request, response_id, None, self._piece, counted=counted)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _prompt(self, request: CompletionRequest) -> list[int]:
        options = self._options
        if request.model != options.model_name:
            raise RequestError(
                f"the model {request.model!r} is not served here; this endpoint serves {options.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        if options.deterministic and request.seed is None:
            raise RequestError("'seed' is missing: this engine runs in deterministic mode and needs one", param="seed")
        prompt_ids = self._prompt_ids(request)
        field = "prompt" if request.kind == "text_completion" else "messages"
        if not prompt_ids:
            raise RequestError(f"{field!r} has no tokens", param=field)
        if len(prompt_ids) >= options.max_length:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens; the context has {options.max_length}, answer included",
                param=field,
                code="context_length_exceeded",
            )
        return prompt_ids

    def _prompt_ids(self, request: CompletionRequest) -> list[int]:
        if isinstance(request.prompt, list):
            bad = next((token for token in request.prompt if token >= self._options.n_vocabulary), None)
            if bad is not None:
                raise RequestError(
                    f"'prompt' has the token id {bad}; the vocabulary has {self._options.n_vocabulary}", param="prompt"
                )
            return request.prompt
        if self._text is None:
            raise RequestError(
                "this engine has no tokenizer; send 'prompt' to /v1/completions as token ids", param="prompt"
            )
        if request.kind == "text_completion":
            return self._text.encode(request.prompt, special=True)
        if not self._text.has_chat_template:
            raise RequestError(
                "the model's tokenizer has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        try:
            return self._text.chat_prompt(request.messages)
        except Exception as error:  # a template raises whatever it likes about messages that it does not take
            raise RequestError(f"the chat template refuses the messages: {error}", param="messages") from error

    def _generations(self, request: CompletionRequest, prompt_ids: list[int]) -> list[Generation]:
        options, stops, text = self._options, request.stops, self._text
        if stops and text is None:
            raise RequestError("this engine has no tokenizer; 'stop' needs one (use 'stop_token_ids')", param="stop")
        room = options.max_length - len(prompt_ids)
        loop = asyncio.get_running_loop()
        return [
            Generation(
                prompt_ids=prompt_ids,
                max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
                temperature=request.temperature,
                top_p=request.top_p,
                stop_ids=options.eos_ids.union(request.stop_token_ids),
                # Several answers to one seed are to differ from each other, and each to be the same every time.
                seed=None if request.seed is None else request.seed + index,
                loop=loop,
                notify=_nobody,
                streams=request.stream,
                ends_text=functools.partial(text.ends_with_stop, stops) if stops and text else None,
            )
            for index in range(request.n)
        ]

    def _answer_text(self, request: CompletionRequest, generation: Generation) -> str:
        return cut_at_stop(self._text.decode(generation.token_ids), request.stops) if self._text else ""

    def _piece(self, token_id: int) -> tuple[str, list[int]]:
        return self._text.piece(token_id) if self._text else (f"token_id:{token_id}", [])


class _Call:
    """The generations of one request, and waiting for them."""

    def __init__(self, generations: list[Generation]) -> None:
        self.generations = generations
        self._cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._news = False

    def bind(self) -> None:
        for generation in self.generations:
            generation.notify = self._notified

    def _notified(self) -> None:
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self, *_: object) -> None:
        """Take unfinished rows out of the batch."""
        self._cancelled = True
        for generation in self.generations:
            generation.cancelled = True
        self._notified()

    async def news(self) -> bool:
        """Wait until something has changed. False: the caller has gone. Raises the error that ended a generation."""
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._news = False
        for generation in self.generations:
            if generation.error is not None:
                raise generation.error
        return not self._cancelled

    async def finished(self) -> bool:
        """Wait until all are done. False: the caller has gone."""
        while await self.news():
            if all(generation.done for generation in self.generations):
                return True
        return False


class _Stream:
    """How much of one generation has been sent."""

    def __init__(self, generation: Generation, text: StreamedText | None) -> None:
        self._generation = generation
        self._text = text
        self._n_sent = 0
        self.ended = False

    def take(self, index: int) -> Choice | None:
        """What is new since the last time, None when nothing is."""
        generation = self._generation
        finish_reason = generation.finish_reason  # read first: when it is set, the tokens are complete
        n = len(generation.logprobs)
        if self.ended or (n == self._n_sent and finish_reason is None):
            return None
        start, self._n_sent = self._n_sent, n
        self.ended = finish_reason is not None
        text = self._text.advance(generation.token_ids[:n], final=self.ended) if self._text else ""
        return Choice(
            index,
            text,
            generation.token_ids[start:n],
            generation.logprobs[start:n],
            generation.policy_versions[start:n],
            finish_reason,
            begins=start == 0,
        )


_COMPLETIONS: Mapping[str, Kind] = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}
_CONTROL_BYTES = 8 * 2**30
"""The most of one training call, whose caller has the control key."""
_JSON_HEADER = (b"content-type", b"application/json")
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def _nobody() -> None:
    """Nobody is waiting yet."""


def _check_key(scope: Message, wanted: str | None) -> None:
    if wanted is None:
        return
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    if not hmac.compare_digest(given, b"Bearer " + wanted.encode()):
        raise RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")


def _response_id(request: CompletionRequest) -> str:
    return ("chatcmpl-" if request.kind == "chat.completion" else "cmpl-") + secrets.token_hex(12)


async def _body(scope: Message, receive: Receive, max_bytes: int) -> bytes:
    return await read_body(dict(scope["headers"]), receive, max_bytes=max_bytes)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [_JSON_HEADER, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _sse(body: bytes) -> Message:
    return {"type": "http.response.body", "body": sse_event(body), "more_body": True}
