"""Where a server is reached that listens on all addresses of its machine."""

from __future__ import annotations

import pytest

from leyden._lib.host.listening import at_host_of


@pytest.mark.parametrize(
    ("url", "neighbour", "expected"),
    [
        ("http://0.0.0.0:4748/v1", "http://machine-a:4747", "http://machine-a:4748/v1"),
        ("http://0.0.0.0:4748/v1", "https://machine-a", "http://machine-a:4748/v1"),
        ("http://[::]:4748/v1", "http://[fd00::7]:4747", "http://[fd00::7]:4748/v1"),
        ("http://0.0.0.0:4748/v1", "memory://", "http://127.0.0.1:4748/v1"),
        ("http://[::]:4748/v1", "sqlite:///runs/store.sqlite", "http://[::1]:4748/v1"),
        ("http://0.0.0.0:4748/v1", "http+unix://%2Frun%2Fstore.sock", "http://127.0.0.1:4748/v1"),
        ("http://0.0.0.0:4748/v1", "postgresql://user@database/leyden", "http://127.0.0.1:4748/v1"),
        ("http://machine-b:4748/v1", "http://machine-a:4747", "http://machine-b:4748/v1"),
        ("http://127.0.0.1:4748/v1", "http://machine-a:4747", "http://127.0.0.1:4748/v1"),
    ],
)
def test_an_address_for_all_addresses_is_that_of_its_neighbour(url: str, neighbour: str, expected: str) -> None:
    assert at_host_of(neighbour, url) == expected
