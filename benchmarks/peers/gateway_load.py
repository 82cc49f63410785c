"""The callers in the gateway benchmark: agents' programs that all ask in the same way, whoever answers.

    python gateway_load.py

Commands come as lines of JSON on the standard input, each is answered by one line on the standard output:

    {"do": "calls", "callers": N, "calls": M | "seconds": S, ...}     milliseconds of each call, its answer read to the end
    {"do": "streams", "streams": N, ...}                              N streams at once: milliseconds to the first chunk, and seconds in all
    {"do": "streams", "callers": N, "calls": M, ...}                  the same, N at a time

Both take `urls` (each caller has one of them, in turn), `model`, `key` and `again`. Connections are kept. An answer that is not 200 or not
whole ends the program with what it said: nobody is measured on errors. But `again` such calls of one command are made once more and not
counted (LiteLLM's proxy answers one stream in some thousands with 500); the answer says how many there were.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

ENDS_WITH = b" word127"
"""How every answer of `gateway_upstream` ends."""
QUESTION = "What follows from the figures above, and which of them would you look at again before you decide? "
HISTORY = [
    {"role": "system", "content": "You are a careful assistant. " + QUESTION},
    {"role": "user", "content": QUESTION * 8},
    {"role": "assistant", "content": QUESTION * 4},
    {"role": "user", "content": QUESTION * 8},
]
"""About 2 kB, as the 512 prompt tokens of the server say."""


class Load:
    """Callers with one pool of connections."""

    def __init__(self):
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),  # uvicorn ends idle connections after 5 s
            timeout=aiohttp.ClientTimeout(total=120),
        )

    async def calls(self, *, urls, model, key, callers, calls=None, seconds=None, again=0):
        """`callers` ask one call after the other: `calls` in all, or for `seconds`."""
        return await self._all(self._call, urls, model, key, callers, calls, seconds, again)

    async def streams(self, *, urls, model, key, callers=None, calls=None, streams=None, again=0):
        """Call as `calls` does, with streams. streams: this many callers with one stream each."""
        return await self._all(self._stream, urls, model, key, callers or streams, calls or streams, None, again)

    async def _all(self, one, urls, model, key, callers, calls, seconds, again):
        body = json.dumps({"model": model, "messages": HISTORY, "temperature": 0.7, "stream": one == self._stream})
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        taken, failed = [], []
        began = time.perf_counter()
        left = iter(range(calls)) if calls else None

        async def caller(number):
            url = urls[number % len(urls)] + "/chat/completions"
            while next(left, None) is not None if left else time.perf_counter() - began < seconds:
                while isinstance(took := await one(url, body, headers), str):
                    failed.append(took)
                    if len(failed) > again:
                        raise SystemExit(took)
                taken.append(took)

        await asyncio.gather(*(caller(number) for number in range(callers)))
        return {"ms": taken, "seconds": time.perf_counter() - began, "failed": len(failed)}

    async def _call(self, url, body, headers):
        """Milliseconds, or what is wrong."""
        began = time.perf_counter()
        async with self._session.post(url, data=body, headers=headers) as response:
            answer = await response.read()
        took = (time.perf_counter() - began) * 1000
        if response.status != 200 or ENDS_WITH not in answer:
            return f"{url} answered {response.status}: {answer[:500]!r}"
        return took

    async def _stream(self, url, body, headers):
        """Send one streaming request and read it to its end."""
        began = time.perf_counter()
        async with self._session.post(url, data=body, headers=headers) as response:
            answer = await response.content.readany()
            took = (time.perf_counter() - began) * 1000
            answer += await response.content.read()
        if response.status != 200 or ENDS_WITH not in answer or b"[DONE]" not in answer:
            return f"{url} answered {response.status}: {answer[:500]!r} ... {answer[-500:]!r}"
        return took


async def main():
    load = Load()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        print(json.dumps(await getattr(load, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
