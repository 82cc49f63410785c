"""Runners at work and at rest: how soon a rollout starts, how many wait at once in one process, what an idle runner costs.

A start is measured with one rollout at a time and idle runners, from just before it is enqueued to the first line of the agent. The store
is in memory on both sides. The peer runs its default settings (`cs`, polling every 5 s), then with its polling tuned by hand; its runners
run one rollout at a time, so that a thousand that wait at once have no counterpart there. Idle processes are measured all at the same
time, which costs nobody anything; a runner's process is the one in which the agent runs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fit import paired
from benchmarks.harness import MINIMUM_RUNS, Peer, Row, Sample, cpu_seconds, summary
from benchmarks.store import percentile
from leyden.agent import LitAgent, rollout
from leyden.algorithm import algo
from leyden.store import InMemoryLightningStore, LightningStore
from leyden.trainer import Trainer
from leyden.types import EnqueueRolloutRequest, find_final_reward

PEER = "bench-agentlightning"
PEER_SCRIPT = Path(__file__).parent / "peers" / "runners_agentlightning.py"
PEER_SECONDS = 400
STRATEGIES = ("shm", "ipc", "cs")
N_STARTS = 100
"""Rollouts in one run."""
N_STARTS_PEER = 50
N_STARTS_PEER_DEFAULT = 5
"""With its default settings, whose rate is set by its timers: five such slices of one run."""
N_WAITING = 1000
IDLE_SECONDS = 30.0
IDLE_WINDOWS = MINIMUM_RUNS
HEADLINES = ()


@rollout
async def clock(task: int) -> float:
    """When it began."""
    return time.time()


@rollout
async def wait(task: int) -> float:
    """Wait as long as a slow model takes."""
    await asyncio.sleep(1.0)
    return 1.0


@rollout
async def whose(task: int) -> float:
    """The process that it runs in."""
    return float(os.getpid())


def main(peer: Peer | None) -> list[Row]:
    """Starts, a thousand that wait, idle processes."""
    return [*starts(peer), waiting(), *idle(peer)]


# ---- starts ----------------------------------------------------------------------------------------------------------


def starts(peer: Peer | None) -> list[Row]:
    """Milliseconds from a rollout's enqueueing to the agent's first line."""
    p99: dict[str, list[Sample]] = {strategy: [] for strategy in STRATEGIES}
    sides: dict[str, Callable[[], Sample]] = {strategy: _starts_of(strategy, p99) for strategy in STRATEGIES}
    if peer is not None:
        sides["tuned"] = lambda: _keep(_peer_starts(peer, "tuned", N_STARTS_PEER, slices=1), p99, "tuned")[0]
    p50 = paired(sides, runs=MINIMUM_RUNS)
    if peer is not None and "tuned" in p50:
        slices = _peer_starts(peer, "default", N_STARTS_PEER_DEFAULT, slices=MINIMUM_RUNS)
        p50["default"] = _keep(slices, p99, "default")
    rows: list[Row] = []
    for strategy in STRATEGIES:
        name = f"enqueue to start, {strategy}"
        for settings in ("default", "tuned") if strategy == "cs" else ("tuned",):
            said = {"default": "defaults, cs", "tuned": "tuned by hand, cs"}[settings]
            peer_name = f"{peer.name}, {said}" if peer and settings in p50 else None
            if settings == "default" and peer_name is None:
                continue
            for label, samples in (("p50", p50), ("p99", p99)):
                theirs = samples.get(settings, [])
                rows.append(
                    summary(f"{name}, {label}", "ms", samples[strategy], theirs, peer_name, higher_is_better=False)
                )
    return rows


def _starts_of(strategy: str, p99: dict[str, list[Sample]]) -> Callable[[], Sample]:
    def run() -> Sample:
        began = cpu_seconds()
        taken = asyncio.run(one_by_one(strategy))
        return _keep([(taken, cpu_seconds() - began)], p99, strategy)[0]

    return run


def _peer_starts(peer: Peer, settings: str, n_tasks: int, *, slices: int) -> list[tuple[list[float], float]]:
    """Milliseconds, and CPU seconds, of each slice of one run."""
    arguments = ["starts", "--settings", settings, "--tasks", str(n_tasks * slices)]
    answer = peer.run(PEER_SCRIPT, *arguments, timeout_seconds=PEER_SECONDS)
    taken, cpu_s = [float(str(ms)) for ms in _listed(answer["ms"])], float(str(answer["cpu_s"]))
    return [(taken[at : at + n_tasks], cpu_s / slices) for at in range(0, len(taken), n_tasks)]


def _keep(slices: list[tuple[list[float], float]], p99: dict[str, list[Sample]], name: str) -> list[Sample]:
    """The p50 of each slice; its p99 goes to `p99`."""
    p99.setdefault(name, []).extend(Sample(value=percentile(taken, 99), cpu_s=cpu_s) for taken, cpu_s in slices)
    return [Sample(value=percentile(taken, 50), cpu_s=cpu_s) for taken, cpu_s in slices]


async def one_by_one(strategy: str) -> list[float]:
    """Milliseconds until each of `N_STARTS` rollouts began; the runners are idle before each."""
    taken: list[float] = []

    @algo
    async def ask(*, store: LightningStore, train_dataset: Sequence[int]) -> None:
        for task in [-1, *train_dataset]:  # the first finds runners that are still starting
            enqueued_at = time.time()
            began_at = await reward_of(store, task)
            if task >= 0:
                taken.append((began_at - enqueued_at) * 1000)

    await run(clock, ask, strategy, list(range(N_STARTS)))
    return taken


async def reward_of(store: LightningStore, task: int) -> float:
    """Run one task and return its reward."""
    made = await store.enqueue_rollout(task)
    (done,) = await store.wait_for_rollouts(rollout_ids=[made.rollout_id])
    reward = find_final_reward(await store.query_spans(done.rollout_id))
    if reward is None:
        raise RuntimeError(f"rollout {done.rollout_id} is {done.status}, without a reward")
    return reward


async def run(agent: LitAgent[Any], algorithm: Any, strategy: str, tasks: Sequence[int], **options: Any) -> None:
    """One run in memory."""
    async with InMemoryLightningStore() as store:
        trainer = Trainer(algorithm=algorithm, strategy=strategy, store=store, **options)
        await trainer.afit(agent, tasks)


# ---- a thousand that wait --------------------------------------------------------------------------------------------


def waiting() -> Row:
    """Seconds for `N_WAITING` rollouts of a second each, in this process."""
    samples: list[Sample] = []
    for _ in range(MINIMUM_RUNS):
        cpu, began = cpu_seconds(), time.perf_counter()
        asyncio.run(all_at_once())
        samples.append(Sample(value=time.perf_counter() - began, cpu_s=cpu_seconds() - cpu))
    name = f"{N_WAITING:,} async rollouts that each wait 1 s, one process"
    return summary(name, "s", samples, [], None, higher_is_better=False)


async def all_at_once() -> None:
    """A run in which all of them wait at the same time."""

    @algo
    async def ask(*, store: LightningStore, train_dataset: Sequence[int]) -> None:
        ids = [
            made.rollout_id
            for made in await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in train_dataset])
        ]
        done = await store.wait_for_rollouts(rollout_ids=ids)
        if any(one.status != "succeeded" for one in done):
            raise RuntimeError("not all succeeded")

    await run(wait, ask, "shm", list(range(N_WAITING)), concurrency=N_WAITING)


# ---- idle processes --------------------------------------------------------------------------------------------------


def idle(peer: Peer | None) -> list[Row]:
    """Megabytes (PSS) and percent of a CPU that a runner's process uses while there is nothing to do."""
    ours, theirs = asyncio.run(watch_idle(peer))
    rows: list[Row] = []
    for strategy, samples in ours.items():
        for label, unit in (("PSS", "MB"), (f"CPU over {IDLE_SECONDS:g} s", "%")):
            name = f"idle runner process ({strategy}), {label}"
            against = theirs.get(unit, [])
            peer_name = f"{peer.name}, defaults, cs" if peer and against else None
            rows.append(summary(name, unit, samples[unit], against, peer_name, higher_is_better=False))
    return rows


async def watch_idle(peer: Peer | None) -> tuple[dict[str, dict[str, list[Sample]]], dict[str, list[Sample]]]:
    """`IDLE_WINDOWS` windows of all sides at once; by strategy and unit, and the peer's by unit."""
    async with AsyncExitStack() as stack:
        pids = {
            strategy: await stack.enter_async_context(idle_runner(strategy))
            for strategy in STRATEGIES
            if strategy != "shm"
        }
        peers_task = None if peer is None else asyncio.create_task(asyncio.to_thread(_idle_peer, peer))
        ours: dict[str, dict[str, list[Sample]]] = {strategy: {"MB": [], "%": []} for strategy in pids}
        for _ in range(IDLE_WINDOWS):
            before = {strategy: _cpu_of(pid) for strategy, pid in pids.items()}
            await asyncio.sleep(IDLE_SECONDS)
            for strategy, pid in pids.items():
                used = _cpu_of(pid) - before[strategy]
                ours[strategy]["MB"].append(Sample(value=_pss_mb(pid), cpu_s=used))
                ours[strategy]["%"].append(Sample(value=100 * used / IDLE_SECONDS, cpu_s=used))
        return ours, {} if peers_task is None else await peers_task


@asynccontextmanager
async def idle_runner(strategy: str) -> AsyncIterator[int]:
    """A run with nothing to do for as long as the context is open: the process of its runner."""
    pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    @algo
    async def ask(*, store: LightningStore, train_dataset: Sequence[int]) -> None:
        pid.set_result(int(await reward_of(store, 0)))
        await over.wait()

    work = asyncio.create_task(run(whose, ask, strategy, [0]))
    try:
        yield await pid
    finally:
        over.set()
        await work


def _idle_peer(peer: Peer) -> dict[str, list[Sample]]:
    arguments = ["idle", "--seconds", str(IDLE_SECONDS), "--windows", str(IDLE_WINDOWS)]
    answer = peer.run(PEER_SCRIPT, *arguments, timeout_seconds=PEER_SECONDS)
    return {
        unit: [Sample(value=float(str(value)), cpu_s=0.0) for value in _listed(answer[unit])] for unit in ("MB", "%")
    }


def _listed(values: object) -> list[object]:
    assert isinstance(values, list)
    return list(values)


def _cpu_of(pid: int) -> float:
    """CPU seconds of its threads, to the nanosecond: an idle process may use less than a tick."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _pss_mb(pid: int) -> float:
    """Return a process's PSS: its own memory, and its share of what it shares with others."""
    return psutil.Process(pid).memory_full_info().pss / 1e6
