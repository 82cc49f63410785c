"""A store and a gateway in one process with short limits: `python -m tests.attack.served DIRECTORY UPSTREAM [DESCRIPTORS]`.

It prints the addresses of both as JSON and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from leyden._lib.host.asgi import ConnectionLimits
from leyden.gateway import LLMProxy
from leyden.store import LightningStoreServer, SqliteLightningStore
from leyden.types import LLM

LIMITS = ConnectionLimits(head_seconds=3.0, stall_seconds=4.0)
MODEL = "fake"


async def serve(directory: Path, upstream: str) -> None:
    model = LLM(endpoint=upstream, model=MODEL)
    async with (
        SqliteLightningStore(directory / "store.db") as store,
        LightningStoreServer(store, connection_limits=LIMITS) as server,
        LLMProxy(model_list=[model], store=store, connection_limits=LIMITS) as gateway,
    ):
        said = {"store": server.endpoint, "gateway": gateway.endpoint.removesuffix("/v1")}
        print(json.dumps(said), flush=True)
        await asyncio.to_thread(sys.stdin.read)


@dataclass
class Served:
    """The running program."""

    store: str
    gateway: str
    process: asyncio.subprocess.Process


@asynccontextmanager
async def served(directory: Path, upstream: str, descriptors: int = 1024) -> AsyncIterator[Served]:
    """Run the program. In the end it must be alive, stop by itself, and have logged no traceback."""
    log = directory / "log.txt"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.attack.served", directory, upstream, str(descriptors)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        line = await process.stdout.readline()
        assert line, log.read_text()
        yield Served(process=process, **json.loads(line))
        assert process.returncode is None, log.read_text()
        process.stdin.close()
        async with asyncio.timeout(20):
            assert await process.wait() == 0, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    limit = int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
