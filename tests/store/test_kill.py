"""A killed process loses nothing that was acknowledged, doubles nothing, and leaves a legal store."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from leyden.store import LightningStoreClient, SqliteLightningStore
from leyden.testing import audit_store

pytest.register_assert_rewrite("tests.store.killing")

from tests.store.killing import TASKS, Forker, Ledger  # noqa: E402
from tests.store.ports import free_port  # noqa: E402


def wait_for_a_moment(ledger: Ledger, chance: random.Random) -> None:
    """A fifth of the time, any moment from now on; else one in the middle of the work."""
    if chance.random() < 0.8:
        ledger.wait_for_more()
    time.sleep(chance.random() * 0.2)


def integrity(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def kill_the_writer(directory: Path, kills: int) -> Ledger:
    """Eight tasks in the process that owns a file; killed at random, also while it opens the file."""
    path, ledger = directory / "store.db", Ledger(directory / "ledger.txt")
    chance = random.Random(kills)

    async def after_kill(number: int) -> None:
        async with SqliteLightningStore(path) as store:
            await ledger.check(store)
            if number % 3 == 0:
                ledger.released(await store.release_claims())
            if number in (kills // 2, kills - 1):
                await ledger.check_all(store, unknown=TASKS * (number + 1))
                assert await audit_store(store) == []
        integrity(path)

    with Forker.opened(directory) as forker:
        for number in range(kills):
            writer = forker.start("embedded", path, number, ledger.path)
            wait_for_a_moment(ledger, chance)
            forker.kill(writer)
            asyncio.run(after_kill(number))
    return ledger


def kill_server_and_clients(directory: Path, kills: int) -> Ledger:
    """A server and eight clients, processes of their own; killed at random and started again while the others go on."""
    path, ledger = directory / "store.db", Ledger(directory / "ledger.txt")
    chance = random.Random(kills)
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    async def after_kill() -> None:
        async with LightningStoreClient(url) as store:
            await ledger.check(store)

    async def in_the_end() -> None:
        async with SqliteLightningStore(path) as store:
            await ledger.check(store)
            await ledger.check_all(store, unknown=TASKS * (kills + 1))
            assert await audit_store(store) == []
            await store.release_claims()
            while rollouts := await store.dequeue_many_rollouts(limit=100):
                for rollout in rollouts:
                    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
            assert all(rollout.finished for rollout in await store.query_rollouts())
            assert await audit_store(store) == []
        integrity(path)

    with Forker.opened(directory) as forker:
        server = forker.start("server", path, port)
        clients = [forker.start("client", url, f"c{k}", ledger.path) for k in range(TASKS)]
        for number in range(kills):
            wait_for_a_moment(ledger, chance)
            if number % 4 == 0:
                victim = chance.randrange(TASKS)
                forker.kill(clients[victim])
                clients[victim] = forker.start("client", url, f"d{number}", ledger.path)
            else:
                forker.kill(server)
                server = forker.start("server", path, port)
            asyncio.run(after_kill())
        for pid in [*clients, server]:
            forker.kill(pid)
        asyncio.run(in_the_end())
    return ledger


@pytest.mark.timeout(120)
def test_a_killed_writer_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    ledger = kill_the_writer(tmp_path, kills=5)
    assert ledger.count["ended"] > 10


@pytest.mark.timeout(120)
def test_a_killed_server_or_client_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    ledger = kill_server_and_clients(tmp_path, kills=4)
    assert ledger.count["ended"] > 10


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_a_writer_killed_at_a_hundred_points(tmp_path: Path) -> None:
    ledger = kill_the_writer(tmp_path, kills=100)
    assert ledger.count["ended"] > 1000


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_a_server_and_its_clients_killed_at_a_hundred_points(tmp_path: Path) -> None:
    ledger = kill_server_and_clients(tmp_path, kills=100)
    assert ledger.count["ended"] > 1000
