"""Processes that read items of a data set ahead. The items are received in the order of requests.

A producer that dies is replaced, and its undelivered items are read again. This module knows no
queue: `leyden.rl.data_queue` decides which items are read, and keeps them.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
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


class Producers:
    """N processes that read items by index.

    Call `request` and `receive` from one thread. `close` may be called from any thread.
    """

    def __init__(self, dataset: Any, n: int) -> None:
        """Start the processes. Raise ConfigError if the data set cannot be pickled."""
        try:
            packed = pack_by_value(dataset)
        except Exception as error:
            raise ConfigError(
                f"the data set cannot go to a producer process: {error}. Open what it holds when it is first read, or leave "
                "producer_num_workers out"
            ) from error
        method = known_start_method(None)
        require_importable_main(method, remedy=_REMEDY)
        self._closed = False
        self._producers = [_Producer(number, method, packed) for number in range(n)]
        self._requested = self._received = 0

    def reap(self) -> None:
        """Release the file descriptors of the processes.

        Call it after `close`, when no thread is in `receive` any more.
        """
        for producer in self._producers:
            producer.child.close()

    def __len__(self) -> int:
        return len(self._producers)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [producer.child.pid for producer in self._producers]

    def request(self, index: int) -> None:
        """Request the item with this index from the next process in turn."""
        self._producers[self._requested % len(self)].request(index)
        self._requested += 1

    def receive(self) -> Any:
        """Wait for the oldest requested item that was not received yet, and return it.

        Raise the error that reading the item raised, SimulatorError if the item has killed three producers, and
        DataQueueClosed after `close`.
        """
        producer = self._producers[self._received % len(self)]
        deaths = 0
        while True:
            try:
                item, error = producer.receive()
            except (EOFError, OSError):
                if self._closed:
                    raise DataQueueClosed("the data queue was closed") from None
                how, deaths = producer.child.describe_end(_LAST_SECONDS, remedy=_REMEDY), deaths + 1
                index = producer.pending[0]
                if deaths >= _DEATHS:
                    producer.pending.popleft()
                    self._received += 1
                producer.restart()
                if self._closed:  # during the restart
                    producer.child.kill()
                if deaths >= _DEATHS:
                    raise SimulatorError(
                        f"producers of the data queue died {deaths} times while they read item {index}; the last one {how}"
                    ) from None
                continue
            self._received += 1
            if error is not None:
                raise error
            return item

    def close(self) -> None:
        """Kill the processes, even during a read. `reap` frees their descriptors."""
        self._closed = True
        for producer in self._producers:  # a producer only reads, so a kill does no harm
            producer.child.kill()


class _Producer:
    """One process, and the indices of the items that were requested and not delivered yet."""

    def __init__(self, number: int, start_method: StartMethod, packed: bytes) -> None:
        self._number, self._packed = number, packed
        self._start_method: StartMethod = start_method
        self.pending: deque[int] = deque()
        self.child = self._start()

    def request(self, index: int) -> None:
        self.pending.append(index)
        self.child.send(index)  # `receive` notices a dead child

    def receive(self) -> tuple[Any, BaseException | None]:
        data = self.child.connection.recv_bytes()
        self.pending.popleft()
        return pickle.loads(data)

    def restart(self) -> None:
        self.child.close()
        self.child = self._start()
        for index in self.pending:
            self.child.send(index)

    def _start(self) -> Child:
        return Child(_produce, (self._packed,), name=f"leyden-producer-{self._number}", start_method=self._start_method)


def _produce(parent: Parent, packed: bytes) -> None:
    end_with_parent(parent.pid)
    dataset = pickle.loads(packed)
    with contextlib.suppress(EOFError, OSError):
        while True:
            parent.connection.send_bytes(_read(dataset, parent.connection.recv()))


def _read(dataset: Any, index: int) -> bytes:
    """Return the pickled pair (item, None), or (None, error) if reading the item raised one."""
    try:
        return pack((dataset[index], None))
    except Exception as error:  # noqa: BLE001 -- user code: whatever it raises goes to the consumer
        return pack((None, portable(error, f"item {index} could not be read")))


def portable(error: Exception, what: str) -> Exception:
    """Return the error if it can be pickled, else a SimulatorError that describes it.

    what: what failed, for the description.
    """
    try:
        if type(pickle.loads(pack(error))) is type(error):
            return error
    except Exception:  # noqa: BLE001 -- an exception's own code may raise anything
        pass
    return SimulatorError(f"{what}: {error_line(error)}")
