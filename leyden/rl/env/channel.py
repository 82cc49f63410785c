"""The channel between a process and its environment worker, and the memory that both map.

A channel carries single signals, which cost one system call on each side, and pickled messages. The
death of the process at the other end is the end of the stream. The memory is a file without a name,
which the system frees when the last process that maps it has ended. This module knows neither
environments nor the contents of messages.
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
from typing import Any, Final

from leyden.host.child import PipeEnd
from leyden.utils.pickling import pack

SIGNAL: Final = object()
"""`Channel.receive` returns it for a signal that the shared memory has changed."""
_SIGNAL: Final = b"S"
_HEAD: Final = struct.Struct("<cQ")
_CHUNK: Final = 65536


class Channel:
    """Signals and messages over the pipes between a process and its child.

    Each side replies before it receives another message.
    """

    def __init__(self, connection: PipeEnd) -> None:
        """connection: the caller owns and closes it."""
        self._read, self._write = connection.fileno(), connection.write_fileno()
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def signal(self) -> None:
        """Signal a change of the shared memory to the other side. Raise OSError if it has gone."""
        os.write(self._write, _SIGNAL)

    def send(self, message: Any) -> None:
        """Send a message, by value (cloudpickle) if pickle cannot send it by name.

        Raise OSError if the other side has gone.
        """
        data = pack(message)
        rest = memoryview(_HEAD.pack(b"M", len(data)) + data)
        while rest:
            rest = rest[os.write(self._write, rest) :]

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """Return the next message, or SIGNAL, a message of one byte that needs no unpickling.

        Raise EOFError if the other side has gone, TimeoutError if nothing arrives in time.
        """
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

    def _some(self, deadline: float | None) -> bytes:
        if deadline is not None and not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        if not (data := os.read(self._read, _CHUNK)):
            raise EOFError
        return data


class SharedMemoryFile:
    """Memory that a process shares with its children: pass it to them as an argument, set its size,
    and map it.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """descriptor: the file to share, in a child. None: a new one without a name."""
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
        """Map the whole file. The mapping lives as long as an array over it."""
        return mmap.mmap(self._descriptor, 0)

    def close(self) -> None:
        """Close the file. Mappings stay valid."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __reduce__(self) -> Any:
        return _arrived, (reduction.DupFd(self._descriptor),)  # possible only while a process is being started


def _arrived(descriptor: Any) -> SharedMemoryFile:
    return SharedMemoryFile(descriptor.detach())
