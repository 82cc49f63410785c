"""Keep a program's output above a display, such as a progress bar, at the bottom of the terminal.

The output of a child process that writes to the terminal itself is not covered.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text


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
        """Show this thread's unfinished line, such as the prompt of `input()`, unless it is a progress bar that will be
        redrawn.
        """
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
    goes there as before.
    """
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    above = {name: _Above(stream, console) for name, stream in before.items() if is_terminal(stream)}
    for name, stream in above.items():
        setattr(sys, name, stream)
    with ExitStack() as stack:
        for name, stream in above.items():
            stack.callback(_give_back, name, stream)
        originals = [stream.stream for stream in above.values() if not isinstance(stream.stream, _Above)]
        originals += [stream for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]
        loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
        for handler in [each for logger in loggers if isinstance(logger, logging.Logger) for each in logger.handlers]:
            _move(handler, originals, next(iter(above.values()), None), stack)
        yield


def _give_back(name: str, stand_in: _Above) -> None:
    stand_in.finish()
    setattr(sys, name, _still_there(getattr(sys, name)))


def _still_there(stream: Any) -> Any:
    """Return the first stream behind this one whose display is still there, or the real stream.

    The displays of two runs may end in any order, so more than one may be gone.
    """
    while isinstance(stream, _Above) and stream.is_over:
        stream = stream.stream
    return stream


def _move(handler: logging.Handler, originals: Sequence[Any], above: _Above | None, stack: ExitStack) -> None:
    """Let a handler that holds one of the `originals` write to `above` until `stack` closes."""
    if above is None:
        return
    if isinstance(handler, logging.StreamHandler):
        writer = cast("logging.StreamHandler[Any]", handler)
        stream = writer.stream
        if any(stream is original for original in originals) and is_terminal(stream):
            writer.setStream(above)
            stack.callback(writer.setStream, stream)
    elif isinstance(console := getattr(handler, "console", None), Console) and any(
        console.file is original for original in originals
    ):
        # rich's handler
        stack.callback(setattr, console, "file", console.file)
        console.file = cast(TextIO, above)


def is_terminal(stream: Any) -> bool:
    """Return whether the stream is a terminal on which lines can be redrawn."""
    if stream is None or not stream.isatty():
        return False
    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal
