"""Records of calls wait while the store is away, and are delivered once each, in order."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import TypeAdapter

from leyden.errors import ConfigError, GatewayError, StoreAway, StoreError, UnknownRollout
from leyden.gateway import LLMProxy, attempts, recorder
from leyden.gateway.spool import SPANS, Spool
from leyden.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer, SqliteLightningStore
from leyden.store.base import StoreStatistics
from leyden.testing import FakeUpstream
from leyden.types import Span, TokenRecord, semconv
from tests.gateway.caller import Caller, new_caller, say, until

MANY = 2**20


class Leaving(InMemoryLightningStore):
    """A store that cannot be reached when told so."""

    away = False
    writes = 0

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        self.writes += 1
        if self.away:
            raise StoreError("connection refused")
        return await super().add_many_spans(spans)

    async def statistics(self) -> StoreStatistics:
        if self.away:
            raise StoreError("connection refused")
        return await super().statistics()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(recorder, "_LAST_SECONDS", 0.1)


@pytest.fixture
async def store() -> AsyncIterator[Leaving]:
    async with Leaving() as opened:
        yield opened


async def ask(caller: Caller, text: str) -> None:
    answer = await caller.client.chat.completions.create(model="fake", messages=say(text))
    assert answer.choices


def asked(spans: Sequence[Span]) -> list[str]:
    """What the calls of an attempt asked, in the order of their numbers."""
    numbered = sorted(spans, key=lambda span: span.attributes[semconv.CALL_INDEX])
    assert [span.sequence_id for span in numbered] == sorted(span.sequence_id for span in spans)
    return [str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES]).split('"')[-2] for span in numbered]


def span(number: int, **fields: Any) -> Span:
    given: dict[str, Any] = {"rollout_id": "ro", "attempt_id": "at", "trace_id": "f" * 32, "name": "é\ud800"} | fields
    return Span(span_id=f"{number:016x}", sequence_id=0, **given)


# ---- the gateway -----------------------------------------------------------------------------------------------------


async def test_answers_pass_while_the_store_is_away_and_their_records_follow_in_order(
    upstream: FakeUpstream, store: Leaving
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller, other = await new_caller(proxy, store), await new_caller(proxy, store)
        async with caller.client, other.client:
            await asyncio.gather(ask(caller, "0"), ask(other, "0"))  # the gateway knows both attempts
            await caller.spans()
            store.away = True
            for turn in range(1, 6):
                await asyncio.gather(ask(caller, str(turn)), ask(other, str(turn)))
            await until(lambda: store.writes > 3)
            flushing = asyncio.create_task(proxy.flush(caller.rollout_id, caller.attempt_id))
            await asyncio.sleep(0.1)
            assert not flushing.done()
            assert len(await store.query_spans(caller.rollout_id)) == 1
            store.away = False
            await flushing
            assert asked(await caller.spans()) == [str(turn) for turn in range(6)]
            assert asked(await other.spans()) == [str(turn) for turn in range(6)]
            await ask(caller, "6")
            assert len(await caller.spans()) == 7


async def test_flush_does_not_wait_for_ever_and_what_is_missing_still_comes(
    upstream: FakeUpstream, store: Leaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_PATIENCE_SECONDS", 0.1)
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            await ask(caller, "0")
            await caller.spans()
            store.away = True
            await ask(caller, "1")
            with pytest.raises(StoreError, match=rf"{caller.rollout_id}.*is not complete.*away"):
                await proxy.flush(caller.rollout_id, caller.attempt_id)
            store.away = False
            assert asked(await caller.spans()) == ["0", "1"]


async def test_what_waits_in_a_named_file_is_delivered_by_the_next_gateway(
    upstream: FakeUpstream, store: Leaving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "spool.jsonl"
    async with LLMProxy(model_list=[upstream.llm()], store=store, spool=path) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            await ask(caller, "0")
            await caller.spans()
            store.away = True
            await ask(caller, "1")
            await ask(caller, "2")
    assert "2 records of model calls wait in" in caplog.text
    assert path.stat().st_mode & 0o077 == 0
    store.away = False
    async with LLMProxy(model_list=[upstream.llm()], store=store, spool=path) as proxy:

        async def all_there() -> bool:
            return len(await store.query_spans(caller.rollout_id)) == 3

        await until(all_there)
        spans = await store.query_spans(caller.rollout_id)
        assert asked(spans.items) == ["0", "1", "2"]
        assert all(found.tokens is not None for found in spans)
        await until(lambda: path.stat().st_size == 0)


async def test_records_beyond_the_limit_are_told_of_by_flush(upstream: FakeUpstream, store: Leaving) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, spool_bytes=3000) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            await ask(caller, "0")
            await caller.spans()
            store.away = True
            for turn in range(1, 9):
                await ask(caller, str(turn))
            await until(lambda: proxy._failures)
            store.away = False
            with pytest.raises(StoreError, match="spool_bytes"):
                await proxy.flush(caller.rollout_id, caller.attempt_id)
            spans = await caller.spans()
        assert 1 < len(spans) < 9


async def test_a_record_that_the_store_refuses_does_not_hold_up_the_others(
    upstream: FakeUpstream, store: Leaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller, gone = await new_caller(proxy, store), await new_caller(proxy, store)
        async with caller.client, gone.client:
            await asyncio.gather(ask(caller, "0"), ask(gone, "0"))
            await caller.spans()
            await gone.spans()
            store.away = True
            await ask(gone, "1")
            await ask(caller, "1")
            await until(lambda: store.writes > 3)
            add = InMemoryLightningStore.add_many_spans

            async def forgetful(self: Any, spans: Sequence[Span]) -> Sequence[Span]:
                if any(each.rollout_id == gone.rollout_id for each in spans):
                    raise UnknownRollout(gone.rollout_id)
                return await add(self, spans)

            monkeypatch.setattr(InMemoryLightningStore, "add_many_spans", forgetful)
            store.away = False
            assert asked(await caller.spans()) == ["0", "1"]
            with pytest.raises(StoreError, match="UnknownRollout"):
                await proxy.flush(gone.rollout_id, gone.attempt_id)


async def test_a_store_that_is_back_before_the_gateway_looks_gets_the_record_at_once(
    upstream: FakeUpstream, store: Leaving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add, failures = InMemoryLightningStore.add_many_spans, iter([StoreAway("connection refused")] * 2)

    async def refused_twice(self: Any, spans: Sequence[Span]) -> Sequence[Span]:
        for failure in failures:
            raise failure
        return await add(self, spans)

    monkeypatch.setattr(InMemoryLightningStore, "add_many_spans", refused_twice)
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            await ask(caller, "0")
            assert asked(await caller.spans()) == ["0"]
    assert "set aside" not in caplog.text


async def test_a_servers_restart_loses_no_record(
    upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_RECHECK_SECONDS", 0.0)  # each call asks whether its attempt is over
    async with SqliteLightningStore(tmp_path / "store.db") as truth:
        server = LightningStoreServer(truth)
        await server.start()
        async with (
            LightningStoreClient(server.endpoint, retry_seconds=0.1) as client,
            LLMProxy(model_list=[upstream.llm()], store=client) as proxy,
        ):
            caller = await new_caller(proxy, client)
            async with caller.client:
                await ask(caller, "0")
                await caller.spans()
                await server.stop()
                for turn in range(1, 4):
                    await ask(caller, str(turn))
                await asyncio.sleep(0.5)
                assert len(await truth.query_spans(caller.rollout_id)) == 1
                await server.start()
                assert asked(await caller.spans()) == ["0", "1", "2", "3"]
                await truth.update_attempt(caller.rollout_id, caller.attempt_id, status="succeeded")
                with pytest.raises(openai.APIStatusError, match="is over"):
                    await ask(caller, "4")
        await server.stop()


# ---- the file --------------------------------------------------------------------------------------------------------


def test_spans_come_back_as_they_went_in(tmp_path: Path) -> None:
    tokens = TokenRecord(prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.5])
    spans = [span(1, tokens=tokens), span(2, attributes={"text": "a\nb", "n": 7}), span(3)]
    spool = Spool(tmp_path / "spool", max_bytes=MANY, items=SPANS)
    assert spool.append(spans) == len(spool) == 3
    assert spool.first(2) == spans[:2]
    assert spool.first(9) == spans
    with pytest.raises(ConfigError, match="JSON"):
        spool.append([span(5), span(6).model_copy(update={"attributes": {"x": object()}})])
    spool.drop(2)
    assert spool.append([span(4)]) == 1
    assert spool.first(9) == [spans[2], span(4)]
    spool.close()


def test_a_line_that_a_crash_cut_off_is_dropped_and_the_rest_is_there(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spool = Spool(path, max_bytes=MANY, items=SPANS)
    spool.append([span(1), span(2)])
    spool.close()
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2 + 5):
        path.write_bytes(whole[:cut])
        again = Spool(path, max_bytes=MANY, items=SPANS)
        assert again.first(9) == [span(1)]
        assert again.append([span(3)]) == 1
        assert again.first(9) == [span(1), span(3)]
        again.close()
    path.write_bytes(b"no span\n" * 3000 + whole)
    again = Spool(path, max_bytes=MANY, items=SPANS)
    assert again.first(9) == [span(1), span(2)]
    again.close()


def test_a_file_belongs_to_one_gateway_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    first = Spool(path, max_bytes=MANY, items=SPANS)
    with pytest.raises(ConfigError, match="another process"):
        Spool(path, max_bytes=MANY, items=SPANS)
    first.close()
    Spool(path, max_bytes=MANY, items=SPANS).close()
    with pytest.raises(ConfigError, match="cannot be opened"):
        Spool(tmp_path, max_bytes=MANY, items=SPANS)


@pytest.mark.parametrize("named", [True, False])
def test_what_a_full_disk_refuses_is_never_written_and_later_records_are_whole(tmp_path: Path, named: bool) -> None:
    path = tmp_path / "spool" if named else None
    spool: Spool[str] = Spool(path, max_bytes=MANY, items=TypeAdapter(str))
    assert spool.append(["first"]) == 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # room for a part of the next line
    try:
        with pytest.raises(GatewayError, match="cannot wait"):
            spool.append(["refused"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert spool.append(["second"]) == 1
    assert spool.first(5) == ["first", "second"]
    spool.close()
    if path is not None:
        assert path.read_text() == '"first"\n"second"\n'


@pytest.mark.skipif(not hasattr(fcntl, "F_ADD_SEALS"), reason="only Linux can forbid that a file shrinks")
def test_a_file_that_cannot_shrink_keeps_what_was_delivered_and_later_records_are_whole() -> None:
    descriptor = os.memfd_create("spool", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    spool: Spool[str] = Spool(Path(f"/proc/self/fd/{descriptor}"), max_bytes=MANY, items=TypeAdapter(str))
    assert spool.append(["first"]) == 1
    spool.drop(1)
    assert (len(spool), spool.append(["second"]), spool.first(5)) == (0, 1, ["second"])
    spool.close()
    os.close(descriptor)
