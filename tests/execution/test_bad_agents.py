"""Agents that do to their process what they can: other runners do not notice, and the record says what happened."""

# ruff: noqa: ASYNC220, ASYNC222, ASYNC240, ASYNC251 -- what agents do

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import leyden as ly
from leyden.execution import ExecutionStrategy, SharedMemoryExecutionStrategy
from leyden.execution.client_server import ClientServerExecutionStrategy
from leyden.execution.inter_process import InterProcessExecutionStrategy
from leyden.execution.process_strategy import ProcessExecutionStrategy
from leyden.runner.calls import call_async, overdue_seconds
from leyden.testing import audit_store
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
    import ctypes

    ctypes.string_at(0)
    return 1.0


async def forgets_where_it_is(path: Path) -> float:
    os.environ.clear()
    os.chdir("/")
    return 1.0


async def run_beside_siblings(
    function: Callable[[Path], Any], strategy: ExecutionStrategy, path: Path, **config: Any
) -> tuple[ly.Attempt, Counter[str]]:
    """The bad agent's one attempt, and how the others ended, of which each other runner works on many."""

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
        # the bad one is tried once; who shares its runner is tried again, as often as the runner dies
        own = {BAD: ly.RolloutConfig(**config)}
        shared = ly.RolloutConfig(max_attempts=5, retry_condition=["failed"])
        enqueued = [await store.enqueue_rollout(task, config=own.get(str(task), shared)) for task in train_dataset]
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in enqueued])

    agent = ly.rollout(agent_async if asyncio.iscoroutinefunction(function) else agent_sync)
    async with ly.InMemoryLightningStore() as store, asyncio.timeout(50):
        trainer = ly.Trainer(algorithm=ask, strategy=strategy, store=store, concurrency=2)
        await trainer.afit(agent, [BAD, *range(SIBLINGS)])
        rollouts = await store.query_rollouts()
        (bad,) = [rollout for rollout in rollouts if rollout.input == BAD]
        (attempt,) = await store.query_attempts(bad.rollout_id)
        for rollout in rollouts:
            made = await store.query_attempts(rollout.rollout_id)
            if made[0].worker_id != attempt.worker_id:
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
    attempt, others = await run_beside_siblings(function, make_strategy(2, memory_bytes=400 * 2**20), tmp_path / "pid")
    assert attempt.status == "failed"
    assert "MemoryError" in attempt.metadata["reason"]
    assert others == {"succeeded": SIBLINGS}


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
