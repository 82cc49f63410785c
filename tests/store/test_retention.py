"""What forgetting costs and what it gives back: the file and the memory of a store stay as large as what is kept."""

from __future__ import annotations

import asyncio
import random
import secrets
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore, Sweeper
from leyden.types import EnqueueRolloutRequest, Retention
from tests.contracts.store import ids, span_of

MB = 1_000_000


async def work(store: LightningStore, count: int, *, spans: int = 3, size: int = 1000) -> None:
    """`count` rollouts from the queue to the end."""
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=index) for index in range(count)])
    for rollout in await store.dequeue_many_rollouts(limit=count):
        await store.add_many_spans(
            [span_of(rollout, f"{index:016x}", attributes={"text": "x" * size}) for index in range(spans)]
        )
        await store.update_attempt(**ids(rollout), status="succeeded")


async def prune_all(store: LightningStore, retention: Retention) -> None:
    while await store.prune(retention):
        pass


@pytest.fixture(params=["memory", "sqlite"])
async def sized(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LightningStore]:
    async with (
        InMemoryLightningStore() if request.param == "memory" else SqliteLightningStore(tmp_path / "x.db") as store
    ):
        yield store


def taken(store: LightningStore) -> int:
    """Bytes of the file, or of the process."""
    if isinstance(store, SqliteLightningStore):
        return store.path.stat().st_size
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("rollouts", [4_000, pytest.param(20_000, marks=pytest.mark.slow)])
async def test_what_a_store_takes_does_not_grow_with_what_it_has_forgotten(
    sized: LightningStore, rollouts: int
) -> None:
    retention = Retention(max_rollouts=500)
    after_first = 0
    for done in range(0, rollouts, 500):
        await work(sized, 500)
        await prune_all(sized, retention)
        if done == 1500:
            after_first = taken(sized)
    assert len(await sized.query_rollouts()) == 500
    assert taken(sized) < 1.1 * after_first + 2 * MB


async def test_bytes_are_counted_as_the_file_counts_them(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "x.db") as store:
        await work(store, 300, spans=10, size=500)
        await work(store, 100, spans=0)
        await work(store, 20, spans=2, size=50_000)
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        (counted,) = database.execute("SELECT sum(bytes) FROM rollouts").fetchone()
    assert counted == pytest.approx((tmp_path / "x.db").stat().st_size, rel=0.2)


async def test_a_file_gives_its_free_pages_back_to_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SqliteLightningStore(path) as store:
        await work(store, 500, spans=1, size=100_000)
    assert path.stat().st_size > 50 * MB
    async with SqliteLightningStore(path) as store:
        await prune_all(store, Retention(max_rollouts=10))
        # After 64 writes the store looks after its file; a Sweeper alone makes that many in a minute.
        for _ in range(64):
            await store.update_worker("w")
        await asyncio.sleep(0.5)
    assert path.stat().st_size < 20 * MB
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_the_sweeper_forgets_on_its_schedule_and_once_more_at_the_end(
    sized: LightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "leyden.store.sweeper")
    async with Sweeper(sized, retention=Retention(max_rollouts=10), prune_interval_seconds=0.02) as sweeper:
        await work(sized, 450, spans=1)
        for _ in range(1000):
            if "440 in all" in caplog.text:
                break
            await asyncio.sleep(0.01)
        assert len(await sized.query_rollouts()) == 10
        assert sweeper.pruned == 440
        sweeper._prune_interval_seconds = 60.0
        await asyncio.sleep(0.1)
        await work(sized, 20, spans=1)
    assert len(await sized.query_rollouts()) == 10
    assert sweeper.pruned == 460


async def test_a_sweeper_without_retention_forgets_nothing(sized: LightningStore) -> None:
    async with Sweeper(sized, interval_seconds=0.01, prune_interval_seconds=0.01) as sweeper:
        await work(sized, 20)
        await asyncio.sleep(0.1)
    assert sweeper.pruned == 0
    assert len(await sized.query_rollouts()) == 20


FORGETFUL = """
    import asyncio, sys
    from leyden.store import SqliteLightningStore
    from leyden.types import Retention
    from tests.store.test_retention import work

    async def main() -> None:
        async with SqliteLightningStore(sys.argv[1]) as store:
            if not await store.query_rollouts(limit=1):
                await work(store, 20)
                await store.pin("kept", [rollout.rollout_id for rollout in await store.query_rollouts()])
            print("open", flush=True)
            while True:
                await work(store, 500, size=20_000)
                while await store.prune(Retention(max_rollouts=0)):
                    pass

    asyncio.run(main())
"""


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_process_that_is_killed_while_it_forgets_leaves_nothing_by_halves(tmp_path: Path) -> None:
    path, chance = tmp_path / "x.db", random.Random(0)
    for _ in range(20):
        command = [sys.executable, "-c", textwrap.dedent(FORGETFUL), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == "open\n"
            time.sleep(chance.uniform(0.0, 1.0))
            program.kill()
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            for orphans in (
                "SELECT count(*) FROM attempts WHERE rollout NOT IN (SELECT seq FROM rollouts)",
                "SELECT count(*) FROM spans WHERE rollout NOT IN (SELECT seq FROM rollouts)",
                "SELECT count(*) FROM spans GROUP BY rollout HAVING count(*) <> 3",
                "SELECT count(*) FROM pins WHERE rollout NOT IN (SELECT seq FROM rollouts)",
            ):
                assert database.execute(orphans).fetchone() in ((0,), None)
            assert database.execute("SELECT count(*) FROM pins").fetchone() == (20,)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_writer_hardly_notices_that_old_rollouts_are_forgotten(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "x.db") as store:
        for _ in range(200):
            await work(store, 500, spans=1, size=100)
        live = await store.start_rollout("live")

        async def waits_until(over: Callable[[int], bool]) -> list[float]:
            """What each of many spans had to wait, the longest last."""
            waits: list[float] = []
            while not over(len(waits)):
                started = time.perf_counter()
                await store.add_span(span_of(live, secrets.token_hex(8)))
                waits.append(time.perf_counter() - started)
                await asyncio.sleep(0.001)
            return sorted(waits)

        quiet = await waits_until(lambda count: count == 2000)
        pruning = asyncio.create_task(prune_all(store, Retention(max_rollouts=0)))
        busy = await waits_until(lambda _: pruning.done())
        assert len(await store.query_rollouts()) == 1
    quiet_p99, busy_p99 = (waits[int(0.99 * len(waits))] for waits in (quiet, busy))
    print(f"p99 of a span: {1000 * quiet_p99:.2f} ms, {1000 * busy_p99:.2f} ms while rollouts are forgotten")
    assert busy_p99 < 0.05 + 20 * quiet_p99  # of a machine that may be busy with other things
