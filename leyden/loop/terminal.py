"""Keep a program's output above a display that is drawn on the terminal.

The display's content is not known here. A child process that writes to the terminal by itself is
not covered.
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
    """A stand-in for a stream of the terminal: whole lines that are written to it appear above the
    display.

    A rich Console that follows `sys.stderr` writes through it too.
    """

    def __init__(self, stream: TextIO, console: Console) -> None:
        super().__init__()
        self.stream = stream
        self.is_over = False
        """The display is gone."""
        self._console = console
        self._lock = threading.Lock()
        self._unfinished: dict[int, str] = {}
        """The last line of each thread, until its end is written."""

    def write(self, text: str) -> int:
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
        """Show this thread's unfinished line, such as the prompt of `input()`, unless it is a
        progress bar that will be redrawn.
        """
        if self.is_over:
            if not self.stream.closed:  # since Python 3.13 an error in a stream's finaliser is printed
                self.stream.flush()
            return
        with self._lock:
            thread = threading.get_ident()
            if "\r" not in self._unfinished.get(thread, "\r"):
                self._print(self._unfinished.pop(thread))

    def finish(self) -> None:
        """Show every unfinished line."""
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

    That is `sys.stdout`, `sys.stderr` and the log handlers that hold one of them. Output to a file
    or a pipe goes there as before.
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
    """Return the stream, or the one behind it if its display is gone: displays of two runs may end
    in any order.
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
    if stream is None or not stream.isatty():
        return False
    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal
