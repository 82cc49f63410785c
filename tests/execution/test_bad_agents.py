"""Agents that do to their process what they can: other runners do not notice, and the record says what happened."""

# ruff: noqa: ASYNC220, ASYNC222, ASYNC240, ASYNC251 -- what agents do

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

import leyden as ly
from leyden.execution import ExecutionStrategy, SharedMemoryExecutionStrategy
from leyden.execution.client_server import ClientServerExecutionStrategy
from leyden.execution.process_strategy import InterProcessExecutionStrategy, ProcessExecutionStrategy
from leyden.execution.runner.calls import call_async, overdue_seconds
from leyden.testing import audit_store
from tests.execution import agents
from tests.execution.family import gone, runners

Strategies = [InterProcessExecutionStrategy, pytest.param(ClientServerExecutionStrategy, marks=pytest.mark.faults)]
BAD = "bad"
SIBLINGS = 30


async def leaks(path: Path) -> float:
    held: list[bytearray] = []
    while True:
        held.append(bytearray(2**20))


async def leaks_little_things(path: Path) -> float:
    held: list[Any] = []
    while True:
        held = [held, object()]


async def forks_a_child_that_stays(path: Path) -> float:
    if os.fork() == 0:
        path.write_text(str(os.getpid()))
        time.sleep(600)
    return 1.0


def forks_a_child_that_stays_from_a_thread(path: Path) -> float:
    if os.fork() == 0:
        path.write_text(str(os.getpid()))
        time.sleep(600)
    return 1.0


async def starts_a_program_that_stays(path: Path) -> float:
    path.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    return 1.0


async def starts_a_program_that_leaves_the_group(path: Path) -> float:
    path.write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
    return 1.0


async def starts_a_program_without_an_environment(path: Path) -> float:
    path.write_text(str(subprocess.Popen(["sleep", "600"], env={}, start_new_session=True).pid))
    return 1.0


async def forks_a_child_that_leaves_for_good(path: Path) -> float:
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            path.write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
    while not path.exists():  # noqa: ASYNC110 -- another process writes it
        await asyncio.sleep(0.01)
    return 1.0


async def swallows_its_cancellation(path: Path) -> float:
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass


async def holds_the_lock(path: Path) -> float:
    python, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    python.pthread_mutex_lock(mutex)
    python.pthread_mutex_lock(mutex)
    return 1.0


async def forks_a_child_that_returns(path: Path) -> float:
    os.fork()
    return 1.0


async def forks_a_child_that_awaits(path: Path) -> float:
    os.fork()
    await asyncio.sleep(0.01)
    return 1.0


async def forks_a_child_that_exits(path: Path) -> float:
    if (child := os.fork()) == 0:
        sys.exit(7)
    return 1.0 if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7 else 0.0


async def closes_stdout(path: Path) -> float:
    sys.stdout.close()
    os.close(1)
    return 1.0


async def closes_every_file(path: Path) -> float:
    os.closerange(0, 1000)
    return 1.0


async def exits(path: Path) -> float:
    sys.exit(3)


def exits_in_a_thread(path: Path) -> float:
    sys.exit(3)


async def exits_in_a_task_of_its_own(path: Path) -> float:
    async def leave() -> None:
        sys.exit(3)

    await asyncio.gather(leave())
    return 1.0


async def exits_at_once(path: Path) -> float:
    os._exit(0)


async def raises_what_is_no_exception(path: Path) -> float:
    class Out(BaseException):
        pass

    raise Out("of here")


async def blocks_the_event_loop(path: Path) -> float:
    time.sleep(600)
    return 1.0


async def stops_the_event_loop(path: Path) -> float:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(600)
    return 1.0


async def cancels_everything(path: Path) -> float:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(600)
    return 1.0


async def crashes(path: Path) -> float:
    ctypes.string_at(0)
    return 1.0


async def forgets_where_it_is(path: Path) -> float:
    os.environ.clear()
    os.chdir("/")
    return 1.0


async def run_beside_siblings(
    function: Callable[[Path], Any],
    strategy: ExecutionStrategy,
    path: Path,
    *,
    concurrency: int = 2,
    siblings_attempts: int = 1,
    **config: Any,
) -> tuple[ly.Attempt, Counter[str]]:
    """The bad agent's one attempt that counts, and how the others ended, of which each other runner works on many.

    siblings_attempts: how many attempts each of the others may have; attempts that were interrupted do not count.
    """

    async def agent_async(task: str | int) -> float:
        if task == BAD:
            return await function(path)
        await asyncio.sleep(0.05)
        return 1.0

    def agent_sync(task: str | int) -> float:
        if task == BAD:
            return function(path)
        time.sleep(0.05)
        return 1.0

    @ly.algo
    async def ask(*, store: ly.LightningStore, train_dataset: list[str | int]) -> None:
        own = {BAD: ly.RolloutConfig(**config)}
        others = ly.RolloutConfig(max_attempts=siblings_attempts, retry_condition=["failed"])
        enqueued = [await store.enqueue_rollout(task, config=own.get(str(task), others)) for task in train_dataset]
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in enqueued])

    agent = ly.rollout(agent_async if asyncio.iscoroutinefunction(function) else agent_sync)
    async with ly.InMemoryLightningStore() as store, asyncio.timeout(50):
        trainer = ly.Trainer(algorithm=ask, strategy=strategy, store=store, concurrency=concurrency)
        await trainer.afit(agent, [BAD, *range(SIBLINGS)])
        rollouts = await store.query_rollouts()
        (bad,) = [rollout for rollout in rollouts if rollout.input == BAD]
        *before, attempt = await store.query_attempts(bad.rollout_id)
        assert all(each.interrupted for each in before), before
        hit = {attempt.worker_id, *(each.worker_id for each in before)}
        for rollout in rollouts:
            made = await store.query_attempts(rollout.rollout_id)
            if not hit & {each.worker_id for each in made}:
                assert len(made) == 1, "a sibling in another runner was touched"
        assert await audit_store(store) == []
    assert runners() == []
    return attempt, Counter(rollout.status for rollout in rollouts if rollout is not bad)


@pytest.mark.parametrize("make_strategy", Strategies)
@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        (forks_a_child_that_exits, "succeeded", None),
        (exits_at_once, "failed", "ended with exit code 0"),
        pytest.param(forks_a_child_that_returns, "succeeded", None, marks=pytest.mark.faults),
        pytest.param(closes_stdout, "succeeded", None, marks=pytest.mark.faults),
        pytest.param(
            stops_the_event_loop,
            "failed",
            "ended with exit code 1: RuntimeError: Event loop stopped",
            marks=pytest.mark.faults,
        ),
        pytest.param(forks_a_child_that_awaits, "succeeded", None, marks=pytest.mark.faults),
        pytest.param(closes_every_file, "failed", "ended with exit code 1", marks=pytest.mark.faults),
        pytest.param(exits, "failed", "SystemExit: 3", marks=pytest.mark.faults),
        pytest.param(exits_in_a_thread, "failed", "SystemExit: 3", marks=pytest.mark.faults),
        pytest.param(exits_in_a_task_of_its_own, "failed", "SystemExit: 3", marks=pytest.mark.faults),
        pytest.param(raises_what_is_no_exception, "failed", "Out: of here", marks=pytest.mark.faults),
        pytest.param(cancels_everything, "failed", "ended with exit code 143", marks=pytest.mark.faults),
        pytest.param(crashes, "failed", "was killed by SIGSEGV", marks=pytest.mark.faults),
        pytest.param(forgets_where_it_is, "succeeded", None, marks=pytest.mark.faults),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_siblings_in_other_runners_do_not_notice(
    make_strategy: type[ProcessExecutionStrategy], tmp_path: Path, function: Any, status: str, reason: str | None
) -> None:
    attempt, others = await run_beside_siblings(function, make_strategy(2), tmp_path / "pid")
    assert attempt.status == status, attempt
    assert others == {"succeeded": SIBLINGS}
    if reason is None:
        assert attempt.metadata == {}
    else:
        assert reason in attempt.metadata["reason"]


@pytest.mark.parametrize("make_strategy", Strategies)
@pytest.mark.parametrize(
    "function",
    [
        starts_a_program_that_leaves_the_group,
        starts_a_program_without_an_environment,
        pytest.param(forks_a_child_that_leaves_for_good, marks=pytest.mark.faults),
        pytest.param(starts_a_program_that_stays, marks=pytest.mark.faults),
        pytest.param(forks_a_child_that_stays, marks=pytest.mark.faults),
        pytest.param(forks_a_child_that_stays_from_a_thread, marks=pytest.mark.faults),
    ],
)
async def test_what_an_agent_leaves_behind_ends_with_its_runner(
    make_strategy: type[ProcessExecutionStrategy], tmp_path: Path, function: Any
) -> None:
    attempt, others = await run_beside_siblings(function, make_strategy(2), tmp_path / "pid")
    assert (attempt.status, others) == ("succeeded", {"succeeded": SIBLINGS})
    pid = int((tmp_path / "pid").read_text())
    if psutil.pid_exists(pid):
        assert gone([psutil.Process(pid)], 8) == []


@pytest.mark.parametrize("make_strategy", Strategies)
@pytest.mark.parametrize("function", [leaks, pytest.param(leaks_little_things, marks=pytest.mark.faults)])
async def test_an_agent_that_leaks_memory_reaches_the_limit_of_its_process(
    make_strategy: type[ProcessExecutionStrategy], tmp_path: Path, function: Any
) -> None:
    attempt, others = await run_beside_siblings(
        function, make_strategy(2, memory_bytes=400 * 2**20), tmp_path / "pid", siblings_attempts=5
    )
    assert attempt.status == "failed"
    assert "MemoryError" in attempt.metadata["reason"]
    assert others == {"succeeded": SIBLINGS}


@pytest.mark.parametrize("make_strategy", Strategies)
async def test_an_agent_that_swallows_its_cancellation_does_not_keep_a_run_from_ending(
    make_strategy: type[ProcessExecutionStrategy], tmp_path: Path
) -> None:
    strategy, path = make_strategy(2), tmp_path / "pid"
    attempt, others = await run_beside_siblings(swallows_its_cancellation, strategy, path, timeout_seconds=0.5)
    assert (attempt.status, others) == ("timeout", {"succeeded": SIBLINGS})


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("concurrency", [1, 8])
async def test_a_runner_whose_agent_holds_pythons_lock_is_replaced_and_the_reason_says_where(
    tmp_path: Path, concurrency: int
) -> None:
    strategy, path = InterProcessExecutionStrategy(1, lock_seconds=1.0), tmp_path / "pid"
    attempt, others = await run_beside_siblings(holds_the_lock, strategy, path, concurrency=concurrency)
    assert (attempt.status, attempt.metadata["reason_kind"]) == ("failed", "runner_died")
    assert re.search(r"held Python's lock .* it is at .*test_bad_agents.py:\d+ in holds", attempt.metadata["reason"])
    assert others == {"succeeded": SIBLINGS}


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Generator[None]:
    """As a debugger does it."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@contextlib.contextmanager
def starved(process: psutil.Process) -> Generator[None]:
    """On a CPU that another process wants, which goes before it."""
    cpu = min(process.cpu_affinity())
    for thread in process.threads():
        os.sched_setscheduler(thread.id, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(thread.id, {cpu})
    with subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"]
    ) as hog:
        try:
            yield
        finally:
            hog.kill()


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("kept_back", [stopped, starved])
async def test_a_runner_that_cannot_answer_lives_on(
    kept_back: Callable[[psutil.Process], contextlib.AbstractContextManager[None]],
) -> None:
    @ly.algo
    async def keep_back(*, store: ly.LightningStore, train_dataset: list[float]) -> None:
        rollout = await store.enqueue_rollout(train_dataset[0])
        while not await store.query_rollouts(status_in=["preparing", "running"]):  # noqa: ASYNC110 -- another process
            await asyncio.sleep(0.01)
        (runner,) = runners()
        with kept_back(runner):
            await asyncio.sleep(3.0)
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])

    strategy = InterProcessExecutionStrategy(1, lock_seconds=0.4)
    async with ly.InMemoryLightningStore() as store, asyncio.timeout(50):
        await ly.Trainer(algorithm=keep_back, strategy=strategy, store=store).afit(agents.where, [3.0])
        (rollout,) = await store.query_rollouts()
        assert [attempt.status for attempt in await store.query_attempts(rollout.rollout_id)] == ["succeeded"]


async def test_the_neighbours_of_an_exit_are_interrupted_and_the_one_that_exits_has_failed(tmp_path: Path) -> None:
    strategy, path = InterProcessExecutionStrategy(1), tmp_path / "pid"
    attempt, others = await run_beside_siblings(exits_at_once, strategy, path, concurrency=SIBLINGS + 1)
    assert (attempt.sequence_id, attempt.metadata["reason_kind"]) == (1, "runner_died")
    assert others == {"succeeded": SIBLINGS}


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("n_runners", [1, 3])
async def test_the_neighbours_of_a_crash_are_interrupted_until_the_one_that_crashes_is_alone(
    tmp_path: Path, n_runners: int
) -> None:
    strategy, path = InterProcessExecutionStrategy(n_runners), tmp_path / "pid"
    attempt, others = await run_beside_siblings(crashes, strategy, path, concurrency=SIBLINGS + 1)
    assert (attempt.metadata["reason_kind"], others) == ("runner_died", {"succeeded": SIBLINGS})
    assert 2 <= attempt.sequence_id <= 5 * n_runners + 1  # each runner halves 31 attempts at most five times


async def test_a_fork_that_comes_back_to_the_loop_of_this_process_ends_there(tmp_path: Path) -> None:
    shm = SharedMemoryExecutionStrategy(2)
    attempt, others = await run_beside_siblings(forks_a_child_that_awaits, shm, tmp_path / "pid")
    assert (attempt.status, others) == ("succeeded", {"succeeded": SIBLINGS})


async def test_a_fork_is_not_late_with_what_only_its_parent_works_on() -> None:
    """Or a runner that was forked beside a run would take its own event loop for blocked."""

    async def forks() -> int:
        if (child := os.fork()) == 0:
            os._exit(0 if overdue_seconds() == float("-inf") else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert await call_async(forks, timeout_seconds=30.0) == 0


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("make_strategy", [InterProcessExecutionStrategy, ClientServerExecutionStrategy])
async def test_a_runner_whose_event_loop_is_blocked_is_replaced_when_the_agents_time_is_over(
    make_strategy: type[ProcessExecutionStrategy], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempt, others = await run_beside_siblings(
        blocks_the_event_loop, make_strategy(2), tmp_path / "pid", timeout_seconds=1.0
    )
    assert (attempt.status, attempt.metadata["reason_kind"]) == ("timeout", "timeout")
    assert others == {"succeeded": SIBLINGS}
    (said,) = [record.getMessage() for record in caplog.records if "blocks the event loop" in record.getMessage()]
    assert "in blocks_the_event_loop: time.sleep(600)" in said


@pytest.mark.faults
@pytest.mark.merge
async def test_siblings_in_a_runner_that_is_ended_for_its_blocked_loop_are_queued_again_and_it_does_not_count(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "tried"

    @ly.rollout
    async def agent(task: str | int) -> float:
        if task == BAD:
            time.sleep(600)
        if not marker.exists():
            marker.touch()
            await asyncio.sleep(600)  # its own time is not over when its process is ended
        return 1.0

    @ly.algo
    async def ask(*, store: ly.LightningStore, train_dataset: list[str | int]) -> None:
        patient, short = ly.RolloutConfig(max_attempts=1), ly.RolloutConfig(timeout_seconds=2.0)
        tasks = [await store.enqueue_rollout(0, config=patient), await store.enqueue_rollout(BAD, config=short)]
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in tasks])

    async with ly.InMemoryLightningStore() as store, asyncio.timeout(50):
        await ly.Trainer(algorithm=ask, strategy="ipc", store=store).afit(agent, [BAD])
        sibling, bad = sorted(await store.query_rollouts(), key=lambda rollout: rollout.input == BAD)
        assert (sibling.status, bad.status) == ("succeeded", "failed")
        first, *_ = await store.query_attempts(sibling.rollout_id)
        assert first.interrupted
        assert "blocks the event loop" in first.metadata["reason"]
