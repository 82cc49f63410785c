"""`graceful_interrupts`: the first Ctrl-C ends a run after its current stage, the second at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_NOTICE: Final = "ends after the stage under way and keeps it; once more to end at once"


@contextlib.contextmanager
def graceful_interrupts(on_stop: Callable[[], object]) -> Generator[None]:
    """Inside the block, the first SIGINT or SIGTERM prints a notice on standard error and calls `on_stop`; the next one
    raises KeyboardInterrupt.

        with graceful_interrupts(loop.stop):
            loop.run(vessel)

    on_stop: runs in the main thread, between two instructions of any code, so it should only set a flag or an event. It
        may set an `asyncio.Event` of this thread's event loop, which is woken.

    The earlier signal handlers are restored at the end. Python lets only the main thread handle signals; in any other
    thread the block runs with signals as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopping = False

    def handle(number: int, frame: FrameType | None) -> None:
        """Request the stop at the first signal. Raise KeyboardInterrupt at the second."""
        nonlocal stopping
        name = signal.Signals(number).name
        if stopping:
            raise KeyboardInterrupt(f"second {name}")
        stopping = True
        notice = f"\n{name}: {_NOTICE}\n"
        try:
            sys.stderr.write(notice)
            sys.stderr.flush()
        except RuntimeError:  # the signal arrived inside a write to the same stream
            os.write(2, notice.encode())
        on_stop()
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread
            # a loop that waits for I/O does not notice what `on_stop` scheduled until it is woken
            asyncio.get_running_loop().call_soon_threadsafe(lambda: None)

    before: dict[signal.Signals, Any] = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: the handler was set outside Python, and cannot be restored from here
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
