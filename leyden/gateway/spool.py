"""A bounded file in which records wait while the store is away.

First in, first out. It knows spans and a file, no store: `recorder` fills and empties it. A spool with a name outlives
its process: the next one finds what was not delivered, and delivers it. Delivering twice does no harm, because a store
keeps a span once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections import deque
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from leyden.errors import ConfigError, GatewayError
from leyden.store.wire import dump, load
from leyden.types import Span

_SPAN = TypeAdapter(Span)


class Spool:
    """Spans as lines of JSON. One process uses a file at a time."""

    def __init__(self, path: Path | None = None, *, max_bytes: int) -> None:
        """
        path: None for a file without a name, which is gone with this process.
        max_bytes: the largest size of the file.
        Raise ConfigError for a file that another gateway uses, or that cannot be opened.
        """
        self.path = path
        self._max_bytes = max_bytes
        self._lengths: deque[int] = deque()
        """The bytes of each line that waits."""
        self._end = 0
        """The size of the file."""
        self._start = 0
        """Where the first of them begins."""
        try:
            if path is None:
                self._file = tempfile.TemporaryFile(prefix="leyden-spool-")  # noqa: SIM115 -- closed by `close`
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b")
        except OSError as error:
            raise ConfigError(
                f"spool: {path} cannot be opened: {error.strerror}; give a path that can be written"
            ) from error
        if path is not None:
            self._claim(path)

    def _claim(self, path: Path) -> None:
        """Lock the file, and find the lines that an earlier process left; one that a crash cut off is dropped."""
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConfigError(f"spool: {path} is used by another gateway; give each a path of its own") from error
        whole = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            self._lengths.append(len(line))
            whole += len(line)
        self._file.truncate(whole)
        self._end = whole

    def __len__(self) -> int:
        return len(self._lengths)

    def append(self, spans: list[Span]) -> int:
        """Add spans behind the others, and return how many fit.

        Raise ConfigError for a span that is not JSON, GatewayError for a file that cannot be written; nothing is added then.
        """
        lines: list[bytes] = []
        free = self._max_bytes - self._end
        for span in spans:
            line = dump(span, "a span") + b"\n"
            if len(line) > free:
                break
            free -= len(line)
            lines.append(line)
        try:
            self._file.seek(0, os.SEEK_END)
            self._file.write(b"".join(lines))
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise GatewayError(f"records cannot wait in {self.path or 'a temporary file'}: {error.strerror}") from error
        self._lengths.extend(map(len, lines))
        self._end += sum(map(len, lines))
        return len(lines)

    def first(self, n: int) -> list[Span]:
        """Return up to `n` spans from the front, which stay. A line at the front that cannot be read is dropped."""
        spans: list[Span] = []
        while not spans and self._lengths:
            self._file.seek(self._start)
            for length in itertools.islice(self._lengths, n):
                try:
                    spans.append(load(_SPAN, self._file.read(length)))
                except ValidationError:
                    break
            if not spans:
                self.drop(1)
        return spans

    def drop(self, n: int) -> None:
        """Remove `n` spans from the front."""
        self._start += sum(self._lengths.popleft() for _ in range(n))
        if not self._lengths:
            self._start = self._end = 0
            self._file.truncate(0)

    def close(self) -> None:
        """Close the file. What waits in one with a name stays there."""
        self._file.close()
