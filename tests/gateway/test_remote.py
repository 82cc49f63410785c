"""A gateway that was given to another process ends attempts there, and nobody else can."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
from pathlib import Path

import aiohttp
import openai
import pytest

from leyden._lib.host.http import Refusal
from leyden.errors import GatewayError, StoreError
from leyden.gateway import FoundGateways, LLMProxy, RemoteGateway, control_key_of
from leyden.gateway.attempts import Attempts
from leyden.gateway.remote import RemoteRecorder, end_path
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.types import LLM, ProxyLLM
from tests.gateway.caller import Caller, new_caller, say


async def test_a_pickled_gateway_ends_an_attempt_with_its_record_whole(caller: Caller) -> None:
    recorder = pickle.loads(pickle.dumps(caller.proxy))
    await caller.client.chat.completions.create(model="fake", messages=say("in time"))
    recorder.end_attempt(caller.rollout_id, caller.attempt_id)
    await recorder.flush(caller.rollout_id, caller.attempt_id)
    assert len(await caller.store.query_spans(caller.rollout_id, caller.attempt_id)) == 1
    with pytest.raises(openai.APIStatusError, match="410"):
        await caller.client.chat.completions.create(model="fake", messages=say("late"))


async def test_who_does_not_know_the_control_key_ends_no_attempt(caller: Caller) -> None:
    stranger = RemoteRecorder(caller.proxy.endpoint.removesuffix("/v1"), "a guess")
    with pytest.raises(StoreError, match="only this gateway's own runners"):
        await stranger.flush(caller.rollout_id, caller.attempt_id)
    await caller.client.chat.completions.create(model="fake", messages=say("still welcome"))


async def test_a_runner_from_elsewhere_ends_attempts_at_the_gateway_that_their_resources_name(caller: Caller) -> None:
    caller.proxy.share_control("what both know")
    recorder = pickle.loads(pickle.dumps(FoundGateways("what both know")))
    await caller.client.chat.completions.create(model="fake", messages=say("in time"))
    given = {"llm": caller.proxy.as_resource(), "other": LLM(endpoint="http://127.0.0.1:9/v1", model="no gateway")}
    recorder.begin_attempt(caller.rollout_id, caller.attempt_id, given)
    recorder.end_attempt(caller.rollout_id, caller.attempt_id)
    await recorder.flush(caller.rollout_id, caller.attempt_id)
    assert len(await caller.store.query_spans(caller.rollout_id, caller.attempt_id)) == 1
    with pytest.raises(openai.APIStatusError, match="410"):
        await caller.client.chat.completions.create(model="fake", messages=say("late"))


async def test_a_runner_from_elsewhere_that_knows_another_secret_is_told_the_remedy(caller: Caller) -> None:
    caller.proxy.share_control("what both know")
    recorder = FoundGateways("something else")
    recorder.begin_attempt(caller.rollout_id, caller.attempt_id, {"llm": caller.proxy.as_resource()})
    with pytest.raises(StoreError, match="LEYDEN_STORE_TOKEN"):
        await recorder.flush(caller.rollout_id, caller.attempt_id)


@pytest.mark.parametrize("secret", [None, ""])
async def test_a_gateway_with_a_token_demands_it_where_no_secret_is_shared(
    upstream: FakeUpstream, store: InMemoryLightningStore, secret: str | None
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, token="sesame") as proxy:
        proxy.share_control(secret)
        caller = await new_caller(proxy, store)
        root, ids = proxy.endpoint.removesuffix("/v1"), (caller.rollout_id, caller.attempt_id)
        for known_to_all in (control_key_of(""), caller.llm.api_key or "", "sesame", ""):
            async with (
                aiohttp.ClientSession(headers={"Authorization": f"Bearer {known_to_all}"}) as session,
                session.post(root + end_path(*ids)) as response,
            ):
                assert response.status == 401
        await caller.client.chat.completions.create(model="fake", messages=say("in time"))
        recorder = FoundGateways(secret)
        recorder.begin_attempt(*ids, {"llm": proxy.as_resource()})
        await recorder.flush(*ids)
        assert len(await store.query_spans(*ids)) == 1
        with pytest.raises(openai.APIStatusError, match="410"):
            await caller.client.chat.completions.create(model="fake", messages=say("late"))
        await caller.client.close()


@pytest.mark.parametrize("live_key", [None, "shared with sessions"])
@pytest.mark.parametrize("when", ["before the start", "while it runs"])
async def test_a_gateway_without_any_token_obeys_its_own_user_and_no_program_that_can_only_guess(
    upstream: FakeUpstream,
    store: InMemoryLightningStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    live_key: str | None,
    when: str,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    proxy = LLMProxy(model_list=[upstream.llm()], store=store, live_key=live_key)
    if when != "while it runs":
        proxy.share_control(None)
    async with proxy:
        if when == "while it runs":
            proxy.share_control(None)
        (file,) = secret_files(tmp_path)
        assert file.stat().st_mode & 0o777 == 0o600
        root = proxy.endpoint.removesuffix("/v1")
        for known_to_all in (control_key_of(""), control_key_of(live_key or ""), live_key or "", ""):
            headers = {"Authorization": f"Bearer {known_to_all}"}
            async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{root}/control/state") as reply:
                assert reply.status == 401
        remote = RemoteGateway(proxy.endpoint)
        assert not (await remote.state())["paused"]
        caller = await new_caller(proxy, store)
        ids = caller.rollout_id, caller.attempt_id
        recorder = pickle.loads(pickle.dumps(FoundGateways(None)))
        recorder.begin_attempt(*ids, {"llm": proxy.as_resource()})
        await recorder.flush(*ids)
        await recorder._sessions.close()
        with pytest.raises(openai.APIStatusError, match="410"):
            await caller.client.chat.completions.create(model="fake", messages=say("late"))
        await caller.client.close()
        file.chmod(0o644)  # readable by others: no secret
        with pytest.raises(GatewayError, match="own user"):
            await remote.state()
        file.chmod(0o600)
        await remote._sessions.close()
    assert not secret_files(tmp_path)


def secret_files(folder: Path) -> list[Path]:
    return list(folder.glob("leyden-*-gateway-*"))


async def test_a_secret_of_a_dead_gateway_is_replaced_and_a_file_that_cannot_be_is_named(
    upstream: FakeUpstream, store: InMemoryLightningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        left = tmp_path / f"leyden-{os.getuid()}-gateway-{proxy.endpoint.split(':')[2].removesuffix('/v1')}"
        left.symlink_to(tmp_path / "elsewhere")
        proxy.share_control(None)
        assert not left.is_symlink()
        assert not (tmp_path / "elsewhere").exists()
        await RemoteGateway(proxy.endpoint).state()
        proxy.share_control("a secret")
        left.mkdir()
        with pytest.raises(GatewayError, match="LEYDEN_STORE_TOKEN"):
            proxy.share_control(None)


async def test_ids_that_the_store_does_not_know_are_refused_and_not_remembered(store: InMemoryLightningStore) -> None:
    attempts = Attempts(store)
    rollout = await store.start_rollout({})
    for index in range(3000):
        with pytest.raises(Refusal, match="Use the base URL") as caught:
            await attempts.end_if_known(f"{index}" * 100 if index % 2 else rollout.rollout_id, f"at-{index}")
        assert caught.value.status == 404
    assert attempts.n_ended == 0
    for _ in range(2):
        await attempts.end_if_known(rollout.rollout_id, rollout.attempt.attempt_id)
    assert attempts.n_ended == 1


async def test_a_runner_is_told_that_the_gateways_store_does_not_know_its_attempt(caller: Caller) -> None:
    caller.proxy.share_control(None)
    recorder = FoundGateways(None)
    recorder.begin_attempt("ro-elsewhere", "at-elsewhere", {"llm": caller.proxy.as_resource()})
    with pytest.raises(StoreError, match=r"ro-elsewhere.*the store that holds its rollout"):
        await recorder.flush("ro-elsewhere", "at-elsewhere")


async def test_a_gateway_that_is_not_there_is_named() -> None:
    recorder = FoundGateways(None)
    recorder.begin_attempt("ro", "at", {"llm": ProxyLLM(endpoint="http://127.0.0.1:9/v1", model="gone")})
    with pytest.raises(GatewayError, match=r"http://127\.0\.0\.1:9 cannot be notified that attempt 'at' is over"):
        await recorder.flush("ro", "at")


async def test_the_end_of_an_attempt_outlives_all_connections_to_a_gateway_that_dies() -> None:
    """Connections to a process that was killed end one after the other, so that the next one may seem to be alive."""
    requests: list[int] = []
    """The connection of each request."""
    numbers, both = itertools.count(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = next(numbers)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                requests.append(connection)
                if len(requests) == 2:
                    both.set()
                await both.wait()
                if len(requests) > 2 and connection < 2:
                    return  # it belonged to the process that died
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        recorder = RemoteRecorder(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key")
        await asyncio.gather(recorder.flush("ro", "at-0"), recorder.flush("ro", "at-1"))
        await recorder.flush("ro", "at-2")
        await recorder.close()
    assert sorted(requests) == [0, 1, requests[2], 2]


def test_agents_are_given_the_address_under_which_the_gateway_is_reached() -> None:
    model = LLM(endpoint="http://127.0.0.1:9/v1", model="m")
    proxy = LLMProxy(host="0.0.0.0", port=4748, token="t", access_host="machine-a", model_list=[model])
    assert proxy.as_resource().endpoint == "http://machine-a:4748/v1"
    assert LLMProxy(host="::1", port=4748, model_list=[model]).as_resource().endpoint == "http://[::1]:4748/v1"
