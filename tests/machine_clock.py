"""The clocks of this machine as a test moves them: the wall clock is stepped, or time passes without waiting."""

from __future__ import annotations

import time

import pytest

from leyden._lib.clock import CLOCK


class MachineClock:
    """Stands in for the system's clocks; `leyden._lib.clock` reads them as ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stepped = self._passed = 0.0
        wall, real = time.time, CLOCK.real
        for owner, name, value in (
            (CLOCK, "_checked", (wall(), real(), 0.0)),  # which also restores it after the test
            (CLOCK, "_is_logged", False),
            (CLOCK, "real", lambda: real() + self._passed),
            (CLOCK, "wall", lambda: wall() + self._stepped + self._passed),
            (time, "time", lambda: CLOCK.wall()),  # a step is seen by all that ask the wall clock
        ):
            monkeypatch.setattr(owner, name, value)

    def step(self, seconds: float) -> None:
        """Step the wall clock, as an administrator does. No time passes."""
        self._stepped += seconds

    def let_pass(self, seconds: float) -> None:
        """Let time pass on all clocks that say when something happened."""
        self._passed += seconds
