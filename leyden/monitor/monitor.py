"""`Monitor` measures a store and its workers on a schedule, keeps time series, and raises and resolves alerts.

It belongs in the process that owns the store, one for each store. It knows workers by their heartbeats alone: no
runner, no strategy, no process. Rules (`rules.py`) decide, sinks (`alert.py`) are notified, actions (`actions.py`) act.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from leyden._lib.clock import unix_time
from leyden._lib.options import NamedOptions, check_number
from leyden.errors import ConfigError, LeydenError, StoreClosed
from leyden.monitor.alert import ALERT_PREFIX, Action, Alert, Sink, log_alert, notify
from leyden.monitor.health import heartbeat_metrics
from leyden.monitor.metric_names import (
    MACHINE_METRICS,
    REPORT_SECONDS,
    STORE_METRICS,
    SYSTEM_METRICS,
    UPSTREAM_METRICS,
    WORKER_METRICS,
    base_name,
)
from leyden.monitor.rules import DEFAULT_RULES, Judgement, Point, Rule
from leyden.monitor.system import SystemProbe, host_name
from leyden.store.base import LightningStore
from leyden.types import Sample, Worker
from leyden.types.worker_health import MISSED_HEARTBEATS, has_ended, heartbeat_seconds

logger = logging.getLogger(__name__)

_COUNTERS = frozenset({"attempts_ended", "attempts_completed", "attempts_succeeded"})
"""Metrics of a worker that only grow. Rules judge their sum over all workers."""
_PROBE_SECONDS = 10.0
"""A store that has not replied after this time is unreachable."""
_ABANDON_SECONDS = 3600.0
"""Seconds without a report after which a worker is no longer judged."""
_UPSTREAM_SECONDS = 6 * REPORT_SECONDS
"""The age at which a gateway's samples expire."""
_MAX_WORKERS = 10_000
_END_SECONDS = 5.0
"""Seconds that the end of a watch waits for the store."""

_Key = tuple[str, str | None]
"""The name of a rule and a subject: a worker, or None for the store with its machine."""


class Monitor(NamedOptions):
    """Checks a store and its workers at intervals, and raises alerts.

    rules: decide when alerts are raised.
    sinks: functions that are notified of each alert when it is raised and when it is resolved; by default the log. The
        store records alerts in any case.
    actions: the actions that the alerts of a rule trigger, by the rule's name.
    interval_seconds: the time between two checks.
    Raise ConfigError for a part of another kind, two rules of one name, actions for an unknown rule, and a rule about
    an unknown metric.
    """

    def __init__(
        self,
        *,
        rules: Sequence[Rule] = DEFAULT_RULES,
        sinks: Sequence[Sink] = (log_alert,),
        actions: Mapping[str, Sequence[Action]] | None = None,
        interval_seconds: float = 10.0,
    ) -> None:
        check_number("interval_seconds", interval_seconds, above=0)
        members = ("name", "severity", "comparison", "metrics", "reach_seconds", "judge")
        wanted = "rules, for example [*DEFAULT_RULES, AlertRule(...)]"
        self.rules = cast(Sequence[Rule], _checked_parts("rules", rules, wanted, members))
        self.sinks = _checked_parts("sinks", sinks, "functions of an Alert, for example [log_alert]", ("__call__",))
        given: Any = {} if actions is None else actions
        if not isinstance(given, Mapping):
            raise ConfigError(f"actions is {given!r:.200}; give a dict of lists of actions by the name of a rule")
        wanted = "actions, for example [PauseClaiming()]"
        self.actions: dict[str, Sequence[Action]] = {
            rule: _checked_parts(f"actions[{rule!r}]", parts, wanted, ("raised", "resolved"))
            for rule, parts in cast(Mapping[str, Any], given).items()
        }
        self.interval_seconds = interval_seconds
        names = [rule.name for rule in self.rules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two rules are called {', '.join(map(repr, twice))}; give each another name")
        known = SYSTEM_METRICS.keys() | WORKER_METRICS.keys() | STORE_METRICS.keys() | UPSTREAM_METRICS.keys()
        for name, metric in ((rule.name, metric) for rule in self.rules for metric in rule.metrics):
            if base_name(metric) not in known:  # nothing measures it, so the rule could never fire
                close = get_close_matches(metric, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ConfigError(
                    f"rule {name!r} reads {metric!r}, which is not measured; {hint}possible: {', '.join(sorted(known))}"
                )
        if unknown := sorted(self.actions.keys() - set(names)):
            raise ConfigError(
                f"actions for {', '.join(map(repr, unknown))}, but the rules are {', '.join(names)}; use a rule's name"
            )

    @asynccontextmanager
    async def watch(self, store: LightningStore) -> AsyncGenerator[Watch]:
        """Check `store` now and every `interval_seconds`, while the context is open.

        At the end all alerts are resolved, and actions release what they hold. A store that cannot be reached raises an
        alert, never an exception.
        """
        watch = Watch(self, store)
        task = asyncio.create_task(_repeat(watch, self.interval_seconds), name="leyden-monitor")
        try:
            yield watch
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with suppress(LeydenError, TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await watch.close()


class Watch:
    """A monitor's watch over one store: its time series and its alerts. Use it in one event loop."""

    def __init__(self, monitor: Monitor, store: LightningStore) -> None:
        self._monitor = monitor
        self._store = store
        scheme, _, path = store.url.partition("://")
        self._probe = SystemProbe(Path(path).parent if scheme == "sqlite" else None)
        self._reach_seconds = {
            metric: max(rule.reach_seconds for rule in monitor.rules if metric in rule.metrics)
            for rule in monitor.rules
            for metric in rule.metrics
        }
        """The age in seconds up to which points of a metric are kept; metrics that no rule reads are missing."""
        self._series: dict[str | None, dict[str, deque[Point]]] = {None: {}}
        """The points that rules read, by subject and metric."""
        self._heartbeats: dict[str, tuple[float | None, float]] = {}
        """The last heartbeat of each worker by the store's clock, and when this watch saw it, by its own clock."""
        self._upstreams: dict[str, float] = {}
        """When a new sample of a gateway was last read, by subject."""
        self._read_until: dict[tuple[str, str], float] = {}
        """The time of the newest sample that was read, for each series of a gateway."""
        self._counts: dict[str, Mapping[str, float]] = {}
        """The counters in the last heartbeat of each worker."""
        self._totals: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        """The growth of each counter since this watch began, over all workers."""
        self._unwritten: deque[Sample] = deque(maxlen=10_000)
        """Samples that the store does not have yet; the oldest are dropped if it stays unavailable."""
        self._made = unix_time()
        self._closed_left_behind = False
        """Whether the alerts of an earlier, killed monitor are closed."""
        self._counts_known = False
        """Whether a first check has read the counters. Growth before it is not judged."""
        self.alerts: dict[_Key, Alert] = {}
        """The raised alerts, by rule and subject."""

    async def check(self) -> None:
        """Measure the store and its workers once, judge the rules, notify, and write the samples.

        If the store cannot be reached, note that and judge the store alone. Raise StoreClosed if it was closed here.
        """
        now = unix_time()
        try:
            if not self._closed_left_behind:
                await self._close_left_behind()
                self._closed_left_behind = True
            workers, store_now = await self._measure_store(now)
            await self._read_upstreams(now)
        except (LeydenError, TimeoutError) as error:
            if isinstance(error, StoreClosed):
                raise
            logger.warning("the monitor cannot reach %s: %s", self._store.url, error or "no reply in time")
            self._note(None, {"store_reachable": 0.0}, now)
            await self._judge(None, now)  # nothing is known of the workers
            return
        self._note_workers(workers, now, store_now)
        for subject in [*self._series]:
            await self._judge(subject, now)
        for key in [key for key in self.alerts if key[1] not in self._series]:
            await self._resolve(key, now)
        await self._write(now)

    async def close(self) -> None:
        """Resolve all alerts and undo their actions. The sinks are not notified."""
        now = unix_time()
        for key, alert in [*self.alerts.items()]:
            del self.alerts[key]
            await self._act(replace(alert, until=now))
            self._unwritten.append(_alert_sample(alert, now, 0.0))
        await self._write(now)

    # ---- measuring -------------------------------------------------------------------------------

    async def _measure_store(self, now: float) -> tuple[Sequence[Worker], float]:
        """Note the metrics of the store and its machine. Return the workers, and the time by the store's clock.

        Raise TimeoutError after ten seconds without a reply, and the store's own errors.
        """
        store, machine = self._store, self._probe.read()
        self._note(
            None, {name: float(value) for name, value in machine.items() if base_name(name) in SYSTEM_METRICS}, now
        )
        async with asyncio.timeout(_PROBE_SECONDS):
            started = time.perf_counter()
            workers = await store.query_workers(sort_by="last_heartbeat_time", sort_order="desc", limit=_MAX_WORKERS)
            latency = time.perf_counter() - started
            statistics = await store.statistics()
        count = statistics["rollouts_by_status"].get
        metrics = {
            "store_reachable": 1.0,
            "store_latency_seconds": latency,
            "queue_length": float(count("queuing", 0) + count("requeuing", 0)),
            "rollouts_under_way": float(count("preparing", 0) + count("running", 0)),
        }
        self._note(None, metrics, now)
        return workers, statistics["time"]

    async def _read_upstreams(self, now: float) -> None:
        """Add the gateways' samples to the series that rules read.

        Drop the series of a gateway that wrote nothing lately, because it is idle or has ended.
        """
        for name in self._reach_seconds:
            if base_name(name) in UPSTREAM_METRICS:
                for sample in await self._store.query_samples(name=name, measured_from=now - _UPSTREAM_SECONDS):
                    subject = sample.worker_id or ""
                    if sample.time > self._read_until.get((subject, name), 0.0):
                        self._read_until[subject, name] = sample.time
                        self._upstreams[subject] = now
                        self._series.setdefault(subject, {})
                        self._keep(subject, name, sample.value, now)
        for subject in [one for one, read in self._upstreams.items() if read < now - _UPSTREAM_SECONDS]:
            del self._upstreams[subject], self._series[subject]
            self._read_until = {key: time for key, time in self._read_until.items() if key[0] != subject}

    def _note_workers(self, workers: Sequence[Worker], now: float, store_now: float) -> None:
        """Note the metrics of each living worker, and drop the series of the others.

        The metrics of a machine come from one healthy worker there, so that one busy machine raises one alert.
        store_now: the time by the store's clock, which dates heartbeats.
        """
        recent = [worker for worker in workers if store_now - (worker.last_heartbeat_time or 0.0) <= _ABANDON_SECONDS]
        alive = sorted((worker for worker in recent if not has_ended(worker)), key=lambda worker: worker.worker_id)
        for worker in recent:
            self._count(worker)
        self._counts_known = True
        for worker_id in self._series.keys() - {None} - self._upstreams.keys() - {one.worker_id for one in alive}:
            del self._series[worker_id]
        new = {worker.worker_id for worker in alive if self._has_new_heartbeat(worker, now)}
        missed = {w.worker_id: (now - self._heartbeats[w.worker_id][1]) / heartbeat_seconds(w) for w in alive}
        healthy = [worker for worker in alive if missed[worker.worker_id] <= MISSED_HEARTBEATS]
        # On its own machine the monitor itself reports the machine's metrics.
        reporters = {_host_of(worker): worker.worker_id for worker in reversed(healthy)} | {host_name(): None}
        for worker in alive:
            metrics = {"missed_heartbeats": missed[worker.worker_id]}
            if worker.worker_id in new:
                known = (SYSTEM_METRICS.keys() | WORKER_METRICS.keys()) - _COUNTERS  # counters are judged as totals
                if reporters.get(_host_of(worker)) != worker.worker_id:
                    known -= MACHINE_METRICS
                metrics |= heartbeat_metrics(worker, known)
            self._series.setdefault(worker.worker_id, {})
            self._note(worker.worker_id, metrics, now)
        self._note(None, {**self._totals, "workers_alive": float(len(healthy))}, now)

    def _has_new_heartbeat(self, worker: Worker, now: float) -> bool:
        """Return whether there was a heartbeat since the last check, and remember it."""
        before = self._heartbeats.get(worker.worker_id)
        if before is not None and before[0] == worker.last_heartbeat_time:
            return False
        self._heartbeats[worker.worker_id] = (worker.last_heartbeat_time, now)
        return True

    def _count(self, worker: Worker) -> None:
        """Add the growth of a worker's counters to the totals. A worker that was restarted counts from 0."""
        counts = heartbeat_metrics(worker, _COUNTERS)
        # At the first check, counters contain growth from before the watch. A worker that appears
        # later is taken to have begun after it, so all of its counts are new.
        before = self._counts.get(worker.worker_id, {} if self._counts_known else counts)
        self._counts[worker.worker_id] = counts
        restarted = counts.get("attempts_ended", 0.0) < before.get("attempts_ended", 0.0)
        for name, value in counts.items():
            self._totals[name] += value - (0.0 if restarted else before.get(name, 0.0))

    def _note(self, subject: str | None, metrics: Mapping[str, float], now: float) -> None:
        for name, value in metrics.items():
            self._unwritten.append(Sample(name=name, time=now, value=value, worker_id=subject))
            self._keep(subject, name, value, now)

    def _keep(self, subject: str | None, name: str, value: float, now: float) -> None:
        if name in self._reach_seconds:
            points = self._series[subject].setdefault(name, deque())
            points.append((now, value))
            while len(points) > 1 and points[0][0] < now - self._reach_seconds[name]:
                points.popleft()

    # ---- judging and notifying -------------------------------------------------------------------

    async def _judge(self, subject: str | None, now: float) -> None:
        for rule in self._monitor.rules:
            verdict = rule.judge(self._series[subject], now)
            raised = (rule.name, subject) in self.alerts
            if verdict is not None and verdict.firing:
                if not raised:
                    await self._raise(rule, subject, verdict, now)
            elif raised:
                await self._resolve((rule.name, subject), now)

    async def _raise(self, rule: Rule, subject: str | None, verdict: Judgement, now: float) -> None:
        """subject: a worker's id; None for the store with its machine."""
        alert = Alert(
            rule=rule.name,
            severity=rule.severity,
            metric=" per ".join(rule.metrics),
            comparison=rule.comparison,
            value=verdict.value,
            limit=verdict.limit,
            worker_id=subject,
            since=now,
        )
        self.alerts[rule.name, subject] = alert
        await self._notify(alert)

    async def _resolve(self, key: _Key, now: float) -> None:
        alert = self.alerts.pop(key)
        self._unwritten.append(_alert_sample(alert, now, 0.0))
        await self._notify(replace(alert, until=now))

    async def _notify(self, alert: Alert) -> None:
        for sink in self._monitor.sinks:
            await notify(sink, alert)
        await self._act(alert)

    async def _act(self, alert: Alert) -> None:
        for action in self._monitor.actions.get(alert.rule, ()):
            try:
                await (action.resolved if alert.resolved else action.raised)(self._store, alert)
            except Exception:
                logger.exception("action %s failed on the alert %s", type(action).__name__, alert.rule)

    # ---- writing ---------------------------------------------------------------------------------

    async def _write(self, now: float) -> None:
        """Write all samples, with a 1 for each raised alert. After an error they stay unwritten."""
        self._unwritten.extend(_alert_sample(alert, now, 1.0) for alert in self.alerts.values())
        written = list(self._unwritten)
        await self._store.add_many_samples(written)
        self._unwritten.clear()

    async def _close_left_behind(self) -> None:
        """Resolve the alerts that a killed monitor left raised in the store, and undo their actions. They are raised
        again if their cause persists.
        """
        for rule in self._monitor.rules:
            latest: dict[str | None, Sample] = {}
            name = ALERT_PREFIX + rule.name
            for sample in await self._store.query_samples(name=name, sort_order="desc", limit=_MAX_WORKERS):
                latest.setdefault(sample.worker_id, sample)
            for sample in latest.values():
                if sample.value:
                    alert = Alert(
                        rule=rule.name,
                        severity=rule.severity,
                        metric=" per ".join(rule.metrics),
                        comparison=rule.comparison,
                        value=math.nan,
                        limit=math.nan,
                        worker_id=sample.worker_id,
                        since=sample.time,
                        until=self._made,
                    )
                    self._unwritten.append(_alert_sample(alert, self._made, 0.0))
                    await self._act(alert)


def _checked_parts(name: str, given: Any, wanted: str, members: Sequence[str]) -> tuple[Any, ...]:
    """Return an option that is a list as a tuple. Raise ConfigError for a part of another kind.

    wanted: the kind of parts, for the message.
    members: the attributes that every part of that kind has.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"{name} is {given!r:.200}; give a list of {wanted}")
    parts = tuple(cast(Sequence[Any], given))
    for index, part in enumerate(parts):
        if isinstance(part, type) or not all(hasattr(part, member) for member in members):
            raise ConfigError(f"{name}[{index}] is {part!r:.200}; give a list of {wanted}")
    return parts


def _host_of(worker: Worker) -> str:
    return str((worker.heartbeat_stats or {}).get("host"))


def _alert_sample(alert: Alert, now: float, value: float) -> Sample:
    return Sample(name=ALERT_PREFIX + alert.rule, time=now, value=value, worker_id=alert.worker_id)


async def _repeat(watch: Watch, interval_seconds: float) -> None:
    """Check at every interval until the store closes or the task is cancelled. Log all other errors."""
    while True:
        try:
            await watch.check()
        except StoreClosed:
            return
        except LeydenError as error:
            logger.warning("the monitor could not write its metrics and tries again: %s", error)
        except Exception:
            # No caller awaits this task: an error that ended it would leave the store unwatched.
            logger.exception("the monitor failed unexpectedly and tries again in %s s", interval_seconds)
        await asyncio.sleep(interval_seconds)
