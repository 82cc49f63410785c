"""Processes that read items of a data set ahead.

A producer that dies is replaced, and reads its item again. This module knows no queue: `leyden.rl.data_queue` decides
which items are read, and keeps them.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any, Final

from leyden._lib.host.child import (
    Child,
    Parent,
    StartMethod,
    end_with_parent,
    known_start_method,
    require_importable_main,
)
from leyden._lib.pickling import pack, pack_by_value
from leyden._lib.text import error_line
from leyden.errors import ConfigError, DataQueueClosed, SimulatorError

_DEATHS: Final = 3
"""An item over which this many producers have died is given up."""
_LAST_SECONDS: Final = 1.0
"""Seconds to wait for a dead producer's exit status."""
_REMEDY: Final = "leave producer_num_workers out"


def start_producers(dataset: Any, n: int) -> list[Producer]:
    """Start n producers. Raise ConfigError if the data set cannot be pickled."""
    try:
        packed = pack_by_value(dataset)
    except Exception as error:
        raise ConfigError(
            f"the data set cannot go to a producer process: {error}. Open what it holds when it is first read, or leave "
            "producer_num_workers out"
        ) from error
    method = known_start_method(None)
    require_importable_main(method, remedy=_REMEDY)
    return [Producer(f"leyden-producer-{number}", packed, method) for number in range(n)]


class Producer:
    """A process that reads one item after another.

    Call `read` from one thread at a time. `close` may be called from any thread.
    """

    def __init__(self, name: str, packed: bytes, start_method: StartMethod) -> None:
        """Start the process with a pickled data set."""
        self._name, self._packed = name, packed
        self._start_method: StartMethod = start_method
        self._closed = False
        self.child = self._start()

    def read(self, index: int) -> Any:
        """Return the item with this index. Raise the error that reading the item raised, SimulatorError if the item has
        killed three processes, and DataQueueClosed after `close`.
        """
        how = ""
        for _ in range(_DEATHS):
            self.child.send(index)
            try:
                data = self.child.connection.recv_bytes()
            except (EOFError, OSError):
                if self._closed:
                    raise DataQueueClosed("the data queue was closed") from None
                how = self.child.describe_end(_LAST_SECONDS, remedy=_REMEDY)
                self.child.close()
                self.child = self._start()
                if self._closed:  # during the restart
                    self.child.kill()
                continue
            item, error = pickle.loads(data)
            if error is not None:
                raise error
            return item
        raise SimulatorError(
            f"producers of the data queue died {_DEATHS} times while they read item {index}; the last one {how}"
        )

    def close(self) -> None:
        """Kill the process, even during a read, which does no harm. `reap` frees its descriptors."""
        self._closed = True
        self.child.kill()

    def reap(self) -> None:
        """Release the file descriptors. Call it after `close`, when no thread is in `read` any more."""
        self.child.close()

    def _start(self) -> Child:
        return Child(_produce, (self._packed,), name=self._name, start_method=self._start_method)


def _produce(parent: Parent, packed: bytes) -> None:
    end_with_parent(parent.pid)
    dataset = pickle.loads(packed)
    with contextlib.suppress(EOFError, OSError):
        while True:
            index = parent.connection.recv()
            try:
                data = pack((dataset[index], None))
            except Exception as error:  # noqa: BLE001 -- user code: whatever it raises goes to the consumer
                data = pack((None, portable(error, f"item {index} could not be read")))
            parent.connection.send_bytes(data)


def portable(error: Exception, what: str) -> Exception:
    """Return the error if it can be pickled, else a SimulatorError that describes it and names `what` failed."""
    try:
        if type(pickle.loads(pack(error))) is type(error):
            return error
    except Exception:  # noqa: BLE001 -- an exception's own code may raise anything
        pass
    return SimulatorError(f"{what}: {error_line(error)}")
