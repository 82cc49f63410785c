"""A terminal for tests: what stands on its screen after a program has written to it, and programs that run in one."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b\]8;[^\x07\x1b]*(?:\x07|\x1b\\)|(\r|\n)|([^\x1b\r\n])", re.DOTALL)


class Emulator:
    """The screen of a terminal with the lines that have left it. It breaks long lines, and those of the screen again
    when it is resized, unless `cuts`: then it cuts them, as xterm does.
    """

    def __init__(self, columns: int, rows: int, *, cuts: bool = False) -> None:
        self.columns, self.rows, self.cuts = columns, rows, cuts
        self.lines: list[list[str]] = [[]]
        """A list of cells for each row, from the first that was ever written; a wide character has "" behind it."""
        self.continued: list[bool] = [False]
        """Whether each row goes on with the one before it, because a line was broken."""
        self.row = self.column = 0
        self.breaks = True

    @property
    def top(self) -> int:
        return max(0, len(self.lines) - self.rows)

    def feed(self, text: str) -> None:
        position = 0
        while position < len(text):
            token = _TOKEN.match(text, position)
            assert token is not None, f"unknown control sequence: {text[position : position + 20]!r}"
            position = token.end()
            parameters, command, control, character = token.groups()
            if command is not None:
                self._obey(parameters, command)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self._down(continued=False)
            elif character is not None:
                self._put(character)

    def _obey(self, parameters: str, command: str) -> None:
        count = int(parameters) if parameters.isdigit() else 1
        match command:
            case "A":
                self.row = max(self.top, self.row - count)
            case "K" | "J" if parameters == "":
                del self.lines[self.row][self.column :]
                below = range(self.row + 1, len(self.lines))
                self.continued[self.row + 1 : self.row + 2] = [False] * len(below[:1])  # its end is erased
                if command == "J":
                    self.continued[self.row + 1 :] = [False] * len(below)
                    self.lines[self.row + 1 :] = [[] for _ in below]
            case "h" | "l" if parameters == "?7":
                self.breaks = command == "h"
            case "m":
                pass
            case _:
                raise AssertionError(f"unknown control sequence: {parameters}{command}")

    def _down(self, *, continued: bool) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])
            self.continued.append(continued)

    def _put(self, character: str) -> None:
        if unicodedata.combining(character):
            return
        width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if self.column + width > self.columns:
            if self.breaks:
                self._down(continued=True)
                self.column = 0
            else:
                self.column = self.columns - width
        line = self.lines[self.row]
        line += [" "] * (self.column - len(line))
        line[self.column : self.column + width] = [character, *[""] * (width - 1)]
        self.column += width

    def resize(self, columns: int, rows: int) -> None:
        if self.cuts:
            self.lines = [line[:columns] for line in self.lines]
        elif columns != self.columns:
            whole: list[list[str]] = []
            cursor = (0, 0)
            for row, (line, continued) in enumerate(zip(self.lines, self.continued, strict=True)):
                whole = [*whole[:-1], whole[-1] + line] if continued else [*whole, line]
                if row == self.row:
                    cursor = len(whole) - 1, len(whole[-1]) - len(line) + self.column
            self.lines, self.continued = [], []
            for number, line in enumerate(whole):
                if number == cursor[0]:
                    self.row, self.column = len(self.lines) + cursor[1] // columns, cursor[1] % columns
                for start in range(0, max(1, len(line)), columns):
                    self.lines.append(line[start : start + columns])
                    self.continued.append(start > 0)
        del self.lines[max(self.row + 1, self.row + rows) :], self.continued[max(self.row + 1, self.row + rows) :]
        self.columns, self.rows = columns, rows
        self.column = min(self.column, columns)

    @property
    def screen(self) -> list[str]:
        """The rows that are visible, without empty ones at the end."""
        return self.everything[self.top :]

    @property
    def everything(self) -> list[str]:
        """All rows that were ever written, as they are now."""
        rows = ["".join(line).rstrip() for line in self.lines]
        while rows and not rows[-1]:
            rows.pop()
        return rows


class Program:
    """A Python program whose standard input, output and error are a terminal of a given size."""

    def __init__(
        self,
        code: str,
        columns: int = 80,
        rows: int = 24,
        *,
        environment: Mapping[str, str] | None = None,
        cuts: bool = False,
        stdout: int | None = None,
    ) -> None:
        self.emulator, self.output = Emulator(columns, rows, cuts=cuts), ""
        self._master, terminal = pty.openpty()
        self._set_size(columns, rows)
        own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**own, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **(environment or {})},
            stdin=terminal,
            stdout=terminal if stdout is None else stdout,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        with self._lock:
            self._set_size(columns, rows)
            self.emulator.resize(columns, rows)

    def _read(self) -> None:
        decoder, pending = codecs.getincrementaldecoder("utf-8")("replace"), ""
        while True:
            try:
                chunk = os.read(self._master, 65536)
            except OSError:  # the program has closed the other side
                chunk = b""
            pending += decoder.decode(chunk, final=not chunk)
            sequence = re.search(r"\x1b[^A-Za-z]*$", pending) if chunk else None  # unfinished
            text, pending = (pending, "") if sequence is None else (pending[: sequence.start()], sequence.group())
            with self._lock:
                self.output += text
                self.emulator.feed(text)
            if not chunk:
                return

    def wait_for(self, condition: Callable[[list[str]], object], what: str = "the screen") -> list[str]:
        """Wait until a condition holds for the rows of the screen that are not empty, and return them."""
        deadline = time.monotonic() + 30
        while True:
            with self._lock:
                shown = [row for row in self.emulator.screen if row]
            if condition(shown):
                return shown
            assert time.monotonic() < deadline, f"{what}: {shown}"
            assert self.process.poll() is None or self._reader.is_alive() or condition(shown), (what, shown)
            threading.Event().wait(0.01)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Wait until the program has ended, and return its exit code."""
        code = self.process.wait(30)
        self._reader.join(10)
        os.close(self._master)
        return code

    def hang_up(self) -> None:
        os.close(self._master)
