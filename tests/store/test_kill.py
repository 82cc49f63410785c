"""A killed process loses nothing that was acknowledged, doubles nothing, and leaves a legal store.

`tests/attack/test_store.py` does it many more times.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.store.killing import kill_server_and_clients, kill_the_writer


@pytest.mark.timeout(120)
def test_a_killed_writer_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    ledger = kill_the_writer(tmp_path, 5, random.Random(5))
    assert ledger.count["ended"] > 10


@pytest.mark.timeout(120)
def test_a_killed_server_or_client_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    ledger = kill_server_and_clients(tmp_path, 4, random.Random(4))
    assert ledger.count["ended"] > 10
