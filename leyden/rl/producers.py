"""Processes that read a data set's items ahead, in order.

A producer that dies is replaced, and its undelivered items are read again. This module knows no
queue: `leyden.rl.data_queue` decides which items are read, and keeps them.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, Final

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] -- it has none

from leyden.errors import ConfigError, DataQueueClosed, SimulatorError
from leyden.rl.children import become_child, end_process, ending_of, process_context, without_sigterm

_DEATHS: Final = 3
"""How often producers may die over one item."""
_LAST_SECONDS: Final = 1.0


class Producers:
    """N processes that read items by index. `request` and `receive` are for one thread, `close` for any."""

    def __init__(self, dataset: Any, n: int) -> None:
        """Start the processes. Raise ConfigError if the data set cannot be pickled."""
        try:
            packed = cloudpickle.dumps(dataset)  # pyright: ignore[reportUnknownMemberType] -- untyped
        except Exception as error:
            raise ConfigError(
                f"the data set cannot go to a producer process: {error}. Open what it holds when it is first read, or leave "
                "producer_num_workers out"
            ) from error
        context = process_context(None)
        self._closed = False
        self._producers = [_Producer(number, context, packed) for number in range(n)]
        self._requested = self._received = 0

    def reap(self) -> None:
        """Give the processes' descriptors back. After `close`, when no thread is in `receive` any more."""
        for producer in self._producers:
            producer.end()

    def __len__(self) -> int:
        return len(self._producers)

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes."""
        return [producer.process.pid for producer in self._producers]

    def request(self, index: int) -> None:
        """Request the item with this index."""
        self._producers[self._requested % len(self)].request(index)
        self._requested += 1

    def receive(self) -> Any:
        """Wait for the item that was requested first of those not yet received.

        Raises the data set's own error, SimulatorError if the item kills its producers, and
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
                how, deaths = ending_of(producer.process, _LAST_SECONDS), deaths + 1
                index = producer.pending[0]
                if deaths >= _DEATHS:
                    producer.pending.popleft()
                    self._received += 1
                producer.restart()
                if self._closed:  # meanwhile
                    producer.kill()
                if deaths >= _DEATHS:
                    raise SimulatorError(
                        f"producers of the data queue died {deaths} times while they read item {index} ({how})"
                    ) from None
                continue
            self._received += 1
            if error is not None:
                raise error
            return item

    def close(self) -> None:
        """Kill the processes, even during a read. `reap` frees their descriptors."""
        self._closed = True
        for producer in self._producers:
            producer.kill()


class _Producer:
    """One process and the indices that it has still to deliver."""

    def __init__(self, number: int, context: Any, packed: bytes) -> None:
        self._number, self._context, self._packed = number, context, packed
        self.pending: deque[int] = deque()
        self._start()

    def request(self, index: int) -> None:
        self.pending.append(index)
        with contextlib.suppress(OSError):  # it has died: `receive` notices
            self._connection.send(index)

    def receive(self) -> tuple[Any, BaseException | None]:
        data = self._connection.recv_bytes()
        self.pending.popleft()
        return pickle.loads(data)

    def restart(self) -> None:
        """Start another process in its place, and request all undelivered items from it."""
        self._connection.close()
        end_process(self.process)
        self._start()
        with contextlib.suppress(OSError):
            for index in self.pending:
                self._connection.send(index)

    def kill(self) -> None:
        """Kill the process, which wakes a thread that waits for it.

        This is safe, because a producer only reads.
        """
        with contextlib.suppress(ValueError, AttributeError):  # it is being replaced: closed, or not started yet
            self.process.kill()

    def end(self) -> None:
        end_process(self.process)
        self._connection.close()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        self.process: Any = self._context.Process(
            target=_produce, args=(theirs, self._packed), name=f"leyden-producer-{self._number}", daemon=True
        )
        with without_sigterm():
            self.process.start()
        theirs.close()
        self._connection: Connection = ours


def _produce(connection: Connection, packed: bytes) -> None:
    """Read items until the owner hangs up. The target of a producer process."""
    become_child()
    dataset = cloudpickle.loads(packed)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send_bytes(_read(dataset, connection.recv()))


def _read(dataset: Any, index: int) -> bytes:
    """Return an item and no error, or no item and the error that reading it raised, packed."""
    try:
        return packed((dataset[index], None))
    except Exception as error:  # noqa: BLE001 -- user code: whatever it raises goes to the consumer
        return packed((None, portable(error, f"item {index} could not be read")))


def packed(value: Any) -> bytes:
    """Pickle a value; what pickle cannot send by name goes by value."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 -- whatever a user's __reduce__ raises; the second attempt says it
        data: bytes = cloudpickle.dumps(value)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] -- untyped
        return data


def portable(error: Exception, what: str) -> Exception:
    """Return an error that can go to another process: itself, or a SimulatorError that describes it."""
    try:
        if type(pickle.loads(packed(error))) is type(error):
            return error
    except Exception:  # noqa: BLE001 -- an exception's own code may raise anything
        pass
    return SimulatorError(f"{what}: {type(error).__name__}: {error}")
