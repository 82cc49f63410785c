"""A real Chromium for tests, driven over its DevTools protocol: open a page, evaluate, press keys, take a picture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._waiting, self._number = socket, dict[int, asyncio.Future[Any]](), 0
        self.problems: list[str] = []
        """Exceptions, errors of the console, and refused or failed requests."""
        self.requests: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                answer = self._waiting.pop(data["id"])
                if not answer.cancelled():
                    answer.set_result(data)
            elif data["method"] == "Network.requestWillBeSent":
                self.requests.append(data["params"]["request"]["url"])
            elif data["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(data["params"]["exceptionDetails"])[:500])
            elif data["method"] == "Log.entryAdded" and data["params"]["entry"]["level"] == "error":
                self.problems.append(str(data["params"]["entry"]["text"]))

    async def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._waiting[self._number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        found = await answer
        assert "error" not in found, found
        return found["result"]

    async def start(self, width: int, height: int, *, dark: bool) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def wait_for(self, expression: str, seconds: float = 20) -> Any:
        """Wait until an expression is true, and return its value; True for an element."""
        expression = f"(() => {{ const found = ({expression}); return found instanceof Node ? true : found; }})()"
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(AssertionError):  # the page is being replaced
                    if found := await self.evaluate(expression):
                        return found
                await asyncio.sleep(0.02)

    async def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    async def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))

    async def close(self) -> None:
        await self._socket.close()
        await self._reader


class Browser:
    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self._address, self._session = f"http://127.0.0.1:{port}", session

    @contextlib.asynccontextmanager
    async def page(self, width: int = 1200, height: int = 900, *, dark: bool = False) -> AsyncIterator[Page]:
        """Open a new tab of this size."""
        async with self._session.put(f"{self._address}/json/new?about:blank") as reply:
            target = await reply.json()
        async with self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Page(socket)
            await page.start(width, height, dark=dark)
            yield page
            await page.close()
        async with self._session.get(f"{self._address}/json/close/{target['id']}"):
            pass


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Start a headless Chromium with a profile of its own."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"),
            *(f"--user-data-dir={profile}", "--disable-background-networking", "about:blank"),
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            while b"DevTools listening on" not in (line := await process.stderr.readline()):
                assert line, "Chromium ended"
            port = int(line.decode().rpartition(":")[2].partition("/")[0])
            draining = asyncio.create_task(process.stderr.read())
            async with aiohttp.ClientSession() as session:
                yield Browser(port, session)
            process.terminate()
            await process.wait()
            await draining
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
