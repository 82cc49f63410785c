"""PostgreSQL goes away and comes back, connections are cut at the worst moments: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import psycopg
import pytest

from leyden.errors import StoreError
from leyden.store import LightningStore, PostgresLightningStore
from leyden.store.sql.postgres import Target, connect
from leyden.store.sql.postgres_pipeline import Pipeline
from leyden.testing import audit_store
from leyden.types import AttemptedRollout, EnqueueRolloutRequest, Span
from tests.store.postgres_server import PostgresServer

pytestmark = [pytest.mark.backends, pytest.mark.merge, pytest.mark.timeout(120)]

COMMIT = re.compile(rb"COMMIT\b")
"""The statement, not READ COMMITTED, with which a transaction may begin."""
RUNNERS = 4
ROLLOUTS = 300


@asynccontextmanager
async def runners(store: LightningStore) -> AsyncIterator[Counter[str]]:
    """Runners that claim, record and report until they are done with `ROLLOUTS`; how often each rollout was claimed."""
    claimed: Counter[str] = Counter()

    async def run(worker: str) -> None:
        while claimed.total() < ROLLOUTS:
            rollout = await store.dequeue_rollout(worker, timeout_seconds=0.5)
            if rollout is None:
                continue
            claimed[rollout.rollout_id] += 1
            ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
            for k in range(2):
                span = Span(**ids, sequence_id=0, trace_id="t", span_id=f"s{k}", name="n", attributes={"k": k})
                added = await store.add_span(span)
                assert added is not None, "it was added by a call that said it was not"
            await store.update_attempt(**ids, status="succeeded")

    async with asyncio.TaskGroup() as group:
        for i in range(RUNNERS):
            group.create_task(run(f"w{i}"))
        yield claimed


async def check(store: LightningStore, claimed: Counter[str]) -> None:
    """Every rollout was claimed once, has its one attempt and its two spans, and succeeded."""
    assert claimed.total() == len(claimed) == ROLLOUTS
    statistics = await store.statistics()
    assert statistics["rollouts_by_status"] == {"succeeded": ROLLOUTS}
    assert statistics["total_attempts"] == ROLLOUTS
    assert statistics["total_spans"] == 2 * ROLLOUTS
    for spans in (await store.query_spans_of(list(claimed))).values():
        assert [(span.span_id, span.sequence_id) for span in spans] == [("s0", 1), ("s1", 2)]


async def enqueue_slowly(store: LightningStore) -> None:
    """Without ids of the caller: a repeat that should not have been is a rollout too many."""
    for i in range(ROLLOUTS // 10):
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=10 * i + k) for k in range(10)])
        await asyncio.sleep(0.05)


async def test_a_run_outlives_restarts_of_its_server(own_server: PostgresServer) -> None:
    async with PostgresLightningStore(own_server.url) as store:
        async with runners(store) as claimed:
            enqueued = asyncio.create_task(enqueue_slowly(store))
            for mode in ("fast", "immediate", "fast"):
                await asyncio.sleep(0.4)
                await asyncio.to_thread(own_server.stop, mode)
                await asyncio.sleep(0.2)
                await asyncio.to_thread(own_server.start)
            await enqueued
        await check(store, claimed)


async def test_a_run_outlives_the_loss_of_all_its_connections(postgres_url: str) -> None:
    async with PostgresLightningStore(postgres_url) as store:
        async with runners(store) as claimed:
            enqueued = asyncio.create_task(enqueue_slowly(store))
            cut = 0
            while not enqueued.done():
                await asyncio.sleep(0.03)
                cut += await asyncio.to_thread(terminate, postgres_url)
            await enqueued
        assert cut > 50
        await check(store, claimed)


def terminate(url: str, application: str = "leyden") -> int:
    """Cut all of a store's connections; how many those were."""
    with psycopg.connect(url.partition("&schema=")[0], autocommit=True) as connection:
        found = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", [application]
        )
        return len(found.fetchall())


async def test_a_server_that_stays_away_is_an_error_after_the_stated_time(own_server: PostgresServer) -> None:
    async with PostgresLightningStore(f"{own_server.url}&password=secret", patience_seconds=0.5) as store:
        await store.enqueue_rollout(1)
        await asyncio.to_thread(own_server.stop)
        started = time.monotonic()
        with pytest.raises(StoreError, match=r"did not answer for 0.5 s.*check that the server runs") as raised:
            await store.enqueue_rollout(2)
        assert 0.5 <= time.monotonic() - started < 20
        assert "secret" not in str(raised.value)
        with pytest.raises(StoreError, match=own_server.url.partition("?")[0]):
            await store.query_rollouts()
        await asyncio.to_thread(own_server.start)
        assert [rollout.input for rollout in await store.query_rollouts()] == [1]


async def test_a_store_closes_while_its_server_is_away(own_server: PostgresServer) -> None:
    store = PostgresLightningStore(own_server.url)
    await store.enqueue_rollout(1)
    await asyncio.to_thread(own_server.stop)
    waiting = asyncio.create_task(store.enqueue_rollout(2))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await store.close()
    assert time.monotonic() - started < 20
    with pytest.raises(StoreError, match="being closed"):
        await waiting


async def test_a_server_that_is_not_there_is_an_error_after_the_stated_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"postgresql://u@/d\?.*did not answer for 0.5 s; .*No such file") as raised:
        PostgresLightningStore(f"postgresql://u:secret@/d?host={tmp_path}", patience_seconds=0.5)
    assert 0.5 <= time.monotonic() - started < 20
    assert "secret" not in str(raised.value)
    assert len(caplog.messages) == 1
    assert "does not answer yet" in caplog.text


async def test_a_server_that_lets_nobody_in_is_an_error_at_once(own_server: PostgresServer) -> None:
    started = time.monotonic()
    with pytest.raises(StoreError, match="no_such_user"):
        PostgresLightningStore(own_server.url.replace("postgres@", "no_such_user@"))
    assert time.monotonic() - started < 20


async def test_a_store_that_is_opened_while_its_server_starts_waits_for_it(own_server: PostgresServer) -> None:
    await asyncio.to_thread(own_server.stop)
    opening = asyncio.create_task(asyncio.to_thread(PostgresLightningStore, own_server.url))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(own_server.start)
    async with await opening as store:
        await store.enqueue_rollout(1)


# ---- stores that die ---------------------------------------------------------------------------------------------------

WRITER = """
    import asyncio, os, sys
    from leyden.store import PostgresLightningStore
    from leyden.types import Span

    acknowledged = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(*words):
        os.write(acknowledged, (" ".join(words) + "\\n").encode())

    async def work(store, worker):
        for i in range(1_000_000):
            await store.enqueue_rollout({"n": i}, rollout_id=f"{sys.argv[3]}-{worker}-{i}")
            say("enqueued", f"{sys.argv[3]}-{worker}-{i}")
            rollout = await store.dequeue_rollout(worker)
            ids = dict(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id)
            say("claimed", *ids.values())
            await store.add_span(Span(**ids, sequence_id=0, trace_id="t", span_id="s", name="n"))
            say("span", *ids.values())
            await store.update_attempt(**ids, status="succeeded")
            say("done", *ids.values())

    async def main():
        store = PostgresLightningStore(sys.argv[1])
        await asyncio.gather(*(work(store, f"w{k}") for k in range(4)))

    asyncio.run(main())
"""


def kill_two_writers(url: str, said: Path, number: int) -> None:
    size = said.stat().st_size
    command = [sys.executable, "-c", textwrap.dedent(WRITER), url, str(said)]
    writers = [subprocess.Popen([*command, f"{number}-{k}"]) for k in range(2)]
    while said.stat().st_size == size:
        time.sleep(0.01)
    time.sleep(random.Random(number).random() * 0.5)
    for writer in writers:
        writer.kill()
        writer.wait()


async def test_processes_that_are_killed_lose_nothing_they_were_told_and_hold_nothing(
    postgres_url: str, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    said.touch()
    async with PostgresLightningStore(postgres_url) as store:
        for number in range(4):
            await asyncio.to_thread(kill_two_writers, postgres_url, said, number)
        rollouts = {rollout.rollout_id: rollout for rollout in await store.query_rollouts()}
        claims: Counter[str] = Counter()
        for words in map(str.split, said.read_text().splitlines()):
            rollout = rollouts[words[1]]
            if words[0] == "claimed":
                claims[words[1]] += 1
            if words[0] != "enqueued":
                assert isinstance(rollout, AttemptedRollout)
                assert rollout.attempt.attempt_id == words[2]
            if words[0] == "span":
                assert len(await store.query_spans(words[1], words[2])) == 1
            if words[0] == "done":
                assert rollout.status == "succeeded"
        assert len(claims) > 50
        assert max(claims.values()) == 1
        async with asyncio.timeout(30):  # nothing that the dead held is held any more
            for rollout in rollouts.values():
                await store.update_rollout(rollout.rollout_id, metadata={"touched": True})
        assert await audit_store(store) == []


# ---- what becomes of a commit ---------------------------------------------------------------------------------------


class Cutter:
    """Stands between a store and its server, and cuts the connection of the next commit before or after it is passed on."""

    def __init__(self, server: PostgresServer, directory: Path) -> None:
        self._server = f"{server.directory}/.s.PGSQL.5432"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{directory}/.s.PGSQL.5432")
        self._listening.listen()
        self.url = f"postgresql://postgres@/postgres?host={directory}"
        self.cut: str | None = None
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError), closing(client), closing(server):
            while data := client.recv(1 << 16):
                cut = self.cut if COMMIT.search(data) else None
                if cut is not None:
                    self.cut = None
                    self.cuts += 1
                    client.shutdown(socket.SHUT_RDWR)
                if cut != "before":
                    server.sendall(data)
                if cut is not None:
                    time.sleep(0.1)  # the server commits meanwhile, and answers nobody
                    server.shutdown(socket.SHUT_RDWR)  # closed alone, it would live on in `_back`
                    return

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cutter(own_server: PostgresServer) -> Iterator[Cutter]:
    directory = own_server.directory / "cutter"
    directory.mkdir()
    with closing(Cutter(own_server, directory)) as made:
        yield made


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_whose_answer_was_lost_is_known_and_happens_once(cutter: Cutter, when: str) -> None:
    async def cut(call: Callable[[], Awaitable[object]]) -> object:
        cutter.cut = when
        answer = await call()
        assert cutter.cut is None
        return answer

    async with PostgresLightningStore(cutter.url) as store:
        await cut(lambda: store.enqueue_rollout("only"))
        assert len(await store.query_rollouts()) == 1
        cutter.cut = when
        rollout = await store.dequeue_rollout("w")
        assert rollout is not None
        assert rollout.attempt.sequence_id == 1
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        span = Span(**ids, sequence_id=0, trace_id="t", span_id="s", name="n")
        added = await cut(lambda: store.add_span(span))
        assert added == span.model_copy(update={"sequence_id": 1})
        assert await cut(lambda: store.get_next_span_sequence_id(**ids)) == 2
        await cut(lambda: store.add_resources({}))
        assert len(await store.query_resources()) == 1
        waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=10))
        await cut(lambda: store.update_attempt(**ids, status="succeeded"))
        assert [found.status for found in await waiting] == ["succeeded"]
        assert len(await store.query_attempts(rollout.rollout_id)) == 1
    assert cutter.cuts == 6


async def test_a_rollout_whose_answer_was_lost_says_when_it_began(cutter: Cutter) -> None:
    async with PostgresLightningStore(cutter.url) as store:
        await store.enqueue_rollout("connected")
        cutter.cut = "after"
        rollout = await store.enqueue_rollout("only")
        assert cutter.cut is None
        assert rollout == await store.get_rollout_by_id(rollout.rollout_id)


def test_a_batch_that_fails_when_it_is_committed_is_an_error(postgres_url: str) -> None:
    with closing(connect(Target.parse(postgres_url, "process"))) as connection:
        connection.execute("CREATE TEMP TABLE unique_at_the_end (a int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        pipeline = Pipeline(connection)
        for _ in range(2):
            pipeline.execute("INSERT INTO unique_at_the_end VALUES (1), (1)")
            with pytest.raises(psycopg.errors.UniqueViolation):
                pipeline.finish()
            pipeline.rollback()
            assert pipeline.execute("SELECT count(*) FROM unique_at_the_end").fetchall() == [(0,)]


# ---- news ---------------------------------------------------------------------------------------------------------------


async def test_waiters_hear_of_what_was_committed_while_the_listener_was_away(postgres_url: str) -> None:
    async with PostgresLightningStore(postgres_url) as ours, PostgresLightningStore(postgres_url) as theirs:
        rollout = await theirs.start_rollout(1)
        for _ in range(5):
            finished = asyncio.create_task(ours.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=30))
            claim = asyncio.create_task(ours.dequeue_rollout(timeout_seconds=30))
            news = asyncio.create_task(ours.get_news(after=(await ours.get_news()).after, timeout_seconds=30))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(terminate, postgres_url)
            await theirs.update_attempt(rollout.rollout_id, "latest", status="succeeded")
            queued = await theirs.enqueue_rollout(2)
            async with asyncio.timeout(20):
                assert [found.rollout_id for found in await finished] == [rollout.rollout_id]
                found = await claim
                heard = await news
            assert found is not None
            assert found.rollout_id == queued.rollout_id
            assert heard.gap or heard.claimable or heard.finished
            rollout = found
