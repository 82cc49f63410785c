"""Stores for the tests: each kind that passes the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from leyden.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    PostgresLightningStore,
    SqliteLightningStore,
)
from tests.store.postgres_server import fresh_url, given_or_own_server

Opened = AbstractAsyncContextManager[LightningStore]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a real PostgreSQL server."""
    with given_or_own_server() as url:
        yield url


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of an empty store on it."""
    with fresh_url(postgres_server) as url:
        yield url


@asynccontextmanager
async def served(opened: Opened) -> AsyncIterator[LightningStore]:
    """A client of a server of the store."""
    async with opened as store, LightningStoreServer(store) as server, LightningStoreClient(server.endpoint) as client:
        yield client


STORES: dict[str, Callable[[Path, Callable[[], str]], Opened]] = {
    "memory": lambda _, __: InMemoryLightningStore(),
    "sqlite": lambda path, _: SqliteLightningStore(path),
    "sqlite-power": lambda path, _: SqliteLightningStore(path, durability="power"),  # every write through the thread
    "http": lambda path, _: served(SqliteLightningStore(path)),
    "postgres": lambda _, postgres_url: PostgresLightningStore(postgres_url()),
    "http-postgres": lambda _, postgres_url: served(PostgresLightningStore(postgres_url())),
}
BACKENDS = {"postgres", "http-postgres"}
MARKS = {"postgres": [pytest.mark.backends, pytest.mark.merge], "http-postgres": [pytest.mark.backends]}
KINDS = [pytest.param(kind, marks=MARKS.get(kind, [])) for kind in STORES]


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LightningStore]:
    """An empty store of each kind."""
    opened = STORES[request.param](tmp_path / "store.db", lambda: request.getfixturevalue("postgres_url"))
    async with opened as made:
        yield made
