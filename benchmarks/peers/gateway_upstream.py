"""The model's server in the gateway benchmark: OpenAI's chat API with canned, truthful answers and a fixed latency.

    python gateway_upstream.py

One line of JSON on the standard input, `{"do": "open"}`, is answered by one with its port; it serves until the input ends. The base URL
says how it behaves, so that it is asked the same way by everybody: `/FIRST_MS/BETWEEN_MS/CHUNKS/v1` waits FIRST_MS before an answer or
before the first of CHUNKS chunks, and BETWEEN_MS before each later one.

Answers are what vLLM gives: token ids with `return_token_ids`, log-probabilities with `logprobs`, the usage of a stream with
`stream_options`; nothing that was not asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import sys
import threading

N_PROMPT, N_RESPONSE = 512, 128
"""Tokens: a turn of an agent with some history."""
_RANDOM = random.Random(7)
PROMPT_IDS = [_RANDOM.randrange(150_000) for _ in range(N_PROMPT)]
RESPONSE_IDS = [_RANDOM.randrange(150_000) for _ in range(N_RESPONSE)]
WORDS = [f" word{n}" for n in range(N_RESPONSE)]
LOGPROBS = [-round(_RANDOM.expovariate(2), 6) for _ in range(N_RESPONSE)]
USAGE = {"prompt_tokens": N_PROMPT, "completion_tokens": N_RESPONSE, "total_tokens": N_PROMPT + N_RESPONSE}
ENDS_WITH = WORDS[-1]
"""How every answer ends."""
ID = "chatcmpl-000000000000"
"""In the place of an answer's own id."""


def dump(value):
    return json.dumps(value, separators=(",", ":")).encode()


def wishes(request):
    """Return what a request wants in its answer: token ids, log-probabilities, usage."""
    usage = bool((request.get("stream_options") or {}).get("include_usage"))
    return bool(request.get("return_token_ids")), bool(request.get("logprobs")), usage


def logprobs_of(start, end):
    return {
        "content": [
            {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}
            for word, logprob in zip(WORDS[start:end], LOGPROBS[start:end], strict=True)
        ]
    }


def head(kind):
    return {"id": ID, "object": kind, "created": 1_700_000_000, "model": "policy"}


def whole(ids, logprobs, _):
    """An answer in one piece."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(WORDS)},
        "logprobs": logprobs_of(0, N_RESPONSE) if logprobs else None,
        "finish_reason": "stop",
    }
    answer = {**head("chat.completion"), "choices": [choice], "usage": USAGE}
    if ids:
        choice["token_ids"] = RESPONSE_IDS
        answer["prompt_token_ids"] = PROMPT_IDS
    return dump(answer)


def streamed(ids, logprobs, usage, n_chunks):
    """An answer as the events of a stream, with their framing."""
    width = -(-N_RESPONSE // n_chunks)
    events = []
    for start in range(0, N_RESPONSE, width):
        end = min(start + width, N_RESPONSE)
        delta = {"content": "".join(WORDS[start:end])}
        choice = {"index": 0, "delta": {"role": "assistant", **delta} if not start else delta}
        choice["logprobs"] = logprobs_of(start, end) if logprobs else None
        choice["finish_reason"] = "stop" if end == N_RESPONSE else None
        chunk = {**head("chat.completion.chunk"), "choices": [choice]}
        if ids:
            choice["token_ids"] = RESPONSE_IDS[start:end]
            if not start:
                chunk["prompt_token_ids"] = PROMPT_IDS
        events.append(dump(chunk))
    if usage:
        events.append(dump({**head("chat.completion.chunk"), "choices": [], "usage": USAGE}))
    return [b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"]]


class Upstream:
    """The server's handler."""

    def __init__(self):
        self._wholes = {}
        self._streams = {}
        self._numbers = itertools.count(1)

    async def __call__(self, request):
        from aiohttp import web

        first_ms, between_ms, n_chunks, *rest = request.path.strip("/").split("/")
        if rest != ["v1", "chat", "completions"]:
            return web.Response(status=404)
        body = json.loads(await request.read())
        own_id = f"chatcmpl-{next(self._numbers):012d}".encode()
        if first_ms != "0":
            await asyncio.sleep(int(first_ms) / 1000)
        wished = wishes(body)
        if not body.get("stream"):
            if wished not in self._wholes:
                self._wholes[wished] = whole(*wished)
            answer = self._wholes[wished].replace(ID.encode(), own_id, 1)
            return web.Response(body=answer, content_type="application/json")
        key = (*wished, int(n_chunks))
        if key not in self._streams:
            self._streams[key] = streamed(*key)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number, event in enumerate(self._streams[key]):
            if 0 < number < int(n_chunks):
                await asyncio.sleep(int(between_ms) / 1000)
            await response.write(event.replace(ID.encode(), own_id, 1))
        return response


async def serve(listener):
    from aiohttp import web

    server = web.Server(Upstream(), access_log=None)
    await asyncio.get_running_loop().create_server(server, sock=listener, backlog=2048)
    await asyncio.Event().wait()


def main():
    import uvloop

    sys.stdin.readline()
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    threading.Thread(target=lambda: uvloop.run(serve(listener)), daemon=True).start()
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
