"""What parent and worker say to each other: single signals, and messages, over two pipes; and memory that both have mapped.

It knows neither environments nor what is said. The pipes end with the process at their other end, so its death is heard of as the end of
a file. The memory is a file without a name: when the last process that has it is gone, however it went, so is it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import struct
import tempfile
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Final

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] -- it has none

SIGNAL: Final = object()
"""What `receive` answers for a signal: there is news in the shared memory."""
_SIGNAL: Final = b"S"
_HEAD: Final = struct.Struct("<cQ")
_CHUNK: Final = 65536


class Channel:
    """One side: reads one pipe and writes the other. A side answers each thing it is told before it is told another."""

    def __init__(self, incoming: Connection, outgoing: Connection) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._read, self._write = incoming.fileno(), outgoing.fileno()
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    @property
    def ends(self) -> tuple[Connection, Connection]:
        """Both pipes, of this side."""
        return self._incoming, self._outgoing

    def signal(self) -> None:
        """Tell the other side to look. Raises OSError when it is gone."""
        os.write(self._write, _SIGNAL)

    def send(self, message: Any) -> None:
        """Raises OSError when the other side is gone; what pickle cannot send by name goes by value (cloudpickle)."""
        try:
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except Exception:  # noqa: BLE001 -- whatever a user's __reduce__ raises; the second attempt says it
            data = cloudpickle.dumps(message)  # pyright: ignore[reportUnknownMemberType] -- untyped
        rest = memoryview(_HEAD.pack(b"M", len(data)) + data)
        while rest:
            rest = rest[os.write(self._write, rest) :]

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """A message, or SIGNAL. Raises EOFError when the other side is gone, TimeoutError when nothing has come in time."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        data = self._some(deadline)
        if data == _SIGNAL:
            return SIGNAL
        parts, have = [data], len(data)
        while have < _HEAD.size:
            parts.append(self._some(deadline))
            have += len(parts[-1])
        data = b"".join(parts)
        _, size = _HEAD.unpack_from(data)
        parts, missing = [data[_HEAD.size :]], size + _HEAD.size - len(data)
        while missing > 0:
            parts.append(self._some(deadline))
            missing -= len(parts[-1])
        return pickle.loads(b"".join(parts))

    def close(self) -> None:
        """Let go of both pipes: the other side hears the end of its own."""
        self._incoming.close()
        self._outgoing.close()

    def _some(self, deadline: float | None) -> bytes:
        if deadline is not None and not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        if not (data := os.read(self._read, _CHUNK)):
            raise EOFError
        return data


class SharedMemoryFile:
    """Memory that a process shares with those that it starts: give it to them as an argument, say how long it is, and map it."""

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create("leyden-env", os.MFD_CLOEXEC)
            else:
                with tempfile.TemporaryFile() as file:
                    descriptor = os.dup(file.fileno())
        self._descriptor = descriptor

    def resize(self, nbytes: int) -> None:
        """Before anyone maps it."""
        os.ftruncate(self._descriptor, nbytes)

    def map(self) -> mmap.mmap:
        """All of it. The mapping lives as long as anything looks at it."""
        return mmap.mmap(self._descriptor, 0)

    def close(self) -> None:
        """Map it no more; mappings live on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __reduce__(self) -> Any:
        return _arrived, (reduction.DupFd(self._descriptor),)  # possible only while a process is being started


def _arrived(descriptor: Any) -> SharedMemoryFile:
    return SharedMemoryFile(descriptor.detach())
