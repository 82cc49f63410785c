"""Runs whose runners, store or network fail in the middle: every rollout ends exactly once, none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.errors import StoreError
from leyden.execution.client_server import ClientServerExecutionStrategy
from leyden.store import SqliteLightningStore
from tests.execution import agents
from tests.execution.family import runners
from tests.execution.stream import Stream, check_each_succeeded_once
from tests.store.network import Network
from tests.store.ports import free_port
from tests.store.serving import StoreProcess

pytestmark = [pytest.mark.faults, pytest.mark.merge]


@pytest.mark.timeout(180)
async def test_a_store_elsewhere_is_killed_and_started_again_in_the_middle_of_a_run(tmp_path: Path) -> None:
    stream = Stream(40)
    with StoreProcess(tmp_path / "store.db") as server:
        strategy = ClientServerExecutionStrategy(2, managed_store=False)
        trainer = ly.Trainer(algorithm=stream.algorithm(), strategy=strategy, store=server.url)
        async with asyncio.timeout(150):
            run = asyncio.create_task(trainer.afit(agents.nap, list(range(40))))
            for _ in range(3):
                await stream.more(2)
                await asyncio.sleep(random.random() * 0.1)  # somewhere in the work
                await asyncio.to_thread(server.kill)
                server.start()
            await stream.more(2)
            stream.end()
            await run
        assert await asyncio.to_thread(server.stop) == 0
    assert runners() == []
    async with SqliteLightningStore(tmp_path / "store.db") as store:
        await check_each_succeeded_once(store, stream.asked, attempts=1)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["broken", "silent"])
async def test_the_network_between_runners_and_store_is_away_for_ten_seconds(how: str) -> None:
    stream, port = Stream(40), free_port()
    options: dict[str, Any] = {"token": "secret"}
    async with ly.InMemoryLightningStore() as store, asyncio.timeout(150):
        algorithm = ClientServerExecutionStrategy(role="algorithm", server_port=port, **options)
        run = asyncio.create_task(
            ly.Trainer(algorithm=stream.algorithm(), strategy=algorithm, store=store).afit(agents.nap, list(range(40)))
        )
        network = Network(port)
        async with network.opened():
            elsewhere = ClientServerExecutionStrategy(2, role="runner", server_port=network.port, **options)
            working = asyncio.create_task(ly.Trainer(strategy=elsewhere).afit(agents.nap))
            await stream.more(2)
            if how == "broken":
                await network.cut()
            else:
                network.hold()
            await asyncio.sleep(10.0)
            rounds = stream.rounds
            network.mend()
            await stream.more(2)
            assert stream.rounds > rounds
            stream.end()
            await run
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError, StoreError):
                await working
        assert runners() == []
        await check_each_succeeded_once(store, stream.asked, attempts=1)
