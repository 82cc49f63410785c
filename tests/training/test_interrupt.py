"""Ctrl-C once ends a run well, twice ends it now."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from leyden.training import graceful_interrupts

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, sys, time
from leyden.training import TrainLoop, graceful_interrupts

kind = sys.argv[1]

class Vessel:
    def step(self, iteration):
        print("step", iteration, flush=True)
        if kind == "stubborn":
            while True:
                pass
        for _ in range(100 if iteration == 0 else 1):
            time.sleep(0.005)
        return {}
    def validate(self, iteration): return {}
    def save(self, path): ...
    def load(self, path): ...

class AsyncVessel(Vessel):
    async def step(self, iteration):
        print("step", iteration, flush=True)
        if iteration == 0:
            return {}
        await stopped.wait()  # nothing else wakes the loop
        return {}

loop = TrainLoop(max_iters=10**6)
stopped = asyncio.Event()

def stop():
    loop.stop()
    stopped.set()

async def main():
    with graceful_interrupts(stop):
        await loop.arun(AsyncVessel())

if kind in ("sync", "stubborn"):
    with graceful_interrupts(stop):
        loop.run(Vessel())
elif kind == "asyncio":
    asyncio.run(main())
else:
    import uvloop
    uvloop.run(main())
print("finished", loop.current_iter, flush=True)
"""


def start(kind: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    wanted = "step 0" if kind in ("sync", "stubborn") else "step 1"
    while process.stdout.readline().strip() != wanted:
        assert process.poll() is None
    time.sleep(0.1)  # the step is under way
    return process


@pytest.mark.parametrize("kind", ["sync", "asyncio", "uvloop"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_the_run_after_the_stage_and_says_so(kind: str, number: signal.Signals) -> None:
    if kind == "uvloop":
        pytest.importorskip("uvloop")
    process = start(kind)
    process.send_signal(number)
    output, errors = process.communicate(timeout=10)
    assert process.returncode == 0, errors
    assert output.strip().splitlines()[-1] == ("finished 1" if kind == "sync" else "finished 2")
    assert errors.strip() == f"{number.name}: ends after the stage under way and keeps it; once more to end at once"


def test_the_second_signal_ends_it_at_once() -> None:
    process = start("stubborn")
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode != 0
    assert "KeyboardInterrupt: second SIGINT" in errors


def test_handlers_are_restored_also_after_an_error() -> None:
    def mine(number: int, frame: object) -> None: ...

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, mine)
    try:
        with contextlib.suppress(ZeroDivisionError), graceful_interrupts(lambda: None):
            assert signal.getsignal(signal.SIGTERM) is not mine
            raise ZeroDivisionError
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_in_another_thread_signals_stay_as_they_are() -> None:
    seen: list[object] = []

    def work(look: Callable[[], object]) -> None:
        with graceful_interrupts(lambda: None):
            seen.append(look())

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work, args=(lambda: signal.getsignal(signal.SIGINT),))
    thread.start()
    thread.join()
    assert seen == [before]
