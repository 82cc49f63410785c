"""`Monitor`: looks at the store and its workers on a schedule, keeps time series, raises and resolves alerts.

It belongs in the process that owns the store, one for each store. It knows workers by their heartbeats alone: no runner, no strategy, no
process. What is judged is in `rules.py`, what is told in `alert.py`, what is done in `actions.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, cast

from leyden.errors import ConfigError, LeydenError, StoreClosed
from leyden.monitor.alert import ALERT_PREFIX, Action, Alert, Sink, log_alert, tell
from leyden.monitor.health import (
    MISSED_HEARTBEATS,
    WORKER_FIGURES,
    base_name,
    figures_of,
    has_ended,
    heartbeat_seconds,
)
from leyden.monitor.rules import DEFAULT_RULES, Point, Rule, Verdict
from leyden.monitor.system import FIGURES, MACHINE_FIGURES, SystemProbe, host_name
from leyden.monitor.upstreams import REPORT_SECONDS, UPSTREAM_FIGURES
from leyden.options import NamedOptions, check_number
from leyden.store.base import LightningStore
from leyden.types import Sample, Worker

logger = logging.getLogger(__name__)

STORE_FIGURES: Final[Mapping[str, str]] = {
    "store_reachable": "1 if the store answered the monitor, 0 if it did not.",
    "queue_length": "Rollouts that wait to be claimed.",
    "rollouts_under_way": "Rollouts that a worker has claimed.",
    "workers_alive": "Workers whose heartbeats the monitor hears.",
    "missed_heartbeats": "For how many of its intervals a worker has been silent.",
}
"""What a monitor finds out by itself."""

_COUNTERS = frozenset({"attempts_ended", "attempts_completed", "attempts_succeeded"})
_PROBE_SECONDS = 10.0
"""A store that has not answered by then is lost."""
_FORGET_SECONDS = 3600.0
"""A worker that was silent for so long is looked at no more."""
_UPSTREAM_SECONDS = 6 * REPORT_SECONDS
"""How long a gateway's samples count, in seconds."""
_MOST_WORKERS = 10_000
_END_SECONDS = 5.0

_Key = tuple[str, str | None]
"""A rule and a subject: a worker, or None for the store with its machine."""


class Monitor(NamedOptions):
    """What is watched for, and who is told.

    rules: when to raise alerts.
    sinks: told of each alert when it is raised and when it is resolved; by default the log. The store keeps them in any case.
    actions: by the name of a rule, what is done about its alerts.
    interval_seconds: between two looks.
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
        self.rules = _checked_parts("rules", rules, "rules, for example [*DEFAULT_RULES, AlertRule(...)]", _is_rule)
        self.sinks = _checked_parts("sinks", sinks, "functions of an Alert, for example [log_alert]", callable)
        self.actions = _checked_actions({} if actions is None else actions)
        self.interval_seconds = interval_seconds
        names = [rule.name for rule in self.rules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two rules are called {', '.join(map(repr, twice))}; give each a name of its own")
        for rule in self.rules:
            _check_figures(rule)
        if unknown := sorted(self.actions.keys() - set(names)):
            raise ConfigError(f"actions for {', '.join(map(repr, unknown))}, but the rules are {', '.join(names)}")

    @asynccontextmanager
    async def watch(self, store: LightningStore) -> AsyncGenerator[Watch]:
        """Look at `store` every `interval_seconds` for as long as the context is open, beginning now.

        At the end alerts are closed: actions let go of what they hold. A store that is away is an alert, never an error here.
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
    """One store under a monitor's eyes. All methods are of one event loop."""

    def __init__(self, monitor: Monitor, store: LightningStore) -> None:
        self._monitor = monitor
        self._store = store
        self._probe = SystemProbe(_directory_of(store))
        self._reach = {
            figure: max(rule.reach_seconds for rule in monitor.rules if figure in rule.figures)
            for rule in monitor.rules
            for figure in rule.figures
        }
        self._series: dict[str | None, dict[str, deque[Point]]] = {None: {}}
        self._heard: dict[str, tuple[float | None, float]] = {}
        """Of each worker its last heartbeat by the store's clock, and when we learned of it by ours."""
        self._upstreams: dict[str, float] = {}
        """When a new sample was last read, for each subject of gateways' samples."""
        self._read_until: dict[tuple[str, str], float] = {}
        """The time of the newest sample that was read, for each series of a gateway."""
        self._counts: dict[str, Mapping[str, float]] = {}
        self._totals: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        self._unwritten: deque[Sample] = deque(maxlen=10_000)
        self._made = time.time()
        self._tidy = self._counting = False
        """Whether alerts that were left behind are closed; whether it is known from where counters are counted."""
        self.alerts: dict[_Key, Alert] = {}
        """Those that are raised, by rule and worker."""

    async def look(self) -> None:
        """Take one look: measure, judge, tell, write."""
        now = time.time()
        try:
            if not self._tidy:
                await self._close_left_behind()
                self._tidy = True
            workers = await self._measure_store(now)
            await self._read_upstreams(now)
        except (LeydenError, TimeoutError) as error:
            if isinstance(error, StoreClosed):
                raise
            logger.warning("the monitor cannot reach %s: %s", self._store.url, error or "no answer in time")
            self._note(None, {"store_reachable": 0.0}, now)
            await self._judge(None, now)  # of its workers nothing is known now
            return
        self._note_workers(workers, now)
        for subject in [*self._series]:
            await self._judge(subject, now)
        for key in [key for key in self.alerts if key[1] not in self._series]:
            await self._resolve(key, now)
        await self._write(now)

    async def close(self) -> None:
        """Close all alerts."""
        now = time.time()
        for key, alert in [*self.alerts.items()]:
            del self.alerts[key]
            await self._act(replace(alert, until=now))
            self._unwritten.append(_alert_sample(alert, now, 0.0))
        await self._write(now)

    # ---- measuring -----------------------------------------------------------------------------------------------------

    async def _measure_store(self, now: float) -> Sequence[Worker]:
        """Note the figures of the store and its machine; its workers. Raises what the store raises, TimeoutError."""
        store, machine = self._store, self._probe.read()
        self._note(None, {name: float(value) for name, value in machine.items() if base_name(name) in FIGURES}, now)
        async with asyncio.timeout(_PROBE_SECONDS):
            started = time.perf_counter()
            workers = await store.query_workers(sort_by="last_heartbeat_time", sort_order="desc", limit=_MOST_WORKERS)
            latency = time.perf_counter() - started
            queued = await store.query_rollouts(status_in=["queuing", "requeuing"], limit=1)
            under_way = await store.query_rollouts(status_in=["preparing", "running"], limit=1)
        figures = {
            "store_reachable": 1.0,
            "store_latency_seconds": latency,
            "queue_length": float(queued.total),
            "rollouts_under_way": float(under_way.total),
        }
        self._note(None, figures, now)
        return workers

    async def _read_upstreams(self, now: float) -> None:
        """Add the gateways' samples to the series that rules read.

        A silent gateway is idle or has ended.
        """
        for name in self._reach:
            if base_name(name) in UPSTREAM_FIGURES:
                for sample in await self._store.query_samples(name=name, measured_from=now - _UPSTREAM_SECONDS):
                    subject = sample.worker_id or ""
                    if sample.time > self._read_until.get((subject, name), 0.0):
                        self._read_until[subject, name] = sample.time
                        self._upstreams[subject] = now
                        self._series.setdefault(subject, {})
                        self._keep(subject, name, sample.value, now)
        for subject in [one for one, heard in self._upstreams.items() if heard < now - _UPSTREAM_SECONDS]:
            del self._upstreams[subject], self._series[subject]
            self._read_until = {key: time for key, time in self._read_until.items() if key[0] != subject}

    def _note_workers(self, workers: Sequence[Worker], now: float) -> None:
        recent = [worker for worker in workers if now - (worker.last_heartbeat_time or 0.0) <= _FORGET_SECONDS]
        alive = sorted((worker for worker in recent if not has_ended(worker)), key=lambda worker: worker.worker_id)
        for worker in recent:
            self._count(worker)
        self._counting = True
        for worker_id in self._series.keys() - {None} - self._upstreams.keys() - {one.worker_id for one in alive}:
            del self._series[worker_id]
        new = {worker.worker_id for worker in alive if self._hear(worker, now)}
        missed = {w.worker_id: (now - self._heard[w.worker_id][1]) / heartbeat_seconds(w) for w in alive}
        well = [worker for worker in alive if missed[worker.worker_id] <= MISSED_HEARTBEATS]
        # One worker speaks for its machine, and the monitor for its own: one cause is one alert.
        speakers = {_host_of(worker): worker.worker_id for worker in reversed(well)} | {host_name(): None}
        for worker in alive:
            figures = {"missed_heartbeats": missed[worker.worker_id]}
            if worker.worker_id in new:
                figures |= _own_figures(worker, speaks=speakers.get(_host_of(worker)) == worker.worker_id)
            self._series.setdefault(worker.worker_id, {})
            self._note(worker.worker_id, figures, now)
        self._note(None, {**self._totals, "workers_alive": float(len(well))}, now)

    def _hear(self, worker: Worker, now: float) -> bool:
        """Whether there was a heartbeat since the last look."""
        before = self._heard.get(worker.worker_id)
        if before is not None and before[0] == worker.last_heartbeat_time:
            return False
        self._heard[worker.worker_id] = (worker.last_heartbeat_time, now)
        return True

    def _count(self, worker: Worker) -> None:
        """Add what a worker's counters have grown by to the totals; a worker that was started again counts from 0."""
        counts = figures_of(worker, _COUNTERS)
        before = self._counts.get(worker.worker_id, {} if self._counting else counts)  # what was before is not judged
        self._counts[worker.worker_id] = counts
        again = counts.get("attempts_ended", 0.0) < before.get("attempts_ended", 0.0)
        for name, value in counts.items():
            self._totals[name] += value - (0.0 if again else before.get(name, 0.0))

    def _note(self, subject: str | None, figures: Mapping[str, float], now: float) -> None:
        for name, value in figures.items():
            self._unwritten.append(Sample(name=name, time=now, value=value, worker_id=subject))
            self._keep(subject, name, value, now)

    def _keep(self, subject: str | None, name: str, value: float, now: float) -> None:
        """Add a point to a series that a rule reads."""
        if name in self._reach:
            points = self._series[subject].setdefault(name, deque())
            points.append((now, value))
            while len(points) > 1 and points[0][0] < now - self._reach[name]:
                points.popleft()

    # ---- judging and telling -------------------------------------------------------------------------------------------

    async def _judge(self, subject: str | None, now: float) -> None:
        for rule in self._monitor.rules:
            verdict = rule.judge(self._series[subject], now)
            raised = (rule.name, subject) in self.alerts
            if verdict is not None and verdict.firing:
                if not raised:
                    await self._raise(rule, subject, verdict, now)
            elif raised:
                await self._resolve((rule.name, subject), now)

    async def _raise(self, rule: Rule, subject: str | None, verdict: Verdict, now: float) -> None:
        alert = Alert(
            rule=rule.name,
            severity=rule.severity,
            figure=" per ".join(rule.figures),
            comparison=rule.comparison,
            value=verdict.value,
            limit=verdict.limit,
            worker_id=subject,
            since=now,
        )
        self.alerts[rule.name, subject] = alert
        await self._tell(alert)

    async def _resolve(self, key: _Key, now: float) -> None:
        alert = self.alerts.pop(key)
        self._unwritten.append(_alert_sample(alert, now, 0.0))
        await self._tell(replace(alert, until=now))

    async def _tell(self, alert: Alert) -> None:
        for sink in self._monitor.sinks:
            await tell(sink, alert)
        await self._act(alert)

    async def _act(self, alert: Alert) -> None:
        for action in self._monitor.actions.get(alert.rule, ()):
            try:
                await (action.resolved if alert.resolved else action.raised)(self._store, alert)
            except Exception:
                logger.exception("action %s failed on the alert %s", type(action).__name__, alert.rule)

    # ---- writing -------------------------------------------------------------------------------------------------------

    async def _write(self, now: float) -> None:
        self._unwritten.extend(_alert_sample(alert, now, 1.0) for alert in self.alerts.values())
        written = list(self._unwritten)
        await self._store.add_many_samples(written)
        self._unwritten.clear()

    async def _close_left_behind(self) -> None:
        """Alerts of a monitor that was killed: they are closed, and raised anew where their cause is still there."""
        for rule in self._monitor.rules:
            latest: dict[str | None, Sample] = {}
            name = ALERT_PREFIX + rule.name
            for sample in await self._store.query_samples(name=name, sort_order="desc", limit=_MOST_WORKERS):
                latest.setdefault(sample.worker_id, sample)
            for sample in latest.values():
                if sample.value:
                    alert = _left_behind(rule, sample, self._made)
                    self._unwritten.append(_alert_sample(alert, self._made, 0.0))
                    await self._act(alert)


def _checked_parts(name: str, given: Any, wanted: str, is_one: Callable[[Any], bool]) -> tuple[Any, ...]:
    """The parts of an option that is a list. Raises ConfigError naming what is none."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"{name} is {given!r:.200}; give a list of {wanted}")
    parts = tuple(cast(Sequence[Any], given))
    for index, part in enumerate(parts):
        if isinstance(part, type) or not is_one(part):
            raise ConfigError(f"{name}[{index}] is {part!r:.200}; give a list of {wanted}")
    return parts


def _checked_actions(given: Any) -> dict[str, Sequence[Action]]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"actions is {given!r:.200}; give a dict of lists of actions by the name of a rule")
    wanted = "actions, for example [PauseClaiming()]"
    named = cast(Mapping[str, Any], given).items()
    return {rule: _checked_parts(f"actions[{rule!r}]", actions, wanted, _is_action) for rule, actions in named}


def _check_figures(rule: Rule) -> None:
    """Raises ConfigError for a rule that could never be met: nobody measures what it reads."""
    known = FIGURES.keys() | WORKER_FIGURES.keys() | STORE_FIGURES.keys() | UPSTREAM_FIGURES.keys()
    for figure in rule.figures:
        if base_name(figure) not in known:
            close = get_close_matches(figure, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"rule {rule.name!r} reads {figure!r}, which is not measured; {hint}possible: {', '.join(sorted(known))}"
            )


def _is_rule(part: Any) -> bool:
    return all(hasattr(part, name) for name in ("name", "severity", "comparison", "figures", "reach_seconds", "judge"))


def _is_action(part: Any) -> bool:
    return hasattr(part, "raised") and hasattr(part, "resolved")


def _host_of(worker: Worker) -> str:
    return str((worker.heartbeat_stats or {}).get("host"))


def _own_figures(worker: Worker, *, speaks: bool) -> dict[str, float]:
    """What is noted of a heartbeat: not the counters, which are judged in all, and the machine's figures only of who speaks for it."""
    names = (FIGURES.keys() | WORKER_FIGURES.keys()) - _COUNTERS
    return figures_of(worker, names if speaks else names - MACHINE_FIGURES)


def _left_behind(rule: Rule, sample: Sample, now: float) -> Alert:
    nan = float("nan")
    figure = " per ".join(rule.figures)
    return Alert(rule.name, rule.severity, figure, rule.comparison, nan, nan, sample.worker_id, sample.time, now)


def _alert_sample(alert: Alert, now: float, value: float) -> Sample:
    return Sample(name=ALERT_PREFIX + alert.rule, time=now, value=value, worker_id=alert.worker_id)


def _directory_of(store: LightningStore) -> Path | None:
    """Where the store's file is; None for one that has none here."""
    scheme, _, path = store.url.partition("://")
    return Path(path).parent if scheme == "sqlite" else None


async def _repeat(watch: Watch, interval_seconds: float) -> None:
    while True:
        try:
            await watch.look()
        except StoreClosed:
            return
        except LeydenError as error:
            logger.warning("the monitor could not write what it saw and tries again: %s", error)
        except Exception:  # nobody awaits this task: an error that ended it would leave the store unwatched in silence
            logger.exception("the monitor failed as nobody foresaw and tries again in %s s", interval_seconds)
        await asyncio.sleep(interval_seconds)
