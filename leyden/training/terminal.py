"""`Terminal`: lines at the bottom of a terminal that are redrawn in place, with the program's output above them.

rich draws them. Its own redirection would send a standard output that goes to a file to the terminal, break lines at
the terminal's width, take brackets for markup, and miss log handlers that hold the stream; `printing_above` does not.
The output of a child process that writes to the terminal itself is not covered.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from leyden._lib.formatting import harmless

if TYPE_CHECKING:
    from leyden.training.progress_bar import Line, RunProgress

_REFRESHES_PER_SECOND = 4


class Terminal:
    """Shows the lines of a state at the bottom of a terminal, until `close` leaves the last ones there."""

    def __init__(self, state: RunProgress, stream: TextIO) -> None:
        self.state = state
        self._console = Console(file=stream)
        self._stack = ExitStack()
        self._stack.enter_context(
            Live(
                get_renderable=lambda: Group(*map(self._drawn, self.state.lines(self._console.width))),
                console=self._console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                redirect_stdout=False,
                redirect_stderr=False,
            )
        )
        self._stack.enter_context(printing_above(self._console))

    def close(self) -> None:
        self._stack.close()

    def _drawn(self, line: Line) -> Text:
        text = Text(harmless(line.label), no_wrap=True, overflow="crop")
        if line.fraction is not None and line.bar:
            full = round(line.bar * min(1.0, max(0.0, line.fraction)))
            stroke = "━" if self._console.encoding.startswith("utf") else "-"
            text.append(" ")
            text.append(stroke * full, style="bar.finished" if line.fraction >= 1.0 else "bar.complete")
            text.append((stroke if self._console.color_system else " ") * (line.bar - full), style="bar.back")
        return text.append(f"  {harmless(line.text)}" if line.text else "")


class _Above(io.TextIOBase):
    """Replaces a stream of the terminal, and prints whole lines above the display.

    A rich Console that follows `sys.stderr` writes through it too.
    """

    def __init__(self, stream: TextIO, console: Console) -> None:
        super().__init__()
        self.stream = stream
        self.is_over = False
        """Whether the display is gone, so that text goes straight to the stream."""
        self._console = console
        self._lock = threading.Lock()
        self._unfinished: dict[int, str] = {}
        """The unfinished line of each thread, by the thread's id."""

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
            self.is_over = True

    def _print(self, text: str) -> None:
        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] -- read-only here
        return self.stream.encoding

    def writable(self) -> bool:
        return True


@contextmanager
def printing_above(console: Console) -> Generator[None]:
    """Let everything that this process writes to the terminal appear above the display.

    Covered are `sys.stdout`, `sys.stderr` and the log handlers that write to one of them. Output to a file or a pipe
    goes there as before. The displays of two runs may end in any order.
    """
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    above = {name: _Above(stream, console) for name, stream in before.items() if can_redraw(stream)}
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


def can_redraw(stream: Any) -> bool:
    """Return whether the stream is a terminal on which lines can be redrawn."""
    if stream is None or not stream.isatty():
        return False
    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal
