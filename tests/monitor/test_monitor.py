"""A monitor looks, keeps what it saw in the store, and says of each alert when it begins and when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from leyden._lib.clock import unix_time
from leyden.errors import ConfigError
from leyden.monitor import DEFAULT_RULES, Alert, AlertRule, Monitor, PauseClaiming, log_alert, monitor
from leyden.monitor.monitor import Watch
from leyden.monitor.system import host_name
from leyden.store import InMemoryLightningStore, LightningStore, LightningStoreClient, LightningStoreServer
from leyden.types import Sample
from tests.machine_clock import MachineClock
from tests.monitor.hearing import Heard

HOT = AlertRule(
    name="hot", metric="cpu_percent", comparison=">", threshold=100.5, window_seconds=0.0, severity="critical"
)
"""No machine is: only a heartbeat made here says so."""


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


async def beat(store: LightningStore, worker_id: str = "w", **metrics: Any) -> None:
    """A heartbeat from another machine."""
    await store.update_worker(worker_id, {"host": f"host of {worker_id}", **metrics})


async def alert_series(store: LightningStore, rule: str) -> list[tuple[str | None, float]]:
    return [(s.worker_id, s.value) for s in await store.query_samples(name=f"alert:{rule}")]


async def test_what_it_sees_is_in_the_store_as_time_series(store: InMemoryLightningStore) -> None:
    await store.enqueue_rollout(1)
    await store.enqueue_rollout(2)
    await store.dequeue_rollout("w")
    watch = Watch(Monitor(), store)
    await beat(store, cpu_percent=12.5, rollouts_running=1, store_latency_seconds=0.25, own_metric="text", other=7)
    before = time.time()
    await watch.check()
    await watch.check()  # there was no heartbeat in between
    await beat(store, cpu_percent=13.5)
    await watch.check()

    async def values(name: str, worker_id: str | None) -> list[float]:
        return [s.value for s in await store.query_samples(name=name) if s.worker_id == worker_id]

    assert await values("cpu_percent", "w") == [12.5, 13.5]
    assert await values("store_latency_seconds", "w") == [0.25]
    assert await values("queue_length", None) == [1.0, 1.0, 1.0]
    assert await values("rollouts_under_way", None) == [1.0, 1.0, 1.0]
    assert await values("workers_alive", None) == [1.0, 1.0, 1.0]
    assert await values("store_reachable", None) == [1.0, 1.0, 1.0]
    assert len(await values("store_latency_seconds", None)) == 3
    assert len(await values("memory_percent", None)) == 3
    assert not await store.query_samples(name="own_metric")
    assert not await store.query_samples(name="other")
    assert all(before - 1 <= s.time <= time.time() + 1 for s in await store.query_samples())


async def test_each_gpu_of_a_worker_is_a_series_and_a_rule_may_be_about_one(store: InMemoryLightningStore) -> None:
    heard = Heard()
    warm = AlertRule(
        name="warm", metric="gpu_device_temperature_celsius:2", comparison=">", threshold=80.0, window_seconds=0.0
    )
    watch = Watch(Monitor(rules=[warm], sinks=[heard]), store)
    for celsius in (70.0, 90.0):
        await beat(store, **{"gpu_device_temperature_celsius:0": 95.0, "gpu_device_temperature_celsius:2": celsius})
        await watch.check()
    values = [sample.value for sample in await store.query_samples(name="gpu_device_temperature_celsius:2")]
    assert values == [70.0, 90.0]
    assert heard.told == [("warm", "w", False)]


async def test_an_alert_is_raised_once_and_resolved_once_and_everybody_is_told(
    store: InMemoryLightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "leyden.monitor")
    heard, called, acted = Heard(), list[Alert](), list[tuple[str, str | None]]()

    class Noting:
        async def raised(self, store: LightningStore, alert: Alert) -> None:
            acted.append(("raised", alert.worker_id))

        async def resolved(self, store: LightningStore, alert: Alert) -> None:
            acted.append(("resolved", alert.worker_id))

    def broken(alert: Alert) -> None:
        raise RuntimeError("not today")

    sinks = (broken, log_alert, heard, called.append)
    watch = Watch(Monitor(rules=[HOT], sinks=sinks, actions={"hot": [Noting()]}), store)
    for value in (50, 101, 102, 103, 100, 99):
        await beat(store, cpu_percent=value)
        await watch.check()
    assert heard.told == [("hot", "w", False), ("hot", "w", True)]
    raised, resolved = heard.alerts
    assert (raised.value, raised.limit, raised.severity) == (101.0, 100.5, "critical")
    assert resolved.until is not None
    assert resolved.until > raised.since == resolved.since
    assert called == heard.alerts
    assert acted == [("raised", "w"), ("resolved", "w")]
    assert await alert_series(store, "hot") == [("w", 1.0), ("w", 1.0), ("w", 1.0), ("w", 0.0)]
    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.name.endswith(".alert")]
    assert told[0][1].startswith("a sink failed")
    assert ("ERROR", "alert hot of w: cpu_percent is 101 (limit: > 100.5)") in told
    assert any(level == "INFO" and "hot of w is resolved" in text for level, text in told)


async def test_an_action_that_fails_stops_nothing(
    store: InMemoryLightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        async def raised(self, store: LightningStore, alert: Alert) -> None:
            raise RuntimeError("not today")

        async def resolved(self, store: LightningStore, alert: Alert) -> None: ...

    heard = Heard()
    watch = Watch(Monitor(rules=[HOT], sinks=[heard], actions={"hot": [Failing()]}), store)
    for worker_id in ("a", "b"):
        await beat(store, worker_id, cpu_percent=101)
    await watch.check()
    assert [worker_id for _, worker_id, _ in heard.told] == ["a", "b"]
    assert "action Failing failed" in caplog.text


async def test_a_machine_speaks_once_however_many_workers_it_has(store: InMemoryLightningStore) -> None:
    heard = Heard()
    watch = Watch(Monitor(rules=[HOT], sinks=[heard]), store)
    for worker_id, host in {"a": "one", "b": "one", "c": "two", "d": host_name()}.items():
        await store.update_worker(worker_id, {"host": host, "cpu_percent": 101.0, "process_cpu_percent": 5.0})
    await watch.check()
    await store.update_worker("b", {"host": "one", "cpu_percent": 101.0})  # between two heartbeats of the other
    await watch.check()
    assert [worker_id for _, worker_id, _ in heard.told] == ["a", "c"]  # the monitor itself speaks for its own machine
    own = await store.query_samples(name="process_cpu_percent")
    assert {s.worker_id for s in own} == {"a", "b", "c", "d", None}


async def test_attempts_are_counted_over_all_workers_and_their_restarts(store: InMemoryLightningStore) -> None:
    heard = Heard()
    shares = [rule for rule in DEFAULT_RULES if rule.name in ("completion", "success")]  # this machine may be busy
    watch = Watch(Monitor(rules=shares, sinks=[heard]), store)

    async def counted(worker_id: str, of: int, completed: int, succeeded: int, **more: Any) -> None:
        counts = {"attempts_ended": of, "attempts_completed": completed, "attempts_succeeded": succeeded}
        await beat(store, worker_id, **counts, **more)

    await counted("a", 1000, 0, 0)  # before anybody looked
    await watch.check()
    await counted("a", 1015, 15, 15)
    await counted("b", 10, 10, 10)
    await watch.check()
    assert heard.told == []
    await counted("a", 5, 4, 4)  # its process was started again
    await counted("b", 11, 10, 10, ended=True)
    await watch.check()
    totals = {name: (await store.query_samples(name=f"attempts_{name}"))[-1].value for name in ("ended", "completed")}
    assert totals == {"ended": 31.0, "completed": 29.0}
    assert heard.told == [("completion", None, False)]
    assert heard.alerts[0].value == pytest.approx(29 / 31)


async def test_a_worker_that_ended_is_not_missed_and_takes_its_alerts_along(store: InMemoryLightningStore) -> None:
    heard = Heard()
    watch = Watch(Monitor(rules=[HOT], sinks=[heard]), store)
    await beat(store, cpu_percent=101)
    await watch.check()
    await beat(store, ended=True)
    await watch.check()
    assert heard.told == [("hot", "w", False), ("hot", "w", True)]
    assert (await store.query_samples(name="workers_alive"))[-1].value == 0
    assert watch.alerts == {}


@pytest.mark.parametrize("hours", [2, -2])
async def test_a_step_of_the_clock_loses_no_worker_and_hides_no_silence(
    store: InMemoryLightningStore, machine_clock: MachineClock, hours: int
) -> None:
    heard = Heard()
    watch = Watch(Monitor(rules=[rule for rule in Monitor().rules if rule.name == "worker_lost"], sinks=[heard]), store)
    await beat(store, heartbeat_seconds=10)
    await watch.check()
    machine_clock.step(3600 * hours)
    await watch.check()
    assert (await store.query_samples(name="workers_alive"))[-1].value == 1
    assert heard.told == []
    for _ in range(30):
        machine_clock.let_pass(5)
        await watch.check()
    assert heard.told == [("worker_lost", "w", False)]


@pytest.mark.parametrize("hours", [2, -2])
async def test_a_monitor_that_began_after_a_step_of_the_clock_sees_the_workers_of_a_store_that_did_not(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    monkeypatch.setattr(monitor, "unix_time", lambda: unix_time() + 3600 * hours)
    watch = Watch(Monitor(sinks=()), store)
    for _ in range(2):
        await beat(store)
        await watch.check()
        assert (await store.query_samples(name="workers_alive", measured_from=0))[-1].value == 1


async def test_a_store_that_is_away_is_an_alert_until_it_is_back(tmp_path: Path) -> None:
    heard = Heard()
    rules = [rule for rule in Monitor().rules if rule.name in ("store_lost", "worker_lost")]
    async with InMemoryLightningStore() as store:
        server = LightningStoreServer(store)
        await server.start()
        async with LightningStoreClient(server.endpoint, retry_seconds=0.0) as client:
            watch = Watch(Monitor(rules=rules, sinks=[heard]), client)
            await beat(store)
            await watch.check()
            await server.stop()
            await watch.check()
            await watch.check()
            assert heard.told == [("store_lost", None, False)]
            await server.start()
            await watch.check()
            await server.stop()
    assert heard.told == [("store_lost", None, False), ("store_lost", None, True)]
    async with InMemoryLightningStore() as closed:
        pass
    async with Monitor(sinks=[heard]).watch(closed):
        pass  # a store that is closed before its monitor ends is no error
    assert len(heard.told) == 2


async def test_what_was_measured_before_the_store_went_away_is_written_when_it_is_back() -> None:
    async with InMemoryLightningStore() as store:
        server = LightningStoreServer(store)
        await server.start()
        async with LightningStoreClient(server.endpoint, retry_seconds=0.0) as client:
            watch = Watch(Monitor(sinks=()), client)
            await server.stop()
            await watch.check()
            await server.start()
            await watch.check()
            await server.stop()
        assert [s.value for s in await store.query_samples(name="store_reachable")] == [0.0, 1.0]


async def test_alerts_that_a_killed_monitor_left_behind_are_closed(store: InMemoryLightningStore) -> None:
    await beat(store)
    await store.pause_worker("w")
    now = time.time()
    left = [Sample(name="alert:hot", time=now - 9 + k, value=value, worker_id="w") for k, value in enumerate((1, 0, 1))]
    await store.add_many_samples([*left, Sample(name="alert:hot", time=now - 9, value=0.0, worker_id="v")])
    heard = Heard()
    watch = Watch(Monitor(rules=[HOT], sinks=[heard], actions={"hot": [PauseClaiming()]}), store)
    await watch.check()
    assert (await alert_series(store, "hot"))[-1] == ("w", 0.0)
    assert len(await alert_series(store, "hot")) == 5
    assert not (await store.get_worker_by_id("w")).paused
    assert heard.told == []


async def test_a_pause_holds_until_no_alert_holds_it_and_ends_with_the_monitor(store: InMemoryLightningStore) -> None:
    action = PauseClaiming()
    everyone = AlertRule(name="full", metric="queue_length", comparison=">", threshold=0.0, window_seconds=0.0)
    monitor = Monitor(
        rules=[HOT, everyone], sinks=(), actions={"hot": [action], "full": [action]}, interval_seconds=1e6
    )

    async def paused() -> list[bool]:
        return [worker.paused for worker in await store.query_workers(sort_by="worker_id")]

    await beat(store, "a", cpu_percent=101)
    await beat(store, "b", cpu_percent=50)
    watch = Watch(monitor, store)
    await watch.check()
    assert await paused() == [True, False]
    rollout = await store.enqueue_rollout(1)
    await watch.check()
    assert await paused() == [True, True]
    await beat(store, "a", cpu_percent=50)
    await watch.check()
    assert await paused() == [True, True]
    await store.update_rollout(rollout.rollout_id, status="cancelled")
    await watch.check()
    assert await paused() == [False, False]
    await beat(store, "b", cpu_percent=101)
    await watch.check()
    assert await paused() == [False, True]
    await watch.close()
    assert await paused() == [False, False]
    assert (await alert_series(store, "hot"))[-1] == ("b", 0.0)


async def test_an_alert_leaves_a_worker_paused_that_was_paused_by_hand_before(store: InMemoryLightningStore) -> None:
    monitor = Monitor(rules=[HOT], sinks=(), actions={"hot": [PauseClaiming()]}, interval_seconds=1e6)
    watch = Watch(monitor, store)

    async def paused_after(cpu_percent: float) -> bool:
        await beat(store, cpu_percent=cpu_percent)
        await watch.check()
        return (await store.get_worker_by_id("w")).paused

    await beat(store)
    await store.pause_worker("w")
    assert await paused_after(101)
    assert await paused_after(50)
    await store.pause_worker("w", paused=False)
    assert await paused_after(101)
    assert not await paused_after(50)
    await watch.close()


def test_a_monitor_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="two rules are called 'hot'"):
        Monitor(rules=[HOT, HOT])
    with pytest.raises(ConfigError, match="actions for 'hot', but the rules are cpu, memory"):
        Monitor(actions={"hot": []})
    with pytest.raises(ConfigError, match="interval_seconds is 0"):
        Monitor(interval_seconds=0)
    typo = AlertRule(name="typo", metric="cpu_percnt", comparison=">", threshold=1.0)
    with pytest.raises(
        ConfigError, match="'typo' reads 'cpu_percnt', which is not measured; did you mean 'cpu_percent'"
    ):
        Monitor(rules=[typo])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rules": HOT}, "rules is AlertRule"),
        ({"rules": [AlertRule]}, r"rules\[0\] is <class"),
        ({"sinks": print}, "sinks is <built-in function print>; give a list of functions"),
        ({"sinks": ["log"]}, r"sinks\[0\] is 'log'"),
        ({"actions": [1]}, r"actions is \[1\]; give a dict"),
        ({"actions": {"cpu": PauseClaiming()}}, r"actions\['cpu'\] is <.*>; give a list of actions"),
        ({"actions": {"cpu": [PauseClaiming]}}, r"actions\['cpu'\]\[0\] is <class"),
        ({"interval_seconds": float("nan")}, "interval_seconds is nan"),
        ({"interval_seconds": "10"}, "interval_seconds is '10'"),
    ],
)
def test_an_option_of_another_kind_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Monitor(**options)
