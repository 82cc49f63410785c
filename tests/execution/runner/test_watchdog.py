"""An agent that blocks the event loop is named while it does, and its siblings do not pay for it."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import gc
import importlib
import inspect
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden._lib.aio import Latch
from leyden._lib.throttle import first_on_this_machine
from leyden.execution.runner import watchdog
from leyden.execution.runner.watchdog import Clocks, InFlight, LagWatchdog, stall_reason
from leyden.store import InMemoryLightningStore, LightningStore, LightningStoreServer, Sweeper
from leyden.types import Attempt, RolloutConfig


@pytest.fixture
async def store(request: pytest.FixtureRequest) -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        if request.param == "memory":
            yield opened
            return
        async with LightningStoreServer(opened) as server, server.client() as client:
            yield client


RELEASED = threading.Event()
"""What the agent that blocks waits for."""
IMPORTING = threading.Event()
"""Set by a module that is being imported."""


@ly.rollout
async def agent(task: str) -> float:
    """A `blocker` blocks until it is released; a `helper` of its own does so in a task; a `sibling` needs a moment."""
    if task == "blocker":
        hold()
    elif task == "helper":
        await asyncio.create_task(hold_later())
    else:
        await asyncio.sleep(1.0 if task == "brief sibling" else 0.01 if RELEASED.is_set() else 30.0)
    return 1.0


def hold() -> None:
    RELEASED.wait(20)


async def hold_later() -> None:
    hold()


@pytest.fixture(autouse=True)
def nothing_is_released(caplog: pytest.LogCaptureFixture) -> None:
    RELEASED.clear()
    IMPORTING.clear()
    watchdog.warnings.reset()
    caplog.set_level(logging.DEBUG, "leyden.execution.runner.watchdog")


async def run(store: LightningStore, tasks: Sequence[str], config: RolloutConfig, *, until: Any) -> list[list[Attempt]]:
    """The attempts of each task. Runners on a loop of their own; what `until(rollout_ids)` waits for happens while it is blocked."""
    rollout_ids = [(await store.enqueue_rollout(task, config=config)).rollout_id for task in tasks]
    stop = Latch()

    async def work() -> None:
        async with ly.LitAgentRunner(concurrency=8).run_context(agent=agent, store=store) as runner:
            await runner.iter(event=stop)

    async with Sweeper(store), asyncio.timeout(30):
        working = asyncio.create_task(asyncio.to_thread(asyncio.run, work()))
        try:
            await until(rollout_ids)
        finally:
            RELEASED.set()
        await store.wait_for_rollouts(rollout_ids=rollout_ids)
        stop.set()
        await working
    return [list(await store.query_attempts(rollout_id)) for rollout_id in rollout_ids]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the watchdog logs for anybody to see."""
    records = [record for record in caplog.records if record.name == "leyden.execution.runner.watchdog"]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


async def until_true(look: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again."""
    while not await look():  # noqa: ASYNC110 -- what is waited for is in a store
        await asyncio.sleep(0.02)


async def until_written(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait for a line of the log, by event."""
    loop, written = asyncio.get_running_loop(), asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                loop.call_soon_threadsafe(written.set)

    listener = Listener()
    logging.getLogger("leyden.execution.runner.watchdog").addHandler(listener)
    try:
        if text not in caplog.text:
            await written.wait()
    finally:
        logging.getLogger("leyden.execution.runner.watchdog").removeHandler(listener)


@pytest.mark.parametrize(("store", "task"), [("http", "blocker"), ("memory", "helper")], indirect=["store"])
async def test_who_blocks_is_named_with_the_stack_while_it_does(
    store: LightningStore, caplog: pytest.LogCaptureFixture, task: str
) -> None:
    async def named(rollout_ids: list[str]) -> None:
        await until_written(caplog, "blocks the event loop")

        async def recorded() -> bool:
            found = await store.get_latest_attempt(rollout_ids[0])
            assert found is not None
            assert not found.finished
            return "blocked_event_loop" in found.metadata

        await until_true(recorded)

    ((attempt,),) = await run(store, [task], RolloutConfig(), until=named)
    (warning,) = warnings(caplog)
    line = hold.__code__.co_firstlineno + 1
    agent = f"agent 'agent' (rollout {attempt.rollout_id}, attempt {attempt.attempt_id})"
    assert warning.startswith(
        f"{agent} blocks the event loop at tests/execution/runner/test_watchdog.py:{line} in hold, for "
    )
    assert "\n" not in warning
    assert "RELEASED.wait(20)" in caplog.text  # the stack, at DEBUG
    assert attempt.status == "succeeded"
    assert attempt.metadata["blocked_event_loop"]["seconds"] > 0
    assert "RELEASED.wait(20)" in attempt.metadata["blocked_event_loop"]["stack"]
    assert "the event loop goes on" in caplog.text


@pytest.mark.parametrize(
    ("store", "config"),
    [
        pytest.param("memory", RolloutConfig(timeout_seconds=3.0), id="timeout"),
        pytest.param("http", RolloutConfig(timeout_seconds=3.0), id="timeout, from elsewhere", marks=pytest.mark.slow),
        pytest.param(
            "memory",
            RolloutConfig(unresponsive_seconds=3.0, retry_condition=["unresponsive"]),
            id="silence",
            marks=pytest.mark.slow,
        ),
    ],
    indirect=["store"],
)
async def test_siblings_whose_time_runs_out_meanwhile_are_queued_again_and_it_does_not_count(
    store: LightningStore, config: RolloutConfig
) -> None:
    async def both_requeued(rollout_ids: list[str]) -> None:
        async def all_are_over() -> bool:
            *siblings, culprit = [(await store.get_rollout_by_id(each)).status for each in rollout_ids]
            return siblings == ["requeuing", "requeuing"] and culprit == "failed"  # its time is over by its own fault

        await until_true(all_are_over)

    *siblings, culprit = await run(store, ["sibling", "sibling", "blocker"], config, until=both_requeued)
    for attempts in siblings:
        *interrupted, last = attempts
        assert [attempt.status for attempt in interrupted] == ["failed"]
        assert [attempt.interrupted for attempt in interrupted] == [True]
        assert f"attempt {culprit[0].attempt_id}) has blocked the event loop" in interrupted[0].metadata["reason"]
        assert last.status == "succeeded"  # though max_attempts is 1
    assert not culprit[0].interrupted
    assert "blocked_event_loop" in culprit[0].metadata


@pytest.mark.parametrize("store", ["http"], indirect=True)
async def test_a_sibling_that_has_time_goes_on_where_it_was(
    store: LightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def named(rollout_ids: list[str]) -> None:
        await until_written(caplog, "blocks the event loop")

    config = RolloutConfig(timeout_seconds=60, unresponsive_seconds=60)
    attempts = await run(store, ["brief sibling", "blocker"], config, until=named)
    assert [[attempt.status for attempt in each] for each in attempts] == [["succeeded"], ["succeeded"]]


@pytest.mark.parametrize("store", ["http"], indirect=True)
async def test_what_is_enqueued_while_a_loop_is_blocked_goes_to_another_runner_until_the_loop_goes_on(
    store: LightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def another_claims(rollout_ids: list[str]) -> None:
        await until_written(caplog, "blocks the event loop")
        late = await store.enqueue_rollout("late")
        (claimed,) = await store.dequeue_many_rollouts(timeout_seconds=10)
        assert claimed.rollout_id == late.rollout_id
        RELEASED.set()
        after = await store.enqueue_rollout("sibling")
        (finished,) = await store.wait_for_rollouts(rollout_ids=[after.rollout_id], timeout=10)
        assert finished.status == "succeeded"

    assert [len(each) for each in await run(store, ["blocker"], RolloutConfig(), until=another_claims)] == [1]


async def test_a_loop_that_is_only_busy_is_not_blocked_by_anybody(caplog: pytest.LogCaptureFixture) -> None:
    async def turn() -> None:
        deadline = time.monotonic() + 0.02
        while time.monotonic() < deadline:
            pass

    async def churn() -> None:
        async with InMemoryLightningStore() as store:
            with LagWatchdog.beside_this_loop() as watchdog:
                task = watchdog.start(asyncio.sleep(1.0), InFlight("busy", await store.start_rollout("busy"), store))
                while not task.done():
                    await asyncio.gather(*(turn() for _ in range(40)))

    await asyncio.to_thread(asyncio.run, churn())
    assert "blocks the event loop" not in caplog.text


async def beside_a_watchdog(work: Coroutine[Any, Any, None]) -> None:
    """Run it as an attempt, on a watched loop of its own in another thread."""

    async def watched() -> None:
        async with InMemoryLightningStore() as store:
            with LagWatchdog.beside_this_loop() as watchdog:
                await watchdog.start(work, InFlight("agent", await store.start_rollout("task"), store))

    await asyncio.to_thread(asyncio.run, watched())
    for thread in threading.enumerate():
        if thread.name == "leyden-watchdog":
            await asyncio.to_thread(thread.join, 10)  # it has logged what it had to


async def test_within_a_minute_a_process_warns_once_of_agents_that_block(caplog: pytest.LogCaptureFixture) -> None:
    async def blocks() -> None:
        time.sleep(0.7)  # noqa: ASYNC251 -- that is what it is about

    for _ in range(2):
        await beside_a_watchdog(blocks())
    assert len(warnings(caplog)) == 1
    assert caplog.text.count("time.sleep(0.7)") == 2  # the stack of each, at DEBUG
    assert caplog.text.count("the event loop goes on") == 2


async def test_an_import_is_no_agents_fault(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import slow_within")
    (tmp_path / "slow_within.py").write_text("import time; time.sleep(0.7)")
    monkeypatch.syspath_prepend(tmp_path)

    async def imports() -> None:
        importlib.import_module("slow_to_import")

    await beside_a_watchdog(imports())
    assert warnings(caplog) == []
    assert re.search(r"the event loop goes on after .* s; importing slow_to_import took \d\.\d s", caplog.text)


async def test_what_an_agent_computes_after_an_import_is_measured_from_its_end(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_before_work.py").write_text("import time; time.sleep(0.7)")
    monkeypatch.syspath_prepend(tmp_path)

    async def imports_and_works() -> None:
        importlib.import_module("slow_before_work")
        time.sleep(0.3)  # noqa: ASYNC251 -- that is what it is about

    await beside_a_watchdog(imports_and_works())
    assert "blocks the event loop" not in caplog.text


async def test_waiting_for_the_import_of_another_thread_is_no_agents_fault(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_elsewhere.py").write_text(
        f"from {__name__} import IMPORTING, RELEASED\nIMPORTING.set()\nRELEASED.wait(20)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importer = threading.Thread(target=importlib.import_module, args=("imported_elsewhere",))
    importer.start()
    assert await asyncio.to_thread(IMPORTING.wait, 20)
    timer = threading.Timer(0.9, RELEASED.set)

    async def imports() -> None:
        timer.start()
        importlib.import_module("imported_elsewhere")

    await beside_a_watchdog(imports())
    importer.join(20)
    assert warnings(caplog) == []
    assert "importing imported_elsewhere took" in caplog.text


LIBRARY = """
import asyncio, functools, time

async def create():
    await asyncio.create_task(_send())

async def _send():
    time.sleep(0.8)

def parse():
    time.sleep(0.8)

async def agent():
    parse()
"""


async def awaits_a_librarys_task() -> None:
    await importlib.import_module("installed_library").create()


async def calls_a_library() -> None:
    importlib.import_module("installed_library").parse()


async def calls_generated_code() -> None:
    @dataclass
    class Settings:
        pause: None = field(default_factory=functools.partial(time.sleep, 0.8))

    Settings()


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (awaits_a_librarys_task, "await importlib"),
        (calls_a_library, "importlib.import_module"),
        (calls_generated_code, "    Settings()"),
    ],
)
async def test_the_line_that_blocks_is_the_users_own(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Any, text: str
) -> None:
    install_library(tmp_path, monkeypatch)
    await beside_a_watchdog(work())
    lines, first = inspect.getsourcelines(work)
    (line,) = [first + index for index, line in enumerate(lines) if text in line]
    (warning,) = warnings(caplog)
    assert f"blocks the event loop at tests/execution/runner/test_watchdog.py:{line} in {work.__name__}, " in warning


async def test_without_a_line_of_the_users_it_is_the_first_of_an_installed_agent_or_nobodys(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_library(tmp_path, monkeypatch)
    await beside_a_watchdog(importlib.import_module("installed_library").agent())
    watchdog.warnings.reset()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(time.sleep, 0.8)
        await beside_a_watchdog(stack.pop_all().aclose())
    installed, standard = warnings(caplog)
    line = LIBRARY.splitlines().index("    parse()") + 1
    assert installed.startswith("agent 'agent' (rollout ")
    assert f"site-packages/installed_library.py:{line} in agent, for " in installed
    assert standard.startswith("something that belongs to no rollout blocks the event loop, for ")


def install_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = folder / "site-packages"
    packages.mkdir()
    (packages / "installed_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.delitem(sys.modules, "installed_library", raising=False)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities and cores of their own elsewhere")
async def test_a_thread_that_gets_no_cpu_is_not_blamed_on_its_agent(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(watchdog, "_SHORTAGE_SECONDS", 0.6)
    core = min(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"

    async def computes_a_little() -> None:
        thread = threading.get_native_id()
        os.sched_setaffinity(thread, {core})
        os.setpriority(os.PRIO_PROCESS, thread, 19)
        started = time.thread_time()
        while time.thread_time() - started < 0.035:
            pass

    spinner = await asyncio.create_subprocess_exec(sys.executable, "-c", busy, stdout=subprocess.PIPE)
    try:
        assert spinner.stdout is not None
        await spinner.stdout.readline()
        await beside_a_watchdog(computes_a_little())
    finally:
        spinner.kill()
        await spinner.wait()
    assert [warning.partition(":")[0] for warning in warnings(caplog)] == ["this machine is short of CPU"]
    assert "blocks the event loop" not in caplog.text


async def test_a_loop_that_other_threads_keep_from_running_is_not_blamed_on_its_agent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_SHORTAGE_SECONDS", 0.5)
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(100))

    async def computes_a_little() -> None:
        started = time.thread_time()
        while time.thread_time() - started < 0.1:  # a seventh of this thread's time
            pass

    threads = [threading.Thread(target=compute, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        await beside_a_watchdog(computes_a_little())
    finally:
        done.set()
    assert "blocks the event loop" not in caplog.text


NOTHING = Clocks(wall=0.0, cpu=0.0, process=0.0, others_queued={"1": 9.0})
SECOND = replace(NOTHING, wall=1.0, wakes=1)


@pytest.mark.parametrize(
    ("now", "why"),
    [
        pytest.param(SECOND, "blocked", id="sleeps"),
        pytest.param(replace(SECOND, process=1.0), "blocked", id="sleeps while other threads compute"),
        pytest.param(replace(SECOND, wakes=200), "blocked", id="polls"),
        pytest.param(replace(SECOND, cpu=1.0, process=1.0), "blocked", id="computes"),
        pytest.param(replace(SECOND, cpu=1.0, process=3.0, wakes=90), "blocked", id="computes, as others do"),
        pytest.param(replace(SECOND, cpu=0.1, queued=0.9, process=0.1, wakes=90), "no_cpu", id="waits for a core"),
        pytest.param(replace(SECOND, wall=5.0, cpu=1.0, queued=4.0, wakes=90), "blocked", id="computes and waits"),
        pytest.param(replace(SECOND, cpu=0.1, process=1.0, wakes=200), "no_lock", id="waits for Python's lock"),
        pytest.param(
            replace(SECOND, process=0.2, wakes=200, others_queued={"1": 9.2, "2": 0.2}),
            "no_lock",
            id="waits for Python's lock, whose holders wait for a core",
        ),
    ],
)
def test_why_a_thread_stands_still_follows_from_its_clocks(now: Clocks, why: str) -> None:
    assert stall_reason(NOTHING, now) == why


def test_of_all_processes_of_a_machine_one_reports_its_shortage_of_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert [first_on_this_machine("shortage") for _ in range(3)] == [True, False, False]
    assert first_on_this_machine("shortage", seconds=0.0)
    assert first_on_this_machine("another shortage")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert first_on_this_machine("shortage")


async def test_an_attempt_that_has_ended_takes_no_room() -> None:
    async with InMemoryLightningStore() as store:
        with LagWatchdog.beside_this_loop() as watchdog:
            in_flight = InFlight("agent", await store.start_rollout("task"), store)
            kept = weakref.ref(in_flight)
            await watchdog.start(asyncio.sleep(0), in_flight)
            del in_flight
            await asyncio.sleep(0)  # until it is forgotten
            gc.collect()
            assert kept() is None


async def test_nothing_is_left_when_the_runners_have_ended() -> None:
    factory = asyncio.get_running_loop().get_task_factory()
    before = threading.enumerate()  # that of an earlier test may still be ending
    with LagWatchdog.beside_this_loop() as first, LagWatchdog.beside_this_loop() as second:
        assert first is second
        (thread,) = [each for each in threading.enumerate() if each.name == "leyden-watchdog" and each not in before]
    assert asyncio.get_running_loop().get_task_factory() is factory
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


IMPORTS_OF_A_FIRST_ROLLOUT = """
import asyncio, sys
import leyden as ly
from leyden.store import InMemoryLightningStore

@ly.rollout
async def agent(task): return 1.0

async def main():
    async with InMemoryLightningStore() as store, ly.LitAgentRunner().run_context(agent=agent, store=store) as runner:
        before = set(sys.modules)
        await runner.step("task")
        print({name.partition(".")[0] for name in set(sys.modules) - before})

asyncio.run(main())
"""


async def test_what_a_runner_needs_is_imported_before_its_first_rollout() -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", IMPORTS_OF_A_FIRST_ROLLOUT, stdout=subprocess.PIPE
    )
    imported, _ = await child.communicate()
    assert not ast.literal_eval(imported.decode()) & {"aiohttp", "httpx", "httpx2", "leyden"}
