"""A disk that is full, a file that may not grow, a place that cannot be written: said clearly, and survived."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal

import pytest

SCENARIO = """
    import asyncio, contextlib, os, resource, signal, sqlite3, sys
    from pathlib import Path
    from leyden.errors import StoreError
    from leyden.store import LightningStoreClient, LightningStoreServer, SqliteLightningStore
    from leyden.testing import audit_store
    from leyden.types import Span

    directory, kind, served = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "served"

    filler = directory / "filler"

    def take_room(spare):
        '''Leave `spare` bytes; in a file system of its own, or by a limit of the size of files.'''
        if kind == "tmpfs":
            free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
            filler.write_bytes(b"x" * max(0, free - spare))
        else:
            largest = max((file.stat().st_size for file in directory.iterdir()), default=0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest + spare, resource.RLIM_INFINITY))

    def give_room():
        filler.unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    @contextlib.asynccontextmanager
    async def opened():
        async with SqliteLightningStore(directory / "x.db") as store:
            if not served:
                yield store
                return
            async with LightningStoreServer(store) as server, LightningStoreClient(server.endpoint) as client:
                yield client

    def span(rollout, number, size):
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        return Span(**ids, span_id=f"s{number}", sequence_id=0, trace_id="t", name="n", attributes={"x": "y" * size})

    async def fill(store, rollout):
        '''Large spans until there is no room; how many were acknowledged.'''
        for number in range(1000):
            try:
                await store.add_span(span(rollout, number, 100_000))
            except StoreError as error:
                assert "free some space" in str(error), error
                assert "x.db" in str(error), error
                return number
        raise AssertionError("the disk was never full")

    async def main():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        take_room(3_000_000)
        async with opened() as store:
            rollout = await store.start_rollout("task", worker_id="w")
            added = await fill(store, rollout)
            assert added > 5
            for _ in range(3):  # and still, for every kind of write that takes room
                for call in (
                    store.add_many_spans([span(rollout, 2000 + n, 100_000) for n in range(5)]),
                    store.enqueue_rollout("x" * 1_000_000),
                    asyncio.gather(*(store.enqueue_rollout("x" * 300_000) for _ in range(5))),
                ):
                    try:
                        await call
                    except StoreError as error:
                        assert "free some space" in str(error), error
                    else:
                        raise AssertionError("where did it find room?")
            found = await store.query_spans(rollout.rollout_id)  # reads go on
            assert [s.span_id for s in found] == [f"s{n}" for n in range(added)]
            assert [s.sequence_id for s in found] == list(range(1, added + 1))
            assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "running"
            assert await audit_store(store) == []
            give_room()
            await store.add_span(span(rollout, 3000, 100_000))  # and so do writes, when there is room
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
            take_room(100_000)
        try:  # it was closed on a full disk, and perhaps there is not even room to open it
            async with opened() as store:
                assert len(await store.query_spans(rollout.rollout_id)) == added + 1
        except StoreError as error:
            assert "free some space" in str(error), error
        give_room()
        async with opened() as store:
            assert len(await store.query_spans(rollout.rollout_id)) == added + 1
            assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "succeeded"
            assert await audit_store(store) == []
        with contextlib.closing(sqlite3.connect(directory / "x.db")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        print("survived")

    asyncio.run(main())
"""


def in_a_small_place(directory: Path, code: str, *arguments: str, kind: Literal["tmpfs", "limit"]) -> str:
    """Run a program whose disk holds a few megabytes; what it said."""
    program = [sys.executable, "-c", textwrap.dedent(code), str(directory), *arguments]
    if kind == "tmpfs":
        mount = f'mount -t tmpfs -o size=40m leyden {directory} && exec "$@"'
        program = [*alone(), "sh", "-c", mount, "sh", *program]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr


def alone() -> list[str]:
    """What gives a program mounts of its own; skips where this machine does not let it."""
    for options in (["-m"], ["-Urm"]):
        command = ["unshare", *options]
        with_mount = [*command, "mount", "-t", "tmpfs", "leyden", "/mnt"]
        if shutil.which("unshare") and subprocess.run(with_mount, capture_output=True).returncode == 0:
            return command
    pytest.skip("this machine lets nobody mount a small disk")


@pytest.mark.parametrize(
    ("kind", "served"),
    [
        ("tmpfs", "served"),
        ("limit", "alone"),
        pytest.param("tmpfs", "alone", marks=pytest.mark.faults),
        pytest.param("limit", "served", marks=pytest.mark.faults),
    ],
)
def test_a_full_disk_is_said_and_survived(tmp_path: Path, kind: Literal["tmpfs", "limit"], served: str) -> None:
    assert in_a_small_place(tmp_path, SCENARIO, kind, served, kind=kind).endswith("survived\n")


NO_ROOM_AT_ALL = """
    import asyncio, os, sys
    from pathlib import Path
    from leyden.errors import StoreError
    from leyden.store import SqliteLightningStore

    directory = Path(sys.argv[1])
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
    for _ in range(2):
        try:
            SqliteLightningStore(directory / "x.db")
        except StoreError as error:
            assert "free some space" in str(error), error
        else:
            raise AssertionError("where did it find room?")
    filler.unlink()
    asyncio.run(SqliteLightningStore(directory / "x.db").close())
    print("opened")
"""


def test_a_store_that_finds_no_room_at_all_says_so_and_can_be_opened_later(tmp_path: Path) -> None:
    assert in_a_small_place(tmp_path, NO_ROOM_AT_ALL, kind="tmpfs").endswith("opened\n")


READ_ONLY_PLACE = """
    import asyncio, subprocess, sys
    from pathlib import Path
    from leyden.errors import StoreError
    from leyden.store import SqliteLightningStore

    directory = Path(sys.argv[1])
    asyncio.run(SqliteLightningStore(directory / "x.db").close())
    subprocess.run(["mount", "-t", "tmpfs", "-o", "remount,ro", "leyden", directory], check=True)
    for path in (directory / "x.db", directory / "new.db"):
        try:
            SqliteLightningStore(path)
        except StoreError as error:
            print(error)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "remount,rw", "leyden", directory], check=True)
    asyncio.run(SqliteLightningStore(directory / "x.db").close())
    print("opened")
"""


def test_a_disk_that_is_read_only_is_named_with_what_to_do(tmp_path: Path) -> None:
    first, second, last = in_a_small_place(tmp_path, READ_ONLY_PLACE, kind="tmpfs").splitlines()
    for line, name in ((first, "x.db"), (second, "new.db")):
        assert name in line
        assert "can be written to" in line
    assert last == "opened"
