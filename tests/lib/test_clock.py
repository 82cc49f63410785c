"""A clock that follows the wall clock and not its steps."""

from __future__ import annotations

import itertools
import logging
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden._lib.clock import Clock, unix_time
from tests.machine_clock import MachineClock

BEGAN = 1.8e9


class Machine:
    """A wall clock and a real clock, and a clock that follows them."""

    def __init__(self) -> None:
        self.wall, self.real = BEGAN, 5.0
        self.clock = Clock(lambda: self.wall, lambda: self.real)

    def let_pass(self, seconds: float) -> None:
        self.wall += seconds
        self.real += seconds

    def work(self, seconds: float) -> None:
        """Read the clock again and again while time passes."""
        for _ in range(100):
            self.let_pass(seconds / 100)
            self.clock.time()

    def off(self) -> float:
        """How many seconds the clock is ahead of the wall clock."""
        return self.clock.time() - self.wall


def test_without_a_step_it_is_the_wall_clock() -> None:
    machine = Machine()
    for seconds in (0, 1e-9, 1e-6, 0.5, 3, 1e5, 1e8):
        machine.let_pass(seconds)
        assert machine.off() == pytest.approx(0, abs=1e-5)


@given(
    st.lists(
        st.tuples(st.floats(-1e9, 1e9) | st.sampled_from([0.0, 0.5, -3600.0, 3600.0]), st.floats(0, 1e6)), max_size=30
    )
)
def test_between_two_readings_the_real_time_passes_whatever_is_done_to_the_wall_clock(
    moves: list[tuple[float, float]],
) -> None:
    machine = Machine()
    readings = [(machine.clock.time(), machine.real)]
    for step, seconds in moves:
        machine.wall += step
        machine.let_pass(seconds)
        readings.append((machine.clock.time(), machine.real))
    for (one, before), (other, after) in itertools.combinations(readings, 2):
        passed = after - before
        assert abs(other - one - passed) <= passed / 100 + 1e-4


@pytest.mark.parametrize("seconds", [0.3, -0.3, 60.0, -60.0, 3600.0, -3600.0])
def test_a_step_is_worked_off_in_a_hundred_times_its_length_and_then_is_no_more(seconds: float) -> None:
    machine = Machine()
    machine.let_pass(1)
    machine.clock.time()
    machine.wall += seconds
    assert machine.off() == pytest.approx(-seconds, abs=1e-4)
    machine.work(abs(seconds) * 50)
    assert machine.off() == pytest.approx(-seconds / 2, rel=0.03)
    machine.work(abs(seconds) * 55)
    assert machine.off() == pytest.approx(0, abs=1e-3)
    machine.let_pass(86_400)
    assert machine.off() == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_it_never_goes_backwards_however_often_it_is_read(seconds: float) -> None:
    machine = Machine()
    machine.wall += seconds
    machine.let_pass(1)
    before = machine.clock.time()
    began = before, machine.real
    for _ in range(200_000):
        machine.let_pass(5e-6)
        now = machine.clock.time()
        assert now >= before
        before = now
    passed = machine.real - began[1]
    assert before - began[0] == pytest.approx(passed * (1.01 if seconds > 0 else 0.99), abs=1e-4)


def test_a_step_is_logged_once_and_so_is_the_next(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    for step in (0.0, 0.5, -0.5, 3600.0, 0.0):
        machine.wall += step
        machine.work(20)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "stepped by +3600 s" in caplog.text
    assert "within 6000 min" in caplog.text
    machine.work(4e5)
    machine.wall -= 60
    machine.work(10)
    assert len(caplog.records) == 2
    assert "stepped by -60 s" in caplog.text


def test_a_process_that_stood_still_between_two_clocks_is_no_step(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    stands_still = True

    def wall() -> float:
        nonlocal stands_still
        if stands_still:
            machine.let_pass(3600)
        stands_still = False
        return machine.wall

    machine.clock.wall = wall
    machine.let_pass(1)
    machine.clock.time()
    assert not stands_still
    machine.work(10)
    assert machine.off() == pytest.approx(0, abs=1e-3)
    assert not caplog.records


def test_threads_that_read_it_while_the_clock_is_stepped_see_the_real_time(machine_clock: MachineClock) -> None:
    wrong: list[float] = []
    over = threading.Event()

    def read() -> None:
        began, reading = time.monotonic(), unix_time()
        while not over.is_set():
            passed = unix_time() - reading - (time.monotonic() - began)
            if abs(passed) > 1:
                wrong.append(passed)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(30):
        machine_clock.step(3600 if number % 2 else -1800)
        time.sleep(0.001)
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong
