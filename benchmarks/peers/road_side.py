"""A process of `benchmarks/road.py`: `road_side.py FOLDER`, with commands as lines of JSON (see `benchmarks/sides.py`).

    {"do": "serve", "engine": "embedded" | "isolated" | "hosting"}    store, gateway and engine; returns the base URLs of attempts
    {"do": "ask", "urls": [...], "calls": N}               N calls by the official client, one agent for each URL
    {"do": "cpu"}                                          CPU seconds so far, of this process and of its children
    {"do": "recorded"}                                     how many calls are in the store with their tokens

`bare` serves a fixed answer in place of gateway and engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")

import psutil

from leyden._lib.aio import look_for_cycles_rarely

AGENTS = 64
QUESTION = {"messages": [{"role": "user", "content": "guess 0..9"}], "temperature": 1.0, "max_tokens": 4}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14},
}


class Side:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._backend: Any = None
        self._rollout_ids: list[str] = []
        self._store: Any = None

    async def serve(self, *, engine: str) -> dict[str, Any]:
        from leyden.cli.demo import WEIGHTS
        from leyden.engine import EmbeddedBackend, IsolatedBackend
        from leyden.engine.isolated import Visitor
        from leyden.gateway import LLMProxy, UpstreamModel, hosted
        from leyden.store import SqliteLightningStore

        kind = EmbeddedBackend if engine == "embedded" else IsolatedBackend
        self._backend = kind(WEIGHTS, device="cpu", max_length=128)
        self._store = SqliteLightningStore(self._folder / f"{engine}-{time.time_ns()}.sqlite")
        await self._store.__aenter__()
        proxy = LLMProxy(store=self._store)
        if engine == "hosting":
            await proxy.reserve()
            self._backend.host(Visitor(hosted.FUNCTION, *proxy.for_process()))
            await self._backend.start()
            proxy.run_by(self._backend.stop)
        else:
            await self._backend.start()
            await proxy.start()
        server = self._backend.endpoint()
        proxy.update_model_list([UpstreamModel(server.model, server.endpoint, api_key=server.api_key)])
        urls: list[str] = []
        for number in range(AGENTS):
            rollout = await self._store.start_rollout(number)
            self._rollout_ids.append(rollout.rollout_id)
            urls.append(proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id).endpoint)
        return {"urls": urls}

    async def bare(self) -> dict[str, Any]:
        import socket

        import uvicorn

        body = json.dumps(ANSWER).encode()
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive()).get("more_body"):
                pass
            await send(start)
            await send({"type": "http.response.body", "body": body})

        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        self._server = asyncio.create_task(server.serve([listening]))
        while not server.started:  # noqa: ASYNC110 -- uvicorn has no event for it
            await asyncio.sleep(0.01)
        return {"urls": [f"http://127.0.0.1:{listening.getsockname()[1]}/v1"] * AGENTS}

    async def ask(self, *, urls: list[str], calls: int) -> dict[str, Any]:
        """Ask as the demo's agents do: an official client on shared connections, one call after the other for each agent."""
        from leyden.types import LLM

        left = iter(range(calls))
        began = time.perf_counter()

        async def agent(url: str) -> None:
            completions = LLM(endpoint=url, model="policy", api_key="none").openai().chat.completions
            for _ in left:
                answer = await completions.create(model="policy", **QUESTION)
                assert answer.choices[0].message.content is not None

        await asyncio.gather(*(agent(url) for url in urls))
        return {"seconds": time.perf_counter() - began}

    async def cpu(self) -> dict[str, float]:
        process = psutil.Process()
        return {
            "own": sum(process.cpu_times()[:2]),
            "children": sum(sum(child.cpu_times()[:2]) for child in process.children(recursive=True)),
        }

    async def recorded(self) -> dict[str, int]:
        deadline = time.monotonic() + 30
        while True:  # records are written behind the answers
            spans_of = await self._store.query_spans_of(self._rollout_ids)
            n = sum(span.tokens is not None for spans in spans_of.values() for span in spans)
            if n == getattr(self, "_n", None) or time.monotonic() > deadline:
                return {"calls": n}
            self._n = n
            await asyncio.sleep(0.5)


async def main() -> None:
    side = Side(Path(sys.argv[1]))
    loop = asyncio.get_running_loop()
    look_for_cycles_rarely()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        print(json.dumps(await getattr(side, command.pop("do"))(**command)), flush=True)
    os._exit(0)  # nothing here outlives the benchmark


if __name__ == "__main__":
    asyncio.run(main())
