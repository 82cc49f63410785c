"""A store served on a Unix socket: reached by its path, by this user alone, and gone when the server is."""

from __future__ import annotations

import asyncio
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from leyden.errors import ConfigError, StoreError
from leyden.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer, open_store
from tests.contracts.store.support import SOON, claimed, span_of


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(dir="/tmp") as directory:  # a socket's path must be short
        yield Path(directory) / "a store.sock"


def mode_of(path: Path) -> int | None:
    """What is permitted to whom at a path; None where there is nothing."""
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


async def test_clients_reach_it_by_its_url_and_nothing_stays_behind(path: Path) -> None:
    async with InMemoryLightningStore() as store, LightningStoreServer(store, socket_path=path) as server:
        assert server.endpoint == f"http+unix://{str(path).replace('/', '%2F').replace(' ', '%20')}"
        assert mode_of(path) == 0o600
        async with open_store(server.endpoint) as client:
            waiting = asyncio.create_task(client.dequeue_rollout("w", timeout_seconds=SOON))
            rollout = await client.enqueue_rollout({"x": 1})
            attempted = await waiting
            assert attempted is not None
            assert attempted.rollout_id == rollout.rollout_id
        async with pickle.loads(pickle.dumps(server)) as client:
            assert client.url == server.endpoint
            await client.add_span(span_of(attempted))
        assert (await store.statistics())["total_spans"] == 1
    assert mode_of(path) is None


async def test_a_client_goes_on_with_the_next_server_on_the_path(path: Path) -> None:
    async with InMemoryLightningStore() as store:
        async with LightningStoreServer(store, socket_path=path) as server:
            client = server.client()
            rollout = await claimed(client)
        reading = asyncio.create_task(client.get_rollout_by_id(rollout.rollout_id))
        await asyncio.sleep(0.05)
        async with LightningStoreServer(store, socket_path=path), client:
            assert (await reading).status == "preparing"


async def test_a_token_is_asked_for_there_too(path: Path) -> None:
    async with InMemoryLightningStore() as store, LightningStoreServer(store, socket_path=path, token="x") as server:
        async with LightningStoreClient(server.endpoint) as client:
            with pytest.raises(ConfigError, match="asks for a token"):
                await client.statistics()
        async with server.client() as client:
            await client.statistics()


async def test_a_socket_that_a_killed_process_left_is_replaced(path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    async with (
        InMemoryLightningStore() as store,
        LightningStoreServer(store, socket_path=path) as server,
        server.client() as client,
    ):
        await client.statistics()


async def test_any_host_name_reaches_it_because_no_browser_can(path: Path) -> None:
    async with InMemoryLightningStore() as store, LightningStoreServer(store, socket_path=path):
        for head in (b"GET /v1/agl/health HTTP/1.1\r\nHost: store\r\n", b"GET /v1/agl/health HTTP/1.0\r\n"):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(head + b"Connection: close\r\n\r\n")
            assert b" 200 " in await reader.readline()
            writer.close()


async def test_a_socket_in_use_is_left_alone(path: Path) -> None:
    async with InMemoryLightningStore() as store, LightningStoreServer(store, socket_path=path) as server:
        with pytest.raises(StoreError, match=f"{path}: Address already in use; choose another socket_path"):
            await LightningStoreServer(store, socket_path=path).start()
        async with server.client() as client:
            await client.statistics()


def test_a_path_that_cannot_be_had_is_refused_and_what_is_there_stays(path: Path) -> None:
    store = InMemoryLightningStore()
    path.write_text("a file")
    long, nowhere = path.with_name("x" * 200), path.parent / "nowhere" / "s.sock"
    for bad, reason in ((path, "Address already in use"), (long, "107 bytes"), (nowhere, "No such file")):
        with pytest.raises(StoreError, match=reason):
            asyncio.run(LightningStoreServer(store, socket_path=bad).start())
    assert path.read_text() == "a file"


@pytest.mark.parametrize("url", ["http+unix:///tmp/x.sock", "http+unix://tmp", "http+unix://%2Ftmp%2Fx/more"])
def test_a_url_whose_path_is_not_quoted_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("http+unix://%2Fpath")):
        LightningStoreClient(url)


def test_a_server_has_a_port_or_a_socket(path: Path) -> None:
    with pytest.raises(ConfigError, match="a port or a socket"):
        LightningStoreServer(InMemoryLightningStore(), port=4747, socket_path=path)


async def test_a_server_that_is_away_is_an_error_that_names_it(path: Path) -> None:
    url = f"http+unix://{str(path).replace('/', '%2F').replace(' ', '%20')}"
    async with LightningStoreClient(url, retry_seconds=0.1) as client:
        with pytest.raises(StoreError, match="does not answer"):
            await client.statistics()


def test_the_command_serves_it(path: Path) -> None:
    command = [sys.executable, "-c", "from leyden.cli import main; main()", "store", "--url", "memory://", "--socket"]
    with subprocess.Popen([*command, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ")[1].split(",")[0]

        async def use() -> None:
            async with open_store(url) as client:
                await claimed(client)

        asyncio.run(use())
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) == 0
    assert not path.exists()
