"""A store in a file: who owns it, what it survives, what it says of a file that it cannot use."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import ConfigError, StoreError, UnknownResources
from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore, open_store
from leyden.testing import audit_store
from leyden.types import EnqueueRolloutRequest, MetricPoint, ReplayFrom, RunRecord, Sample, Span, TokenRecord, semconv


@contextmanager
def started(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A program of its own, which does not outlive the test."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        try:
            yield program
        finally:
            program.kill()


def closed(store: LightningStore) -> None:
    asyncio.run(store.close())


async def test_what_was_written_is_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "store.db"
    async with SqliteLightningStore(path) as store:
        enqueued = await store.enqueue_rollout({"q": 1}, metadata={"m": 2})
        rollout = await store.dequeue_rollout("w")
        assert rollout is not None
        span = Span(
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
            sequence_id=1,
            trace_id="t",
            span_id="s",
            name="n",
        )
        await store.add_span(span)
        before = (await store.get_rollout_by_id(enqueued.rollout_id), await store.get_worker_by_id("w"))
    async with SqliteLightningStore(path) as store:
        assert (await store.get_rollout_by_id(enqueued.rollout_id), await store.get_worker_by_id("w")) == before
        assert list(await store.query_spans(rollout.rollout_id)) == [span]
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["store.db", "store.db.lock"]


def test_stores_are_opened_by_address(tmp_path: Path) -> None:
    path = tmp_path / "a b%20?#é.db"
    for address in (str(path), path, f"sqlite://{path}"):
        store = open_store(address)
        assert store.url == f"sqlite://{path}"
        assert store.capabilities["durable"]
        closed(store)
    assert path.exists()
    memory = open_store("memory://")
    assert isinstance(memory, InMemoryLightningStore)
    assert not memory.capabilities["durable"]
    closed(memory)


@pytest.mark.parametrize("address", ["sqlite://relative.db", "mysql://x/y", "ftp://localhost:1", "memory://x"])
def test_an_address_that_is_no_store_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="sqlite:///absolute/path"):
        open_store(address)


def test_an_option_that_means_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="durability"):
        open_store("memory://", durability="power")
    with pytest.raises(ConfigError, match="forever"):
        SqliteLightningStore(tmp_path / "x.db", durability="forever")  # type: ignore[arg-type]
    assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize(("durability", "level"), [("process", 1), ("power", 2)])
async def test_durability_is_what_was_asked_for(tmp_path: Path, durability: str, level: int) -> None:
    async with SqliteLightningStore(tmp_path / "x.db", durability=durability) as store:  # type: ignore[arg-type]
        assert await pragma(store, "synchronous") == (level,)


# ---- ownership -------------------------------------------------------------------------------------------------------


async def test_a_file_is_not_opened_twice_in_one_process(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SqliteLightningStore(path) as store:
        with pytest.raises(StoreError, match="this process"):
            SqliteLightningStore(path)
        assert json.loads((tmp_path / "x.db.lock").read_text()) == {"pid": os.getpid(), "url": store.url}
    await SqliteLightningStore(path).close()


OWNER = """
    import sys, time
    from leyden.store import SqliteLightningStore
    store = SqliteLightningStore(sys.argv[1])
    print("open", flush=True)
    time.sleep(60)
"""


async def test_a_file_with_a_second_name_is_not_opened_beside_its_owner(tmp_path: Path) -> None:
    path, link = tmp_path / "a" / "store.db", tmp_path / "link.db"
    async with SqliteLightningStore(path):
        link.symlink_to(path)  # has the same lock
        with pytest.raises(StoreError, match="open in this process already"):
            SqliteLightningStore(link)
        link.unlink()
        os.link(path, link)
        for read_only in (False, True):
            with pytest.raises(StoreError, match="has 2 names"):
                SqliteLightningStore(link, read_only=read_only)
    with pytest.raises(StoreError, match="remove the other names"):
        SqliteLightningStore(path)
    link.unlink()
    await SqliteLightningStore(path).close()


@pytest.mark.skipif(sys.platform != "linux", reason="the lock of the file itself")
def test_another_process_is_refused_a_file_that_was_renamed_while_it_is_open(tmp_path: Path) -> None:
    """A renamed file has one name, and its lock file lies under the old one, as with a bind mount."""
    code = "import sys; from leyden.store import SqliteLightningStore; SqliteLightningStore(sys.argv[1])"
    store = SqliteLightningStore(tmp_path / "store.db")
    (tmp_path / "store.db").rename(tmp_path / "renamed.db")
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "renamed.db")], capture_output=True, text=True, check=False
    )
    assert "is open already under another name" in ran.stderr
    with pytest.raises(StoreError, match="open already under another name"):
        SqliteLightningStore(tmp_path / "renamed.db")
    asyncio.run(store.close())
    asyncio.run(SqliteLightningStore(tmp_path / "renamed.db").close())


def test_another_processs_file_is_refused_and_free_again_when_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with started(OWNER, path) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match=f"process {owner.pid}"):
            SqliteLightningStore(path)
        owner.kill()
        owner.wait()
        closed(SqliteLightningStore(path))


FORKER = """
    import asyncio, os, sys, time, warnings
    from leyden.errors import StoreError
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point here
    from leyden.store import SqliteLightningStore
    store = SqliteLightningStore(sys.argv[1])
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(store.enqueue_rollout(1))
        except StoreError as error:
            print(os.getpid(), error, flush=True)
    time.sleep(60)
"""


def test_a_forked_child_neither_uses_the_store_nor_keeps_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with started(FORKER, path) as owner:
        assert owner.stdout is not None
        child, _, message = owner.stdout.readline().partition(" ")
        try:
            assert "forked child" in message
            owner.kill()
            owner.wait()
            closed(SqliteLightningStore(path))
        finally:
            os.kill(int(child), signal.SIGKILL)


COPIER = """
    import asyncio, os, sys
    from leyden.errors import StoreError
    from leyden.store import InMemoryLightningStore
    store = InMemoryLightningStore()
    if os.fork() == 0:
        try:
            asyncio.run(store.enqueue_rollout(1))
        except StoreError as error:
            print(error, flush=True)
    else:
        os.wait()
        print(len(asyncio.run(store.query_rollouts())))
"""


def test_a_forked_child_does_not_write_into_a_copy_of_a_store_in_memory() -> None:
    with started(COPIER) as program:
        message, _, count = program.communicate(timeout=60)[0].rpartition("would be in a copy")
    assert "memory://" in message
    assert "LightningStoreServer" in count
    assert count.endswith("\n0\n")


def test_a_dropped_store_lets_go_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    store = SqliteLightningStore(path)
    asyncio.run(store.enqueue_rollout(1))
    del store
    reopened = SqliteLightningStore(path)
    assert len(asyncio.run(reopened.query_rollouts())) == 1
    closed(reopened)


FORGETFUL = """
    import asyncio, sys
    from leyden.store import SqliteLightningStore
    store = SqliteLightningStore(sys.argv[1])
    asyncio.run(store.enqueue_rollout(1))
"""


def test_a_program_that_forgets_to_close_ends_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with started(FORGETFUL, path) as program:
        assert program.communicate(timeout=60)[0] == ""
        assert program.returncode == 0
    assert not path.with_name("x.db-wal").exists()
    store = SqliteLightningStore(path)
    assert len(asyncio.run(store.query_rollouts())) == 1
    closed(store)


@pytest.mark.parametrize("kind", [InMemoryLightningStore, SqliteLightningStore])
def test_a_store_is_not_pickled(tmp_path: Path, kind: type) -> None:
    store = kind() if kind is InMemoryLightningStore else kind(tmp_path / "x.db")
    with pytest.raises(StoreError, match="cannot be pickled"):
        pickle.dumps(store)
    closed(store)


# ---- files that cannot be used ---------------------------------------------------------------------------------------


def database(path: Path, script: str) -> Path:
    """A file that somebody else made."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
    return path


def test_a_file_of_a_newer_leyden_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    closed(SqliteLightningStore(path))
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    database(path, "PRAGMA user_version = 999")
    with pytest.raises(StoreError, match=r"newer Leyden \(schema 999"):
        SqliteLightningStore(path)
    database(path, f"PRAGMA user_version = {version}")
    closed(SqliteLightningStore(path))


async def test_a_file_of_the_first_schema_is_brought_up_to_date_with_what_is_in_it(tmp_path: Path) -> None:
    script = (files("leyden.store.sql") / "migrations" / "sqlite" / "0001_initial.sql").read_text()
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
        connection.execute(
            "INSERT INTO workers (worker_id, status, heartbeat_stats) VALUES ('w', 'idle', '{\"a\": 1}')"
        )
        connection.execute("PRAGMA user_version = 1")
        connection.execute("PRAGMA application_id = 0x4C595244")
        connection.commit()
    with pytest.raises(StoreError, match=rf"`leyden store upgrade sqlite://{path}` brings it up to date"):
        SqliteLightningStore(path, read_only=True)
    async with SqliteLightningStore(path) as store:
        worker = await store.get_worker_by_id("w")
        assert (worker.status, worker.heartbeat_stats, worker.paused) == ("idle", {"a": 1}, False)
        await store.add_many_samples([Sample(name="x", time=time.time(), value=1.0)])
        assert len(await store.query_samples()) == 1


async def test_a_file_whose_calls_were_searched_is_read_and_goes_on_with_its_conversations(tmp_path: Path) -> None:
    """Before the migration, the newest calls of an attempt were searched with an index of their own."""
    path = tmp_path / "x.db"
    scripts = sorted(files("leyden.store.sql").joinpath("migrations", "sqlite").iterdir(), key=lambda each: each.name)
    version = next(number for number, each in enumerate(scripts) if each.name.endswith("_known_prefix.sql"))
    ids = list(range(100))
    records = [TokenRecord(prompt_ids=ids[:20], response_ids=ids[20:40]), TokenRecord(prompt_ids=ids, response_ids=[7])]
    with closing(sqlite3.connect(path)) as connection:
        for each in scripts[:version]:
            connection.executescript(each.read_text())
        connection.execute(
            "INSERT INTO rollouts (seq, rollout_id, status, input, config, metadata, start_time, attempts)"
            " VALUES (1, 'r', 'running', '1', '', '', 2.0, 1)"
        )
        connection.execute(
            "INSERT INTO attempts (rollout, sequence_id, attempt_id, status, start_time, last_span, spans)"
            " VALUES (1, 1, 'a', 'running', 2.0, 2, 2)"
        )
        for number, (base, record) in enumerate(zip((None, 1), records, strict=True), start=1):
            connection.execute(
                "INSERT INTO spans (rollout, attempt, sequence_id, span_id, trace_id, name, kind, status_code, tokens_base, tokens,"
                " attributes, events, resource) VALUES (1, 1, ?, ?, 't', 'n', 'CLIENT', 'OK', ?, ?, '', '', '')",
                (number, f"s{number}", base, record.pack(shared=40 if base else 0)),
            )
        assert "spans_with_tokens" in indexes(connection)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("PRAGMA application_id = 0x4C595244")
        connection.commit()
    with pytest.raises(StoreError, match="older Leyden"):
        SqliteLightningStore(path, read_only=True)
    records.append(TokenRecord(prompt_ids=[*ids, 7, 8], response_ids=[9]))
    attributes: dict[str, Any] = {semconv.GOES_ON_FROM: "s2", semconv.KNOWN_PREFIX: 101}
    where: dict[str, Any] = {"rollout_id": "r", "attempt_id": "a", "sequence_id": 3, "trace_id": "t"}
    async with SqliteLightningStore(path) as store:
        assert [span.tokens for span in await store.query_spans("r")] == records[:2]
        await store.add_span(Span(**where, span_id="s3", name="n", attributes=attributes, tokens=records[2]))
        assert [span.tokens for span in await store.query_spans("r")] == records
        assert await audit_store(store) == []
    with closing(sqlite3.connect(path)) as connection:
        assert "spans_with_tokens" not in indexes(connection)
        assert connection.execute("SELECT tokens_base FROM spans WHERE span_id = 's3'").fetchone() == (2,)


def indexes(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}


async def test_the_forks_in_a_file_of_the_eighth_schema_are_found(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    scripts = files("leyden.store.sql") / "migrations" / "sqlite"
    source = ReplayFrom(rollout_id="r1", attempt_id="at", n_calls=2).as_metadata()
    broken = '{"leyden.replay_from": '
    with closing(sqlite3.connect(path)) as connection:
        for script in sorted(each.name for each in scripts.iterdir())[:8]:
            connection.executescript((scripts / script).read_text())
        for seq, metadata in enumerate(("", json.dumps({"a": 1} | source), broken), start=1):
            connection.execute(
                "INSERT INTO rollouts (seq, rollout_id, status, input, config, metadata, start_time, end_time)"
                " VALUES (?, ?, 'failed', 'null', '', ?, 2.0, 3.0)",
                (seq, f"r{seq}", metadata),
            )
        connection.execute("UPDATE totals SET failed = 3")
        connection.execute("PRAGMA user_version = 8")
        connection.execute("PRAGMA application_id = 0x4C595244")
        connection.commit()
    async with SqliteLightningStore(path) as store:
        assert [each.rollout_id for each in await store.query_rollouts(replay_from="r1")] == ["r2"]


async def test_a_file_of_the_third_schema_gets_runs_and_goes_on_with_its_rollouts(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    scripts = files("leyden.store.sql") / "migrations" / "sqlite"
    with closing(sqlite3.connect(path)) as connection:
        for name in ("0001_initial.sql", "0002_samples.sql", "0003_totals.sql"):
            connection.executescript((scripts / name).read_text())
        for seq, (status, end) in enumerate([("succeeded", 3.0), ("queuing", None)], start=1):
            connection.execute(
                "INSERT INTO rollouts (seq, rollout_id, status, input, config, metadata, start_time, end_time)"
                " VALUES (?, ?, ?, '\"task\"', '', '', 2.0, ?)",
                (seq, f"r{seq}", status, end),
            )
        connection.execute("UPDATE totals SET succeeded = 1")
        connection.execute("PRAGMA user_version = 3")
        connection.execute("PRAGMA application_id = 0x4C595244")
        connection.commit()
    async with SqliteLightningStore(path) as store:
        before = await store.query_rollouts()
        assert [(each.rollout_id, each.run_id, each.group_id) for each in before] == [
            ("r1", None, None),
            ("r2", None, None),
        ]
        assert not await store.query_runs()
        await store.start_run(RunRecord(run_id="run", name="run", kind="fit", start_time=4.0))
        await store.add_metrics("run", [MetricPoint(stage="val", iteration=0, name="reward", value=1.0, time=5.0)])
        await store.enqueue_rollout("task", rollout_id="r3", run_id="run", group_id="g")
        claimed = await store.dequeue_many_rollouts(limit=3)
        assert [(each.rollout_id, each.run_id) for each in claimed] == [("r2", None), ("r3", "run")]
        assert [each.rollout_id for each in await store.query_rollouts(run_id="run", group_id="g")] == ["r3"]
        assert await audit_store(store) == []
    async with SqliteLightningStore(path, read_only=True) as reader:
        assert len(await reader.query_metrics("run")) == 1
        with pytest.raises(StoreError, match="read-only"):
            await reader.update_run("run")


def test_another_programs_database_is_refused_and_untouched(tmp_path: Path) -> None:
    path = database(tmp_path / "x.db", "CREATE TABLE theirs (x)")
    with pytest.raises(StoreError, match="another program"):
        SqliteLightningStore(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.write_text("hello " * 1000)
    with pytest.raises(StoreError, match="not an SQLite database"):
        SqliteLightningStore(path)
    assert path.read_text() == "hello " * 1000


async def test_a_damaged_file_says_so_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SqliteLightningStore(path) as store:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="x" * 3000) for _ in range(100)])
    content = bytearray(path.read_bytes())
    content[8192:] = os.urandom(len(content) - 8192)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        async with SqliteLightningStore(path) as store:
            await store.query_rollouts()


def test_a_path_where_no_file_can_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="directory"):
        SqliteLightningStore(tmp_path / "file" / "x.db")
    (tmp_path / "dir.db").mkdir()
    with pytest.raises(StoreError, match=r"dir\.db"):
        SqliteLightningStore(tmp_path / "dir.db")


NOBODY = """
    import os, sys
    from leyden.errors import StoreError
    from leyden.store import SqliteLightningStore
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        SqliteLightningStore(sys.argv[1])
    except StoreError as error:
        print(error)
"""


def test_a_file_that_may_not_be_written_is_refused() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.db"
        closed(SqliteLightningStore(path))
        lock = path.with_name("x.db.lock")
        for entry, mode in ((path.parent, 0o755), (path, 0o444), (lock, 0o666)):
            entry.chmod(mode)
        with started(NOBODY, path) as program:
            assert "check the permissions" in program.communicate(timeout=60)[0]
        lock.chmod(0o444)
        with started(NOBODY, path) as program:
            assert "can be written to" in program.communicate(timeout=60)[0]


def test_an_older_file_is_migrated(tmp_path: Path) -> None:
    path = database(tmp_path / "x.db", "")  # schema 0: before the first migration
    closed(SqliteLightningStore(path))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] >= 1


async def test_a_lock_of_another_program_is_an_error_and_passes(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SqliteLightningStore(path) as store:
        await pragma(store, "busy_timeout = 50")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="another program holds a lock"):
                await store.enqueue_rollout(1)
            other.execute("ROLLBACK")
        await store.enqueue_rollout(2)
        assert [rollout.input for rollout in await store.query_rollouts()] == [2]


async def test_a_full_disk_fails_the_batch_and_later_ones_go_on(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "x.db") as store:
        await store.enqueue_rollout("before")
        await pragma(store, "max_page_count = 60")  # SQLite's own way to have a full disk
        with pytest.raises(StoreError, match="free some space"):
            await store.enqueue_rollout("x" * 1_000_000)
        await pragma(store, "max_page_count = 100000")
        await store.enqueue_rollout("after")
        assert [rollout.input for rollout in await store.query_rollouts()] == ["before", "after"]


def test_other_programs_open_and_close_the_file_of_a_store_that_writes_and_nothing_is_lost(tmp_path: Path) -> None:
    path, n_rollouts = tmp_path / "x.db", 2000
    code = """
        import asyncio, sys
        from leyden.store import SqliteLightningStore

        async def main():
            async with SqliteLightningStore(sys.argv[1]) as store:
                await store.enqueue_rollout(0)
                print("open", flush=True)
                for n in range(1, int(sys.argv[2])):
                    await store.enqueue_rollout(n)

        asyncio.run(main())
    """
    with started(code, path, n_rollouts) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "open\n"
        while program.poll() is None:
            with closing(sqlite3.connect(path)) as connection:
                assert connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]
        assert program.returncode == 0, program.stdout.read()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM rollouts").fetchall() == [(n_rollouts,)]


async def test_the_log_is_copied_into_the_file_and_begins_again(tmp_path: Path) -> None:
    log = tmp_path / "x.db-wal"
    async with SqliteLightningStore(tmp_path / "x.db") as store:
        for _ in range(1000):
            await store.enqueue_rollout("x" * 100_000)
        for _ in range(1000):
            if log.stat().st_size < 2**25:
                break
            await store.update_worker("w")
            await asyncio.sleep(0.01)
        assert log.stat().st_size < 2**25
        assert (tmp_path / "x.db").stat().st_size > 50_000_000


async def test_a_long_read_holds_up_no_write_and_no_checkpoint_for_ever(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def under_way(tx: Any) -> int:
        return sum(row[1] for row in tx.all("count_under_way"))

    def read(tx: Any) -> int:
        tx.expect(None)
        before = under_way(tx)
        entered.set()
        assert release.wait(30)
        return under_way(tx) - before

    async with SqliteLightningStore(tmp_path / "x.db") as store:
        reading = asyncio.create_task(store._driver.read(read, (), {}))
        await asyncio.to_thread(entered.wait, 30)
        for _ in range(500):
            await store.start_rollout("x" * 100_000)
        assert not reading.done()
        release.set()
        assert await reading == 0  # it saw one moment of the store
        assert len(await store.query_rollouts()) == 500


async def pragma(store: SqliteLightningStore, setting: str) -> Any:
    """Change a setting of the writer's connection, as no user can."""
    return await store._driver.write(lambda tx: tx._cursor.execute(f"PRAGMA {setting}").fetchone(), (), {})


async def test_a_refused_batch_writes_nothing_to_the_file(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "store.db") as store:
        with closing(sqlite3.connect(tmp_path / "store.db")) as file:
            before = file.execute("PRAGMA data_version").fetchone()
            requests = [EnqueueRolloutRequest(input=k) for k in range(500)]
            with pytest.raises(UnknownResources):
                await store.enqueue_many_rollouts([*requests, EnqueueRolloutRequest(input=0, resources_id="missing")])
            assert file.execute("PRAGMA data_version").fetchone() == before
