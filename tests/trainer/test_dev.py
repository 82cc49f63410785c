"""`Trainer.dev` is for someone with a debugger: agent code on the calling thread, one rollout at a time, no limits of time."""

from __future__ import annotations

import asyncio
import bdb
import io
import logging
import pdb
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

import leyden as ly
from leyden.execution.process_strategy import InterProcessExecutionStrategy


class Impatient(ly.Baseline):
    """Runs each task with a limit of time, like an algorithm for training."""

    async def run(self, train_dataset: Sequence[Any] | None = None, val_dataset: Sequence[Any] | None = None) -> None:
        store = self.get_store()
        config = ly.RolloutConfig(timeout_seconds=0.05, unresponsive_seconds=0.05, max_attempts=1)
        rollouts = [await store.enqueue_rollout(task, config=config) for task in train_dataset or ()]
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in rollouts])


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("strategy", ["shm", "ipc"])
def test_the_agent_runs_on_the_calling_thread_and_one_rollout_at_a_time(kind: str, strategy: str) -> None:
    threads: set[threading.Thread] = set()
    under_way, most = 0, 0

    async def agent_async(task: int) -> float:
        nonlocal under_way, most
        threads.add(threading.current_thread())
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return 1.0

    def agent_sync(task: int) -> float:
        threads.add(threading.current_thread())
        return 1.0

    trainer = ly.Trainer(strategy=strategy, n_runners=2)
    before = trainer.strategy, trainer.runner
    agent = ly.rollout(agent_async if kind == "async" else agent_sync)
    assert trainer.dev(agent, [1, 2, 3]).rollouts["succeeded"] == 3
    assert (threads, most) == ({threading.current_thread()}, 1 if kind == "async" else 0)
    assert (trainer.strategy, trainer.runner) == before


async def test_under_a_running_loop_a_sync_agent_still_runs_on_the_calling_thread() -> None:
    threads: set[threading.Thread] = set()

    @ly.rollout
    def agent(task: int) -> float:
        threads.add(threading.current_thread())
        if task == 2:
            raise StopIteration
        return 1.0

    summary = ly.Trainer().dev(agent, [1, 2])
    assert (threads, summary.rollouts["succeeded"]) == ({threading.current_thread()}, 1)


@pytest.mark.parametrize("kind", ["plain", "notebook"])
def test_a_sync_agent_may_run_a_loop_of_its_own(kind: str) -> None:
    @ly.rollout
    def agent(task: int) -> float:
        return asyncio.run(asyncio.sleep(0.01, result=1.0))

    async def notebook() -> ly.RunSummary:
        summary = ly.Trainer().dev(agent, [1, 2])
        await asyncio.sleep(0)  # its loop still runs
        return summary

    summary = ly.Trainer().dev(agent, [1, 2]) if kind == "plain" else asyncio.run(notebook())
    assert summary.rollouts["succeeded"] == 2


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_time_at_a_breakpoint_is_nobodys_limit(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def agent_async(task: int) -> float:
        time.sleep(0.7)  # noqa: ASYNC251 -- as a breakpoint holds up the loop
        await asyncio.sleep(0.1)
        return 1.0

    def agent_sync(task: int) -> float:
        time.sleep(0.7)
        return 1.0

    agent = ly.rollout(agent_async if kind == "async" else agent_sync)
    assert ly.Trainer(algorithm=Impatient()).dev(agent, [1, 2]).rollouts["succeeded"] == 2
    assert "blocks the event loop" not in caplog.text


def test_a_breakpoint_stops_in_the_agent() -> None:
    said = io.StringIO()

    @ly.rollout
    def agent(task: str) -> float:
        pdb.Pdb(stdin=io.StringIO("p task.upper()\nc\n"), stdout=said).set_trace()
        return 1.0

    assert ly.Trainer().dev(agent, ["look"]).rollouts["succeeded"] == 1
    assert "'LOOK'" in said.getvalue()


ENDS: dict[str, type[BaseException]] = {"quit": bdb.BdbQuit, "ctrl-c": KeyboardInterrupt}


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("end", ENDS)
def test_the_debuggers_quit_and_ctrl_c_end_the_run_and_another_can_follow(kind: str, end: str) -> None:
    seen: list[str] = []

    def agent_sync(task: str) -> float:
        seen.append(task)
        if task in ENDS:
            raise ENDS[task]
        return 1.0

    async def agent_async(task: str) -> float:
        return agent_sync(task)

    agent = ly.rollout(agent_async if kind == "async" else agent_sync)
    with pytest.raises(ENDS[end]):
        ly.Trainer().dev(agent, ["first", end, "never"])
    assert ly.Trainer().dev(agent, ["again"]).rollouts["succeeded"] == 1
    assert seen == ["first", end, "again"]


def test_what_an_agent_raises_is_shown_with_its_traceback_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @ly.rollout
    def agent(task: int) -> float:
        if task == 1:
            raise SystemExit(3)
        return 1.0 / task

    summary = ly.Trainer().dev(agent, [0, 1, 2])
    assert (summary.rollouts["failed"], summary.rollouts["succeeded"]) == (2, 1)
    shown = [record for record in caplog.records if record.levelno == logging.ERROR and record.exc_info]
    assert [type(record.exc_info[1]) for record in shown if record.exc_info] == [ZeroDivisionError, RuntimeError]


def test_dev_and_fit_run_agents_on_the_same_loop_so_that_their_clients_work_in_both() -> None:
    loops: set[int] = set()

    @ly.rollout
    async def agent(task: int) -> float:
        loops.add(id(asyncio.get_running_loop()))
        return 1.0

    trainer = ly.Trainer(algorithm="baseline", store="memory")
    for run in (trainer.dev, trainer.fit, trainer.dev):
        assert run(agent, [1]).rollouts["succeeded"] == 1
    assert len(loops) == 1


def test_fit_of_a_trainer_for_development_is_dev() -> None:
    threads: set[threading.Thread] = set()

    @ly.rollout
    def agent(task: int) -> float:
        threads.add(threading.current_thread())
        return 1.0

    ly.Trainer(dev=True, strategy=InterProcessExecutionStrategy(2)).fit(agent, [1, 2])
    assert threads == {threading.current_thread()}


def test_without_an_algorithm_no_task_is_held_back_for_validation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "leyden")
    modes: list[str | None] = []

    @ly.rollout
    def agent(task: int, rollout: ly.Rollout) -> float:
        modes.append(rollout.mode)
        if task == 2:
            raise ValueError("two is too many")
        return 1.0

    ly.Trainer().dev(agent, [1, 2, 3])
    assert modes == ["train"] * 3
    assert "3 of 3 rollouts finished, 1 of them failed, mean reward 1.000 of 2" in caplog.text
    assert "in _call_agent" not in caplog.text  # the traceback begins with the agent
