"""A store in a file that is only looked at: while its owner writes it, after its end, where nothing may be written."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from leyden.errors import ConfigError, StoreClosed, StoreError, UnknownRollout
from leyden.store import InMemoryLightningStore, LightningStoreServer, SqliteLightningStore, Sweeper, open_store
from leyden.types import Retention
from tests.contracts.store.support import SOON, claimed, ids, span_of


@contextmanager
def started(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A program of its own, which does not outlive the test."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def listing(directory: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in directory.iterdir()}


OWNER = """
    import asyncio, sys
    from leyden.store import SqliteLightningStore
    from leyden.types import Span

    async def main() -> None:
        async with SqliteLightningStore(sys.argv[1]) as store:
            print("open", flush=True)
            for line in sys.stdin:
                rollout = await store.start_rollout(line.strip())
                for index in range(100):
                    await store.add_span(Span(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id,
                        sequence_id=0, trace_id="t", span_id=str(index), name="n", attributes={"text": "x" * 1000}))
                await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
                print(rollout.rollout_id, flush=True)

    asyncio.run(main())
"""


class Owner:
    """The process that owns a store, and writes a rollout with 100 spans when it is told to."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self.program = program

    def hears(self, task: str) -> None:
        assert self.program.stdin is not None
        self.program.stdin.write(f"{task}\n")
        self.program.stdin.flush()

    def says(self) -> str:
        assert self.program.stdout is not None
        return self.program.stdout.readline().strip()

    def writes(self, task: str) -> str:
        self.hears(task)
        return self.says()


@contextmanager
def owner_of(path: Path) -> Iterator[Owner]:
    with started(OWNER, path) as program:
        owner = Owner(program)
        assert owner.says() == "open"
        yield owner


async def test_a_file_is_read_while_another_process_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with owner_of(path) as owner:
        first = owner.writes("first")
        async with SqliteLightningStore(path, read_only=True) as store:
            assert [rollout.input for rollout in await store.query_rollouts()] == ["first"]
            for index in range(20):
                rollout_id = owner.writes(str(index))
                assert (await store.get_rollout_by_id(rollout_id)).status == "succeeded"
                assert len(await store.query_spans(rollout_id)) == 100
            assert len(await store.query_spans(first)) == 100
            assert (await store.statistics())["total_spans"] == 2100
        assert owner.writes("last")  # nobody disturbed it


async def test_who_waits_is_woken_by_what_another_process_commits(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with owner_of(path) as owner:
        owner.writes("first")
        async with SqliteLightningStore(path, read_only=True) as store:
            news = await store.get_news()
            end = (await store.poll_new_spans(after="latest")).after
            polling = asyncio.create_task(store.poll_new_spans(after=end, timeout_seconds=SOON))
            telling = asyncio.create_task(store.get_news(after=news.after, spans=True, timeout_seconds=SOON))
            await asyncio.sleep(0.1)
            assert not polling.done()
            rollout_id = await asyncio.to_thread(owner.writes, "second")
            assert (await polling).spans[0].rollout_id == rollout_id
            assert (await telling).gap
            assert len(await store.wait_for_rollouts(rollout_ids=[rollout_id], timeout=SOON)) == 1


async def test_every_write_says_who_may_write(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with owner_of(path) as owner:
        rollout_id = owner.writes("first")
        async with SqliteLightningStore(path, read_only=True) as store:
            for write in (
                store.enqueue_rollout("x"),
                store.dequeue_rollout(timeout_seconds=SOON),
                store.update_rollout(rollout_id, metadata={}),
                store.sweep(),
                store.pin("x", [rollout_id]),
                store.update_worker("w"),
                store.index_span_attribute("a"),
            ):
                with pytest.raises(StoreError, match=f"read-only.*process {owner.program.pid} owns it"):
                    await write
        owner.program.kill()
        owner.program.wait()
    async with SqliteLightningStore(path, read_only=True) as store:
        with pytest.raises(StoreError, match="open it without read_only"):
            await store.enqueue_rollout("x")
        with pytest.raises(UnknownRollout):
            await store.get_rollout_by_id("ro-nowhere")
        assert await store.prune(Retention(max_rollouts=5)) == 0  # nothing to do
        assert len(await store.query_rollouts()) == 1


async def test_what_a_killed_owner_left_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with owner_of(path) as owner:
        rollouts = [owner.writes(str(index)) for index in range(5)]
        os.kill(owner.program.pid, signal.SIGKILL)
        owner.program.wait()
    assert path.with_name("x.db-wal").stat().st_size > 0
    async with SqliteLightningStore(path, read_only=True) as store:
        assert [rollout.rollout_id for rollout in await store.query_rollouts()] == rollouts
    async with SqliteLightningStore(path) as again:
        assert len(await again.query_rollouts()) == 5


async def test_a_file_that_nobody_owns_is_read_and_its_directory_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SqliteLightningStore(path) as store:
        rollout = await claimed(store)
        await store.add_span(span_of(rollout))
        await store.update_attempt(**ids(rollout), status="succeeded")
    before = listing(tmp_path)
    async with SqliteLightningStore(path, read_only=True) as one, open_store(f"sqlite://{path}", read_only=True) as two:
        assert await one.query_rollouts() == await two.query_rollouts()
        assert len(await one.query_spans(rollout.rollout_id)) == 1
        assert one.url == f"sqlite://{path}"
    assert listing(tmp_path) == before


async def test_an_owner_that_comes_back_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SqliteLightningStore(path) as store:
        await store.enqueue_rollout("before")
    async with SqliteLightningStore(path, read_only=True) as store:
        assert len(await store.query_rollouts()) == 1
        end = (await store.poll_new_spans(after="latest")).after
        polling = asyncio.create_task(store.poll_new_spans(after=end, timeout_seconds=SOON))
        await asyncio.sleep(0.1)
        with owner_of(path) as owner:
            rollout_id = await asyncio.to_thread(owner.writes, "after")
            assert (await polling).spans[0].rollout_id == rollout_id
            assert len(await store.query_rollouts()) == 2


async def test_an_owner_that_came_and_went_between_two_looks_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    await SqliteLightningStore(path).close()
    async with SqliteLightningStore(path, read_only=True) as store:
        for index in range(3):
            assert len(await store.query_rollouts()) == index
            async with SqliteLightningStore(path) as owner:
                await owner.enqueue_rollout(index)


UNPRIVILEGED = """
    import asyncio, concurrent.futures.thread, os, sys
    from leyden.store import InMemoryLightningStore, SqliteLightningStore

    async def main() -> None:
        async with InMemoryLightningStore() as store:  # everything is imported while it can be
            await store.query_rollouts()
        if os.geteuid() == 0:
            os.setuid(65534)
        async with SqliteLightningStore(sys.argv[1], read_only=True) as store:
            for rollout in await store.query_rollouts():
                print(rollout.input, len(await store.query_spans(rollout.rollout_id)), flush=True)

    asyncio.run(main())
"""


@pytest.mark.parametrize("life", ["closed", "killed", "alive"])
def test_a_file_is_read_where_nothing_may_be_written(life: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.db"
        with owner_of(path) as owner:
            owner.writes("task")
            if life == "closed":
                assert owner.program.stdin is not None
                owner.program.stdin.close()
                owner.program.wait(timeout=SOON)
            elif life == "killed":
                owner.program.kill()
                owner.program.wait()
            for entry in path.parent.iterdir():
                entry.chmod(0o444)
            path.parent.chmod(0o555)
            before = {entry.name for entry in path.parent.iterdir()}
            with started(UNPRIVILEGED, path) as program:
                assert program.communicate(timeout=60)[0] == "task 100\n"
            assert {entry.name for entry in path.parent.iterdir()} == before
            path.parent.chmod(0o755)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(StoreError) as refused:
            SqliteLightningStore(path, read_only=True)
        return str(refused.value)

    assert "does not exist" in refusal(tmp_path / "nowhere" / "x.db")
    assert "does not exist" in refusal(tmp_path)
    (tmp_path / "empty.db").touch()
    assert "holds no store yet" in refusal(tmp_path / "empty.db")
    (tmp_path / "text.db").write_text("hello " * 1000)
    assert "not an SQLite database" in refusal(tmp_path / "text.db")
    with closing(sqlite3.connect(tmp_path / "theirs.db")) as connection:
        connection.executescript("CREATE TABLE theirs (x)")
    assert "another program" in refusal(tmp_path / "theirs.db")
    path = tmp_path / "x.db"
    asyncio.run(SqliteLightningStore(path).close())
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA user_version = 999")
    assert "newer Leyden (schema 999" in refusal(path)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("address", ["memory://", "postgresql://localhost/x"])
def test_only_a_file_is_opened_read_only(address: str) -> None:
    with pytest.raises(ConfigError, match="read_only"):
        open_store(address, read_only=True)
    with pytest.raises(ConfigError, match="durability"):
        open_store("/x.db", read_only=True, durability="power")
    asyncio.run(InMemoryLightningStore().close())


async def test_a_closed_one_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    await SqliteLightningStore(path).close()
    store = SqliteLightningStore(path, read_only=True)
    await store.close()
    await store.close()
    await SqliteLightningStore(path).close()
    with pytest.raises(StoreClosed):
        await store.query_rollouts()


async def test_a_server_in_front_of_a_file_that_is_only_read_sweeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SqliteLightningStore(tmp_path / "store.db") as owner:
        await owner.enqueue_rollout("task", rollout_id="ro-1")
    async with (
        SqliteLightningStore(tmp_path / "store.db", read_only=True) as store,
        Sweeper(store, interval_seconds=0.01),
        LightningStoreServer(store) as server,
        server.client() as client,
    ):
        assert (await client.get_rollout_by_id("ro-1")).input == "task"
        with pytest.raises(StoreError, match="read"):
            await client.update_rollout("ro-1", status="cancelled")
        await asyncio.sleep(0.05)
    assert not [record for record in caplog.records if "sweep" in record.message]
