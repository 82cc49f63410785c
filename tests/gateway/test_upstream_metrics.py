"""How the models' servers do: counted at the gateway, written to the store, judged by the monitor, shown to Prometheus."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest

from leyden.gateway import LLMProxy, UpstreamModel, upstream_metrics
from leyden.gateway.upstream_metrics import UpstreamFailure, UpstreamMetrics
from leyden.monitor import DEFAULT_RULES, AlertRule, Monitor
from leyden.monitor.metric_names import UPSTREAM_METRICS, base_name
from leyden.monitor.monitor import Watch
from leyden.monitor.prometheus import exposition
from leyden.store import InMemoryLightningStore
from leyden.store.request_metrics import RequestMetrics
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types import Sample
from tests.gateway.caller import Caller, new_caller, say, until
from tests.monitor.hearing import Heard


async def ask(caller: Caller) -> None:
    await caller.client.chat.completions.create(model="fake", messages=say("hello"))


async def ask_in_vain(caller: Caller) -> None:
    with pytest.raises(openai.APIError):
        await ask(caller)


async def test_requests_failures_and_latency_are_counted_for_each_server(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, upstream_retries=0) as proxy:
        assert proxy.upstreams() == []
        caller = await new_caller(proxy, store)
        async with caller.client:
            await ask(caller)
            upstream.misbehave(
                Misbehaviour(status=500),
                Misbehaviour(close_after_chunks=0),
                Misbehaviour(status=400),
                Misbehaviour(body=b"<html>", content_type="text/html"),
            )
            for _ in range(3):
                await ask_in_vain(caller)
            await ask(caller)  # garbage passes as it came
            assert not proxy.upstreams()[0].healthy
            await ask(caller)
            [status] = proxy.upstreams()
            assert (status.model_name, status.address, status.requests) == ("fake", upstream.endpoint, 6)
            assert status.errors == {"failed": 1, "garbage": 1, "incomplete": 1}, "400 is the client's fault"
            assert status.healthy, "the last answer was none of a server that is ill"
            assert status.latency_p50_seconds is not None
            assert status.latency_p95_seconds is not None
            assert 0 < status.latency_p50_seconds <= status.latency_p95_seconds < 5
            await upstream.stop()
            await ask_in_vain(caller)
            [status] = proxy.upstreams()
            assert status.errors["unreachable"] == 1
            assert not status.healthy
            assert f"cannot reach {upstream.endpoint}" in (status.problem or "")


async def test_a_request_under_way_is_in_flight(upstream: FakeUpstream, store: InMemoryLightningStore) -> None:
    upstream.misbehave(Misbehaviour(delay_seconds=0.3))
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            call = asyncio.create_task(ask(caller))
            await until(lambda: upstream.requests)
            assert [status.in_flight for status in proxy.upstreams()] == [1]
            await call
            assert [status.in_flight for status in proxy.upstreams()] == [0]


def test_a_password_in_an_address_is_in_no_figure() -> None:
    counted = UpstreamMetrics()
    model = UpstreamModel(model_name="m", endpoint="http://user:SECRET@host/v1")
    began = counted.begin(model)
    counted.end(model, began, healthy=False, failure=UpstreamFailure("timeout", "too slow"))
    samples = counted.samples("here:1", 3)
    assert "SECRET" not in f"{samples} {counted.statuses()}"
    assert {sample.worker_id for sample in samples} == {"m at http://host/v1 behind here:1", "here:1"}
    assert {base_name(sample.name) for sample in samples} <= UPSTREAM_METRICS.keys()
    assert next(sample.value for sample in samples if sample.name == "upstream_failures:timeout") == 1


def test_a_server_at_rest_is_reported_no_more_and_one_that_is_ill_always() -> None:
    counted = UpstreamMetrics()
    models = [UpstreamModel(model_name="m", endpoint=f"http://{name}/v1") for name in ("well", "ill")]
    for model, well in zip(models, (True, False), strict=True):
        began = counted.begin(model)
        counted.end(model, began, healthy=well, failure=None if well else UpstreamFailure("timeout", "too slow"))
    reported = [{sample.worker_id for sample in counted.samples("g", 0)} - {"g"} for _ in range(2)]
    assert reported == [
        {"m at http://well/v1 behind g", "m at http://ill/v1 behind g"},
        {"m at http://ill/v1 behind g"},
    ]


async def test_a_server_that_left_the_list_is_reported_no_more(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, upstream_retries=0) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            await upstream.stop()
            await ask_in_vain(caller)
            assert [status.healthy for status in proxy.upstreams()] == [False]
            proxy.update_model_list([UpstreamModel("other", "http://127.0.0.1:1/v1")])
            await until(lambda: not proxy.upstreams())


def test_a_server_that_leaves_the_list_during_a_request_is_forgotten_after_it() -> None:
    counted, model = UpstreamMetrics(), UpstreamModel("m", "http://gpu:8000/v1")
    began = counted.begin(model)
    counted.keep([])
    assert [status.in_flight for status in counted.statuses()] == [1]
    counted.end(model, began, healthy=False, failure=UpstreamFailure("timeout", "it was silent"))
    assert counted.statuses() == []


def test_a_server_that_is_well_again_is_reported_once_more() -> None:
    counted = UpstreamMetrics()
    model = UpstreamModel(model_name="m", endpoint="http://host/v1")
    began = counted.begin(model)
    counted.end(model, began, healthy=False, failure=UpstreamFailure("timeout", "too slow"))
    began = counted.begin(model)
    told = [sample.value for sample in counted.samples("g", 0) if sample.name == "upstream_healthy"]
    counted.end(model, began, healthy=True, failure=None)
    told += [sample.value for sample in counted.samples("g", 0) if sample.name == "upstream_healthy"]
    assert told == [0, 1]
    assert not counted.samples("g", 0)


def test_latencies_are_those_of_the_last_minute() -> None:
    now = [0.0]
    counted = UpstreamMetrics(lambda: now[0])
    model = UpstreamModel(model_name="m", endpoint="http://host/v1")
    for start in range(100):
        now[0] = float(start)
        began = counted.begin(model)
        now[0] = start + (0.1 if start < 50 else start / 100)
        counted.end(model, began, healthy=True, failure=None)
    [status] = counted.statuses()
    assert status.latency_p50_seconds == pytest.approx(0.69)
    assert status.latency_p95_seconds == pytest.approx(0.96)
    now[0] = 1000.0
    assert counted.statuses()[0].latency_p50_seconds is None


async def test_a_server_that_is_down_raises_an_alert_and_is_shown_to_prometheus(
    upstream: FakeUpstream, store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_metrics, "REPORT_SECONDS", 0.05)
    port = int(upstream.endpoint.rsplit(":", 1)[1].partition("/")[0])
    down = AlertRule(name="down", metric="upstream_healthy", comparison="<", threshold=0.5, window_seconds=0.0)
    heard = Heard()
    watch = Watch(Monitor(rules=[down], sinks=[heard]), store)
    async with LLMProxy(model_list=[upstream.llm()], store=store, upstream_retries=0) as proxy:
        subject = f"fake at {upstream.endpoint} behind {proxy.endpoint.removeprefix('http://').removesuffix('/v1')}"
        caller = await new_caller(proxy, store)

        async def told(*, resolved: bool) -> bool:
            await watch.check()
            return ("down", subject, resolved) in heard.told

        async with caller.client:
            await ask(caller)
            await upstream.stop()
            await ask_in_vain(caller)
            await until(lambda: told(resolved=False))
            page = (await exposition(store, RequestMetrics())).decode()
            assert f'leyden_upstream_healthy{{upstream="{subject}"}} 0.0\n' in page
            assert f'leyden_upstream_requests{{upstream="{subject}"}} 2.0\n' in page
            assert f'leyden_upstream_failures{{reason="unreachable",upstream="{subject}"}} 1.0\n' in page
            assert f'leyden_upstream_latency_p95_seconds{{upstream="{subject}"}} 0.' in page
            assert f'leyden_alert{{rule="down",worker="{subject}"}} 1.0\n' in page
            await upstream.start(port=port)
            await ask(caller)
            await until(lambda: told(resolved=True))
            connections = await store.query_samples(name="gateway_connections")
            assert connections[-1].value >= 1
    assert len(heard.told) == 2


async def test_the_rule_for_servers_fires_after_two_reports_and_reads_no_old_ones(
    store: InMemoryLightningStore,
) -> None:
    heard = Heard()
    watch = Watch(Monitor(rules=[rule for rule in DEFAULT_RULES if rule.name == "upstream"], sinks=[heard]), store)
    now = time.time()
    for age in (3600, 2, 1):
        assert not heard.told
        sample = Sample(name="upstream_healthy", time=now - age, value=0.0, worker_id="m at x behind g")
        await store.add_many_samples([sample])
        await watch.check()
    assert heard.told == [("upstream", "m at x behind g", False)]
