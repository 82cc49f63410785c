"""`DataQueue`: gives each item of a data set to one consumer, in any process.

    with DataQueue(orders, repeat=-1, producer_num_workers=2, queue_maxsize=64) as queue:
        for order in queue:
            ...

A `SeedPlan` in the process that made the queue decides the order. Threads of that process take items directly. Other
processes, which get the queue by `fork` or as an argument, request one item after another over a socket. If such a
process is killed, another consumer gets its item. This module knows no environments: a vectorised environment draws
from a queue as from any other `SeedSource`.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar, cast

from leyden._lib.options import check_number
from leyden._lib.pickling import pack
from leyden.errors import ConfigError, DataQueueClosed
from leyden.rl.producers import Producer, portable, start_producers
from leyden.rl.seed import Items, Seed, SeedPlan

T = TypeVar("T")
_PUT_FROM: Final = 1 << 32
"""The number of the first item that is `put`, above all numbers of the data set's items."""
_LAST_SECONDS: Final = 2.0
"""Seconds that closing the queue waits for each thread that serves a consumer."""
_RETRY_SECONDS: Final = 0.1
"""The pause before consumers are accepted again after an error."""
_GONE: Final = "the process that made the data queue has left its `with`, or has ended"


class _QueueAddress(NamedTuple):
    """The socket at which other processes find a queue, and the key that both sides must know."""

    path: str
    key: bytes


class DataQueue(Generic[T]):
    """Gives each item of a data set to one consumer, once in each pass.

    `with` (or `activate`) starts the producers and lets other processes take part. Its end (or `cleanup`) ends
    everything that was started. In one process and without producers, the queue works outside of `with` too.

    A consumer holds the item that it took last until it requests the next one, or ends. If its process is killed,
    another consumer gets the item, so no item is lost and one may be worked on twice. A consumer that is at the end
    already misses that item; iterate again to be sure that none is left.
    """

    def __init__(
        self,
        dataset: Items[T],
        repeat: int = 1,
        shuffle: bool = True,
        producer_num_workers: int = 0,
        queue_maxsize: int = 0,
        seed: int = 0,
        *,
        timeout_seconds: float | None = None,
    ) -> None:
        """Make an inactive queue.

        repeat: the number of passes; -1: without end.
        shuffle: give each pass its own order, which `seed` and the pass's number decide.
        producer_num_workers: processes that read items ahead, for data sets whose items are slow to read. 0: the
            process that made the queue reads an item when a consumer takes it.
        queue_maxsize: the most items that are read ahead, and the most that `put` adds before it waits; 0: one for each
            CPU.
        timeout_seconds: how long a consumer waits for an item before TimeoutError; None: without limit.
        """
        check_number("repeat", repeat, at_least=-1, whole=True)
        check_number("producer_num_workers", producer_num_workers, at_least=0, whole=True)
        check_number("queue_maxsize", queue_maxsize, at_least=0, whole=True)
        check_number("seed", seed, whole=True)
        check_number("timeout_seconds", timeout_seconds, at_least=0, or_none="no limit")
        maxsize = queue_maxsize or os.cpu_count() or 1
        plan: SeedPlan[Any] = SeedPlan(dataset, repeat=repeat, shuffle=shuffle, seed=seed)
        self._local: _LocalQueue | None = _LocalQueue(dataset, plan, producer_num_workers, maxsize)
        self._pid = os.getpid()
        self._address: _QueueAddress | None = None
        self._remote: _RemoteQueue | None = None
        self._finalizer: Any = None
        self._timeout_seconds = timeout_seconds

    # ---- life ------------------------------------------------------------------------------------

    def activate(self) -> Self:
        """Start the producers and let other processes take part. Raise ConfigError if the queue is active."""
        local = self._require_own("activate")
        self._address = local.activate()
        # Finalize also closes a queue without references; at exit, it does so before multiprocessing waits for the
        # producers
        self._finalizer = Finalize(self, local.cleanup, exitpriority=10)
        ACTIVE_QUEUES[self._address.path] = self
        return self

    def cleanup(self) -> None:
        """Stop everything that `activate` started.

        Items that were read ahead and not taken come first after the next `activate`.
        """
        self._require_own("cleanup")
        if self._address is not None:
            ACTIVE_QUEUES.pop(self._address.path, None)
            self._address = None
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Self:
        return self.activate()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cleanup()

    def _require_own(self, what: str) -> _LocalQueue:
        if self._local is None or self._pid != os.getpid():
            raise ConfigError(
                f"{what}() was called in another process than that which made the DataQueue; call it there"
            )
        return self._local

    # ---- for consumers ---------------------------------------------------------------------------

    def get(self, block: bool = True, timeout_seconds: float | None = None) -> T:
        """Return the next item, and mark the previous item of this process as done.

        block: False does not wait.
        timeout_seconds: the longest wait; None: the queue's own limit.
        Raise StopIteration at the end, and TimeoutError if no item came in time.
        """
        wait = 0.0 if not block else self._timeout_seconds if timeout_seconds is None else timeout_seconds
        if (seed := self._call("take_next", wait)) is None:
            raise StopIteration
        return seed.item

    def __iter__(self) -> Iterator[T]:
        while (seed := self._call("take_next", self._timeout_seconds)) is not None:
            yield seed.item

    def put(self, item: T, block: bool = True, timeout_seconds: float | None = None) -> None:
        """Add an item, which is taken before the items of the data set.

        The queue then ends only with `mark_as_done`. If `queue_maxsize` added items have not been taken, wait until one
        is.
        block: False does not wait.
        timeout_seconds: the longest wait; None: without limit.
        Raise TimeoutError if the item could not be added in time, and ConfigError after `mark_as_done`.
        """
        self._call("put", item, 0.0 if not block else timeout_seconds)

    def mark_as_done(self) -> None:
        """End the queue: no more items are read from the data set, and `put` raises ConfigError.

        Items that were read or put before are still handed out.
        """
        self._call("mark_as_done")

    # ---- as a source of seeds --------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """Whether `take` would return None now."""
        return self._call("is_exhausted")

    def take(self) -> Seed[T] | None:
        """Return the next seed, or None at the end. The caller must finish it or give it back."""
        return self._call("take", self._timeout_seconds)

    def give_back(self, seed: Seed[T]) -> None:
        """Hand a seed back because its episode was lost. It is taken again before any other."""
        self._call("give_back", replace(seed, item=None))

    def finish(self, seed: Seed[T]) -> None:
        """Mark the episode of a seed as finished."""
        self._call("finish", replace(seed, item=None))

    # ---- where it is -----------------------------------------------------------------------------

    @property
    def address(self) -> str | None:
        """The address of an active queue, by which other processes find it; None if inactive."""
        return None if self._address is None else self._address.path

    def __reduce__(self) -> Any:
        if self._address is None:
            raise ConfigError(
                "a DataQueue can be sent to another process only while it is active; use it in `with`, or call activate()"
            )
        return _attach, (self._address, self._timeout_seconds)

    @classmethod
    def attach(cls, address: _QueueAddress, timeout_seconds: float | None) -> DataQueue[Any]:
        """Return the queue with this address: itself in the process that made it, elsewhere one that connects to it."""
        if (here := ACTIVE_QUEUES.get(address.path)) is not None and here._pid == os.getpid():
            return here
        queue = cls.__new__(cls)
        queue._local, queue._remote, queue._finalizer = None, None, None
        queue._pid, queue._address, queue._timeout_seconds = -1, address, timeout_seconds
        return queue

    def _call(self, what: str, *arguments: Any) -> Any:
        """Call a method of `_LocalQueue`: here, or over a connection, which is opened at first use."""
        if self._local is not None and self._pid == os.getpid():
            return getattr(self._local, what)(*arguments)
        if self._address is None:
            raise ConfigError("this process was forked before the DataQueue was active; fork inside its `with`")
        if self._remote is None or self._remote.pid != os.getpid():
            self._remote = _RemoteQueue(self._address)
        return self._remote.call(what, *arguments)


ACTIVE_QUEUES: weakref.WeakValueDictionary[str, DataQueue[Any]] = weakref.WeakValueDictionary()
"""The active queues of this process by address, so that a queue that is sent back unpickles to itself."""


def _attach(address: _QueueAddress, timeout_seconds: float | None) -> DataQueue[Any]:
    return DataQueue.attach(address, timeout_seconds)


def address_of(seeds: object) -> str | None:
    """Return the address of an active queue; None for anything else."""
    return cast("DataQueue[Any]", seeds).address if isinstance(seeds, DataQueue) else None


@dataclass(slots=True)
class _ReadAhead:
    """An item that a producer reads or has read."""

    seed: Seed[Any]
    error: Exception | None = None
    """The error that reading the item raised."""
    done: bool = False


class _LocalQueue:
    """The queue in the process that made it. Its methods may be called from any thread."""

    def __init__(self, dataset: Items[Any], plan: SeedPlan[Any], n_producers: int, maxsize: int) -> None:
        self._dataset, self._plan = dataset, plan
        self._n_producers, self._maxsize = n_producers, maxsize
        self._changed = threading.Condition()
        """A condition that guards the attributes below and is notified when they change."""
        self._put: deque[Seed[Any]] = deque()
        """Items that were put and not taken yet."""
        self._n_put = 0
        self._put_held: dict[int, Seed[Any]] = {}
        """The put items that consumers hold, by number."""
        self._open = False
        """Whether more items may be put, so that consumers wait at the end."""
        self._done = False
        """Whether `mark_as_done` was called."""
        self._active = False
        self._ahead: deque[_ReadAhead] = deque()
        """Items that producers read ahead, in the order in which they are to be taken."""
        self._server: _QueueServer | None = None
        self.producers: list[Producer] = []
        self._readers: list[threading.Thread] = []

    # ---- life

    def activate(self) -> _QueueAddress:
        """Start producers and server; return the address for other processes. Raise ConfigError if active already."""
        if self._active:
            raise ConfigError("this DataQueue is active already; leave its `with`, or call cleanup(), before another")
        if self._n_producers:
            self.producers = start_producers(self._dataset, self._n_producers)
        self._server = _QueueServer(self)
        self._active = True
        self._readers = [
            threading.Thread(target=self._read_ahead, args=(each,), name="leyden-queue-reader", daemon=True)
            for each in self.producers
        ]
        for reader in self._readers:
            reader.start()
        return self._server.address

    def cleanup(self) -> None:
        """End server and producers, and give the seeds that were read ahead back to the plan. Safe to repeat."""
        with self._changed:
            if not self._active:
                return
            self._active = False
            self._changed.notify_all()
        assert self._server is not None
        self._server.close()
        for producer in self.producers:
            producer.close()
        for reader, producer in zip(self._readers, self.producers, strict=True):
            _join(reader)
            producer.reap()
        self.producers, self._readers = [], []
        with self._changed:
            for read in self._ahead:
                self._plan.give_back(read.seed)
            self._ahead.clear()

    # ---- items

    def is_exhausted(self) -> bool:
        with self._changed:
            return self._nothing_left()

    def take(self, timeout_seconds: float | None) -> Seed[Any] | None:
        """Return the next seed, or None at the end. Items that were put come first.

        An item that could not be read raises its error here, and stays in the plan.
        timeout_seconds: the longest wait; None: without limit.
        Raise TimeoutError after it, DataQueueClosed if the queue is closed during the wait, and ConfigError for a queue
        with producers that is not active.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._changed:
            if self._n_producers and not self._active:
                raise ConfigError(
                    "a DataQueue with producers is not active; use it in `with`, or call activate() first"
                )
            was_active = self._active
            while True:
                if self._put:
                    seed = self._put.popleft()
                    self._put_held[seed.number] = seed
                    self._changed.notify_all()
                    return seed
                if self._ahead and self._ahead[0].done:
                    read = self._ahead.popleft()
                    self._changed.notify_all()
                    if read.error is not None:
                        self._plan.give_back(read.seed)
                        raise read.error
                    return read.seed
                if self._nothing_left():
                    return None
                if not self._n_producers and not self._done and not self._plan.exhausted:
                    return self._plan.take()
                self._wait(deadline, "no item came")
                if was_active and not self._active:
                    raise DataQueueClosed("the data queue was closed while a consumer waited for an item")

    def take_next(self, timeout_seconds: float | None) -> Seed[Any] | None:
        """Return the next seed, which counts as finished at once, because this process cannot die alone."""
        if (seed := self.take(timeout_seconds)) is not None:
            self.finish(seed)
        return seed

    def finish(self, seed: Seed[Any]) -> None:
        with self._changed:
            if seed.number >= _PUT_FROM:
                self._put_held.pop(seed.number, None)
            else:
                self._plan.finish(seed)

    def give_back(self, seed: Seed[Any]) -> None:
        with self._changed:
            if seed.number < _PUT_FROM:
                self._plan.give_back(seed)
            elif (held := self._put_held.pop(seed.number, None)) is not None:
                self._put.appendleft(held)
            self._changed.notify_all()

    def put(self, item: Any, timeout_seconds: float | None) -> None:
        """Add an item, after a wait if `queue_maxsize` items are to be taken. Raise TimeoutError after the wait,
        ConfigError after `mark_as_done`.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._changed:
            while not self._done and len(self._put) >= self._maxsize:
                self._wait(deadline, f"{self._maxsize} items wait already (queue_maxsize), and none was taken")
            if self._done:
                raise ConfigError("put() after mark_as_done(): the queue has ended; make another DataQueue")
            self._open = True
            self._put.append(Seed(len(self._plan) + self._n_put, item, _PUT_FROM + self._n_put))
            self._n_put += 1
            self._changed.notify_all()

    def mark_as_done(self) -> None:
        with self._changed:
            self._done, self._open = True, False
            self._changed.notify_all()

    def _nothing_left(self) -> bool:
        return not (self._ahead or not (self._done or self._plan.exhausted) or self._put or self._open)

    def _wait(self, deadline: float | None, what: str) -> None:
        """Wait for a change. Raise TimeoutError, which begins with `what`, at the deadline."""
        left = None if deadline is None else deadline - time.monotonic()
        if (left is not None and left <= 0) or not self._changed.wait(left):
            reading = [read.seed.index for read in self._ahead if not read.done]
            raise TimeoutError(f"{what} in time" + (f"; producers are reading items {reading}" if reading else ""))

    def _read_ahead(self, producer: Producer) -> None:
        """Let a producer read items until the queue is closed. Runs in a thread."""
        while True:
            with self._changed:
                seed = None
                while self._active and seed is None:
                    if self._done or len(self._ahead) >= self._maxsize or (seed := self._plan.take_index()) is None:
                        self._changed.wait()
                if seed is None:
                    return
                self._ahead.append(read := _ReadAhead(seed))
            try:
                read.seed = replace(seed, item=producer.read(seed.index))
            except DataQueueClosed:
                return
            except Exception as error:  # noqa: BLE001 -- raised again in the consumer that takes the item
                read.error = error
            with self._changed:
                read.done = True
                self._changed.notify_all()


class _QueueServer:
    """Serves the queue to other processes over a Unix socket, with one thread for each process."""

    def __init__(self, local: _LocalQueue) -> None:
        self._local = local
        name = f"leyden-queue-{secrets.token_hex(8)}"
        # Linux: an abstract socket, which needs no file
        path = f"\0{name}" if sys.platform == "linux" else str(Path(multiprocessing.util.get_temp_dir()) / name)
        self.address = _QueueAddress(path, secrets.token_bytes(32))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(128)
        _OPEN.add(self._socket)
        self._serving: dict[Connection, threading.Thread] = {}
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="leyden-queue", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Close all connections and end the threads. Items that consumers hold count as finished."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        _join(self._accepting)
        self._socket.close()
        for connection, thread in self._serving.items():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it, which closes it
            _join(thread, _LAST_SECONDS)

    def _accept(self) -> None:
        """Accept consumers until the server closes, with a thread for each. Runs in a thread."""
        while not self._closed:
            try:
                accepted, _ = self._socket.accept()
            except OSError:  # closed, or this process has too many open files, which may pass
                time.sleep(0 if self._closed else _RETRY_SECONDS)
                continue
            connection = Connection(accepted.detach())
            _OPEN.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), name="leyden-queue-consumer", daemon=True)
            self._serving = {one: serving for one, serving in self._serving.items() if serving.is_alive()}
            self._serving[connection] = thread
            thread.start()

    def _serve(self, connection: Connection) -> None:
        """Serve one process until it leaves or dies. Give the items of a dead process back."""
        consumer = _Consumer(self._local)
        try:
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            while True:
                what, arguments = connection.recv()
                try:
                    reply = pack((True, getattr(consumer, what)(*arguments)))
                except Exception as error:  # noqa: BLE001 -- it is raised in the process that called
                    reply = pack((False, portable(error, f"{what} failed in the process that made the data queue")))
                connection.send_bytes(reply)
        except (EOFError, OSError, AuthenticationError):
            pass
        finally:
            consumer.leave(finished=self._closed)  # if the queue was closed, the process lives and keeps its items
            connection.close()


class _Consumer:
    """The queue for one other process. The server calls its methods by name."""

    def __init__(self, local: _LocalQueue) -> None:
        self._local = local
        self._held: dict[int, Seed[Any]] = {}
        """The seeds that the process has taken and not finished, by number, without their items."""
        self._last: Seed[Any] | None = None
        """The seed that `take_next` returned last."""
        self.is_exhausted, self.put, self.mark_as_done = local.is_exhausted, local.put, local.mark_as_done

    def take(self, timeout_seconds: float | None) -> Seed[Any] | None:
        if (seed := self._local.take(timeout_seconds)) is not None:
            self._held[seed.number] = replace(seed, item=None)
        return seed

    def take_next(self, timeout_seconds: float | None) -> Seed[Any] | None:
        """Return the next seed. The process holds it until it requests another one this way."""
        last, self._last = self._last, None
        if last is not None:
            self.finish(last)
        self._last = self.take(timeout_seconds)
        return self._last

    def finish(self, seed: Seed[Any]) -> None:
        self._local.finish(self._held.pop(seed.number))

    def give_back(self, seed: Seed[Any]) -> None:
        self._local.give_back(self._held.pop(seed.number))

    def leave(self, *, finished: bool = True) -> None:
        """Finish the seeds that the process holds, or give them back. A process that ends by itself has finished."""
        for seed in self._held.values():
            (self._local.finish if finished else self._local.give_back)(seed)
        self._held.clear()


def _join(thread: threading.Thread, seconds: float | None = None) -> None:
    """Join a thread, unless it is this one: a garbage collection may close a queue in any thread."""
    if thread is not threading.current_thread():
        thread.join(seconds)


_OPEN: weakref.WeakSet[socket.socket | Connection] = weakref.WeakSet()
"""The sockets of this process. A forked process closes its copies, so that the other end notices when this one ends."""


os.register_at_fork(after_in_child=lambda: [end.close() for end in list(_OPEN)])


class _RemoteQueue:
    """A connection from another process to the queue."""

    def __init__(self, address: _QueueAddress) -> None:
        """Connect, and let both sides prove that they know the queue's key. Raise DataQueueClosed if the process that
        made the queue has left its `with` or has ended.
        """
        self.pid = os.getpid()
        self._lock = threading.Lock()
        try:
            self._connection = cast(Connection, Client(address.path, "AF_UNIX", address.key))
        except (EOFError, OSError):
            raise DataQueueClosed(_GONE) from None
        _OPEN.add(self._connection)
        # a process that ends by itself has finished its item, and says so
        Finalize(self, _report_finished, (self._connection, self.pid), exitpriority=10)

    def call(self, what: str, *arguments: Any) -> Any:
        """Call a method of `_Consumer` in the queue's process. Return its result, or raise its error or
        DataQueueClosed.
        """
        with self._lock:
            try:
                self._connection.send_bytes(pack((what, arguments)))
                fine, result = cast("tuple[bool, Any]", self._connection.recv())
            except (EOFError, OSError):
                raise DataQueueClosed(_GONE) from None
        if not fine:
            raise result
        return result


def _report_finished(connection: Connection, pid: int) -> None:
    """Report that this process has finished its item, and close the connection.

    pid: the process that opened the connection; a forked copy does nothing.
    """
    if pid == os.getpid():
        with contextlib.suppress(EOFError, OSError):
            connection.send(("leave", ()))
            connection.recv()
        connection.close()
