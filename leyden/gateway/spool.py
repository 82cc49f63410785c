"""A bounded file in which records wait while the store is unavailable, first in, first out.

The module knows the type of the items and a file, and no store: `recorder` and serving sessions fill and empty a spool.
A spool with a name outlives its process: the next process delivers the items that it finds there. Delivering twice does
no harm, because a store keeps each item once.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import os
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from leyden._lib.atomic import private_directory
from leyden.errors import ConfigError, GatewayError
from leyden.store.wire import dump, load
from leyden.types import Span

T = TypeVar("T")

SPANS: TypeAdapter[Span] = TypeAdapter(Span)
"""The type of the items of a gateway's spool."""
_COMPACT_BYTES = 4 * 2**20
"""How many delivered bytes a file keeps before it is rewritten without them."""
_FIRST_BYTES = 8 * 2**20
"""The most bytes that are read from the front together."""


class Spool(Generic[T]):
    """A queue on disk, bounded in bytes, in which items wait until they are delivered.

    Items are lines of JSON. One process uses a file at a time.
    """

    def __init__(self, path: Path | None = None, *, max_bytes: int, items: TypeAdapter[T]) -> None:
        """Open the file, and lock it if it has a name.

        path: None for a file without a name, which ends with this process.
        max_bytes: the largest size of the file.
        items: the type of the items, as JSON.
        Raise ConfigError for a file that another process uses, or that cannot be opened.
        """
        self.path = path
        self._items = items
        self._max_bytes = max_bytes
        self._lengths: deque[int] = deque()
        """The length in bytes of each waiting line."""
        self._end = 0
        """The size of the file."""
        self._start = 0
        """The offset of the first waiting line."""
        self._torn = False
        """Whether a part of a line may lie behind the end, because writing it failed."""
        try:
            if path is None:
                self._file = tempfile.TemporaryFile(prefix="leyden-spool-", buffering=0)  # noqa: SIM115 -- closed by `close`
            else:
                private_directory(path.parent)
                self._file = _opened(path)
        except OSError as error:
            raise ConfigError(
                f"spool: {path} cannot be opened: {error.strerror}; give a path that can be written"
            ) from error
        if path is not None:
            self._claim(path)

    def _claim(self, path: Path) -> None:
        """Lock the file, count the lines that an earlier process left, and remove a last one that a crash cut off.
        Raise ConfigError if another process has the lock.
        """
        try:
            _lock(self._file)
        except OSError as error:
            self._file.close()
            raise ConfigError(f"spool: {path} is used by another process; give each a path of its own") from error
        whole = 0
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._lengths.append(len(line))
                whole += len(line)
        self._file.truncate(whole)
        self._end = whole

    def beside(self, suffix: str, *, max_bytes: int | None = None) -> Spool[T]:
        """Open another spool of this kind, whose file has this one's name and a suffix.

        max_bytes: None for as many as this one's.
        """
        path = None if self.path is None else self.path.with_name(f"{self.path.name}{suffix}")
        return Spool(path, max_bytes=self._max_bytes if max_bytes is None else max_bytes, items=self._items)

    def __len__(self) -> int:
        return len(self._lengths)

    def append(self, items: list[T], *, bounded: bool = True) -> int:
        """Add items at the end, and return how many of the first ones fit.

        bounded: False adds all of them, even beyond `max_bytes`.
        Raise ConfigError for an item that is not JSON, GatewayError for a file that cannot be written. In both cases
        nothing is added.
        """
        return self.append_lines([self.line_of(item) for item in items], bounded=bounded)

    @staticmethod
    def line_of(item: object) -> bytes:
        """Return an item as a line of JSON. Raise ConfigError if it is not JSON."""
        return dump(item, "a record") + b"\n"

    def load(self, line: bytes) -> T:
        """Return the item of a line. Raise ValidationError for a line of another type."""
        return load(self._items, line)

    def append_lines(self, given: Sequence[bytes], *, bounded: bool = True) -> int:
        """Add items as `line_of` returns them. See `append`."""
        lines: list[bytes] = []
        free = self._max_bytes - self._end
        for line in given:
            if bounded and len(line) > free:
                break
            free -= len(line)
            lines.append(line)
        try:
            if self._torn:
                self._file.truncate(self._end)
            self._torn = True
            _write(self._file, b"".join(lines), self._end)
            self._torn = False
        except OSError as error:
            with contextlib.suppress(OSError):  # else the next call removes the part that was written
                self._file.truncate(self._end)
            raise GatewayError(
                f"records cannot wait in {self.path or 'a temporary file'}: {error.strerror}; make room there, or let them "
                "wait in another file"
            ) from error
        self._lengths.extend(map(len, lines))
        self._end += sum(map(len, lines))
        return len(lines)

    def first(self, n: int) -> list[T]:
        """Return up to `n` items from the front, fewer if large, and keep them. Drop unreadable lines there."""
        items: list[T] = []
        while not items and self._lengths:
            lengths = list(itertools.islice(self._lengths, n))
            size = list(itertools.accumulate(lengths))
            lengths = lengths[: max(1, bisect.bisect_right(size, _FIRST_BYTES))]
            self._file.seek(self._start)
            lines = io.BytesIO(self._file.read(sum(lengths)))
            for length in lengths:
                try:
                    items.append(self.load(lines.read(length)))
                except ValidationError:
                    break
            if not items:
                self.drop(1)
        return items

    def lines(self) -> list[bytes]:
        """Return all waiting items as lines of JSON, without those that cannot be read."""
        self._file.seek(self._start)
        lines = io.BytesIO(self._file.read(self._end - self._start)).readlines()
        readable: list[bytes] = []
        for line in lines:
            with contextlib.suppress(ValidationError):
                self.load(line)
                readable.append(line)
        return readable

    def replace(self, lines: Sequence[bytes]) -> None:
        """Keep these items alone. Raise GatewayError if the file cannot be written."""
        try:
            self._rewrite(b"".join(lines))
        except OSError as error:
            raise GatewayError(f"{self.path or 'a temporary file'} cannot be written: {error.strerror}") from error
        self._lengths = deque(map(len, lines))

    def drop(self, n: int) -> None:
        """Remove `n` items from the front. If the file cannot be changed, a later process delivers them again."""
        self._start += sum(self._lengths.popleft() for _ in range(n))
        with contextlib.suppress(OSError):  # a full or read-only disk: the file stays as it is
            if not self._lengths:
                self._file.truncate(0)
                self._start = self._end = 0
            elif self._start > max(_COMPACT_BYTES, self._end // 2):
                # Without the delivered lines, so that a busy spool does not grow for ever.
                self._file.seek(self._start)
                self._rewrite(self._file.read(self._end - self._start))

    def _rewrite(self, waiting: bytes) -> None:
        """Replace the file's content. A file with a name is replaced by a new one, so that a crash loses nothing."""
        if self.path is None:
            _write(self._file, waiting, 0)
            self._file.truncate(len(waiting))
        else:
            aside = self.path.with_name(f"{self.path.name}.new")
            file = _opened(aside, os.O_TRUNC)
            try:
                _write(file, waiting, 0)
                _lock(file)
                aside.replace(self.path)
            except OSError:
                file.close()
                raise
            self._file.close()
            self._file = file
        self._start, self._end = 0, len(waiting)

    def close(self) -> None:
        """Close the file. Items that wait in a named file stay there."""
        self._file.close()


def _opened(path: Path, flags: int = 0) -> Any:
    """Open a file for reading and appending, for this user only, and create it if it is missing."""
    return os.fdopen(
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | flags, 0o600), "r+b", buffering=0
    )  # a buffer would keep what a full disk refused


def _write(file: Any, data: bytes, at: int) -> None:
    """Write all of the data from an offset on. A full disk may take a part before the error."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file.fileno(), left, at)
        left, at = left[written:], at + written


def _lock(file: Any) -> None:
    """Lock a file. Raise OSError if another process has locked it."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
