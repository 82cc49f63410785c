"""Runners that are killed, crashed, terminated and stopped at random: each rollout ends once, with one success and one reward."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time

import psutil
import pytest

import leyden as ly
from leyden.execution import ExecutionStrategy
from leyden.execution.client_server import ClientServerExecutionStrategy
from leyden.execution.process_strategy import InterProcessExecutionStrategy
from leyden.types import find_reward_spans
from tests.attack.harness import Attack, sizes
from tests.execution import agents
from tests.execution.family import runners
from tests.execution.stream import Stream, check_each_succeeded_once

N_RUNNERS = 4
SIGNALS = [signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGSTOP]
RETRIED = ly.RolloutConfig(timeout_seconds=10, max_attempts=100, retry_condition=["failed", "timeout"])


SETTLED_SECONDS = 4.0
"""Runners are struck when they have worked for a while. One that dies within its first second five times in a row ends the run."""


def settled() -> list[psutil.Process]:
    """The runners that are old enough to be struck."""
    found = list[psutil.Process]()
    for runner in runners():
        with contextlib.suppress(psutil.NoSuchProcess):
            if time.time() - runner.create_time() > SETTLED_SECONDS:
                found.append(runner)
    return found


async def strike(chance: random.Random) -> signal.Signals | None:
    """Send a random signal to a random runner, and return it. One that was stopped goes on, or is killed, a moment later."""
    if not (alive := await asyncio.to_thread(settled)):
        return None
    victim, number = chance.choice(alive), chance.choice(SIGNALS)
    try:
        victim.send_signal(number)
        if number == signal.SIGSTOP:
            await asyncio.sleep(chance.random() * 2)
            victim.send_signal(chance.choice([signal.SIGCONT, signal.SIGKILL]))
    except psutil.NoSuchProcess:
        return None
    return number


@pytest.mark.parametrize("strategy", [InterProcessExecutionStrategy, ClientServerExecutionStrategy])
@sizes("kills", faults=(12,), long=(110,))
async def test_runners_are_killed_crashed_terminated_and_stopped(
    attack: Attack, kills: int, strategy: type[ExecutionStrategy]
) -> None:
    chance, stream = attack.chance, Stream(100, RETRIED)
    async with ly.InMemoryLightningStore() as store:
        trainer = ly.Trainer(algorithm=stream.algorithm(), strategy=strategy(N_RUNNERS), store=store)
        run = asyncio.create_task(trainer.afit(agents.nap, list(range(100))))
        await stream.more(1)
        while attack.figures["kills"] < kills:
            await asyncio.sleep(chance.uniform(0.1, 1.0))
            if number := await strike(chance):
                attack.count(kills=1, **{number.name: 1})
            assert not run.done()
        stream.end()
        await run
        assert runners() == []
        await check_each_succeeded_once(store, stream.asked)
        tries = 0
        for rollout in await store.query_rollouts():
            made = await store.query_attempts(rollout.rollout_id)
            tries += len(made)
            [succeeded] = [attempt for attempt in made if attempt.status == "succeeded"]
            spans = await store.query_spans(rollout.rollout_id, succeeded.attempt_id)
            assert len(find_reward_spans(spans)) == 1
        assert tries > len(stream.asked), "no attempt was hit"
        attack.count(rollouts=len(stream.asked), attempts=tries)
