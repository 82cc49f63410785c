"""Several stores on one PostgreSQL database: they share its truth, hear of each other, and never do a thing twice."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from leyden.errors import StoreError, UnknownRollout
from leyden.store import PostgresLightningStore, open_store
from leyden.store.sql.postgres import Target, connect, placeholders
from leyden.store.sql.postgres_session import news_of
from leyden.store.sql.queries import load_queries
from leyden.types import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    PromptTemplate,
    Retention,
    RolloutConfig,
    Span,
)
from tests.machine_clock import MachineClock

pytestmark = [pytest.mark.backends, pytest.mark.merge, pytest.mark.timeout(120)]

SOON = 10.0


@pytest.fixture
async def stores(postgres_url: str) -> AsyncIterator[list[PostgresLightningStore]]:
    """Two stores on one schema, as two servers would have them."""
    async with PostgresLightningStore(postgres_url) as one, PostgresLightningStore(postgres_url) as two:
        yield [one, two]


def span_of(rollout: AttemptedRollout, span_id: str, **fields: Any) -> Span:
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    return Span(**ids, **{"sequence_id": 0, "trace_id": "t", "span_id": span_id, "name": "n"} | fields)


def raw(url: str) -> psycopg.Connection[Any]:
    """A connection of somebody else, in the store's schema."""
    server, _, schema = url.partition("&schema=")
    connection = psycopg.connect(server, autocommit=True)
    connection.execute(f"SET search_path TO {schema}")
    return connection


def ours() -> int:
    """How many threads belong to stores."""
    return sum(thread.name.startswith("leyden-store") for thread in threading.enumerate())


# ---- one truth --------------------------------------------------------------------------------------------------------


async def test_stores_on_one_schema_share_it_and_on_another_do_not(postgres_url: str) -> None:
    async with open_store(postgres_url) as one, open_store(postgres_url, durability="power") as two:
        rollout = await one.enqueue_rollout("x")
        assert await two.get_rollout_by_id(rollout.rollout_id) == rollout
        assert one.capabilities["zero_copy"] and one.capabilities["durable"]
        other = f"{postgres_url}_b"
        try:
            async with open_store(other) as three:
                with pytest.raises(UnknownRollout):
                    await three.get_rollout_by_id(rollout.rollout_id)
        finally:
            with raw(other) as connection:
                connection.execute(f"DROP SCHEMA {other.partition('&schema=')[2]} CASCADE")


@pytest.mark.parametrize(("durability", "level"), [("process", "local"), ("power", "on")])
async def test_durability_is_what_was_asked_for(postgres_url: str, durability: Any, level: str) -> None:
    def look(tx: Any) -> str:
        return tx._cursor.execute("SHOW synchronous_commit").fetchone()[0]

    async with PostgresLightningStore(postgres_url, durability=durability) as store:
        assert await store._driver.write(look, (), {}) == level


async def test_ten_thousand_claims_of_two_stores_take_each_rollout_once(
    stores: list[PostgresLightningStore],
) -> None:
    n = 10_000
    for start in range(0, n, 2000):
        requests = [EnqueueRolloutRequest(input=start + i) for i in range(2000)]
        await stores[start % 2].enqueue_many_rollouts(requests)
    taken: list[int] = []

    async def take(store: PostgresLightningStore, worker: str, limit: int) -> None:
        while claimed := await store.dequeue_many_rollouts(limit=limit, worker_id=worker):
            assert [rollout.input for rollout in claimed] == sorted(rollout.input for rollout in claimed)
            taken.extend(rollout.input for rollout in claimed)

    async with asyncio.TaskGroup() as group:
        for k, store in enumerate(stores * 3):
            group.create_task(take(store, f"w{k}", limit=1 + 10 * k))
    assert sorted(taken) == list(range(n))
    assert (await stores[0].statistics())["total_attempts"] == n


async def test_two_workers_race_for_one_rollout_and_one_wins(stores: list[PostgresLightningStore]) -> None:
    for i in range(50):
        await stores[0].enqueue_rollout(i)
        found = await asyncio.gather(*(store.dequeue_rollout() for store in stores * 2))
        assert [rollout.input for rollout in found if rollout is not None] == [i]


async def test_a_claim_repeated_while_the_first_is_under_way_is_one_claim(
    stores: list[PostgresLightningStore],
) -> None:
    await stores[0].enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(40)])
    for i in range(10):
        found = await asyncio.gather(*(store.dequeue_many_rollouts(limit=2, claim_id=f"c{i}") for store in stores * 2))
        attempts = {tuple(rollout.attempt.attempt_id for rollout in claimed) for claimed in found}
        assert len(attempts) == 1
    assert (await stores[0].statistics())["total_attempts"] == 20


async def test_a_rollout_made_by_two_at_once_is_one_rollout(stores: list[PostgresLightningStore]) -> None:
    for i in range(10):
        names = [f"{i}-{k}" for k in range(10)]
        orders = [names, names[::-1], random.Random(i).sample(names, 10), names]
        await asyncio.gather(
            *(
                store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, rollout_id=name) for name in order])
                for store, order in zip(stores * 2, orders, strict=True)
            )
        )
    assert len(await stores[0].query_rollouts()) == 100
    started = await asyncio.gather(
        *(store.start_rollout(1, rollout_id="mine", attempt_id="at") for store in stores * 2)
    )
    assert len({rollout.model_dump_json() for rollout in started}) == 1


async def test_a_queued_rollout_that_somebody_just_holds_is_still_claimed(
    stores: list[PostgresLightningStore], postgres_url: str
) -> None:
    rollout = await stores[0].enqueue_rollout(1)
    with raw(postgres_url) as holder:
        holder.execute("BEGIN")
        holder.execute("UPDATE rollouts SET metadata = '{}'")
        claim = asyncio.create_task(stores[0].dequeue_rollout())
        await asyncio.sleep(0.2)
        assert not claim.done()
        holder.execute("ROLLBACK")
        async with asyncio.timeout(SOON):
            found = await claim
    assert found is not None
    assert found.rollout_id == rollout.rollout_id


async def test_claims_wait_for_what_a_stopped_process_holds_and_nobody_else_does(
    stores: list[PostgresLightningStore], postgres_url: str
) -> None:
    store = stores[0]
    held = await store.enqueue_rollout("held")
    with raw(postgres_url) as stopped:
        stopped.execute("BEGIN")
        stopped.execute("SELECT * FROM rollouts FOR UPDATE")
        claims = [asyncio.create_task(store.dequeue_rollout(f"w{k}", timeout_seconds=SOON)) for k in range(12)]
        await asyncio.sleep(1.0)
        began = time.monotonic()
        for i in range(5):
            await store.update_worker("busy")
            assert (await store.start_rollout(i)).status == "preparing"
        await store.enqueue_rollout("free")
        done, waiting = await asyncio.wait(claims, return_when="FIRST_COMPLETED")
        assert time.monotonic() - began < SOON / 2
        assert [claim.result().input for claim in done] == ["free"]  # type: ignore[union-attr]
        stopped.execute("ROLLBACK")
    done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
    assert [claim.result().rollout_id for claim in done] == [held.rollout_id]  # type: ignore[union-attr]
    for claim in waiting:
        claim.cancel()


async def test_spans_of_one_attempt_are_numbered_once_whoever_adds_them(stores: list[PostgresLightningStore]) -> None:
    rollout = await stores[0].start_rollout(1)

    async def add(store: PostgresLightningStore, k: int) -> None:
        for i in range(25):
            await store.add_span(span_of(rollout, f"{k}-{i}"))

    await asyncio.gather(*(add(store, k) for k, store in enumerate(stores * 2)))
    spans = await stores[0].query_spans(rollout.rollout_id)
    assert [span.sequence_id for span in spans] == list(range(1, 101))


async def test_bulk_writers_in_any_order_do_not_stand_in_each_others_way(
    stores: list[PostgresLightningStore],
) -> None:
    rollouts = [await stores[0].start_rollout(i, worker_id=f"w{i % 3}") for i in range(8)]

    async def add(store: PostgresLightningStore, k: int) -> None:
        chance = random.Random(k)
        for i in range(15):
            order = chance.sample(rollouts, len(rollouts))
            await store.add_many_spans([span_of(rollout, f"{k}-{i}") for rollout in order])

    started = time.monotonic()
    await asyncio.gather(*(add(store, k) for k, store in enumerate(stores * 2)))
    assert time.monotonic() - started < 30
    for rollout in rollouts:
        assert len(await stores[1].query_spans(rollout.rollout_id)) == 60


async def test_an_attempt_that_two_report_on_ends_once(stores: list[PostgresLightningStore]) -> None:
    for i in range(20):
        rollout = await stores[0].start_rollout(i)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        ends = await asyncio.gather(
            stores[0].update_attempt(**ids, status="succeeded"),
            stores[1].update_attempt(**ids, status="failed"),
            stores[1].update_rollout(rollout.rollout_id, status="cancelled"),
            stores[0].add_span(span_of(rollout, "s")),
            return_exceptions=True,
        )
        ended = [end.status for end in ends[:2] if not isinstance(end, BaseException)]  # type: ignore[union-attr]
        assert len(ended) == 1
        now = await stores[0].get_rollout_by_id(rollout.rollout_id)
        assert isinstance(now, AttemptedRollout)
        assert now.attempt.status == ended[0]
        assert now.status in ("cancelled", ended[0])
        assert (now.status == "cancelled") == (not isinstance(ends[2], BaseException))


async def test_versions_of_resources_are_counted_by_one_at_a_time(stores: list[PostgresLightningStore]) -> None:
    written = await asyncio.gather(
        *(store.update_resources("r", {"p": PromptTemplate(template=f"{k}")}) for k, store in enumerate(stores * 5))
    )
    assert sorted(update.version for update in written) == list(range(1, 11))
    latest = await stores[0].get_latest_resources()
    assert latest is not None
    assert latest.version == 10


async def test_time_is_the_servers_whatever_the_clocks_of_the_stores_say(
    stores: list[PostgresLightningStore], machine_clock: MachineClock
) -> None:
    now = time.time()
    machine_clock.step(-86_400)
    machine_clock.let_pass(3600)
    rollout = await stores[0].start_rollout(1, config=RolloutConfig(timeout_seconds=3600))
    assert abs(rollout.start_time - now) < 60
    assert await stores[1].sweep() == []
    ended = await stores[1].update_attempt(rollout.rollout_id, "latest", status="succeeded")
    assert ended.end_time is not None
    assert ended.end_time >= rollout.attempt.start_time


async def test_only_one_store_sweeps_an_attempt(stores: list[PostgresLightningStore]) -> None:
    config = RolloutConfig(timeout_seconds=0.001)
    for i in range(30):
        await stores[0].start_rollout(i, config=config)
    swept = await asyncio.gather(*(store.sweep(time.time() + 1) for store in stores * 2))
    ended = [attempt.attempt_id for attempts in swept for attempt in attempts]
    assert len(ended) == len(set(ended))
    ended += [attempt.attempt_id for attempt in await stores[0].sweep(time.time() + 1)]
    assert len(ended) == 30


async def test_a_rollout_pinned_while_it_is_forgotten_is_kept_or_unknown(
    stores: list[PostgresLightningStore],
) -> None:
    ids: list[str] = []
    for i in range(40):
        rollout = await stores[0].start_rollout(i)
        await stores[0].update_attempt(rollout.rollout_id, "latest", status="succeeded")
        ids.append(rollout.rollout_id)

    async def pin(rollout_id: str) -> bool:
        try:
            await stores[1].pin(rollout_id, [rollout_id])
        except UnknownRollout:
            return False
        return True

    async def prune() -> None:
        for _ in range(8):
            await stores[0].prune(Retention(max_rollouts=0), limit=5)

    pinned, _ = await asyncio.gather(asyncio.gather(*map(pin, ids)), prune())
    kept = {rollout.rollout_id for rollout in await stores[0].query_rollouts()}
    assert {rollout_id for rollout_id, there in zip(ids, pinned, strict=True) if there} <= kept


# ---- waiting ----------------------------------------------------------------------------------------------------------


async def test_waiters_are_woken_by_what_another_store_commits(stores: list[PostgresLightningStore]) -> None:
    ours, theirs = stores
    seconds: dict[str, list[float]] = {"claim": [], "finish": [], "spans": []}
    for i in range(20):
        claim = asyncio.create_task(ours.dequeue_rollout(timeout_seconds=SOON))
        await asyncio.sleep(0.01)
        began = time.monotonic()
        await theirs.enqueue_rollout(i)
        rollout = await claim
        seconds["claim"].append(time.monotonic() - began)
        assert rollout is not None
        after = (await ours.poll_new_spans(after="latest")).after
        watch = asyncio.create_task(ours.poll_new_spans(after=after, timeout_seconds=SOON))
        finish = asyncio.create_task(ours.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=SOON))
        await asyncio.sleep(0.01)
        began = time.monotonic()
        await theirs.add_span(span_of(rollout, "s"))
        assert [span.span_id for span in (await watch).spans] == ["s"]
        seconds["spans"].append(time.monotonic() - began)
        began = time.monotonic()
        await theirs.update_attempt(rollout.rollout_id, "latest", status="succeeded")
        assert len(await finish) == 1
        seconds["finish"].append(time.monotonic() - began)
    print({name: f"{1000 * statistics.median(times):.1f} ms" for name, times in seconds.items()})
    assert max(statistics.median(times) for times in seconds.values()) < 0.5


async def test_news_of_many_rollouts_arrives_whole(stores: list[PostgresLightningStore]) -> None:
    ours, theirs = stores
    names = [f"{i:04}-" + "é" * 40 for i in range(300)]
    await theirs.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, rollout_id=name) for name in names])
    for name in names:
        await theirs.start_attempt(name)
    after = (await ours.get_news()).after
    await theirs.sweep(time.time())
    wait = asyncio.create_task(ours.wait_for_rollouts(rollout_ids=names, timeout=SOON))
    await asyncio.sleep(0.05)

    def finish(tx: Any) -> None:
        tx.run("set_rollout_status", seq=1, status="running", end_time=None)
        tx.finished += names

    with raw_of(theirs) as connection:
        connection.execute("UPDATE rollouts SET status = 'succeeded', end_time = 1")
    await theirs._driver.write(finish, (), {})
    with raw_of(theirs) as connection:
        connection.execute("UPDATE rollouts SET status = 'succeeded', end_time = 1")
    assert len(await wait) == 300
    assert (await ours.get_news(after=after, timeout_seconds=SOON)).finished == names


def raw_of(store: PostgresLightningStore) -> psycopg.Connection[Any]:
    return raw(store._address[0])


@pytest.mark.parametrize("names", [[], ["a"], ["x" * 100] * 500, ["é" * 3000], ["a", "b" * 9000, "c"]])
def test_a_notification_is_never_too_long(names: list[str]) -> None:
    texts = news_of("me", 3, names, True)
    assert all(len(text.encode()) < 8000 for text in texts)
    news = [json.loads(text) for text in texts]
    told = [name for entry in news if len(entry) > 1 for name in entry[2]]
    assert told == [name for name in names if len(json.dumps(name)) < 7000]
    everything = any(len(entry) == 1 for entry in news)  # look at everything: nothing is named
    assert everything == (told != names)
    assert everything or sum(entry[1] for entry in news) == 3


async def test_spans_of_slow_transactions_are_not_skipped(
    stores: list[PostgresLightningStore], postgres_url: str
) -> None:
    rollout = await stores[0].start_rollout(1)
    with raw(postgres_url) as slow:
        slow.execute("BEGIN")
        slow.execute("SELECT pg_current_xact_id()")
        await stores[1].add_span(span_of(rollout, "quick"))
        watch = asyncio.create_task(stores[0].poll_new_spans(timeout_seconds=SOON))
        await asyncio.sleep(0.3)
        assert not watch.done(), "a span with a lower number may still come"
        slow.execute(
            "INSERT INTO spans (rollout, attempt, sequence_id, span_id, trace_id, name, kind, status_code, attributes,"
            " events, resource) VALUES (1, 1, 9, 'slow', 't', 'n', 'INTERNAL', 'OK', '', '', '')"
        )
        slow.execute("COMMIT")  # and nobody says so
    assert [span.span_id for span in (await watch).spans] == ["slow", "quick"]


async def test_a_watcher_sees_every_span_once_while_many_write(stores: list[PostgresLightningStore]) -> None:
    rollouts = [await stores[0].start_rollout(i) for i in range(4)]

    async def add(store: PostgresLightningStore, k: int) -> None:
        for i in range(60):
            await store.add_many_spans([span_of(rollouts[k], f"{k}-{i}-{j}") for j in range(1 + i % 3)])

    seen: list[str] = []

    async def watch() -> None:
        async for span in stores[1].watch_spans(after=None):
            seen.append(span.span_id)
            if len(seen) == 4 * 120:
                return

    async with asyncio.timeout(60):
        await asyncio.gather(watch(), *(add(store, k) for k, store in enumerate(stores * 2)))
    assert len(set(seen)) == len(seen)
    assert (await stores[0].poll_new_spans(after=(await stores[0].poll_new_spans(after="latest")).after)).spans == []


async def test_a_cursor_goes_on_after_the_database_was_restored_into_another_server(postgres_url: str) -> None:
    async with PostgresLightningStore(postgres_url) as store:
        rollout = await store.start_rollout(1)
        for i in range(5):
            await store.add_span(span_of(rollout, f"{i}"))
        with raw(postgres_url) as connection:
            connection.execute(
                "UPDATE spans SET txid = txid + 1000000000"
            )  # it had seen more transactions than this one
            where = connection.execute("SELECT txid, key FROM spans WHERE span_id = '2'").fetchone()
    assert where is not None
    async with PostgresLightningStore(postgres_url) as store:
        assert [span.span_id for span in (await store.poll_new_spans()).spans] == ["0", "1", "2", "3", "4"]
        page = await store.poll_new_spans(after=f"{where[0]}.{where[1]}")
        assert [span.span_id for span in page.spans] == ["3", "4"]
        await store.add_span(span_of(rollout, "5"))
        assert [span.span_id for span in (await store.poll_new_spans(after=page.after)).spans] == ["5"]
        page = await store.poll_new_spans(after=f"{where[0]}.{where[1]}")
        assert [span.span_id for span in page.spans] == ["3", "4", "5"]


# ---- opening ----------------------------------------------------------------------------------------------------------


async def test_many_open_an_empty_database_at_once(postgres_url: str) -> None:
    opened: list[PostgresLightningStore] = []
    threads = [threading.Thread(target=lambda: opened.append(PostgresLightningStore(postgres_url))) for _ in range(8)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert len(opened) == 8
    await opened[0].enqueue_rollout(1)
    for store in opened:
        assert len(await store.query_rollouts()) == 1
        await store.close()


async def test_what_another_program_or_a_newer_leyden_wrote_is_refused(postgres_url: str) -> None:
    schema = postgres_url.partition("&schema=")[2]
    with raw(postgres_url) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
        connection.execute("CREATE TABLE theirs (x int)")
        with pytest.raises(StoreError, match=f"{schema}.*another program.*schema=NAME"):
            PostgresLightningStore(postgres_url)
        connection.execute("DROP TABLE theirs")
        await PostgresLightningStore(postgres_url).close()
        connection.execute("UPDATE leyden_schema SET version = 99")
        with pytest.raises(StoreError, match="newer Leyden"):
            PostgresLightningStore(postgres_url)


async def test_nothing_stays_behind_of_a_store_that_was_closed(postgres_url: str) -> None:
    before = ours()
    store = PostgresLightningStore(postgres_url, connections=4)
    await asyncio.gather(*(store.enqueue_rollout(i) for i in range(20)), *(store.statistics() for _ in range(20)))
    assert ours() - before == 5
    await store.close()
    assert ours() == before
    with raw(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM connections").fetchone() == (0,)
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'leyden'"
        for _ in range(100):
            if (left := connection.execute(query).fetchone()) == (0,):
                break
            await asyncio.sleep(0.01)
        assert left == (0,)


async def test_a_store_that_is_dropped_ends_its_threads(postgres_url: str) -> None:
    before = ours()
    store = PostgresLightningStore(postgres_url)
    await store.enqueue_rollout(1)
    del store
    for _ in range(1000):
        if ours() == before:
            break
        await asyncio.sleep(0.01)
    assert ours() == before


def count_in_child(pickled: bytes, answer: Any) -> None:
    async def count() -> int:
        async with pickle.loads(pickled) as store:
            await store.enqueue_rollout("child's")
            return len(await store.query_rollouts())

    answer.put(asyncio.run(count()))


async def test_a_store_goes_to_a_child_process_by_its_address(postgres_url: str) -> None:
    context = multiprocessing.get_context("spawn")
    async with PostgresLightningStore(f"{postgres_url}&password=secret") as store:
        await store.enqueue_rollout("parent's")
        answer = context.Queue()
        child = context.Process(target=count_in_child, args=(pickle.dumps(store), answer))
        child.start()
        assert await asyncio.to_thread(answer.get, True, 60) == 2
        child.join()
        assert len(await store.query_rollouts()) == 2
        assert "secret" not in store.url


async def test_a_forked_child_is_told_to_open_its_own(postgres_url: str) -> None:
    async with PostgresLightningStore(postgres_url) as store:
        await store.enqueue_rollout(1)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                coroutine = store.query_rollouts()
                coroutine.send(None)
            except StoreError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.close(writer)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert b"forked child" in os.read(reader, 4096)
        os.close(reader)
        assert len(await store.query_rollouts()) == 1


async def test_a_server_that_takes_no_writes_is_refused(postgres_url: str) -> None:
    with pytest.raises(StoreError, match="read-only"):
        PostgresLightningStore(f"{postgres_url}&options=-c default_transaction_read_only=on")


# ---- values -----------------------------------------------------------------------------------------------------------


async def test_a_name_with_nul_is_unknown_and_a_text_with_it_is_kept(stores: list[PostgresLightningStore]) -> None:
    store = stores[0]
    rollout = await store.start_rollout({"a\0": "b\0"}, metadata={"c": "\0"})
    await store.add_span(span_of(rollout, "s", name="n\0", attributes={"\0": "\0"}))
    for call in (store.get_rollout_by_id("ro\0"), store.update_rollout("ro\0"), store.query_spans("ro\0")):
        with pytest.raises(UnknownRollout):
            await call
    assert list(await store.query_rollouts(rollout_id_in=["\0"])) == []
    assert list(await store.query_spans(rollout.rollout_id, name_contains="\0")) == []
    (found,) = await store.query_rollouts(rollout_id_in=["\0", rollout.rollout_id])
    assert (found.input, found.metadata) == ({"a\0": "b\0"}, {"c": "\0"})
    (span,) = await store.query_spans(rollout.rollout_id)
    assert (span.name, span.attributes) == ("n\\x00", {"\0": "\0"})


# ---- speed ------------------------------------------------------------------------------------------------------------


FILL = """
    INSERT INTO rollouts (rollout_id, status, input, config, metadata, start_time, end_time, attempts)
    SELECT 'old-' || i, 'succeeded', '1', '', '', i, i + 1, 1 FROM generate_series(1, 100000) i;
    INSERT INTO attempts (rollout, sequence_id, attempt_id, status, start_time, end_time)
    SELECT i, 1, 'at-' || i, 'succeeded', i, i + 1 FROM generate_series(1, 100000) i;
    INSERT INTO spans (rollout, attempt, sequence_id, span_id, trace_id, name, kind, status_code, attributes, events, resource)
    SELECT i, 1, 1, 's', 't', 'n', 'INTERNAL', 'OK', '', '', '' FROM generate_series(1, 100000) i
"""
PLANS = {
    "next_in_queue": ({"limit": 1}, "rollouts_queue"),
    "is_anything_queued": ({}, "using rollouts_"),
    "get_rollout": ({"rollout_id": "x"}, "rollouts_rollout_id_key"),
    "get_rollout_with_attempt": ({"rollout_id": "x", "attempt_id": "y"}, "attempts_pkey"),
    "get_span_target": ({"rollout_id": "x", "attempt_id": "y"}, "attempts_pkey"),
    "get_claim": ({"claim_id": "x"}, "attempts_claim"),
    "lock_rollouts": ({"rollout_ids": ["x"]}, "rollouts_rollout_id_key"),
    "select_overdue": ({"now": 0.0}, "attempts_unfinished"),
    "select_unfinished": ({}, "attempts_unfinished"),
    "next_deadlines": ({}, "attempts_unfinished"),
    "select_new_positions": ({"txid": 0, "key": 0, "last_txid": 9, "last_key": 9}, "spans_arrival"),
    "get_token_record": ({"rollout": 1, "attempt": 1, "span_id": "x"}, "spans_of_attempt"),
    "select_token_chain": ({"key": 1}, "spans_pkey"),
    "select_spans": ({}, "spans_of_attempt"),
    "are_spans_hidden": ({}, "spans_arrival"),
    "get_last_span": ({"txid": 1, "key": 1}, "spans_arrival"),
    "claim_again": ({"claim_id": "x"}, "attempts_claim"),
    "get_span_counters": ({"rollout_id": "x"}, "attempts_pkey"),
    "count_under_way": ({}, "attempts_unfinished"),
    "select_prunable": ({"status": "failed", "limit": 10}, "rollouts_finished_ended"),
    "prune_rollout": ({"seq": 1}, "rollouts_pkey"),
    "prune_attempts": ({"seq": 1}, "attempts_pkey"),
    "prune_spans": ({"seq": 1}, "spans_of_attempt"),
    "newest_rollout": ({}, "rollouts_pkey"),
    "rollout_of_newest_span": ({}, "spans_arrival"),
    "get_latest_resources": ({}, "resources_pkey"),
    "get_resources": ({"resources_id": "x"}, "resources_resources_id_version_key"),
}


SUFFIXES = {
    "select_new_positions": " ORDER BY 1, 2 LIMIT 1000",
    "select_spans": " WHERE s.rollout = 1 AND s.attempt = 1 ORDER BY s.sequence_id, s.key",
}


@pytest.mark.parametrize("analyzed", [False, True])
async def test_no_query_scans_a_long_history(postgres_url: str, analyzed: bool) -> None:
    async with PostgresLightningStore(postgres_url) as store:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(10)])
        with raw(postgres_url) as connection:
            connection.execute(FILL)
            if analyzed:
                connection.execute("ANALYZE")
        with connect(Target.parse(postgres_url, "process")) as connection:
            for name, (parameters, index) in PLANS.items():
                statement = placeholders(load_queries("postgres")[name])
                statement += SUFFIXES.get(name, "")
                plan = connection.execute(f"EXPLAIN {statement}", parameters).fetchall()
                text = "\n".join(line for (line,) in plan)
                assert index in text, f"{name}:\n{text}"
                assert "Seq Scan" not in text, f"{name}:\n{text}"
            claim = placeholders(load_queries("postgres")["next_in_queue"])
            explained = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {claim}", {"limit": 1}).fetchone()
            assert explained is not None
            plan = explained[0][0]["Plan"]
            assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 20
