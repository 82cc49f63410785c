"""The example with several machines, run as its reader runs it: one PostgreSQL, two servers, two runners, one algorithm."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import leyden as ly
from leyden.types import find_reward_spans
from tests.store.postgres_server import fresh_url, given_or_own_server

pytestmark = [pytest.mark.backends, pytest.mark.merge, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "shared_store"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "LEYDEN_STORE_TOKEN": "a secret of both machines"}
SERVE = "from leyden.cli import main; main()"
ADDRESS = r"http://[\d.]+:\d+"


@dataclass
class Machine:
    """A server of the store, and a runner beside it."""

    address: str
    runner: subprocess.Popen[str]
    worker: str
    """The name under which the store knows the runner."""


@contextmanager
def running(*command: object, until: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process from the moment that it says `until` (its output so far is answered too) to the end of the block."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = ""
    try:
        assert process.stdout is not None
        while not re.search(until, said):
            line = process.stdout.readline()
            assert line, f"{command} ended before it said {until!r}: {said}"
            said += line
        yield process, said
    finally:
        process.terminate()
        process.communicate(timeout=20)


def run_algorithm(machine: Machine, *options: object) -> str:
    """What the algorithm printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "algorithm.py"), "--store", machine.address, *map(str, options)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def url() -> Iterator[str]:
    """An empty PostgreSQL store."""
    with given_or_own_server() as server, fresh_url(server) as fresh:
        yield fresh


@pytest.fixture
def machines(url: str) -> Iterator[list[Machine]]:
    """Two of them, on one database."""
    with ExitStack() as stack:
        made: list[Machine] = []
        for _ in range(2):
            _, said = stack.enter_context(running("-c", SERVE, "store", "--url", url, "--port", 0, until=ADDRESS))
            address = re.findall(ADDRESS, said)[0]
            runner, said = stack.enter_context(running(EXAMPLE / "runner.py", "--store", address, until="works for"))
            made.append(Machine(address, runner, said.split()[0]))
        yield made


async def test_two_machines_do_every_task_once(url: str, machines: list[Machine]) -> None:
    said = run_algorithm(machines[0], "--tasks", 40)
    assert re.findall(r"^(\d\.\d\d)  ", said, re.MULTILINE) == ["0.67", "0.67", "0.33"]
    async with ly.open_store(url) as store:
        rollouts = await store.query_rollouts()
        assert {rollout.status for rollout in rollouts} == {"succeeded"}
        assert len(rollouts) == 3 * 40
        assert {rollout.attempt.sequence_id for rollout in rollouts} == {1}, "no rollout was tried twice"
        spans = await store.query_spans_of([rollout.rollout_id for rollout in rollouts])
        assert {len(find_reward_spans(of_one)) for of_one in spans.values()} == {1}
        counts = Counter(rollout.attempt.worker_id for rollout in rollouts)
        assert set(counts) == {machine.worker for machine in machines}, "both have worked"
        for worker, count in counts.items():
            assert f"{worker}: {count} rollouts" in said


async def test_what_a_killed_machine_had_claimed_is_done_by_the_other(url: str, machines: list[Machine]) -> None:
    survivor, victim = machines
    async with ly.open_store(url) as store:
        killing = asyncio.create_task(kill_while_it_works(store, victim))
        await asyncio.to_thread(run_algorithm, survivor, "--tasks", 40, "--timeout", 2)
        await killing
        rollouts = await store.query_rollouts()
        assert {rollout.status for rollout in rollouts} == {"succeeded"}
        assert len(rollouts) == 3 * 40
        taken_over = [rollout for rollout in rollouts if rollout.attempt.sequence_id > 1]
        assert {rollout.attempt.worker_id for rollout in taken_over} == {survivor.worker}
        before = [await store.query_attempts(rollout.rollout_id) for rollout in taken_over]
        assert {(attempts[0].worker_id, attempts[0].status) for attempts in before} == {(victim.worker, "timeout")}


async def kill_while_it_works(store: ly.LightningStore, machine: Machine) -> None:
    """Stop its runner as it is, look whether it has something in hand, and kill it if so."""
    async with aclosing(store.watch_spans(after=None)) as spans:
        async for _ in spans:
            machine.runner.send_signal(signal.SIGSTOP)
            open_rollouts = await store.query_rollouts(status_in=["preparing", "running"])
            if any(rollout.attempt.worker_id == machine.worker for rollout in open_rollouts):
                machine.runner.kill()
                return
            machine.runner.send_signal(signal.SIGCONT)
