"""Stores for the tests: each kind that passes the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore


@pytest.fixture(params=["memory", "sqlite", "sqlite-power"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LightningStore]:
    """An empty store of each kind; with `durability="power"` every write goes through the writer's thread."""
    made = {
        "memory": InMemoryLightningStore,
        "sqlite": lambda: SqliteLightningStore(tmp_path / "store.db"),
        "sqlite-power": lambda: SqliteLightningStore(tmp_path / "store.db", durability="power"),
    }[request.param]()
    async with made:
        yield made
