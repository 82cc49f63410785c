"""The engine's OpenAI-compatible endpoint: an ASGI application over a decoder.

It serves `/v1/chat/completions` and `/v1/completions` (streamed or not), `/v1/models` and
`/health`. If a client disconnects, its responses leave the batch. The module knows the decoder's
queue and the wire format; no gradients, no rollouts. To serve more paths, give `Endpoint` handlers.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyden.dialects import openai_error, sse_event, usage
from leyden.engine.answers import Choice, chunk, response
from leyden.engine.chat import Chat, PartialReply, Prompt
from leyden.engine.decoder import Decoder, Generation
from leyden.engine.grammar import GrammarConstraint, Grammars
from leyden.engine.refusal import bad_request
from leyden.engine.text import Text
from leyden.engine.wire import CompletionRequest, Kind, parse_request
from leyden.errors import LeydenError
from leyden.host.http import (
    JSON,
    MAX_BODY_BYTES,
    ClientGone,
    Handler,
    Message,
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
    read_body,
    send_reply,
)

logger = logging.getLogger("leyden.engine")


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """The model that an endpoint serves, and the keys that clients must send."""

    model_name: str
    max_length: int
    """The most tokens of a prompt and its response together."""
    n_vocabulary: int
    eos_ids: frozenset[int]
    """The tokens that end a response."""
    deterministic: bool
    """Whether each request must have a seed."""
    api_key: str | None
    """The key that clients must send; None: none."""
    tool_parser: str | None = None
    """The name of a parser of tool calls; None chooses by the chat template's format."""
    control_key: str | None = None
    """The key that callers of the handlers' paths must send; None: none."""


class Endpoint:
    """The engine's ASGI application: completions in OpenAI's form, health, and control commands."""

    def __init__(
        self,
        decoder: Decoder,
        text: Text | None,
        options: EndpointOptions,
        handlers: Mapping[str, Handler] | None = None,
        *,
        guard: SiteGuard,
    ) -> None:
        """Set up the application. It serves while the decoder runs.

        text: the tokenizer; None serves only prompts of token ids.
        handlers: handlers of further paths, by path, for POST requests with the control key.
        guard: checks where a request comes from.
        """
        self._decoder = decoder
        self._text = text
        self._chat = None
        self._grammars = None
        if text is not None:
            self._grammars = Grammars(text.tokenizer, n_vocabulary=options.n_vocabulary, eos_ids=options.eos_ids)
            self._chat = Chat(text, model=options.model_name, eos_ids=options.eos_ids, tool_parser=options.tool_parser)
        self._options = options
        self._handlers = dict(handlers or {})
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request. Every error becomes a response in OpenAI's form."""
        try:
            await self._route(scope, receive, send)
        except ClientGone:
            return
        except Refusal as refusal:
            error = openai_error(refusal.status, refusal.message, param=refusal.param, code=refusal.code or None)
            await send_reply(send, error, status=refusal.status, headers=[JSON, *refusal.headers])
        except LeydenError as error:
            await send_reply(send, openai_error(500, str(error)), status=500)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Dispatch a request by its path: health, control commands, completions, the list of
        models. Raise Refusal for any other path.
        """
        self._guard.check(scope)
        path, headers = scope["path"], dict(scope["headers"])
        if path == "/health":
            return await send_reply(send, b'{"status": "ok"}')
        if path in self._handlers and scope["method"] == "POST":
            _check_key(scope, self._options.control_key)
            body = await read_body(headers, receive, max_bytes=_CONTROL_BYTES)
            reply = await self._handlers[path](body, headers)
            return await send_reply(send, reply.body, status=reply.status, headers=reply.headers)
        _check_key(scope, self._options.api_key)
        if path in _COMPLETIONS:
            check_method(scope, "POST")
            body = await read_body(headers, receive, max_bytes=MAX_BODY_BYTES)
            await self._complete(body, _COMPLETIONS[path], receive, send)
        elif path == "/v1/models":
            model = {"id": self._options.model_name, "object": "model", "created": 0, "owned_by": "leyden"}
            await send_reply(send, json.dumps({"object": "list", "data": [model]}).encode())
        else:
            possible = ", ".join(("/health", "/v1/models", *_COMPLETIONS))
            raise bad_request(f"there is nothing at {scope['method']} {path}; possible: {possible}", status=404)

    async def _complete(self, body: bytes, kind: Kind, receive: Receive, send: Send) -> None:
        """Generate the `n` responses to a completion request and send them, whole or as a stream.
        Cancel the generations if the client disconnects.
        """
        request = parse_request(body, kind)
        prompt = self._prompt(request)
        replies = [self._reply(request, prompt, index) for index in range(request.n)]
        constraints: list[GrammarConstraint] | list[None] = [None] * request.n
        if request.constrained:
            assert self._chat is not None and self._grammars is not None, "the prompt was made by a chat template"
            # Not in the event loop: a tokenizer's first grammar takes a second.
            constraints = await asyncio.to_thread(self._grammars.constraints, request, self._chat.parser)
        call = _PendingResponse(self._generations(request, prompt.token_ids, constraints))
        call.bind()
        self._decoder.submit(call.generations)
        streams = [
            _ChoiceStream(index, generation, reply)
            for index, (generation, reply) in enumerate(zip(call.generations, replies, strict=True))
        ]
        with on_disconnect(receive, call.cancel):
            try:
                if request.stream:
                    await self._stream(request, prompt, call, streams, send)
                else:
                    await self._whole(request, prompt, call, streams, send)
            finally:
                call.cancel()

    async def _whole(
        self,
        request: CompletionRequest,
        prompt: Prompt,
        call: _PendingResponse,
        streams: list[_ChoiceStream],
        send: Send,
    ) -> None:
        """Wait until all choices are finished and send them in one response. Send nothing to a
        client that has disconnected.
        """
        if not await call.finished():
            return
        choices = [choice for stream in streams if (choice := self._take(request, stream, prompt)) is not None]
        await send_reply(send, response(request, _response_id(request), prompt.token_ids, choices, self._piece))

    async def _stream(
        self,
        request: CompletionRequest,
        prompt: Prompt,
        call: _PendingResponse,
        streams: list[_ChoiceStream],
        send: Send,
    ) -> None:
        """Send a chunk with the new tokens of each choice whenever there are some.

        The text may lag behind its tokens, until no later token can change it. An error after the
        first chunk is sent as an event.
        """
        response_id = _response_id(request)
        first: list[int] | None = prompt.token_ids
        started = False
        try:
            while not all(stream.ended for stream in streams):
                if not await call.news():
                    return
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    started = True
                for stream in streams:
                    choice = self._take(request, stream, prompt)
                    if choice is not None:
                        data = chunk(request, response_id, choice, self._piece, prompt_ids=first)
                        first = None
                        await send({"type": "http.response.body", "body": data, "more_body": True})
        except LeydenError as error:
            if not started:
                raise
            await send(_sse(openai_error(500, str(error))))
        if request.include_usage:
            counted = usage(len(prompt.token_ids), sum(len(g.token_ids) for g in call.generations))
            data = chunk(request, response_id, None, self._piece, counted=counted)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _take(self, request: CompletionRequest, stream: _ChoiceStream, prompt: Prompt) -> Choice | None:
        """Return the new part of a choice; None if there is none. When the choice has ended, keep
        its ids for the next turn, before the client can continue the conversation.
        """
        choice = stream.take()
        if stream.ended and choice is not None and self._chat is not None and stream.reply is not None:
            self._chat.ended(request, prompt, stream.generation.token_ids, stream.reply)
        return choice

    def _reply(self, request: CompletionRequest, prompt: Prompt, index: int) -> PartialReply | None:
        """Return the reader of one response's text; None without a tokenizer."""
        return None if self._chat is None else self._chat.reply(request, prompt, index)

    def _prompt(self, request: CompletionRequest) -> Prompt:
        """Return the request's prompt. Raise Refusal for an unknown model, an empty prompt, a
        prompt that fills the context, or a missing seed in deterministic mode.
        """
        options = self._options
        if request.model != options.model_name:
            raise bad_request(
                f"the model {request.model!r} is not served here; this endpoint serves {options.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        if options.deterministic and request.seed is None:
            raise bad_request("'seed' is missing: this engine runs in deterministic mode and needs one", param="seed")
        prompt = self._read_prompt(request)
        prompt_ids = prompt.token_ids
        field = "prompt" if request.kind == "text_completion" else "messages"
        if not prompt_ids:
            raise bad_request(f"{field!r} has no tokens; give it at least one", param=field)
        if len(prompt_ids) >= options.max_length:
            raise bad_request(
                f"the prompt has {len(prompt_ids)} tokens; the context has {options.max_length}, answer included",
                param=field,
                code="context_length_exceeded",
            )
        return prompt

    def _read_prompt(self, request: CompletionRequest) -> Prompt:
        """Return the prompt's token ids: the given ids, the encoded text, or the messages in the
        model's chat template. Raise Refusal for an id outside the vocabulary.
        """
        if isinstance(request.prompt, list):
            bad = next((token for token in request.prompt if token >= self._options.n_vocabulary), None)
            if bad is not None:
                raise bad_request(
                    f"'prompt' has the token id {bad}; the vocabulary has {self._options.n_vocabulary} tokens, so encode "
                    "the prompt with this model's tokenizer",
                    param="prompt",
                )
            return Prompt(request.prompt)
        if self._text is None or self._chat is None:
            raise bad_request(
                "this engine has no tokenizer; send 'prompt' to /v1/completions as token ids", param="prompt"
            )
        if request.kind == "text_completion":
            return Prompt(self._text.encode(request.prompt, special=True))
        return self._chat.prompt(request)

    def _generations(
        self, request: CompletionRequest, prompt_ids: list[int], constraints: Sequence[GrammarConstraint | None]
    ) -> list[Generation]:
        """Return one generation per requested response. They are not submitted to the decoder yet.

        constraints: one per response, None for unconstrained text.
        """
        options, stops, text = self._options, request.stops, self._text
        if stops and text is None:
            raise bad_request("this engine has no tokenizer; 'stop' needs one (use 'stop_token_ids')", param="stop")
        room = options.max_length - len(prompt_ids)
        loop = asyncio.get_running_loop()
        return [
            Generation(
                prompt_ids=prompt_ids,
                max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
                temperature=request.temperature,
                top_p=request.top_p,
                stop_ids=options.eos_ids.union(request.stop_token_ids),
                # The responses to a request with a seed differ from each other, but not from those
                # to an equal request.
                seed=None if request.seed is None else request.seed + index,
                loop=loop,
                notify=_ignore,
                streams=request.stream,
                ends_text=self._ends_text(request),
                constraint=constraint,
            )
            for index, constraint in enumerate(constraints)
        ]

    def _ends_text(self, request: CompletionRequest) -> Callable[[Sequence[int]], bool] | None:
        """Return a function of a response's ids so far that tells whether its text ends the
        response: by a stop string, or by its first tool call if parallel calls are off. None if
            neither applies.
        """
        stops, text, chat = request.stops, self._text, self._chat
        if text is None or chat is None:
            return None
        ends: list[Callable[[Sequence[int]], bool]] = []
        if stops:
            ends.append(functools.partial(text.ends_with_stop, stops))
        if request.may_call and not request.parallel_tool_calls:
            ends.append(functools.partial(chat.has_call, schemas=request.schemas))
        return (lambda ids: any(end(ids) for end in ends)) if ends else None

    def _piece(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes; a name made of its id without a tokenizer."""
        return self._text.piece(token_id) if self._text else (f"token_id:{token_id}", [])


class _PendingResponse:
    """The generations of one request, and one waiter for news of any of them."""

    def __init__(self, generations: list[Generation]) -> None:
        self.generations = generations
        self._cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._news = False

    def bind(self) -> None:
        """Let the generations notify this object of their tokens."""
        for generation in self.generations:
            generation.notify = self._notified

    def _notified(self) -> None:
        """Wake the handler that waits for tokens; on its event loop."""
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """Let the decoder take unfinished generations out of the batch, and wake the waiter."""
        self._cancelled = True
        for generation in self.generations:
            generation.cancelled = True
        self._notified()

    async def news(self) -> bool:
        """Wait until a generation of this request has a new token or has ended.

        Return False if the client has left. Raise the error that ended a generation.
        """
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
        """Wait until all generations are done. Return False if the client has left."""
        while await self.news():
            if all(generation.done for generation in self.generations):
                return True
        return False


class _ChoiceStream:
    """The part of one generation that has been sent."""

    def __init__(self, index: int, generation: Generation, reply: PartialReply | None) -> None:
        """index: the index of the choice. reply: reads the text; None if there is no tokenizer."""
        self._index = index
        self.generation = generation
        self.reply = reply
        self._n_sent = 0
        """The number of tokens that have been sent."""
        self._n_calls = 0
        """The number of tool calls that have been sent."""
        self.ended = False
        """Whether the end of the choice has been sent."""

    def take(self) -> Choice | None:
        """Return the part of the choice that is new since the last call; None if there is none."""
        generation = self.generation
        finish_reason: str | None = generation.finish_reason  # read first: when it is set, the tokens are complete
        n = len(generation.logprobs)
        if self.ended or (n == self._n_sent and finish_reason is None):
            return None
        start, self._n_sent = self._n_sent, n
        self.ended = finish_reason is not None
        text, calls = "", list[Any]()
        if self.reply is not None:
            text, calls = self.reply.advance(generation.token_ids[:n], final=self.ended)
        first_call, self._n_calls = self._n_calls, self._n_calls + len(calls)
        if finish_reason == "stop" and self._n_calls:
            finish_reason = "tool_calls"
        return Choice(
            self._index,
            text,
            generation.token_ids[start:n],
            generation.logprobs[start:n],
            generation.policy_versions[start:n],
            finish_reason,
            calls,
            begins=start == 0,
            first_call=first_call,
        )


_COMPLETIONS: Mapping[str, Kind] = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}
_CONTROL_BYTES = 8 * 2**30
"""The largest body of a request with the control key, such as a training call."""
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def _ignore() -> None:
    """Do nothing. A generation has this function until `_PendingResponse.bind` replaces it."""


def _check_key(scope: Scope, wanted: str | None) -> None:
    """Raise Refusal unless a request has the endpoint's API key; None: it has none."""
    if wanted is not None and not is_secret(bearer_token(header(scope, b"authorization")), wanted.encode()):
        raise bad_request(
            "the API key is missing or wrong; send the engine's api_key as `Authorization: Bearer`",
            status=401,
            code="invalid_api_key",
        )


def _response_id(request: CompletionRequest) -> str:
    """Return a new id for a response, in OpenAI's form."""
    return ("chatcmpl-" if request.kind == "chat.completion" else "cmpl-") + secrets.token_hex(12)


def _sse(body: bytes) -> Message:
    """Return the ASGI message that sends a body as a server-sent event."""
    return {"type": "http.response.body", "body": sse_event(body), "more_body": True}
