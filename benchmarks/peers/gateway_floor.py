"""The floor of the gateway benchmark: uvicorn and aiohttp, which pass a call on and its answer back, and nothing else.

    python gateway_floor.py PORT '{"MODEL": "http://.../v1", ...}'

What stands between a caller and a server costs at least this with these two libraries. Calls with an answer in one piece alone.
"""

import json
import sys

import aiohttp
import uvicorn

JSON = (b"content-type", b"application/json")


class PassThrough:
    """An ASGI application."""

    def __init__(self, servers):
        """servers: base URLs by model."""
        self._servers = servers
        self._session = None

    async def __call__(self, scope, receive, send):
        if self._session is None:  # in the loop that it belongs to
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = (await receive())["body"]
        url = f"{self._servers[json.loads(body)['model']]}/chat/completions"
        async with self._session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
            raw = await answer.read()
            headers = [JSON, (b"content-length", str(len(raw)).encode())]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await send({"type": "http.response.body", "body": raw})


if __name__ == "__main__":
    app = PassThrough(json.loads(sys.argv[2]))
    uvicorn.run(
        app, port=int(sys.argv[1]), log_level="error", access_log=False, loop="uvloop", http="httptools", lifespan="off"
    )
