"""Servers for the tests: the shared one of the store's tests, and one that a test may break."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.store.conftest import postgres_server as postgres_server
from tests.store.conftest import postgres_url as postgres_url
from tests.store.conftest import store as store
from tests.store.postgres_server import PostgresServer


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A running PostgreSQL that may be stopped and started."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.delete()
