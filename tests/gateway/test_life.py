"""Options, start, stop and restart."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from leyden._lib.clock import unix_time
from leyden._lib.host.asgi import ConnectionLimits
from leyden.errors import ConfigError, GatewayError
from leyden.gateway import LLMProxy, UpstreamModel, attempts
from leyden.gateway.attempts import Attempts
from leyden.gateway.record import ModelCall, span_of
from leyden.store import InMemoryLightningStore, LightningStoreServer
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types import LLM, ProxyLLM, semconv
from tests.gateway.caller import Caller, new_caller, say, until


def open_sockets() -> int:
    """How many sockets this process holds."""
    targets: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except OSError:
            continue  # closed meanwhile, as the folder's own descriptor is
    return sum(target.startswith("socket:") for target in targets)


async def test_a_restarted_gateway_serves_at_the_same_address(caller: Caller, upstream: FakeUpstream) -> None:
    endpoint = caller.proxy.endpoint
    for _ in range(3):
        await caller.client.chat.completions.create(model="fake", messages=say("hello"))
        await caller.proxy.restart()
        assert caller.proxy.endpoint == endpoint
    assert caller.proxy.is_running()
    assert len(await caller.spans()) == len(upstream.calls) == 3


async def test_a_restarted_gateway_goes_on_counting_where_the_record_ends(caller: Caller) -> None:
    for number in range(6):
        await caller.client.chat.completions.create(model="fake", messages=say(str(number)))
        if number == 2:
            await caller.proxy.restart()
    assert [span.attributes[semconv.CALL_INDEX] for span in await caller.spans()] == list(range(6))


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_gateway_that_began_after_a_step_of_the_clock_goes_on_counting(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """The store of another process has not worked the step off."""
    await caller.client.chat.completions.create(model="fake", messages=say("0"))
    monkeypatch.setattr(attempts, "unix_time", lambda: unix_time() + 3600 * hours)
    await caller.proxy.restart()
    await caller.client.chat.completions.create(model="fake", messages=say("1"))
    assert [span.attributes[semconv.CALL_INDEX] for span in await caller.spans()] == [0, 1]


async def test_of_attempts_that_nobody_ends_a_bounded_number_is_remembered_and_none_is_counted_anew(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_MAX_LIVE", 2)
    met = Attempts(store)
    keys = [(one.rollout_id, one.attempt.attempt_id) for one in [await store.start_rollout(None) for _ in range(4)]]
    for number in range(2):
        for key in keys:
            admission = await met.admit(*key)
            assert admission.call_index == number
            assert len(met) <= 2
            call = ModelCall(*key, admission.trace_id, None, admission.call_index, "chat", start_time=time.time())
            await store.add_many_spans([span_of(call)])


async def test_starting_and_stopping_twice_does_nothing(upstream: FakeUpstream, store: InMemoryLightningStore) -> None:
    proxy = LLMProxy(model_list=[upstream.llm()], store=store)
    await proxy.stop()
    assert not proxy.is_running()
    await proxy.start()
    await proxy.start()
    assert proxy.is_running()
    await proxy.stop()
    await proxy.stop()
    assert not proxy.is_running()


async def test_a_stopped_gateway_leaves_no_thread_and_no_socket(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    threads, sockets = set(threading.enumerate()), open_sockets()
    for lap in range(3):
        async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
            caller = await new_caller(proxy, store)
            async with caller.client as client:
                await client.chat.completions.create(model="fake", messages=say("hello"))
        await asyncio.sleep(0.05)  # the upstream's side of the connection closes when it hears of it
        if lap == 0:  # the client has started this loop's executor, which stays
            threads |= {thread for thread in threading.enumerate() if thread.name.startswith("asyncio_")}
    assert set(threading.enumerate()) == threads
    assert open_sockets() == sockets


async def test_stop_writes_every_record_before_it_ends(upstream: FakeUpstream, store: InMemoryLightningStore) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            for number in range(5):
                await client.chat.completions.create(model="fake", messages=say(str(number)))
    assert len(await store.query_spans(caller.rollout_id, caller.attempt_id)) == 5


async def test_calls_under_way_when_the_gateway_stops_are_answered_and_recorded(
    upstream: FakeUpstream, store: InMemoryLightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller = await new_caller(proxy, store)
        upstream.misbehave(Misbehaviour(delay_seconds=60), Misbehaviour(chunk_delay_seconds=10.0))

        async def read_stream() -> None:
            async for _ in await caller.client.chat.completions.create(
                model="fake", messages=say("hello"), stream=True
            ):
                pass

        async with caller.client as client:
            whole = asyncio.create_task(client.chat.completions.create(model="fake", messages=say("hello")))
            await until(lambda: len(upstream.requests) == 1)
            streamed = asyncio.create_task(read_stream())
            await until(lambda: len(upstream.requests) == 2)
            async with asyncio.timeout(20):
                await proxy.stop()
            for call in (whole, streamed):
                with pytest.raises(openai.APIError, match="stopped"):
                    await call
    spans = await store.query_spans(caller.rollout_id, caller.attempt_id)
    assert ["stopped" in str(span.status.description) for span in spans] == [True, True]
    assert not caplog.records


async def test_the_gateway_leaves_the_programs_loggers_and_signals_alone(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    names = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")

    def state() -> list[Any]:
        loggers = [logging.getLogger(name) for name in names]
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers] + handlers

    before = state()
    async with LLMProxy(model_list=[upstream.llm()], store=store):
        assert state() == before
    assert state() == before


async def test_a_port_in_use_is_named_with_its_option(proxy: LLMProxy, store: InMemoryLightningStore) -> None:
    port = int(proxy.endpoint.rsplit(":", 1)[1].removesuffix("/v1"))
    other = LLMProxy(port=port, store=store)
    with pytest.raises(GatewayError, match=rf"port {port}.*port="):
        await other.start()
    assert not other.is_running()


async def test_a_gateway_without_a_store_does_not_start() -> None:
    with pytest.raises(ConfigError, match=r"set_store\(\)"):
        await LLMProxy().start()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_a_host_that_others_can_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="give token, or bind to"):
        LLMProxy(host=host)
    LLMProxy(host=host, token="sesame")


@pytest.mark.parametrize("token", ["", " ", "\n"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_empty_token_is_refused_on_every_address(host: str, token: str) -> None:
    with pytest.raises(ConfigError, match="token is empty; leave it out"):
        LLMProxy(host=host, token=token)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_a_loopback_host_needs_none(host: str) -> None:
    LLMProxy(host=host)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"launch_mode": "mp"}, r"launch_mode is 'mp'; .*thread"),
        ({"model_list": [{"model_name": "m"}]}, "no 'endpoint'"),
        ({"model_list": [{"model_name": "m", "endpoint": "http://x/v1", "key": 1}]}, "'key'.*api_key"),
        ({"model_list": [{"model_name": "m", "endpoint": "localhost:80"}]}, "'localhost:80'"),
        ({"model_list": [{"model_name": "", "endpoint": "http://x/v1"}]}, "model_name is empty"),
        ({"model_list": [LLM(endpoint="http://x/v1", model="m")] * 2}, "'m' twice"),
        ({"model_list": [ProxyLLM(endpoint="http://x/v1", model="m")]}, "ProxyLLM"),
        ({"token": "sk-leyden-secret"}, "token begins with"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMProxy(**options)


async def test_models_can_change_while_the_gateway_runs(caller: Caller, upstream: FakeUpstream) -> None:
    caller.proxy.update_model_list(
        [{"model_name": "new", "endpoint": upstream.endpoint, "api_key": "k", "upstream_model": "fake"}]
    )
    answer = await caller.client.chat.completions.create(model="new", messages=say("hello"))
    assert answer.choices
    with pytest.raises(openai.NotFoundError):
        await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    with pytest.raises(ConfigError):
        caller.proxy.update_model_list([{"model_name": "x"}])
    await caller.client.chat.completions.create(model="new", messages=say("hello"))


async def test_a_running_gateway_keeps_its_store(proxy: LLMProxy, store: InMemoryLightningStore) -> None:
    with pytest.raises(GatewayError, match="stop it"):
        proxy.set_store(store)
    await proxy.stop()
    async with InMemoryLightningStore() as other:
        proxy.set_store(other)
        assert proxy.get_store() is other


def test_the_gateway_is_a_resource_for_any_attempt_or_for_one() -> None:
    models = [
        UpstreamModel(model_name="a", endpoint="http://x/v1", sampling_parameters={"top_p": 0.9, "temperature": 1.0}),
        UpstreamModel(model_name="b", endpoint="http://x/v1"),
    ]
    proxy = LLMProxy(port=4711, model_list=models)
    resource = proxy.as_resource(model="a", sampling_parameters={"temperature": 0.5})
    assert isinstance(resource, ProxyLLM)
    assert resource.endpoint == "http://127.0.0.1:4711/v1"
    assert resource.sampling_parameters == {"top_p": 0.9, "temperature": 0.5}
    one = proxy.as_resource("ro-1", "at-1", model="b")
    assert not isinstance(one, ProxyLLM)
    assert one.endpoint == "http://127.0.0.1:4711/rollout/ro-1/attempt/at-1/v1"
    with pytest.raises(ConfigError, match="'a', 'b'"):
        proxy.as_resource()
    with pytest.raises(ConfigError, match="attempt_id"):
        proxy.as_resource("ro-1", model="a")
    with pytest.raises(ConfigError, match="model_list="):
        LLMProxy(port=1).as_resource()
    with pytest.raises(GatewayError, match="start it first"):
        LLMProxy(model_list=models).as_resource(model="a")


async def test_a_gateway_that_is_given_a_store_server_records_in_the_store_that_it_serves(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with (
        LightningStoreServer(store) as server,
        LLMProxy(model_list=[upstream.llm()], store=server) as proxy,
    ):
        assert proxy.get_store() is store
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            await client.chat.completions.create(model="fake", messages=say("hello"))
        assert (await caller.span()).tokens is not None


def test_what_is_no_store_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="store is a str"):
        LLMProxy(store=cast(Any, "memory://"))
    with pytest.raises(ConfigError, match="store is a dict"):
        LLMProxy().set_store(cast(Any, {}))


async def test_a_client_that_never_finishes_its_request_is_cut_off(store: InMemoryLightningStore) -> None:
    limits = ConnectionLimits(head_seconds=0.2, stall_seconds=0.2)
    async with LLMProxy(store=store, connection_limits=limits) as proxy, asyncio.timeout(20):
        port = int(proxy.endpoint.removesuffix("/v1").rpartition(":")[2])
        path = b"POST /rollout/ro/attempt/at/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        for sent, said in {path: b"", path + b"Content-Length: 9\r\n\r\n{": b"HTTP/1.1 408 "}.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert (await reader.read()).startswith(said)
            writer.close()
            await writer.wait_closed()
