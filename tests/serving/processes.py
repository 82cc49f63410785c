"""A store, a gateway and a serving process, each a real process that a test kills and starts again on its port."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import psutil

from leyden.store import LightningStoreClient
from leyden.testing import FakeUpstream
from leyden.types import LLM, NamedResources, PromptTemplate, ProxyLLM
from tests.store.killing import Forker
from tests.store.ports import free_port

__all__ = ["KEY", "Place", "Role", "call_model", "opened_forker", "opened_place", "resources"]

KEY = "live-key"
Role = Literal["store", "gateway", "serve"]
_START_SECONDS = 20.0


def resources(text: str) -> NamedResources:
    return {"prompt": PromptTemplate(template=text), "llm": ProxyLLM(endpoint="gateway://any", model="fake")}


@contextmanager
def opened_forker(directory: Path, *modules: str, within: Sequence[str] = ()) -> Iterator[Forker]:
    """A process that has imported what the others need, so that each of them starts in milliseconds."""
    served = (
        "leyden.cli.gateway",
        "leyden.gateway",
        "leyden.cli.serve",
        "leyden.serving.serving_app",
        "leyden._lib.host.asgi",
    )
    with Forker.opened(directory, *served, *modules, within=within) as forker:
        yield forker


class Place:
    """Where requests are served: `leyden store`, `leyden gateway` and `leyden serve` as users start them."""

    def __init__(self, forker: Forker, folder: Path, upstream: FakeUpstream, store: Path | None = None) -> None:
        """store: where the store's file is; None: in `folder`."""
        self.path = store or folder / "store.db"
        self.outbox = folder / "serving" / "outbox"
        """The file of the serving process."""
        self.calls = folder / "calls"
        """The file of the gateway."""
        self._forker = forker
        self._ports: dict[Role, int] = {"store": free_port(), "gateway": free_port(), "serve": free_port()}
        store, gateway = self.url("store"), self.url("gateway")
        self._commands: dict[Role, tuple[object, ...]] = {
            "store": ("--url", f"sqlite://{self.path}"),
            "gateway": (
                *("--store", store, "--live-key", KEY),
                *("--spool", self.calls, "--model", f"fake={upstream.endpoint}"),
            ),
            "serve": (
                *("--store", store, "--gateway", gateway, "--live-key", KEY),
                *("--folder", self.outbox.parent, "--refresh-seconds", 0.05),
            ),
        }
        self._alive: dict[Role, int] = {}

    def url(self, role: Role) -> str:
        return f"http://127.0.0.1:{self._ports[role]}"

    async def start(self, *roles: Role) -> None:
        """Start processes one behind the other, and return when they listen."""
        for role in roles:
            command = (role, *self._commands[role], "--port", self._ports[role])
            self._alive[role] = self._forker.start("leyden", *command)
            deadline = time.monotonic() + _START_SECONDS
            while not await self._listens(role):
                assert time.monotonic() < deadline, f"{role} does not start: {self._forker.log.read_text()}"
                await asyncio.sleep(0.005)

    async def kill(self, *roles: Role) -> None:
        """`kill -9`."""
        for role in roles:
            await asyncio.to_thread(self._forker.kill, self._alive.pop(role))

    def pause(self, role: Role, *, stop: bool = True) -> None:
        """Stop a process without its notice (`SIGSTOP`), or let it go on."""
        os.kill(self._alive[role], signal.SIGSTOP if stop else signal.SIGCONT)

    async def kill_all(self) -> None:
        await self.kill(*self._alive)

    def limit_files(self, role: Role, largest_bytes: int) -> None:
        """Let no file of a process grow beyond this size (`RLIMIT_FSIZE`)."""
        resource.prlimit(self._alive[role], resource.RLIMIT_FSIZE, (largest_bytes, resource.RLIM_INFINITY))

    def memory(self, *roles: Role) -> int:
        """Return how many bytes the processes hold in memory."""
        return sum(psutil.Process(self._alive[role]).memory_info().rss for role in roles)

    async def _listens(self, role: Role) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._ports[role])
        except OSError:
            return False
        writer.close()
        return True


@asynccontextmanager
async def opened_place(forker: Forker, folder: Path, *roles: Role, store: Path | None = None) -> AsyncIterator[Place]:
    """A store with two versions of `rs`, of which version 1 is in production, and processes of the other roles.

    store: where the store's file is; None: in `folder`.
    """
    async with FakeUpstream() as upstream:
        place = Place(forker, folder, upstream, store)
        try:
            await place.start("store")
            async with LightningStoreClient(place.url("store")) as client:
                for text in ("old", "new"):
                    await client.update_resources("rs", resources(text))
                await client.set_label("production", "rs", 1)
            await place.start(*roles)
            yield place
        finally:
            await place.kill_all()


async def call_model(http: aiohttp.ClientSession, llm: LLM | dict[str, Any], text: str = "hi") -> int:
    """Call a model once, and return the status of its answer."""
    given = llm.model_dump() if isinstance(llm, LLM) else llm
    async with http.post(
        f"{given['endpoint']}/chat/completions",
        json={"model": given["model"], "messages": [{"role": "user", "content": text}]},
        headers={"authorization": f"Bearer {given['api_key']}"},
    ) as response:
        await response.read()
        return response.status
