"""A network that breaks: connections are cut in the middle of requests and answers, and nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from leyden.store import LightningStoreClient, LightningStoreServer, SqliteLightningStore
from leyden.testing import audit_store
from tests.attack.harness import sizes
from tests.store.killing import TASKS, Ledger, Pen, work
from tests.store.network import Network


class BadNetwork(Network):
    """A way to a server that lets through some bytes of each connection, and then cuts it."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(port)
        self._chance = random.Random(seed)
        self.cuts = 0

    def limits(self) -> tuple[float, float]:
        return self._chance.randint(100, 8000), self._chance.randint(50, 4000)

    def was_cut(self) -> None:
        self.cuts += 1


async def through_a_bad_network(directory: Path, seed: int, rounds: int) -> int:
    """Eight clients work; returns how many connections were cut."""
    ledger = Ledger(directory / "ledger.txt")
    async with SqliteLightningStore(directory / "store.db") as store, LightningStoreServer(store) as server:
        network = BadNetwork(int(server.endpoint.rpartition(":")[2]), seed)
        async with network.opened() as url, LightningStoreClient(url) as client:
            pen = Pen(str(ledger.path))
            await asyncio.gather(*(work(client, f"n{seed}-{k}", pen, rounds) for k in range(TASKS)))
        await ledger.check(store)
        await ledger.check_all(store, unknown=0)
        assert await audit_store(store) == []
        attempts = (await store.statistics())["total_attempts"]
        assert attempts == len(ledger.claims)
        assert ledger.count["enqueued"] == TASKS * rounds == (await store.statistics())["total_rollouts"]
    return network.cuts


async def test_a_network_that_cuts_connections_loses_and_doubles_nothing(tmp_path: Path) -> None:
    assert await through_a_bad_network(tmp_path, seed=1, rounds=10) > 20


@sizes(("n_seeds", "n_cuts"), faults=(2, 300), long=(6, 1000))
async def test_a_network_that_cuts_hundreds_of_connections(tmp_path: Path, n_seeds: int, n_cuts: int) -> None:
    cuts = 0
    for seed in range(2, 2 + n_seeds):
        directory = tmp_path / str(seed)
        directory.mkdir()
        cuts += await through_a_bad_network(directory, seed, rounds=40)
    assert cuts > n_cuts
