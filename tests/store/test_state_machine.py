"""Any order of calls leaves a store where a small model says it is."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from leyden.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    PostgresLightningStore,
    SqliteLightningStore,
)
from leyden.store.sql.transaction import SpanTarget
from leyden.store.sqlite import Durability

pytest.register_assert_rewrite("tests.contracts.store_machine")

from tests.contracts.store_machine import Chance, StoreMachine, thorough, walk  # noqa: E402
from tests.store.postgres_server import fresh_url  # noqa: E402

WALKS = {"memory": 30, "file": 6, "power": 2, "http": 3}
"""How many of each kind, with a hundred steps each: about a second."""


def kept_targets_are_true(session: Any) -> None:
    """What the next operation may read of `tx.targets` is what the database would say."""
    with session.lock:
        tx = session._transaction
        for (rollout_id, attempt_id), target in tx.targets.items() if tx._targets_hold else ():
            assert target == SpanTarget(*tx.one("get_span_target", rollout_id=rollout_id, attempt_id=attempt_id))


class MemoryMachine(StoreMachine):
    """A store in memory."""

    def open(self) -> Sequence[LightningStore]:
        return [InMemoryLightningStore()]

    def look_inside(self) -> None:
        kept_targets_are_true(self.stores[0]._driver._session)


class FileMachine(StoreMachine):
    """A store in a file, which is closed and opened between calls."""

    CALLS = StoreMachine.CALLS | {"reopen": 2}
    durability: Durability = "process"

    def open(self) -> Sequence[LightningStore]:
        self.directory = tempfile.TemporaryDirectory()
        return [self.opened()]

    def opened(self) -> LightningStore:
        return SqliteLightningStore(Path(self.directory.name) / "x.db", durability=self.durability)

    def look_inside(self) -> None:
        kept_targets_are_true(self.stores[0]._driver._writer._session)

    def reopen(self, _: Chance) -> None:
        self.do(self.store.close())
        self.stores = [self.opened()]

    def teardown(self) -> None:
        super().teardown()
        self.directory.cleanup()


class PowerMachine(FileMachine):
    """The same with every write in the writer's thread."""

    durability = "power"


class HttpMachine(StoreMachine):
    """Two clients of one server, of a store in memory; the server is stopped and started between calls."""

    CALLS = StoreMachine.CALLS | {"restart": 1}

    def open(self) -> Sequence[LightningStore]:
        self.served = InMemoryLightningStore()
        self.server = LightningStoreServer(self.served)
        self.do(self.server.start())
        return [LightningStoreClient(self.server.endpoint) for _ in range(2)]

    def restart(self, _: Chance) -> None:
        self.do(self.server.stop())
        self.do(self.server.start())

    def teardown(self) -> None:
        if getattr(self, "stores", []):
            self.ask_for_nobody()
        for store in getattr(self, "stores", []):
            self.do(store.close())
        self.stores = []
        if hasattr(self, "server"):
            self.do(self.server.stop())
            self.do(self.served.close())
        super().teardown()


class PostgresMachine(StoreMachine):
    """Two stores on one database, as in two processes."""

    server: ClassVar[str]

    def open(self) -> Sequence[LightningStore]:
        self.fresh = fresh_url(self.server)
        url = self.fresh.__enter__()
        return [PostgresLightningStore(url, connections=2) for _ in range(2)]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "fresh"):
            self.fresh.__exit__(None, None, None)


MACHINES = {"memory": MemoryMachine, "file": FileMachine, "power": PowerMachine, "http": HttpMachine}


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, walks in WALKS.items() for seed in range(walks)])
def test_a_store_is_where_the_model_is(kind: str, seed: int) -> None:
    walk(MACHINES[kind], seed, steps=100)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "walks"), [("memory", 100), ("file", 15), ("http", 6)])
def test_long_walks(kind: str, walks: int) -> None:
    for seed in range(walks):
        walk(MACHINES[kind], 1000 + seed, steps=300)


@pytest.mark.backends
@pytest.mark.timeout(300)
def test_postgres_is_where_the_model_is(postgres_server: str) -> None:
    PostgresMachine.server = postgres_server
    for seed in range(10):
        walk(PostgresMachine, seed, steps=100)


TestByHypothesis = pytest.mark.slow(MemoryMachine.TestCase)  # walks find more in the same time, see store_machine.py
TestByHypothesis.settings = thorough(50)
