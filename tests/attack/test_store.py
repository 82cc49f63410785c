"""A store whose processes are killed again and again: each acknowledged write is there, once."""

from __future__ import annotations

from pathlib import Path

from tests.attack.harness import Attack, sizes
from tests.store.killing import Ledger, kill_server_and_clients, kill_the_writer

ACKNOWLEDGED = ("enqueued", "claimed", "span", "ended", "cancelled", "resources")


def count_writes(attack: Attack, ledger: Ledger) -> None:
    attack.count(acknowledged_writes=sum(ledger.count[kind] for kind in ACKNOWLEDGED))


@sizes("kills", faults=(40,), long=(250,), merge=False)
def test_a_store_server_and_its_clients_are_killed_at_random(tmp_path: Path, attack: Attack, kills: int) -> None:
    ledger = kill_server_and_clients(tmp_path, kills, attack.chance, killed=lambda: attack.count(kills=1))
    assert ledger.count["ended"] > 5 * kills
    count_writes(attack, ledger)


@sizes("kills", faults=(40,), long=(200,))
def test_a_writer_is_killed_at_random(tmp_path: Path, attack: Attack, kills: int) -> None:
    ledger = kill_the_writer(tmp_path, kills, attack.chance, killed=lambda: attack.count(kills=1))
    assert ledger.count["ended"] > 5 * kills
    count_writes(attack, ledger)
