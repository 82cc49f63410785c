"""A record on which the store itself fails holds up no other, and is delivered when the store takes it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from leyden.errors import StoreError
from leyden.gateway import LLMProxy, dead_letters
from leyden.gateway.spool import SPANS, Spool
from leyden.serving import OnlineSession, outbox
from leyden.store import LightningStoreClient, LightningStoreServer, SqliteLightningStore
from leyden.testing import FakeUpstream
from tests.gateway.caller import new_caller, say
from tests.serving.processes import KEY, resources
from tests.serving.test_faults import until

OF = "NEW.rollout = (SELECT seq FROM rollouts WHERE rollout_id = '{}')"
"""The condition on a span that it belongs to a rollout."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_AGAIN_SECONDS", 0.01)
    for name, seconds in {"_FIRST_SECONDS": 0.1, "_MAX_SECONDS": 0.2}.items():
        monkeypatch.setattr(dead_letters, name, seconds)


@dataclass
class Broken:
    """A store server with a database that breaks."""

    store: SqliteLightningStore
    url: str
    gateway: str
    path: Path

    def break_down(self, at: str, table: str = "feedback") -> None:
        """Let inserting rows fail, so that the server answers with status 503. at: a condition on the row `NEW`."""
        fails = "SELECT RAISE(ABORT, 'failed on purpose')"
        self.execute(f"CREATE TRIGGER broken BEFORE INSERT ON {table} WHEN {at} BEGIN {fails}; END")

    def repair(self) -> None:
        self.execute("DROP TRIGGER broken")

    async def feedback(self) -> list[str]:
        """Return the ids of the feedback in the store, in the order of arrival."""
        return [each.feedback_id for each in await self.store.query_feedback()]

    def execute(self, statement: str) -> None:
        with closing(sqlite3.connect(self.path)) as database, database:
            database.execute(statement)


@pytest.fixture
async def broken(tmp_path: Path) -> AsyncGenerator[Broken]:
    path = tmp_path / "store.db"
    async with SqliteLightningStore(path) as store:
        await store.update_resources("rs", resources("old"))
        await store.set_label("production", "rs", 1)
        async with (
            LightningStoreServer(store) as server,
            FakeUpstream() as upstream,
            LLMProxy(model_list=[upstream.llm()], store=store, live_key=KEY) as gateway,
        ):
            yield Broken(store, server.endpoint, gateway.endpoint, path)


@asynccontextmanager
async def opened_session(broken: Broken, folder: Path) -> AsyncGenerator[OnlineSession]:
    async with (
        LightningStoreClient(broken.url, retry_seconds=0.1) as store,
        OnlineSession(store, gateway=broken.gateway, live_key=KEY, folder=folder) as session,
    ):
        yield session


def give(session: OnlineSession, *feedback_ids: str) -> None:
    """Serve a request for each id, with feedback of that id."""
    for feedback_id in feedback_ids:
        with session.serve(feedback_id, user="ada") as served:
            pass
        session.feedback(served, source="user", reward=1.0, feedback_id=feedback_id)


async def test_a_record_on_which_the_store_fails_is_set_aside_and_its_siblings_arrive(
    broken: Broken, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken.break_down(at="NEW.feedback_id = 'poison'")
    async with opened_session(broken, tmp_path / "session") as session:
        give(session, "a", "poison", "b")
        await until(lambda: session.status().set_aside == 1 and not session.status().waiting)
        give(session, "c")
        await until(lambda: not session.status().waiting)
        assert await broken.feedback() == ["a", "b", "c"]
        status = session.status()
        assert (status.set_aside, status.refused, status.lost, status.store_error) == (1, 0, 0, None)
        aside = tmp_path / "session" / "outbox-aside"
        assert b'"poison"' in aside.read_bytes()
        (said,) = [each.getMessage() for each in caplog.records if "set aside" in each.getMessage()]
        assert "fails on 1 records" in said
        assert str(aside) in said
        assert "failed on purpose" in said
        broken.repair()
        await until(lambda: not session.status().set_aside)
        assert await broken.feedback() == ["a", "b", "c", "poison"]
        assert not aside.stat().st_size


async def test_a_record_that_the_store_answers_with_status_500_is_set_aside(
    broken: Broken, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened_session(broken, tmp_path / "session") as session:
        served = session.begin("q", user="ada")
        await until(lambda: not session.status().waiting)
        broken.execute("UPDATE rollouts SET metadata = '{' || metadata")  # its end finds a row that cannot be read
        session.end(served)
        give(session, "a")
        await until(lambda: session.status().set_aside == 1 and not session.status().waiting)
        assert "failed unexpectedly" in caplog.text
        assert await broken.feedback() == ["a"]
        broken.execute("UPDATE rollouts SET metadata = substr(metadata, 2) WHERE metadata LIKE '{{%'")
        await until(lambda: not session.status().set_aside)
        assert {each.status for each in await broken.store.query_rollouts()} == {"succeeded"}


async def test_a_record_that_is_alone_is_tried_again_before_it_is_set_aside(broken: Broken, tmp_path: Path) -> None:
    async with opened_session(broken, tmp_path / "session") as session:
        with session.serve("q", user="ada") as served:
            pass
        await until(lambda: not session.status().waiting)
        broken.break_down(at="NEW.feedback_id = 'alone'")
        session.feedback(served, source="user", reward=1.0, feedback_id="alone")
        await until(lambda: session.status().store_error is not None)
        assert "failed on purpose" in str(session.status().store_error)
        await until(lambda: session.status().set_aside == 1)
        assert (session.status().waiting, session.status().store_error) == (0, None)
    broken.repair()
    async with opened_session(broken, tmp_path / "session") as session:  # the next process with the folder
        await until(lambda: not session.status().set_aside)
        assert await broken.feedback() == ["alone"]


async def test_nothing_is_lost_or_doubled_while_the_store_fails_on_everything(broken: Broken, tmp_path: Path) -> None:
    broken.break_down(at="true")
    names = [f"{number:03d}" for number in range(300)]  # more than one batch
    async with opened_session(broken, tmp_path / "session") as session:
        give(session, *names[:200])
        await until(lambda: session.status().set_aside > 0)
        give(session, *names[200:])
        await until(lambda: session.status().set_aside == 300)
        assert not await broken.feedback()
        broken.repair()
        await until(lambda: not session.status().set_aside and not session.status().waiting)
        assert sorted(await broken.feedback()) == names
        status = session.status()
        assert (status.refused, status.lost) == (0, 0)
        assert (await broken.store.query_rollouts(status_in=["succeeded"], limit=1)).total == 300


async def test_a_call_on_which_the_store_fails_is_set_aside_by_the_gateway(broken: Broken, tmp_path: Path) -> None:
    spool, waits = tmp_path / "calls.jsonl", tmp_path / "calls.jsonl-aside"
    async with FakeUpstream() as upstream, LightningStoreClient(broken.url, retry_seconds=0.1) as store:
        async with LLMProxy(model_list=[upstream.llm()], store=store, spool=spool) as proxy:
            poison, other = [await new_caller(proxy, broken.store) for _ in range(2)]
            broken.break_down(at=OF.format(poison.rollout_id), table="spans")
            async with poison.client, other.client:
                for caller in (poison, other, poison):
                    await caller.client.chat.completions.create(model="fake", messages=say("hello"))
            with pytest.raises(StoreError, match="could not be recorded"):
                await proxy.flush(poison.rollout_id, poison.attempt_id)
            assert len(await other.spans()) == 1
            assert len(waits.read_bytes().splitlines()) == 2
        broken.repair()
        async with LLMProxy(model_list=[upstream.llm()], store=store, spool=spool):  # the next one with the spool
            await until(lambda: not waits.stat().st_size)
        assert len(await broken.store.query_spans(poison.rollout_id)) == 2


async def test_a_bad_record_among_those_that_waited_for_the_store_holds_up_no_other(
    broken: Broken, tmp_path: Path
) -> None:
    spool, waits = tmp_path / "calls.jsonl", tmp_path / "calls.jsonl-aside"
    async with FakeUpstream() as upstream, LightningStoreClient(broken.url, retry_seconds=0.1) as store:
        async with LLMProxy(model_list=[upstream.llm()], store=broken.store) as proxy:
            callers = [await new_caller(proxy, broken.store) for _ in range(9)]
            for caller in callers:
                async with caller.client:
                    await caller.client.chat.completions.create(model="fake", messages=say("hello"))
                await caller.spans()
        spans = [(await broken.store.query_spans(caller.rollout_id))[0] for caller in callers]
        with closing(Spool(spool, max_bytes=2**20, items=SPANS)) as earlier:  # as a killed gateway leaves it
            earlier.append([span.model_copy(update={"span_id": f"{number:016x}"}) for number, span in enumerate(spans)])
        broken.break_down(at=OF.format(callers[4].rollout_id), table="spans")
        async with LLMProxy(model_list=[upstream.llm()], store=store, spool=spool):
            await until(lambda: not spool.stat().st_size)
            assert len(waits.read_bytes().splitlines()) == 1
            broken.repair()
            await until(lambda: not waits.stat().st_size)
        assert [len(await broken.store.query_spans(caller.rollout_id)) for caller in callers] == [2] * 9
