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
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar, cast

from leyden._lib.options import check_number
from leyden._lib.pickling import pack
from leyden.errors import ConfigError, DataQueueClosed
from leyden.rl.producers import Producers, portable
from leyden.rl.seed import Items, Seed, SeedPlan

T = TypeVar("T")
_PUT_FROM: Final = 1 << 32
"""The number of the first item that is `put`, above all numbers of the data set's items."""
_LAST_SECONDS: Final = 2.0
"""Seconds that closing the queue waits for each thread that serves a consumer."""
_RETRY_SECONDS: Final = 0.1
"""The pause before consumers are accepted again after an error."""


class _QueueAddress(NamedTuple):
    """The socket at which other processes find a queue, and the key that both sides must know."""

    path: str
    key: bytes


class _UnreadableItem(NamedTuple):
    """An item that a producer could not read."""

    seed: Seed[Any]
    error: BaseException


class DataQueue(Generic[T]):
    """Gives each item of a data set to one consumer, once in each pass.

    `with` (or `activate`) starts the producers and lets other processes take part. Its end (or `cleanup`) ends
    everything that was started. In one process and without producers, the queue works outside of `with` too.

    A consumer holds the item that it took last until it requests the next one, or ends. If its process is killed,
    another consumer gets the item, so no item is lost and one may be worked on twice. A consumer that had reached the
    end before does not get that item; iterate once more to be sure that none is left.
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
        shuffle: give each pass an order of its own, which `seed` and the pass's number decide.
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
        """Start the producers and let other processes take part.

        Raise ConfigError if the queue is active already.
        """
        local = self._require_own("activate")
        self._address = local.activate()
        # Finalize also closes a queue that is forgotten; at exit, it does so before multiprocessing
        # waits for the producers
        self._finalizer = Finalize(self, local.cleanup, exitpriority=10)
        _ACTIVE[self._address.path] = self
        return self

    def cleanup(self) -> None:
        """Stop everything that `activate` started.

        Items that were read ahead and not taken come first after the next `activate`.
        """
        self._require_own("cleanup")
        if self._address is not None:
            _ACTIVE.pop(self._address.path, None)
            self._address = None
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Self:
        return self.activate()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cleanup()

    def __reduce__(self) -> Any:
        if self._address is None:
            raise ConfigError(
                "a DataQueue can be sent to another process only while it is active; use it in `with`, or call activate()"
            )
        return _attach, (self._address, self._timeout_seconds)

    # ---- for consumers ---------------------------------------------------------------------------

    def get(self, block: bool = True, timeout_seconds: float | None = None) -> T:
        """Return the next item, and mark the previous item of this process as done.

        block: False does not wait.
        timeout_seconds: the longest wait; None: the queue's own limit.
        Raise StopIteration at the end, and TimeoutError if no item came in time.
        """
        seed = self._next(0.0 if not block else self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        if seed is None:
            raise StopIteration
        return seed.item

    def __iter__(self) -> Iterator[T]:
        while (seed := self._next(self._timeout_seconds)) is not None:
            yield seed.item

    def put(self, item: T, block: bool = True, timeout_seconds: float | None = None) -> None:
        """Add an item, which is taken before the items of the data set.

        The queue then ends only with `mark_as_done`. If `queue_maxsize` added items have not been taken, wait until one
        is.
        block: False does not wait.
        timeout_seconds: the longest wait; None: without limit.
        Raise TimeoutError if the item could not be added in time, and ConfigError after `mark_as_done`.
        """
        self._end.put(item, 0.0 if not block else timeout_seconds)

    def mark_as_done(self) -> None:
        """End the queue: no more items are read from the data set, and `put` raises ConfigError.

        Items that were read or put before are still handed out.
        """
        self._end.mark_as_done()

    def _next(self, timeout_seconds: float | None) -> Seed[T] | None:
        """Return the next seed. In the queue's own process it counts as finished at once."""
        end = self._end
        if isinstance(end, _RemoteQueue):
            return end.take_next(timeout_seconds)
        seed = end.take(timeout_seconds)
        if seed is not None:
            end.finish(seed)
        return seed

    # ---- as a source of seeds --------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """Whether `take` would return None now."""
        return self._end.exhausted

    def take(self) -> Seed[T] | None:
        """Return the next seed, or None at the end. The caller must finish it or give it back."""
        return self._end.take(self._timeout_seconds)

    def give_back(self, seed: Seed[T]) -> None:
        """Hand a seed back because its episode was lost. It is taken again before any other."""
        self._end.give_back(seed)

    def finish(self, seed: Seed[T]) -> None:
        """Mark the episode of a seed as finished."""
        self._end.finish(seed)

    # ---- where it is -----------------------------------------------------------------------------

    @property
    def address(self) -> str | None:
        """The address of an active queue, by which other processes find it; None if inactive."""
        return None if self._address is None else self._address.path

    @classmethod
    def attach(cls, address: _QueueAddress, timeout_seconds: float | None) -> DataQueue[Any]:
        """Return the queue with this address: itself in the process that made it, elsewhere a queue that connects to
        it.
        """
        if (here := _ACTIVE.get(address.path)) is not None and here._pid == os.getpid():
            return here
        queue = cls.__new__(cls)
        queue._local, queue._remote, queue._finalizer = None, None, None
        queue._pid, queue._address, queue._timeout_seconds = -1, address, timeout_seconds
        return queue

    @property
    def _end(self) -> _LocalQueue | _RemoteQueue:
        """The queue itself, or this process's connection to it, which is opened at first use."""
        if self._local is not None and self._pid == os.getpid():
            return self._local
        if self._address is None:
            raise ConfigError("this process was forked before the DataQueue was active; fork inside its `with`")
        if self._remote is None or self._remote.pid != os.getpid():
            self._remote = _RemoteQueue(self._address)
        return self._remote

    def _require_own(self, what: str) -> _LocalQueue:
        if self._local is None or self._pid != os.getpid():
            raise ConfigError(
                f"{what}() was called in another process than that which made the DataQueue; call it there"
            )
        return self._local


_ACTIVE: weakref.WeakValueDictionary[str, DataQueue[Any]] = weakref.WeakValueDictionary()
"""The active queues of this process by address, so that a queue that is sent back unpickles to itself."""


def active_queue(path: str) -> DataQueue[Any] | None:
    """Return the active queue of this process at the address, or None."""
    return _ACTIVE.get(path)


def _attach(address: _QueueAddress, timeout_seconds: float | None) -> DataQueue[Any]:
    """Return a queue that is unpickled. At module level, because cloudpickle sends it by its name."""
    return DataQueue.attach(address, timeout_seconds)


def address_of(seeds: object) -> str | None:
    """Return the address of an active queue; None for anything else."""
    return cast("DataQueue[Any]", seeds).address if isinstance(seeds, DataQueue) else None


class _LocalQueue:
    """The queue in the process that made it. Its methods may be called from any thread."""

    def __init__(self, dataset: Items[Any], plan: SeedPlan[Any], n_producers: int, maxsize: int) -> None:
        self._dataset, self._plan = dataset, plan
        self._n_producers, self._maxsize = n_producers, maxsize
        self._changed = threading.Condition()
        """A condition that guards the attributes below and is notified when they change."""
        self._put: deque[Seed[Any]] = deque()
        """Items that were put and are to be taken."""
        self._n_put = 0
        """The number of items that were put so far."""
        self._put_held: set[int] = set()
        """The numbers of the put items that consumers hold."""
        self._open = False
        """Whether more items may be put, so that consumers wait at the end."""
        self._done = False
        """Whether `mark_as_done` was called."""
        self._active = False
        self._ahead: deque[Seed[Any] | _UnreadableItem] = deque()
        """Items that producers have read and that are to be taken."""
        self._requested: deque[Seed[Any]] = deque()
        """Seeds whose items producers are reading, in order."""
        self._producers: Producers | None = None
        self._server: _QueueServer | None = None
        self._reader: threading.Thread | None = None

    # ---- life

    def activate(self) -> _QueueAddress:
        """Start producers and server, and return the address for other processes.

        Raise ConfigError if the queue is active already.
        """
        if self._active:
            raise ConfigError("this DataQueue is active already; leave its `with`, or call cleanup(), before another")
        if self._n_producers:
            self._producers = Producers(self._dataset, self._n_producers)
            self._reader = threading.Thread(target=self._read_ahead, name="leyden-queue-reader", daemon=True)
        self._server = _QueueServer(self)
        self._active = True
        if self._reader is not None:
            self._reader.start()
        return self._server.address

    def cleanup(self) -> None:
        """End server and producers, and give the seeds that were read ahead back to the plan.

        Safe to repeat.
        """
        with self._changed:
            if not self._active:
                return
            self._active = False
            self._changed.notify_all()
        assert self._server is not None
        self._server.close()
        if self._producers is not None and self._reader is not None:
            self._producers.close()
            _join(self._reader)
            self._producers.reap()
            self._producers = self._reader = None
        with self._changed:
            for read in (*self._ahead, *self._requested):
                self._plan.give_back(read.seed if isinstance(read, _UnreadableItem) else read)
            self._ahead.clear()
            self._requested.clear()

    # ---- items

    @property
    def exhausted(self) -> bool:
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
                    self._put_held.add(seed.number)
                    self._changed.notify_all()
                    return seed
                if self._ahead:
                    read = self._ahead.popleft()
                    self._changed.notify_all()
                    if isinstance(read, _UnreadableItem):
                        self._plan.give_back(read.seed)
                        raise read.error
                    return read
                if self._nothing_left():
                    return None
                if not self._n_producers and not self._done and not self._plan.exhausted:
                    return self._plan.take()
                self._wait(deadline, "no item came")
                if was_active and not self._active:
                    raise DataQueueClosed("the data queue was closed while a consumer waited for an item")

    def finish(self, seed: Seed[Any]) -> None:
        with self._changed:
            if seed.number >= _PUT_FROM:
                self._put_held.discard(seed.number)
            else:
                self._plan.finish(seed)

    def give_back(self, seed: Seed[Any]) -> None:
        """Hand back a seed that a consumer holds. It is taken again before any other."""
        with self._changed:
            if seed.number >= _PUT_FROM:
                self._put_held.discard(seed.number)
                self._put.appendleft(seed)
            else:
                self._plan.give_back(seed)
            self._changed.notify_all()

    def put(self, item: Any, timeout_seconds: float | None) -> None:
        """Add an item, after a wait if `queue_maxsize` items are to be taken.

        Raise TimeoutError after the wait, ConfigError after `mark_as_done`.
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
        of_dataset = self._ahead or self._requested or not (self._done or self._plan.exhausted)
        return not (of_dataset or self._put or self._open)

    def _wait(self, deadline: float | None, what: str) -> None:
        """Wait for a change. Raise TimeoutError, which begins with `what`, at the deadline."""
        left = None if deadline is None else deadline - time.monotonic()
        if (left is not None and left <= 0) or not self._changed.wait(left):
            reading = [seed.index for seed in self._requested]
            raise TimeoutError(f"{what} in time" + (f"; producers are reading items {reading}" if reading else ""))

    # ---- reading ahead

    def _read_ahead(self) -> None:
        """Request items and receive them, so that enough are read ahead. Runs in a thread."""
        producers = self._producers
        assert producers is not None
        while True:
            with self._changed:
                while self._active and not self._request_more(producers):
                    self._changed.wait()
                if not self._active:
                    return
                seed = self._requested[0]
            read: Seed[Any] | _UnreadableItem
            try:
                item = producers.receive()
                read = Seed(seed.index, item, seed.number, seed.entropy)
            except DataQueueClosed:
                return
            except Exception as error:  # noqa: BLE001 -- raised again in the consumer that takes the item
                read = _UnreadableItem(seed, error)
            with self._changed:
                self._requested.popleft()
                self._ahead.append(read)
                self._changed.notify_all()

    def _request_more(self, producers: Producers) -> bool:
        """Request as many items as there is room for, at most two for each producer.

        Return whether any requested item is still to be received.
        """
        while len(self._requested) < min(2 * len(producers), self._maxsize - len(self._ahead)) and not self._done:
            if (seed := self._plan.take_index()) is None:
                break
            self._requested.append(seed)
            producers.request(seed.index)
        return bool(self._requested)


class _QueueServer:
    """Serves the queue to other processes over a Unix socket, with one thread for each process."""

    def __init__(self, local: _LocalQueue) -> None:
        self._local = local
        self._folder = None if sys.platform == "linux" else tempfile.TemporaryDirectory()
        name = f"leyden-queue-{secrets.token_hex(8)}"
        # Linux: an abstract socket, which needs no file
        path = f"\0{name}" if self._folder is None else str(Path(self._folder.name) / name)
        self.address = _QueueAddress(path, secrets.token_bytes(32))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(128)
        self._connections: set[Connection] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="leyden-queue", daemon=True)
        self._accepting.start()
        _SERVERS.add(self)

    def close(self) -> None:
        """Close all connections and end the threads. Items that consumers hold count as finished."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        _join(self._accepting)
        self._socket.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it, which closes it
        for thread in self._threads:
            _join(thread, _LAST_SECONDS)
        if self._folder is not None:
            self._folder.cleanup()

    def close_inherited(self) -> None:
        self._socket.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        """Accept consumers until the server closes, with a thread for each. Runs in a thread."""
        while not self._closed:
            try:
                accepted, _ = self._socket.accept()
            except OSError:  # closed, or this process has too many open files, which may pass
                time.sleep(0 if self._closed else _RETRY_SECONDS)
                continue
            connection = Connection(accepted.detach())
            self._connections.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), name="leyden-queue-consumer", daemon=True)
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()

    def _serve(self, connection: Connection) -> None:
        """Serve one process until it leaves or dies. Give the items of a dead process back."""
        held: dict[int, Seed[Any]] = {}
        try:
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            while True:
                what, arguments = connection.recv()
                try:
                    reply = pack((True, self._call(held, what, *arguments)))
                except Exception as error:  # noqa: BLE001 -- it is raised in the process that called
                    reply = pack((False, portable(error, f"{what} failed in the process that made the data queue")))
                connection.send_bytes(reply)
        except (EOFError, OSError, AuthenticationError):
            pass
        finally:
            for seed in held.values():  # if the queue was closed, the process lives and keeps its items
                (self._local.finish if self._closed else self._local.give_back)(seed)
            self._connections.discard(connection)
            connection.close()

    def _call(self, held: dict[int, Seed[Any]], what: str, *arguments: Any) -> Any:
        """Call a method of the queue for a consumer and return its result.

        what: the method's name, or "bye" from a consumer that ends by itself: its seeds are finished.
        held: the seeds that this consumer has taken and not finished, by number. It is updated, so that they can be
            given back if the consumer dies.
        """
        local = self._local
        if what == "take":
            if (seed := local.take(*arguments)) is not None:
                held[seed.number] = seed
            return seed
        if what in ("finish", "give_back"):
            (number,) = arguments
            return getattr(local, what)(held.pop(number))
        if what == "bye":
            for seed in held.values():
                local.finish(seed)
            return held.clear()
        if what == "exhausted":
            return local.exhausted
        return {"put": local.put, "mark_as_done": local.mark_as_done}[what](*arguments)


def _join(thread: threading.Thread, seconds: float | None = None) -> None:
    """Join a thread, unless it is this one: a garbage collection may close a queue in any thread."""
    if thread is not threading.current_thread():
        thread.join(seconds)


_SERVERS: weakref.WeakSet[_QueueServer] = weakref.WeakSet()
_REMOTES: weakref.WeakSet[_RemoteQueue] = weakref.WeakSet()


def _close_inherited() -> None:
    for end in (*_SERVERS, *_REMOTES):
        end.close_inherited()


os.register_at_fork(after_in_child=_close_inherited)


class _RemoteQueue:
    """A connection from another process to the queue. Its methods are those of `_LocalQueue`.

    Each raises DataQueueClosed if the process that made the queue has left its `with` or has ended.
    """

    def __init__(self, address: _QueueAddress) -> None:
        """Connect, and let both sides prove that they know the queue's key."""
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._taken: Seed[Any] | None = None
        """The seed that `take_next` returned last."""
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(address.path)
        except OSError:
            end.close()
            raise DataQueueClosed(_GONE) from None
        self._connection = Connection(end.detach())
        try:
            answer_challenge(self._connection, address.key)
            deliver_challenge(self._connection, address.key)
        except (EOFError, OSError):
            raise DataQueueClosed(_GONE) from None
        _REMOTES.add(self)
        # a process that ends by itself has finished its item, and says so
        Finalize(self, _sign_off, (self._connection, self.pid), exitpriority=10)

    def close_inherited(self) -> None:
        self._connection.close()

    @property
    def exhausted(self) -> bool:
        return self._request("exhausted")

    def take_next(self, timeout_seconds: float | None) -> Seed[Any] | None:
        if self._taken is not None:
            taken, self._taken = self._taken, None
            self.finish(taken)
        self._taken = self.take(timeout_seconds)
        return self._taken

    def take(self, timeout_seconds: float | None) -> Seed[Any] | None:
        return self._request("take", timeout_seconds)

    def finish(self, seed: Seed[Any]) -> None:
        self._request("finish", seed.number)

    def give_back(self, seed: Seed[Any]) -> None:
        self._request("give_back", seed.number)

    def put(self, item: Any, timeout_seconds: float | None) -> None:
        self._request("put", item, timeout_seconds)

    def mark_as_done(self) -> None:
        self._request("mark_as_done")

    def _request(self, what: str, *arguments: Any) -> Any:
        """Call a method of the queue in its process. Return its result, or raise its error."""
        with self._lock:
            try:
                self._connection.send_bytes(pack((what, arguments)))
                fine, result = cast("tuple[bool, Any]", self._connection.recv())
            except (EOFError, OSError):
                raise DataQueueClosed(_GONE) from None
        if not fine:
            raise result
        return result


_GONE: Final = "the process that made the data queue has left its `with`, or has ended"


def _sign_off(connection: Connection, pid: int) -> None:
    """Report that this process has finished its item, and close the connection.

    pid: the process that opened the connection; a forked copy does nothing.
    """
    if pid == os.getpid():
        with contextlib.suppress(EOFError, OSError):
            connection.send(("bye", ()))
            connection.recv()
        connection.close()
