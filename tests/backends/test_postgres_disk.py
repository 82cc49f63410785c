"""The disk of a PostgreSQL server is full: said clearly, reads go on where the server does, and nothing acknowledged is lost."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest

from tests.store.test_faults_disk import alone

pytestmark = [pytest.mark.backends, pytest.mark.merge, pytest.mark.timeout(120)]

SCENARIO = """
    import asyncio, os, sys
    from pathlib import Path
    from leyden.errors import StoreError
    from leyden.store import PostgresLightningStore
    from leyden.testing import audit_store
    from leyden.types import Span
    from tests.store.postgres_server import PostgresServer

    directory, on_the_disk = Path(sys.argv[1]), sys.argv[2]
    directory.chmod(0o755)
    filler = directory / "filler"

    def take_room(spare):
        '''Leave `spare` bytes.'''
        disk = os.statvfs(directory)
        filler.write_bytes(b"x" * (disk.f_bavail * disk.f_frsize - spare))

    def span(rollout, number):
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        noise = os.urandom(50_000).hex()
        return Span(**ids, span_id=f"s{number}", sequence_id=0, trace_id="t", name="n", attributes={"x": noise})

    async def fill(store, rollout):
        '''Large spans until there is no room: how many were acknowledged, and what the next was told.'''
        for number in range(1000):
            try:
                await store.add_span(span(rollout, number))
            except StoreError as error:
                return number, str(error)
        raise AssertionError("the disk was never full")

    async def main(server):
        async with PostgresLightningStore(server.url, patience_seconds=3) as store:
            rollout = await store.start_rollout("task", worker_id="w")
            take_room(8_000_000 if on_the_disk == "tables" else 25_000_000)
            added, told = await fill(store, rollout)
            assert added > 5
            if on_the_disk == "tables":
                assert "the server's disk is full; free some space and repeat the call" in told, told
                found = await store.query_spans(rollout.rollout_id)
                assert [s.sequence_id for s in found] == list(range(1, added + 1))
                filler.unlink()
            else:  # without a log it ends itself, and cannot come back before there is room
                assert "may or may not be there" in told, told
                try:
                    await store.query_spans(rollout.rollout_id)
                except StoreError as error:
                    assert "check that the server runs and can be reached" in str(error), error
                else:
                    raise AssertionError("who answered?")
                filler.unlink()
                await asyncio.to_thread(server.start)
            await store.add_span(span(rollout, 2000))
            found = await store.query_spans(rollout.rollout_id)
            expected = {f"s{n}" for n in range(added)} | {"s2000"}
            assert {s.span_id for s in found} - {f"s{added}"} == expected  # that one was in doubt
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
            assert await audit_store(store) == []
        print("survived")

    server = PostgresServer(within=str(directory), log_within="/tmp" if on_the_disk == "tables" else None)
    try:
        server.start()
        asyncio.run(main(server))
    finally:
        filler.unlink(missing_ok=True)
        server.delete()
"""


@pytest.mark.parametrize("on_the_disk", ["tables", "tables and log"])
def test_a_full_disk_of_the_server_is_said_and_survived(on_the_disk: Literal["tables", "tables and log"]) -> None:
    with TemporaryDirectory(prefix="leyden-", dir="/tmp") as place:
        mount = f'mount -t tmpfs -o size=200m leyden {place} && exec "$@"'
        program = [sys.executable, "-c", textwrap.dedent(SCENARIO), place, on_the_disk]
        Path(place).chmod(0o755)  # the server is another user
        done = subprocess.run(
            [*alone(), "sh", "-c", mount, "sh", *program], capture_output=True, text=True, timeout=100
        )
    assert done.stdout == "survived\n", done.stdout + done.stderr
