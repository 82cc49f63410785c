"""The engine's endpoint: an ASGI application over a decoder.

It serves `/v1/chat/completions`, `/v1/completions`, `/v1/responses` and `/v1/messages` (streamed or not), `/v1/models`
and `/health`. It counts prompts at `/v1/messages/count_tokens`, `/v1/responses/input_tokens` and vLLM's `/tokenize`. If
a client disconnects, its responses leave the batch. The module knows the decoder's queue and the wire format; no
gradients, no rollouts. To serve more paths, give `Endpoint` handlers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyden._lib.host.http import (
    JSON,
    MAX_BODY_BYTES,
    ClientGone,
    Handler,
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
    parsed,
    read_body,
    send_reply,
)
from leyden._lib.json import Json
from leyden.dialects import dialect_of_client, dump, openai_error, sse_event, usage
from leyden.engine.chat_prompts import Chat, PartialReply, Prompt
from leyden.engine.decoder import Decoder, Generation, PendingGenerations
from leyden.engine.grammar import GrammarConstraint, Grammars
from leyden.engine.loading import LoadedPolicy
from leyden.engine.refusal import bad_request, unknown_token
from leyden.engine.response_objects import Choice, chunk, response
from leyden.engine.text import Offsets
from leyden.engine.translation import COUNTED, TRANSLATED, TranslatedSend, read_translation
from leyden.engine.wire import ChatRequest, Kind, TextRequest, parse_request
from leyden.errors import LeydenError

logger = logging.getLogger("leyden.engine")


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """The name of the model that an endpoint serves, its limits, and the keys that clients must send."""

    model_name: str
    max_length: int
    """The most tokens of a prompt and its response together."""
    deterministic: bool
    """Whether each request must have a seed."""
    api_key: str | None
    """The key that clients must send; None: none."""
    tool_parser: str | None
    """The name of a parser of tool calls; None chooses by the chat template's format."""
    control_key: str | None
    """The key that callers of the handlers' paths must send; None: none."""


class Endpoint:
    """The engine's ASGI application: completions in four APIs, health, and control commands."""

    def __init__(
        self,
        decoder: Decoder,
        policy: LoadedPolicy,
        options: EndpointOptions,
        handlers: Mapping[str, Handler],
        *,
        guard: SiteGuard,
    ) -> None:
        """Set up the application. It serves while the decoder runs.

        policy: a policy without a tokenizer is served only prompts of token ids.
        handlers: handlers of further paths, by path, for POST requests with the control key.
        guard: checks where a request comes from.
        """
        self._decoder = decoder
        self._policy, self._text = policy, policy.text
        self._chat = None
        self._grammars = None
        if (text := policy.text) is not None:
            self._grammars = Grammars(text.tokenizer, n_vocabulary=policy.n_vocabulary, eos_ids=policy.eos_ids)
            self._chat = Chat(text, model=options.model_name, eos_ids=policy.eos_ids, tool_parser=options.tool_parser)
        self._options = options
        self._handlers = handlers
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request. An error becomes a response in the form of the client's API."""
        dialect = (
            TRANSLATED.get(scope["path"])
            or COUNTED.get(scope["path"])
            or dialect_of_client(name for name, _ in scope["headers"])
        )
        try:
            await self._route(scope, receive, send)
        except ClientGone:
            return
        except Refusal as refusal:
            error = dialect.error(refusal.status, refusal.message, param=refusal.param, code=refusal.code or None)
            await send_reply(send, error, status=refusal.status, headers=[JSON, *refusal.headers])
        except LeydenError as error:
            await send_reply(send, dialect.error(500, str(error)), status=500)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Dispatch a request by its path: health, control commands, completions, the list of models. Raise Refusal for
        any other path.
        """
        self._guard.check(scope)
        path, headers = scope["path"], dict(scope["headers"])
        if path == "/health":
            return await send_reply(send, b'{"status": "ok"}')
        if path in self._handlers and scope["method"] == "POST":
            _check_key(scope, self._options.control_key)
            # The caller is the program that started this one, and its batches hold many numbers.
            body = await read_body(headers, receive, max_bytes=_CONTROL_BYTES, is_json=False)
            reply = await self._handlers[path](body, headers)
            return await send_reply(send, reply.body, status=reply.status, headers=reply.headers)
        _check_key(scope, self._options.api_key)
        if path in _COMPLETIONS:
            check_method(scope, "POST")
            body = await read_body(headers, receive, max_bytes=MAX_BODY_BYTES)
            request = await parsed(body, lambda body: parse_request(body, _COMPLETIONS[path]))
            await self._complete(request, receive, send)
        elif path in TRANSLATED:
            check_method(scope, "POST")
            body = await read_body(headers, receive, max_bytes=MAX_BODY_BYTES)
            translation = await parsed(body, lambda body: read_translation(body, TRANSLATED[path]))
            request = await parsed(translation.body, lambda body: parse_request(body, ChatRequest))
            await self._complete(request, receive, TranslatedSend(translation, send))
        elif path in COUNTED or path == _TOKENIZE:
            check_method(scope, "POST")
            body = await read_body(headers, receive, max_bytes=MAX_BODY_BYTES)
            if (counted := COUNTED.get(path)) is not None:
                body = (await parsed(body, lambda body: read_translation(body, counted))).body
            request = await parsed(body, lambda body: parse_request(body, ChatRequest))
            self._check_model(request)
            ids = self._read_prompt(request).token_ids
            length = self._options.max_length
            vllm: Json = {"count": len(ids), "max_model_len": length, "tokens": ids}
            await send_reply(send, dump(vllm if counted is None else counted.count_answer(len(ids))))
        elif path == "/v1/models":
            await send_reply(send, dump(dialect_of_client(headers).models_page([self._options.model_name])))
        else:
            possible = ", ".join(("/health", "/v1/models", *_COMPLETIONS, *TRANSLATED, *COUNTED, _TOKENIZE))
            raise bad_request(f"there is nothing at {scope['method']} {path}; possible: {possible}", status=404)

    async def _complete(self, request: ChatRequest | TextRequest, receive: Receive, send: Send) -> None:
        """Generate the `n` responses to a completion request and send them, whole or as a stream. Cancel the
        generations if the client disconnects.
        """
        prompt = self._prompt(request)
        constraints: list[GrammarConstraint] | list[None] = [None] * request.n
        if isinstance(request, ChatRequest) and request.constrained:
            assert self._chat is not None and self._grammars is not None, "the prompt was made by a chat template"
            # Not in the event loop: a tokenizer's first grammar takes a second.
            constraints = await asyncio.to_thread(self._grammars.constraints, request, self._chat.parser)
        pending = PendingGenerations(self._generations(request, prompt.token_ids, constraints))
        streams = [
            _ChoiceStream(
                index,
                generation,
                None if self._chat is None else self._chat.reply(request, prompt, index),
                Offsets(self._text) if self._text and request.logprobs and request.kind == "text_completion" else None,
            )
            for index, generation in enumerate(pending.generations)
        ]
        self._decoder.submit(pending.generations)
        with on_disconnect(receive, pending.cancel):
            try:
                if request.stream:
                    await self._stream(request, prompt, pending, streams, send)
                elif await pending.finished():
                    choices = self._new_parts(request, prompt, streams)
                    await send_reply(
                        send, response(request, _response_id(request.kind), prompt.token_ids, [*choices], self._piece)
                    )
            finally:
                pending.cancel()

    async def _stream(
        self,
        request: ChatRequest | TextRequest,
        prompt: Prompt,
        pending: PendingGenerations,
        streams: list[_ChoiceStream],
        send: Send,
    ) -> None:
        """Send a chunk with the new tokens of each choice whenever there are some.

        The text may lag behind its tokens, until no later token can change it. An error after the first chunk is sent
        as an event.
        """
        response_id = _response_id(request.kind)
        first: list[int] | None = prompt.token_ids
        started = False

        async def send_chunk(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            while not all(stream.ended for stream in streams):
                if not await pending.news():
                    return
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    started = True
                for choice in self._new_parts(request, prompt, streams):
                    await send_chunk(chunk(request, response_id, choice, self._piece, prompt_ids=first))
                    first = None
        except (LeydenError, Refusal) as error:
            if not started:
                raise
            status = error.status if isinstance(error, Refusal) else 500
            await send_chunk(sse_event(openai_error(status, str(error))))
        if request.include_usage:
            counted = usage(len(prompt.token_ids), sum(len(g.token_ids) for g in pending.generations))
            await send_chunk(chunk(request, response_id, None, self._piece, counted=counted))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _new_parts(
        self, request: ChatRequest | TextRequest, prompt: Prompt, streams: Sequence[_ChoiceStream]
    ) -> Iterator[Choice]:
        """Yield the new part of each choice that has one. When a choice has ended, keep its ids for the next turn,
        before the client can continue the conversation.
        """
        for stream in streams:
            if (choice := stream.take()) is None:
                continue
            if stream.ended and self._chat is not None and stream.reply is not None:
                self._chat.ended(request, prompt, stream.generation.token_ids, stream.reply)
            yield choice

    def _prompt(self, request: ChatRequest | TextRequest) -> Prompt:
        """Return the request's prompt. Raise Refusal for an unknown model, an empty prompt, a prompt that fills the
        context, or a missing seed in deterministic mode.
        """
        options = self._options
        self._check_model(request)
        if options.deterministic and request.seed is None:
            raise bad_request("'seed' is missing: this engine runs in deterministic mode and needs one", param="seed")
        prompt = self._read_prompt(request)
        prompt_ids = prompt.token_ids
        field = "prompt" if isinstance(request, TextRequest) else "messages"
        if not prompt_ids:
            raise bad_request(f"{field!r} has no tokens; give it at least one", param=field)
        if len(prompt_ids) >= options.max_length:
            raise bad_request(
                f"the prompt has {len(prompt_ids)} tokens; the context has {options.max_length}, answer included",
                param=field,
                code="context_length_exceeded",
            )
        return prompt

    def _check_model(self, request: ChatRequest | TextRequest) -> None:
        if request.model != self._options.model_name:
            raise bad_request(
                f"the model {request.model!r} is not served here; this endpoint serves {self._options.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _read_prompt(self, request: ChatRequest | TextRequest) -> Prompt:
        """Return the prompt's token ids: the given ids, the encoded text, or the messages in the model's chat template.
        Raise Refusal for an id outside the vocabulary.
        """
        if isinstance(request, TextRequest) and isinstance(request.prompt, list):
            if fault := unknown_token(request.prompt, self._policy.n_vocabulary):
                raise bad_request(f"'prompt' {fault}", param="prompt")
            return Prompt(request.prompt)
        if self._text is None or self._chat is None:
            raise bad_request(
                "this engine has no tokenizer; send 'prompt' to /v1/completions as token ids", param="prompt"
            )
        if isinstance(request, ChatRequest):
            return self._chat.prompt(request)
        return Prompt(self._text.encode(str(request.prompt), special=True))

    def _generations(
        self,
        request: ChatRequest | TextRequest,
        prompt_ids: list[int],
        constraints: Sequence[GrammarConstraint | None],
    ) -> list[Generation]:
        """Return one generation per requested response. They are not submitted to the decoder yet.

        constraints: one per response, None for unconstrained text.
        """
        if request.stops and self._text is None:
            raise bad_request("this engine has no tokenizer; 'stop' needs one (use 'stop_token_ids')", param="stop")
        room = self._options.max_length - len(prompt_ids)
        return [
            Generation(
                prompt_ids=prompt_ids,
                max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
                temperature=request.temperature,
                top_p=request.top_p,
                stop_ids=self._policy.eos_ids.union(request.stop_token_ids or ()),
                # The responses to a request with a seed differ from each other, but not from those
                # to an equal request.
                seed=None if request.seed is None else request.seed + index,
                streams=request.stream,
                ends_text=self._ends_text(request),
                constraint=constraint,
            )
            for index, constraint in enumerate(constraints)
        ]

    def _ends_text(self, request: ChatRequest | TextRequest) -> Callable[[Sequence[int]], bool] | None:
        """Return a function of a response's ids so far that tells whether its text ends the
        response: by a stop string, or by its first tool call if it may hold no other. None if neither applies.
        """
        stops, text, chat = request.stops, self._text, self._chat
        schemas = None
        if isinstance(request, ChatRequest) and request.may_call and not request.may_call_often:
            schemas = request.schemas
        if text is None or chat is None or not (stops or schemas):
            return None
        return lambda ids: bool(
            (stops and text.ends_with_stop(stops, ids)) or (schemas and chat.has_call(ids, schemas))
        )

    def _piece(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes; a name made of its id without a tokenizer."""
        return self._text.piece(token_id) if self._text else (f"token_id:{token_id}", [])


class _ChoiceStream:
    """The part of one generation that has been sent."""

    def __init__(self, index: int, generation: Generation, reply: PartialReply | None, offsets: Offsets | None) -> None:
        """index: the index of the choice.
        reply: reads the text; None if there is no tokenizer.
        offsets: finds the tokens in the text; None if the request does not ask for that.
        """
        self._offsets = offsets
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
            calls=calls,
            text_offsets=self._offsets.of(generation.token_ids[start:n]) if self._offsets else [0] * (n - start),
            begins=start == 0,
            first_call=first_call,
        )


_COMPLETIONS: Mapping[str, type[ChatRequest | TextRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": TextRequest,
}
_TOKENIZE = "/tokenize"
_CONTROL_BYTES = 8 * 2**30
"""The largest body of a request with the control key, such as a training call."""
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def _check_key(scope: Scope, wanted: str | None) -> None:
    """Raise Refusal unless a request has the endpoint's API key; None: it has none."""
    given = header(scope, b"x-api-key") or bearer_token(header(scope, b"authorization"))
    if wanted is not None and not is_secret(given, wanted.encode()):
        raise bad_request(
            "the API key is missing or wrong; send the engine's api_key as `Authorization: Bearer`, or as `x-api-key`",
            status=401,
            code="invalid_api_key",
        )


def _response_id(kind: Kind) -> str:
    return ("chatcmpl-" if kind == "chat.completion" else "cmpl-") + secrets.token_hex(12)
