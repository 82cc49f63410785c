"""Stores for the tests: each kind that passes the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LightningStore]:
    """An empty store of each kind."""
    made = InMemoryLightningStore() if request.param == "memory" else SqliteLightningStore(tmp_path / "store.db")
    async with made:
        yield made
