"""The channel between a process and its environment worker, and the memory that both map.

A channel carries signals of one byte, which cost one system call on each side, and pickled messages. When the process
at the other end dies, the stream ends. The memory is a file without a name, which the system frees when the last
process that maps it has ended. This module knows neither environments nor the contents of messages.
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
from typing import Any, Final, Self

from leyden._lib.host.child import PipeEnd
from leyden._lib.pickling import pack

SIGNAL: Final = object()
"""`Channel.receive` returns this object for a signal that the shared memory has changed."""
_SIGNAL: Final = b"S"
_HEAD: Final = struct.Struct("<cQ")
"""The head of a message: the letter M, and the length of the pickle."""
_CHUNK: Final = 65536
"""The most bytes of one read."""


class Channel:
    """Signals and messages over the pipes between a process and its child.

    Each side replies before it receives another message, so a signal never arrives together with a message.
    """

    def __init__(self, connection: PipeEnd) -> None:
        """Use a connection, which the caller owns and closes."""
        self._read, self._write = connection.fileno(), connection.write_fileno()
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def signal(self) -> None:
        """Signal to the other side that the shared memory has changed. Raise OSError if it is gone."""
        os.write(self._write, _SIGNAL)

    def send(self, message: Any) -> None:
        """Send a message, pickled, or by cloudpickle if pickle fails. Raise OSError if the other side is gone."""
        data = pack(message)
        rest = memoryview(_HEAD.pack(b"M", len(data)) + data)
        while rest:
            rest = rest[os.write(self._write, rest) :]

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """Return the next message, or SIGNAL.

        Raise EOFError if the other side is gone, TimeoutError if it is not here in time.
        timeout_seconds: for the whole message; None: no limit.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        data = self._read_available(deadline)
        if data == _SIGNAL:
            return SIGNAL
        parts, have = [data], len(data)
        while have < _HEAD.size:
            parts.append(self._read_available(deadline))
            have += len(parts[-1])
        data = b"".join(parts)
        _, size = _HEAD.unpack_from(data)
        parts, missing = [data[_HEAD.size :]], size + _HEAD.size - len(data)
        while missing > 0:
            parts.append(self._read_available(deadline))
            missing -= len(parts[-1])
        return pickle.loads(b"".join(parts))

    def _read_available(self, deadline: float | None) -> bytes:
        """Return the bytes that have arrived. Raise TimeoutError after the deadline, EOFError if the sender closed."""
        if deadline is not None and not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        if not (data := os.read(self._read, _CHUNK)):
            raise EOFError
        return data


class SharedMemoryFile:
    """Memory that a process shares with its children.

    Pass the object to the children as an argument when they are started. Set the size before any process maps it.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Make a file without a name, or take over the open one of this descriptor."""
        if descriptor is None:
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create("leyden-env", os.MFD_CLOEXEC)
            else:
                with tempfile.TemporaryFile() as file:
                    descriptor = os.dup(file.fileno())
        self._descriptor = descriptor

    def resize(self, nbytes: int) -> None:
        """Set the size in bytes. Call this before any process maps the file."""
        os.ftruncate(self._descriptor, nbytes)

    def map(self) -> mmap.mmap:
        """Return a mapping of the whole file, which lives as long as an array over it."""
        return mmap.mmap(self._descriptor, 0)

    def close(self) -> None:
        """Close the file. Mappings stay valid. Safe to repeat."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __reduce__(self) -> Any:
        # DupFd works only while a child process is being started
        return SharedMemoryFile._in_child, (reduction.DupFd(self._descriptor),)

    @classmethod
    def _in_child(cls, descriptor: Any) -> Self:
        return cls(descriptor.detach())
