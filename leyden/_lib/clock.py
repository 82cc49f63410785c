"""`unix_time`: the time of the records, deadlines and ages that Leyden keeps. A step of the wall clock does not move
it.

The wall clock is stepped by an administrator, by NTP, and by the host of a virtual machine that was paused. A program
that compares the wall clock with a time from before such a step takes it for time that has passed, and ends what is
under way. `unix_time` begins as the wall clock when the process begins, counts the real time from there on, and works
off any difference at one hundredth of real time: a second takes 100 seconds, an hour four days.

Use `time.time()` only for a time that other machines or people read, and `time.monotonic()` for a duration within one
process that is not recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

logger = logging.getLogger(__name__)

_RATE: Final = 0.01
"""The part of real time by which the clock runs faster or slower until a difference is worked off. No limit is wrong by
more."""
_CHECK_SECONDS: Final = 0.1
"""Seconds between two readings of the wall clock."""
_NO_DIFFERENCE_SECONDS: Final = 0.001
"""A smaller difference from the wall clock is left as it is. It may be the time between the readings of two clocks."""
_LOGGED_SECONDS: Final = 2.0
"""A larger difference is logged."""
_REAL: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A system clock that is never stepped, and that counts the time in which the machine slept."""


class Clock:
    """A clock that follows the wall clock without its steps. Between two readings passes the real time, give or take
    one hundredth. Thread-safe.

    wall: returns the wall clock in Unix seconds.
    real: returns seconds since some moment, by a clock that is never stepped.
    """

    def __init__(self, wall: Callable[[], float], real: Callable[[], float]) -> None:
        self.wall = wall
        self.real = real
        self._checked = wall(), real(), 0.0
        """This clock, the real time, and the seconds by which the wall clock was ahead, when it was last checked. One
        tuple, because threads read and replace it without a lock.
        """
        self._is_logged = False

    def time(self) -> float:
        then, real_then, ahead = self._checked  # read first, so that no other thread's is later than `real`
        passed = self.real() - real_then
        if not ahead and passed < _CHECK_SECONDS:
            return then + passed
        max_change = passed * _RATE
        now = then + passed + min(max(ahead, -max_change), max_change)
        if passed >= _CHECK_SECONDS:
            self._check(now, real_then + passed)
        return now

    def _check(self, now: float, real: float) -> None:
        ahead = self.wall() - now
        if self.real() - real > _NO_DIFFERENCE_SECONDS:
            return  # the thread stood still between the two clocks; the next reading tries again
        self._checked = now, real, ahead if abs(ahead) > _NO_DIFFERENCE_SECONDS else 0.0
        is_stepped = abs(ahead) > _LOGGED_SECONDS
        if is_stepped and not self._is_logged:
            logger.warning(
                "this machine's clock was stepped by %+.0f s; deadlines, ages and new records of this process follow it "
                "slowly, within %.0f min; if it is restarted before, it takes the rest for time that has passed",
                ahead,
                abs(ahead) / _RATE / 60,
            )
        self._is_logged = is_stepped


CLOCK: Final = Clock(time.time, partial(time.clock_gettime, _REAL))
"""The clock of this process."""
unix_time: Final = CLOCK.time
"""Return the time of this process, in Unix seconds."""
