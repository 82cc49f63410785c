"""`FakeUpstream`: a small truthful OpenAI-compatible server.

Its answers follow from the request alone (and its `seed`), with real token ids and log-probabilities in vLLM's
convention, streamed or not, and it keeps the truth of every answer to compare with. On demand it misbehaves as real
servers do.

It knows nothing of the gateway. To add a way to misbehave, add a field to `Misbehaviour` and honour it in `_Answer`.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self, cast

from aiohttp import web

from leyden.testing.tokens import END, encode, prompt_text
from leyden.types import LLM

__all__ = ["FakeUpstream", "Misbehaviour", "ServedCall"]

Json = dict[str, Any]

_WORDS = ("lightning", "jar", "Größe", "left", "42", "higher", "雷", "no", "perhaps", "🌩", "yes", "run")
_KEPT = 100_000


@dataclass(frozen=True, slots=True)
class Misbehaviour:
    """What goes wrong with one answer."""

    status: int | None = None
    """Answer with this HTTP status and an error object."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Headers of that error."""
    body: bytes | None = None
    """Answer 200 with these bytes, whatever they are."""
    content_type: str = "application/json"
    """The content type of `body`."""
    delay_seconds: float = 0.0
    """Be silent for so long before the first byte."""
    close_after_chunks: int | None = None
    """Break the connection after so many chunks of a stream, or in the middle of a whole answer."""
    end_after_chunks: int | None = None
    """End a stream properly after so many chunks, as if it were complete."""
    no_token_ids: bool = False
    """Ignore `return_token_ids`."""
    lost_response_ids: int = 0
    """Leave out the ids of so many response tokens, but count them in the usage."""
    lost_logprobs: int = 0
    """Leave out so many log-probabilities."""
    no_usage: bool = False
    chunk_delay_seconds: float = 0.0
    """Wait so long before each chunk of a stream."""


@dataclass(frozen=True, slots=True)
class ServedCall:
    """The truth of one answer. P prompt tokens, R response tokens."""

    response_id: str
    path: str
    headers: dict[str, str]
    request: Json
    prompt_ids: list[int]
    """Shape (P,)."""
    response_ids: list[int]
    """Shape (R,)."""
    logprobs: list[float]
    """Shape (R,); multiples of 1/64, which 32-bit floats hold exactly."""
    text: str
    finish_reason: str


class FakeUpstream:
    """Serves on a free loopback port of the running event loop, between `start` and `stop` (or in `async with`)."""

    def __init__(
        self,
        *,
        model: str = "fake",
        reply: Callable[[Json], str] | None = None,
        delay_seconds: float = 0.0,
        policy_version: int | None = None,
    ) -> None:
        """reply: the text to answer a request with; without one, words that follow from prompt and seed.

        delay_seconds: how long each answer takes. policy_version: claimed for every token, if given.
        """
        self.model = model
        self.calls: deque[ServedCall] = deque(maxlen=_KEPT)
        """What was answered, newest last."""
        self.requests: deque[Json] = deque(maxlen=_KEPT)
        """The body of each request that was JSON, answered or not, newest last."""
        self.cancelled = 0
        """How many answers the client did not wait for."""
        self._reply = reply
        self._delay_seconds = delay_seconds
        self._policy_version = policy_version
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
        """The base URL."""
        return f"http://127.0.0.1:{self._port}/v1"

    def llm(self) -> LLM:
        """The model as a resource."""
        return LLM(endpoint=self.endpoint, model=self.model, api_key="upstream-key")

    def misbehave(self, *misbehaviours: Misbehaviour) -> None:
        """Let the next answers go wrong, one each."""
        self._next.extend(misbehaviours)

    def truth(self, response_id: str) -> ServedCall:
        """What was answered under this id. Raises KeyError."""
        for call in reversed(self.calls):
            if call.response_id == response_id:
                return call
        raise KeyError(response_id)

    async def start(self, *, port: int = 0) -> None:
        """Take requests. Calling it again does nothing."""
        if self._runner is not None:
            return
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, backlog=2048)
        await site.start()
        self._port = runner.addresses[0][1]
        self._runner = runner

    async def stop(self) -> None:
        """Take no more requests. Calling it again does nothing."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ---- routes ------------------------------------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            return await self._answer_or_fail(request, chat=chat)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled += 1
            raise

    async def _answer_or_fail(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            body: Json = json.loads(await request.read())
        except ValueError as error:
            return _error(400, f"not JSON: {error}")
        self.requests.append(body)
        fault = self._next.popleft() if self._next else Misbehaviour()
        if delay := fault.delay_seconds or self._delay_seconds:
            await asyncio.sleep(delay)
        if fault.status is not None:
            return _error(fault.status, f"told to answer {fault.status}", fault.headers)
        if fault.body is not None:
            return web.Response(body=fault.body, content_type=fault.content_type)
        if body.get("model") != self.model:
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        answer = _Answer(self._serve(request, body, chat=chat), fault, chat=chat, policy_version=self._policy_version)
        if body.get("stream"):
            return await _stream(request, answer, fault)
        if fault.close_after_chunks is not None:
            return await _break_off(request, answer)
        return web.json_response(answer.whole())

    def _serve(self, request: web.Request, body: Json, *, chat: bool) -> ServedCall:
        prompt: Any = prompt_text(body["messages"]) if chat else body["prompt"]
        prompt_ids = cast(list[int], prompt) if isinstance(prompt, list) else encode(str(prompt))
        draw = hashlib.sha256(f"{prompt_ids}\x1f{body.get('seed')}".encode()).digest()
        text = (
            self._reply(body)
            if self._reply
            else " ".join(_WORDS[byte % len(_WORDS)] for byte in draw[: 2 + draw[0] % 4])
        )
        ids = [*encode(text), END]
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or len(ids)
        finish_reason = "stop" if len(ids) <= limit else "length"
        ids = ids[:limit]
        self._served += 1
        call = ServedCall(
            response_id=f"{'chatcmpl' if chat else 'cmpl'}-{self._served:08d}",
            path=request.path,
            headers=dict(request.headers),
            request=body,
            prompt_ids=prompt_ids,
            response_ids=ids,
            logprobs=[-(draw[index % 32] + index) / 64 for index in range(len(ids))],
            text=_pieces(ids)[1],
            finish_reason=finish_reason,
        )
        self.calls.append(call)
        return call


class _Answer:
    """One answer in OpenAI's format, whole or as chunks."""

    def __init__(self, call: ServedCall, fault: Misbehaviour, *, chat: bool, policy_version: int | None) -> None:
        request = call.request
        self._call = call
        self._fault = fault
        self._chat = chat
        self._with_ids = bool(request.get("return_token_ids")) and not fault.no_token_ids
        wished = request.get("logprobs")
        self._with_logprobs = wished is not None and wished is not False
        self._with_usage = bool(cast(Json, request.get("stream_options") or {}).get("include_usage"))
        self._policy_version = policy_version
        self._head = {
            "id": call.response_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": 1_700_000_000,
            "model": request["model"],
        }

    def whole(self) -> Json:
        """The answer to a request without `stream`."""
        call = self._call
        choice: Json = {"index": 0, "finish_reason": call.finish_reason, "logprobs": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": call.text}
        else:
            choice["text"] = call.text
        n_tokens = len(call.response_ids)
        answer: Json = {**self._head, "choices": [choice]}
        self._add_tokens(choice, 0, n_tokens)
        self._add_prompt_ids(answer, choice)
        if not self._fault.no_usage:
            answer["usage"] = self._usage()
        return answer

    def chunks(self) -> list[Json]:
        """The answer to a request with `stream`: the role, one chunk for each token, and the usage if it was asked
        for."""
        call = self._call
        texts, _ = _pieces(call.response_ids)
        chunks: list[Json] = []
        if self._chat:
            chunks.append(self._chunk({"delta": {"role": "assistant", "content": ""}}, first=True))
        for index, text in enumerate(texts):
            choice: Json = {"delta": {"content": text}} if self._chat else {"text": text}
            if index == len(texts) - 1:
                choice["finish_reason"] = call.finish_reason
            self._add_tokens(choice, index, index + 1)
            chunks.append(self._chunk(choice, first=not chunks))
        if self._with_usage and not self._fault.no_usage:
            chunks.append({**self._chunk_head(), "choices": [], "usage": self._usage()})
        return chunks

    def _chunk_head(self) -> Json:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def _chunk(self, choice: Json, *, first: bool) -> Json:
        choice = {"index": 0, "finish_reason": None, "logprobs": None, **choice}
        chunk: Json = {**self._chunk_head(), "choices": [choice]}
        if first:
            self._add_prompt_ids(chunk, choice)
        if self._with_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> Json:
        n_prompt, n_response = len(self._call.prompt_ids), len(self._call.response_ids)
        return {"prompt_tokens": n_prompt, "completion_tokens": n_response, "total_tokens": n_prompt + n_response}

    def _add_prompt_ids(self, answer: Json, choice: Json) -> None:
        if self._with_ids:
            (answer if self._chat else choice)["prompt_token_ids"] = self._call.prompt_ids

    def _add_tokens(self, choice: Json, start: int, stop: int) -> None:
        call, n_tokens = self._call, len(self._call.response_ids)
        if self._with_ids:
            choice["token_ids"] = call.response_ids[start : min(stop, n_tokens - self._fault.lost_response_ids)]
            if self._policy_version is not None:
                choice["policy_versions"] = [self._policy_version] * len(choice["token_ids"])
        if not self._with_logprobs:
            return
        stop = min(stop, n_tokens - self._fault.lost_logprobs)
        drawn = list(zip(call.response_ids[start:stop], call.logprobs[start:stop], strict=True))
        if self._chat:
            choice["logprobs"] = {
                "content": [
                    {"token": f"token_id:{id_}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                    for id_, logprob in drawn
                ]
            }
        else:
            choice["logprobs"] = {
                "tokens": [f"token_id:{id_}" for id_, _ in drawn],
                "token_logprobs": [logprob for _, logprob in drawn],
                "top_logprobs": [],
                "text_offset": [0 for _ in drawn],
            }


def _pieces(ids: list[int]) -> tuple[list[str], str]:
    """The text that each token adds once its characters are whole, and the whole text. An unfinished last character is
    left out."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    pieces = [decoder.decode(bytes([id_ - 16])) if id_ >= 16 else "" for id_ in ids]
    return pieces, "".join(pieces)


async def _stream(request: web.Request, answer: _Answer, fault: Misbehaviour) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    sent = 0
    async for chunk in _paced(answer.chunks(), fault.chunk_delay_seconds):
        if sent == fault.close_after_chunks:
            return _cut(request, response)
        if sent == fault.end_after_chunks:
            await response.write_eof()
            return response
        await response.write(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n")
        sent += 1
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _paced(chunks: list[Json], delay_seconds: float) -> AsyncIterator[Json]:
    for chunk in chunks:
        if delay_seconds:
            await asyncio.sleep(delay_seconds)
        yield chunk


async def _break_off(request: web.Request, answer: _Answer) -> web.StreamResponse:
    body = json.dumps(answer.whole()).encode()
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    return _cut(request, response)


def _cut(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Break the connection as a dying server does."""
    if request.transport is not None:
        request.transport.abort()
    return response


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "api_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return web.json_response({"error": error}, status=status, headers=headers)
