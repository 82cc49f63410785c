"""The application in the serving benchmark: a program that serves requests, with a session or without.

    python serving_side.py

Commands come as lines of JSON on the standard input, each is answered by one line on the standard output:

    {"do": "open", "store": URL, "folder": PATH, "gateway": URL, "live_key": KEY}    a session over a store
    {"do": "requests", "n": N, "pause_ms": MS, "calls": true | false}    N requests, one behind the other: milliseconds of each
    {"do": "calls", "url": URL, "key": KEY, "n": N, "pause_ms": MS}    N calls without a session: milliseconds of each
    {"do": "loops", "n": N, "pause_ms": MS}    N loops that take about as long as a session, without one: milliseconds of each
    {"do": "settle"}    returns when the store has everything, with its numbers of rollouts and feedback
    {"do": "fill", "rollouts": N}    N finished live rollouts with feedback, in bulk

A request is: `begin`, one call of the model (with `calls`), `end` and one feedback. The call is the same, whoever answers it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack

MODEL = "quick"
QUESTION = "What follows from the figures above, and which of them would you look at again before you decide? "
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": QUESTION * 20}], "temperature": 0.7})
"""About 2 kB, as the 512 prompt tokens of the server say."""
ROW, LOOP = json.dumps({"ids": list(range(20)), "text": "word " * 20}), 60
"""What is parsed in a loop without a session, and how often: about 0.1 ms."""
BATCH = 500
USERS = 1000


class Application:
    """At most one session, and one pool of connections."""

    def __init__(self):
        import aiohttp

        self._http = aiohttp.ClientSession()
        self._stack = AsyncExitStack()
        self._store = None
        self._session = None
        self._before = {}

    async def open(self, *, store, folder, gateway, live_key):
        from leyden.serving import Assignment, OnlineSession
        from leyden.store import open_store
        from leyden.types import PromptTemplate, ProxyLLM

        opened = await self._stack.enter_async_context(open_store(store))
        for text in ("production", "canary"):
            resources = {
                "prompt": PromptTemplate(template=text),
                "llm": ProxyLLM(endpoint="gateway://any", model=MODEL),
            }
            await opened.update_resources("rs", resources)
        await opened.set_label("production", "rs", 1)
        await opened.set_label("canary", "rs", 2)
        session = OnlineSession(
            opened,
            gateway=gateway,
            live_key=live_key,
            folder=folder,
            assignment=Assignment(canary_percent=20),
        )
        self._store = opened
        self._before = await self._counts()
        self._session = await self._stack.enter_async_context(session)
        return {}

    async def requests(self, *, n, pause_ms, calls):
        session, taken = self._session, []
        for number in range(n):
            began = time.perf_counter()
            with session.serve({"number": number}, user=f"user {number % USERS}") as served:
                if calls:
                    llm = served.llm()
                    await self._call(llm.endpoint, llm.api_key)
            session.feedback(served, source="user", reward=1.0)
            taken.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(pause_ms / 1000)
        return {"ms": taken}

    async def calls(self, *, url, key, n, pause_ms):
        taken = []
        for _ in range(n):
            began = time.perf_counter()
            await self._call(url, key)
            taken.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(pause_ms / 1000)
        return {"ms": taken}

    async def loops(self, *, n, pause_ms):
        taken = []
        for _ in range(n):
            began = time.perf_counter()
            for _ in range(LOOP):
                json.loads(ROW)
            taken.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(pause_ms / 1000)
        return {"ms": taken}

    async def settle(self):
        session = self._session
        deadline = time.monotonic() + 120
        while session.status().waiting:
            if time.monotonic() > deadline:
                raise SystemExit(f"{session.status()} after two minutes")
            await asyncio.sleep(0.01)
        status = session.status()
        if status.lost or status.refused:
            raise SystemExit(f"records were lost: {status}")
        return {name: count - self._before[name] for name, count in (await self._counts()).items()}

    async def _counts(self):
        last = await self._store.query_feedback(sort_order="desc", limit=1)
        rollouts = (await self._store.statistics())["total_rollouts"]
        return {"rollouts": rollouts, "feedback": last[0].sequence_id if last else 0}

    async def fill(self, *, rollouts):
        from leyden._lib import ids
        from leyden.types import Feedback, LiveRollout

        store = self._store
        for at in range(0, rollouts, BATCH):
            known = {"resources_id": "rs", "version": 1, "arm": "control", "start_time": time.time()}
            batch = [
                LiveRollout(
                    rollout_id=ids.rollout_id(),
                    attempt_id=ids.attempt_id(),
                    input={"number": number},
                    status="succeeded",
                    seconds=0.1,
                    metadata={"user_hash": f"{number % USERS:032x}"},
                    **known,
                )
                for number in range(at, min(at + BATCH, rollouts))
            ]
            await store.record_live_rollouts(batch)
            await store.add_many_feedback(
                [Feedback(rollout_id=one.rollout_id, source="user", value=1.0) for one in batch]
            )
        return {}

    async def close(self):
        await self._stack.aclose()
        await self._http.close()

    async def _call(self, url, key):
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        async with self._http.post(f"{url}/chat/completions", data=BODY, headers=headers) as response:
            answer = await response.read()
        if response.status != 200 or b" word127" not in answer:
            raise SystemExit(f"{url} answered {response.status}: {answer[:500]!r}")


async def main():
    application = Application()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        print(json.dumps(await getattr(application, command.pop("do"))(**command)), flush=True)
    await application.close()


if __name__ == "__main__":
    asyncio.run(main())
