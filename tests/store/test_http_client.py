"""The client: it repeats what is safe, says what it does not know, and waits without asking again and again."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from leyden.errors import ConfigError, StoreClosed, StoreError
from leyden.store import InMemoryLightningStore, LightningStore, LightningStoreClient, LightningStoreServer, open_store
from leyden.types import LLM, EnqueueRolloutRequest, PromptTemplate, Span

SOON = 10.0


class Recorded(LightningStoreServer):
    """A server of a store in memory that counts what it is asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

        class Counting(InMemoryLightningStore):
            def __getattribute__(counting, name: str) -> Any:  # noqa: N805
                if not name.startswith("_"):
                    self.asked[name] += 1
                return super().__getattribute__(name)

        super().__init__(Counting())


@pytest.fixture
async def server() -> AsyncIterator[Recorded]:
    async with Recorded() as server, server.store:
        yield server


@pytest.fixture
async def client(server: Recorded) -> AsyncIterator[LightningStoreClient]:
    async with server.client() as client:
        yield client


# ---- failures on the way -------------------------------------------------------------------------------------------------

Trouble = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@asynccontextmanager
async def in_front_of(
    server: LightningStoreServer, spoil: Callable[[int], str | None], answers: list[bytes] | None = None
) -> AsyncIterator[str]:
    """A proxy that passes the n-th request on to the server, or spoils it: "drop" before it, "lose" its answer, "502";
    "408" in place of the server, as it says when a body does not come in time.

    answers: where the server's answers are collected.
    """
    host, port = server.endpoint.removeprefix("http://").split(":")
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                body = await reader.readexactly(length)
                what = spoil(count)
                count += 1
                if what == "drop":
                    break
                if what == "408":
                    writer.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 4\r\n\r\nlate")
                    break
                up_reader, up_writer = await asyncio.open_connection(host, int(port))
                up_writer.write(head.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + body)
                answer = await up_reader.read()
                up_writer.close()
                if answers is not None:
                    answers.append(answer)
                if what == "lose":
                    break
                if what == "502":
                    answer = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 3\r\n\r\nbad"
                writer.write(answer)
                break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with proxy:
        yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("what", ["drop", "lose", "502", "408"])
async def test_a_request_that_is_lost_is_made_again_and_done_once(server: Recorded, what: str) -> None:
    async with in_front_of(server, lambda n: what if n % 2 == 0 else None) as url, LightningStoreClient(url) as client:
        await client.enqueue_rollout("a")
        await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=k) for k in "bc"])
        claimed = await client.dequeue_rollout("w")
        assert claimed is not None
        assert claimed.input == "a"
        again = await client.start_attempt(claimed.rollout_id)
        span = Span(
            rollout_id=again.rollout_id,
            attempt_id=again.attempt.attempt_id,
            sequence_id=0,
            trace_id="t",
            span_id="s",
            name="n",
        )
        await client.add_many_spans([span])
        await client.update_attempt(again.rollout_id, again.attempt.attempt_id, status="succeeded")
        started = await client.start_rollout("d")
        added = await client.add_resources({"llm": LLM(endpoint="http://x", model="m")})
        assert await client.get_resources_by_id(added.resources_id) == added
    store = server.store
    assert [rollout.input for rollout in await store.query_rollouts()] == ["a", "b", "c", "d"]
    assert [attempt.sequence_id for attempt in await store.query_attempts(claimed.rollout_id)] == [1, 2]
    assert [span.sequence_id for span in await store.query_spans(claimed.rollout_id)] == [1]
    assert (await store.query_attempts(started.rollout_id)).total == 1
    assert (await store.query_resources()).total == 1
    assert (await store.get_latest_resources()).version == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["drop", "lose", "502"])
async def test_what_cannot_be_repeated_is_an_unknown_outcome(server: Recorded, what: str) -> None:
    rollout = await server.store.start_rollout("a")
    async with in_front_of(server, lambda n: what) as url, LightningStoreClient(url, retry_seconds=5.0) as client:
        with pytest.raises(StoreError, match=r"outcome is unknown"):
            await client.release_claims()
        with pytest.raises(StoreError, match=r"outcome is unknown"):
            await client.update_rollout(rollout.rollout_id, status="requeuing")


async def test_what_the_server_did_not_get_in_time_is_sent_again(server: Recorded) -> None:
    await server.store.start_rollout("a")
    async with in_front_of(server, lambda n: None if n else "408") as url, LightningStoreClient(url) as client:
        assert len(await client.release_claims()) == 1


async def test_an_error_of_the_store_is_raised_at_once_and_as_itself(server: Recorded) -> None:
    class Full(InMemoryLightningStore):
        tries = 0

        async def enqueue_many_rollouts(self, rollouts: Any) -> Any:
            self.tries += 1
            raise StoreError("sqlite:///x: the disk is full; make room")

    full = Full()
    async with full, LightningStoreServer(full) as server, server.client() as client:
        with pytest.raises(StoreError, match=r"^sqlite:///x: the disk is full; make room$"):
            await client.enqueue_rollout(1)
    assert full.tries == 1


async def test_what_is_no_store_is_said(server: Recorded) -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\nconnection: close\r\n\r\n<html>Hi</html>")
        writer.close()

    async with await asyncio.start_server(page, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        async with LightningStoreClient(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(StoreError, match="cannot read"):
                await client.statistics()
            with pytest.raises(StoreError, match="200"):
                await client.enqueue_rollout(1)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:p@x:1", "http://x:1/?a=b", "x:1"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        LightningStoreClient(url)


def test_a_store_is_opened_by_its_servers_url(server: Recorded) -> None:
    opened = open_store(server.endpoint, token="t")
    assert isinstance(opened, LightningStoreClient)
    assert opened.url == server.endpoint
    for wrong in ({"durability": "power"}, {"durability": "process"}):
        with pytest.raises(ConfigError, match="an option of the server"):
            open_store(server.endpoint, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="token is for a store server"):
        open_store("memory://", token="t")


# ---- waiting -----------------------------------------------------------------------------------------------------------


async def test_many_who_wait_are_one_long_poll(server: Recorded, client: LightningStoreClient) -> None:
    rollouts = await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=k) for k in range(50)])
    waiting = [
        asyncio.create_task(client.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=SOON))
        for rollout in rollouts
    ]
    await asyncio.sleep(0.5)
    quiet = server.asked.copy()
    assert quiet["wait_for_rollouts"] >= 50
    await asyncio.sleep(0.5)
    changed = server.asked - quiet
    assert not {name for name in changed if name not in ("sweep", "next_deadline", "capabilities")}, "nobody polls"
    assert quiet["get_news"] < 10
    for rollout in rollouts[:25]:
        await server.store.update_rollout(rollout.rollout_id, status="cancelled")
    done = await asyncio.gather(*waiting[:25])
    assert [rollout.status for (rollout,) in done] == ["cancelled"] * 25
    assert not any(task.done() for task in waiting[25:])
    for rollout in rollouts[25:]:
        await client.update_rollout(rollout.rollout_id, status="cancelled")
    await asyncio.gather(*waiting)


async def test_claims_beyond_the_turns_at_the_server_wait_here(server: Recorded, client: LightningStoreClient) -> None:
    claiming = [asyncio.create_task(client.dequeue_rollout(f"w{k}", timeout_seconds=SOON)) for k in range(30)]
    in_vain = [asyncio.create_task(client.dequeue_rollout(f"v{k}", timeout_seconds=0.2)) for k in range(30)]
    assert await asyncio.gather(*in_vain) == [None] * 30
    await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=k) for k in range(30)])
    claimed = await asyncio.gather(*claiming)
    assert sorted(rollout.input for rollout in claimed if rollout) == list(range(30))


async def test_claims_that_are_cancelled_at_any_moment_lose_nothing(client: LightningStoreClient) -> None:
    n = 40
    got: list[str] = []

    async def worker(name: str) -> None:
        while rollout := await client.dequeue_rollout(name, timeout_seconds=0.5):
            got.append(rollout.rollout_id)

    async def impatient(delay: float) -> None:
        try:
            async with asyncio.timeout(delay):
                rollout = await client.dequeue_rollout("impatient", timeout_seconds=SOON)
                assert rollout is not None
                got.append(rollout.rollout_id)
        except TimeoutError:
            pass

    ids = [f"ro-{k}" for k in range(n)]
    leaving = [asyncio.create_task(impatient(k * 0.0007)) for k in range(n)]
    for rollout_id in ids:
        await client.enqueue_rollout(1, rollout_id=rollout_id)
    await asyncio.gather(*leaving)
    await asyncio.gather(*(worker(f"w{k}") for k in range(3)))
    assert sorted(got) == sorted(ids)


async def test_spans_are_watched_as_they_come(client: LightningStoreClient) -> None:
    rollout = await client.start_rollout("a")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    waiting = asyncio.create_task(client.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=SOON))
    await asyncio.sleep(0.1)  # a long poll that does not hear of spans is under way
    page = await client.poll_new_spans(after="latest")
    watching = asyncio.create_task(client.poll_new_spans(after=page.after, timeout_seconds=SOON))
    await asyncio.sleep(0.05)
    await client.add_span(Span(**ids, sequence_id=0, trace_id="t", span_id="s", name="n"))
    async with asyncio.timeout(SOON / 2):
        assert [span.span_id for span in (await watching).spans] == ["s"]
    await client.update_attempt(**ids, status="succeeded")
    assert [rollout.status for rollout in await waiting] == ["succeeded"]


async def test_each_client_remembers_by_itself_which_spans_it_was_given(client: LightningStoreClient) -> None:
    rollout = await client.start_rollout("a")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    await client.add_span(Span(**ids, sequence_id=0, trace_id="t", span_id="s", name="n"))
    async with LightningStoreClient(client.url) as other:
        for each in (client, other, pickle.loads(pickle.dumps(client))):
            assert [span.span_id for span in (await each.poll_new_spans()).spans] == ["s"]
            assert (await each.poll_new_spans()).spans == []
            if each not in (client, other):
                await each.close()


async def test_spans_come_back_with_their_numbers_and_are_not_sent_back(client: LightningStoreClient) -> None:
    rollout = await client.start_rollout("a")

    def span(span_id: str, sequence_id: int = 0) -> Span:
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        return Span(
            **ids, sequence_id=sequence_id, trace_id="t", span_id=span_id, name="n", attributes={"x": "y" * 999}
        )

    first = await client.add_many_spans([span("a"), span("b", 7)])
    assert first == [span("a", 1), span("b", 7)]
    assert await client.add_many_spans([span("b", 7), span("c"), span("c"), span("a")]) == [span("c", 8)]
    assert list(await client.query_spans(rollout.rollout_id)) == [span("a", 1), span("b", 7), span("c", 8)]


# ---- event loops and threads -------------------------------------------------------------------------------------------


def test_threads_with_loops_of_their_own_use_one_client() -> None:
    """Each loop ends on its own; none leaves an open session behind (a warning is an error here)."""
    store = InMemoryLightningStore()
    server = LightningStoreServer(store)
    asyncio.run(server.start())
    client = server.client()
    seen: list[str] = []

    def thread(k: int) -> None:
        async def work() -> None:
            rollout = await client.enqueue_rollout(k)
            await client.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=0.05)
            claimed = await client.dequeue_rollout(f"w{k}", timeout_seconds=SOON)
            assert claimed is not None
            seen.append(claimed.rollout_id)

        asyncio.run(work())

    threads = [threading.Thread(target=thread, args=(k,)) for k in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(seen)) == 6
    asyncio.run(client.close())
    asyncio.run(server.stop())
    asyncio.run(store.close())


async def test_a_closed_client_says_so_to_those_who_wait_too(server: Recorded) -> None:
    client = server.client()
    rollout = await client.enqueue_rollout(1)
    waiting = [
        asyncio.create_task(client.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=SOON)),
        asyncio.create_task(client.poll_new_spans(after="latest", timeout_seconds=SOON)),
    ]
    await client.dequeue_rollout()
    waiting.append(asyncio.create_task(client.dequeue_rollout(timeout_seconds=SOON)))  # type: ignore[arg-type]
    await asyncio.sleep(0.1)
    await client.close()
    await client.close()
    for task in waiting:
        with pytest.raises(StoreClosed, match="is closed"):
            await task
    with pytest.raises(StoreClosed):
        await client.statistics()


# ---- the cache of resources ------------------------------------------------------------------------------------------------


async def test_resources_are_sent_once_and_never_stale(server: Recorded, client: LightningStoreClient) -> None:
    other: LightningStore = server.store
    first = await client.add_resources({"p": PromptTemplate(template="1")}, resources_id="rs")
    for _ in range(3):
        got = await client.get_resources_by_id("rs")
        assert got == first
        got.resources["p"].template = "mine"  # type: ignore[union-attr]
    second = await other.update_resources("rs", {"p": PromptTemplate(template="2")})
    assert await client.get_resources_by_id("rs") == second
    assert await client.get_latest_resources() == second
    third = await other.add_resources({"p": PromptTemplate(template="3")})
    assert await client.get_latest_resources() == third
    assert await client.get_resources_by_id("rs") == second


async def test_an_answer_that_holds_is_not_sent_again(server: Recorded) -> None:
    await server.store.add_resources({"p": PromptTemplate(template="x" * 10_000)}, resources_id="rs")
    answers: list[bytes] = []
    async with in_front_of(server, lambda n: None, answers) as url, LightningStoreClient(url) as client:
        for _ in range(3):
            assert (await client.get_resources_by_id("rs")).resources["p"].template == "x" * 10_000  # type: ignore[union-attr]
        assert [answer[9:12] for answer in answers] == [b"200", b"304", b"304"]
        assert [len(answer) > 10_000 for answer in answers] == [True, False, False]
        for k in range(40):
            await server.store.add_resources({}, resources_id=f"rs-{k}")
            await client.get_resources_by_id(f"rs-{k}")
        answers.clear()
        await client.get_resources_by_id("rs")
        assert answers[0][9:12] == b"200", "what was not used for long is forgotten"


async def test_what_cannot_be_repeated_takes_no_connection_that_may_be_lost(server: Recorded) -> None:
    async with server.client() as client:
        await client.statistics()
        await server.stop()  # the pooled connection is closed, which the client has not read yet
        await server.start()
        rollout = await server.store.start_rollout("a")
        assert await client.release_claims() == [rollout.rollout_id]
