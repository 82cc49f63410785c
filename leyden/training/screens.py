"""Where the live view of a run is shown: at the bottom of a terminal, in the output of a notebook's cell, or as lines.

A screen asks its state for lines and shows them, a few times a second in a thread of its own, until `close`. It takes
the size of the terminal each time, so a resize needs no signal. A terminal or stream that is gone ends the screen and
nothing else.

A terminal's lines are drawn here, not with rich: importing its `Live` takes longer than all of `leyden.training`, its
thread dies with the terminal, it hides the cursor, and it leaves copies behind when the terminal becomes narrower.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from html import escape
from typing import Any, TextIO

from leyden._lib.formatting import harmless, is_on_terminal, printable_on
from leyden.training.live_view import Line, RunView

logger = logging.getLogger(__name__)

_TERMINAL_SECONDS, _NOTEBOOK_SECONDS = 0.25, 0.5
"""Seconds between two redraws."""
_NOTEBOOK_SIZE = 100, 16
_COLOURS = {"bar": "36", "rest": "90", "bad": "31", "dim": "2"}
_CSS = {"bar": "color:#3aa6b9", "rest": "opacity:.4", "bad": "color:#e6694f", "dim": "opacity:.7"}
_ASCII = str.maketrans("━─▁▂▃▄▅▆▇█…", "=-_.:-+*%#~")
"""For streams whose encoding lacks bars and curves."""
_MOVES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b[^\[\]\\]|[\x08\x0b\x0c]")
"""Whatever moves the cursor or erases, but neither colours nor links, in what a program prints."""


def open_screen(state: RunView, stream: TextIO | None, line_seconds: float) -> Terminal | Notebook | Lines:
    """Return the screen that suits a stream; for None, the notebook's cell or `sys.stderr`."""
    if stream is None and (shell := _notebook()) is not None:
        return Notebook(state, shell)
    shown_on: TextIO | None = stream or sys.stderr
    if shown_on is None or not can_redraw(shown_on) or not _in_foreground(shown_on):
        return Lines(state, shown_on, line_seconds)
    if isinstance(shown_on, _Above) and not shown_on.is_over:  # of another run, whose display its lines go above
        return Lines(state, shown_on, line_seconds)
    return Terminal(state, shown_on)


def can_redraw(stream: Any) -> bool:
    """Return whether the stream is a terminal on which lines can be redrawn."""
    return is_on_terminal(stream) and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


class _Ticks:
    """Calls a function now and then in a thread, until `stop`."""

    def __init__(self, work: Callable[[], None], wait_seconds: Callable[[], float]) -> None:
        self._work, self._wait_seconds, self._stopped = work, wait_seconds, threading.Event()
        self._thread = threading.Thread(target=self._run, name="leyden-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(min(3600.0, max(0.0, self._wait_seconds()))):
            self._work()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


class Terminal:
    """Shows the lines of a state at the bottom of a terminal. What the program prints appears above them.

    Between two redraws the cursor stands in an empty line above them. So a child process that writes to the terminal
    itself writes there, and the next redraw begins behind that: nothing of it is lost, though a burst of lines ends in
    remains of the view. And a resize, which moves and breaks the lines below the cursor, does not matter.
    """

    def __init__(self, state: RunView, stream: TextIO) -> None:
        self.state, self._stream = state, stream
        self._lock = threading.RLock()  # a signal handler may print while this thread draws
        self._is_gone = False
        self._has_colours = not os.environ.get("NO_COLOR")
        self._stack = ExitStack()
        self._stack.enter_context(printing_above(self))
        self.draw()
        self._ticks = _Ticks(self.draw, lambda: _TERMINAL_SECONDS)
        atexit.register(self.close, keep=True)

    def close(self, *, keep: bool) -> None:
        try:
            self._ticks.stop()
            self._stack.close()
        finally:  # also after a second Ctrl-C
            with self._lock:
                self.draw(is_last=True, lines=None if keep else [])
                self._is_gone = True
            atexit.unregister(self.close)

    def draw(self, above: str = "", *, is_last: bool = False, lines: list[Line] | None = None) -> None:
        """Redraw the lines that stand there. A terminal that fails is not written to again.

        above: whole lines to print above them.
        lines: instead of the state's.
        """
        with self._lock:
            if self._is_gone or not _in_foreground(self._stream):
                if above:
                    self._stream.write(above)
                    self._stream.flush()
                return
            width, height = _size(self._stream)
            if lines is None:
                # One column and one line stay free: a full line may break, and a full screen scrolls.
                try:
                    lines = self.state.lines(max(1, width - 1), max(1, height - 1))
                except Exception:  # whatever prints must not fail because of the view
                    self._is_gone = True
                    logger.exception("the live view cannot be drawn and ends; the run goes on")
                    return self.draw(above)
            drawn = [f"{self._text(line)}\x1b[K" for line in lines]
            text = f"\r\x1b[J{above}\x1b[0m" if above else ""
            if is_last:
                text += "\r\x1b[J" + "".join(f"{line}\r\n" for line in drawn)
            else:
                up = f"\x1b[{len(drawn)}A" if drawn else ""
                text += "\x1b[K\x1b[?7l" + "".join(f"\r\n{line}" for line in drawn) + f"\x1b[J{up}\r\x1b[?7h"
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                self._is_gone = True

    def _text(self, line: Line) -> str:
        text = "".join(
            f"\x1b[{_COLOURS[style]}m{harmless(piece)}\x1b[0m"
            if style and piece and self._has_colours
            else harmless(piece)
            for piece, style in line
        )
        encoding = self._stream.encoding or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
        return text


def _in_foreground(stream: TextIO) -> bool:
    """Return False for a background job, whose terminal the shell or another program uses."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # not the terminal of this session
        return True


def _size(stream: TextIO) -> tuple[int, int]:
    """Return the columns and lines of a terminal. $COLUMNS and $LINES may say less, or stand for unknown ones."""
    try:
        real: tuple[int, int] = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        real = 0, 0
    given = [int(text) if (text := os.environ.get(name, "")).isdecimal() else 0 for name in ("COLUMNS", "LINES")]
    columns, lines = (min(filter(None, pair), default=0) for pair in zip(real, given, strict=True))
    return columns or 80, lines or 24


class Notebook:
    """Shows the lines of a state in one output of a notebook's cell, which is replaced each time."""

    def __init__(self, state: RunView, display: Any) -> None:
        self.state = state
        self._shown = self._content()
        self._handle = display(self._shown, raw=True, display_id=True)
        self._ticks = _Ticks(self._draw, lambda: _NOTEBOOK_SECONDS)

    def close(self, *, keep: bool) -> None:
        self._ticks.stop()
        self._draw(self._content() if keep else {"text/plain": "", "text/html": ""})

    def _draw(self, content: dict[str, str] | None = None) -> None:
        content = content or self._content()
        if content != self._shown:
            self._shown = content
            self._handle.update(content, raw=True)

    def _content(self) -> dict[str, str]:
        lines = self.state.lines(*_NOTEBOOK_SIZE)
        html = "\n".join(
            "".join(
                f'<span style="{_CSS[style]}">{escape(text)}</span>' if style else escape(text) for text, style in line
            )
            for line in lines
        )
        return {
            "text/plain": "\n".join("".join(text for text, _ in line).rstrip() for line in lines),
            "text/html": f'<pre style="line-height:1.2">{html}</pre>',
        }


def _notebook() -> Any:
    """Return IPython's `display` if this program runs in a notebook; None elsewhere, also in IPython on a terminal."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    return importlib.import_module("IPython.display").display


class Lines:
    """Shows progress off a terminal: a line for each iteration, and one after each `seconds` without a line."""

    def __init__(self, state: RunView, stream: TextIO | None, seconds: float) -> None:
        self.state, self._stream, self._seconds = state, stream, seconds
        self._lock, self._last = threading.Lock(), time.monotonic()
        self._ticks = _Ticks(self._keep_time, lambda: self._last + self._seconds - time.monotonic())

    def end_iteration(self) -> None:
        state = self.state
        self._write([state.label, *state.values(), *state.rates(), state.failures(), state.left()])

    def close(self, *, keep: bool) -> None:
        self._ticks.stop()

    def _keep_time(self) -> None:
        """Print a line when none was printed for a while."""
        if time.monotonic() < self._last + self._seconds:  # an iteration ended during the wait
            return
        state = self.state
        label = state.label if state.in_iterations else ""
        self._write(
            [
                label,
                *(state.pause.texts[:1] or [state.under_way()]),
                *state.values(),
                *state.rates(),
                state.failures(),
                state.left(),
            ]
        )

    def _write(self, parts: Iterable[str]) -> None:
        with self._lock:
            self._last = time.monotonic()
            if self._stream is None:  # closed when Python started
                return
            try:
                self._stream.write(printable_on(self._stream, "  ".join(part for part in parts if part) + "\n"))
                self._stream.flush()
            except (OSError, ValueError):  # closed or full: no reason to end the run
                self._last = float("inf")


# ---- what the program prints ---------------------------------------------------------------------


class _Above:
    """Replaces a stream of the terminal, and prints whole lines above the display.

    A rich Console that follows `sys.stderr` writes through it too. In a forked child it writes to the stream itself.
    """

    def __init__(self, stream: TextIO, terminal: Terminal) -> None:
        self.stream = stream
        self._terminal, self._lock, self._pid = terminal, threading.RLock(), os.getpid()
        self._ended = False
        self._unfinished: dict[int, str] = {}
        """The unfinished line of each thread, by the thread's id."""

    @property
    def is_over(self) -> bool:
        """Whether the display is gone, so that text goes straight to the stream."""
        return self._ended or os.getpid() != self._pid

    def write(self, text: str) -> int:
        """Print the lines that the text completes, and keep the rest until its line is complete."""
        if self.is_over:
            return self.stream.write(text)
        with self._lock:
            thread = threading.get_ident()
            lines, end, rest = (self._unfinished.pop(thread, "") + text).rpartition("\n")
            if rest:
                self._unfinished[thread] = rest
            if end:
                self._print(lines)
        return len(text)

    def flush(self) -> None:
        """Show this thread's unfinished line, such as `input()`'s prompt, unless it is a progress bar to be redrawn."""
        if self.is_over:
            if not self.stream.closed:  # since Python 3.13 an error in a stream's finaliser is printed
                self.stream.flush()
            return
        with self._lock:
            thread = threading.get_ident()
            if "\r" not in self._unfinished.get(thread, "\r"):  # none counts as a bar
                self._print(self._unfinished.pop(thread))

    def finish(self) -> None:
        with self._lock:
            for text in self._unfinished.values():
                self._print(text)
            self._unfinished.clear()
            self._ended = True

    def _print(self, text: str) -> None:
        lines = (line.rstrip("\r").rpartition("\r")[2] for line in _MOVES.sub("", text).split("\n"))
        self._terminal.draw("".join(f"{line}\n" for line in lines))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def printing_above(terminal: Terminal) -> Generator[None]:
    """Let everything that this process writes to the terminal appear above the display.

    Covered are `sys.stdout`, `sys.stderr` and the log handlers that write to one of them. Output to a file or a pipe
    goes there as before, and that of a child process to the terminal itself. The displays of two runs may end in any
    order.
    """
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    above = {name: _Above(stream, terminal) for name, stream in before.items() if can_redraw(stream)}
    originals = [stream.stream for stream in above.values() if not isinstance(stream.stream, _Above)]
    originals += [stream for stream in (sys.__stdout__, sys.__stderr__) if stream is not None and above]
    with ExitStack() as stack:
        for name, stream in above.items():
            setattr(sys, name, stream)
            stack.callback(_give_back, name, stream)
        for logger in [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]:
            for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
                rich_console = getattr(handler, "console", None)  # of rich's handler
                holder, name = (handler, "stream") if rich_console is None else (rich_console, "file")
                stream = getattr(holder, name, None)
                if any(stream is original for original in originals) and can_redraw(stream):
                    setattr(holder, name, next(iter(above.values())))
                    stack.callback(setattr, holder, name, stream)
        yield


def _give_back(name: str, stand_in: _Above) -> None:
    stand_in.finish()
    stream: Any = getattr(sys, name)
    while isinstance(stream, _Above) and stream.is_over:
        stream = stream.stream
    setattr(sys, name, stream)
