"""Relay commits of other stores on the same PostgreSQL as signals in this process, and announce this store's spans to
them.

One thread listens on its own connection. A transaction that queues or finishes rollouts notifies the other stores
itself, so that no news is lost. New spans come in thousands, and a commit that notifies waits for all other such
commits of its database. The thread therefore announces spans, at most once in `_PAUSE_SECONDS`. After a lost connection
every waiter reads again.
"""

from __future__ import annotations

import json
import logging
import selectors
import socket
import threading
import time
import weakref
from typing import Any

from leyden.store.notify import Signals
from leyden.store.sql.postgres import Target, connect, psycopg
from leyden.store.sql.postgres_session import news_of

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.02
"""The shortest time between two announcements of spans."""
_MAX_RECONNECT_PAUSE_SECONDS = 1.0
"""The longest pause between two attempts to reconnect."""


class _Requests:
    """Requests to the thread: flags, and a socket that wakes it."""

    def __init__(self) -> None:
        self.spans = False
        """Whether this store has committed new spans."""
        self.check = False
        """Whether there are new spans that readers cannot see yet."""
        self.stopped = threading.Event()
        self.reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def wake(self) -> None:
        try:
            self._writer.send(b"w")
        except OSError:  # full: it is awake; closed: it has ended
            pass

    def drain(self) -> None:
        """Remove the wake-ups from the socket, so that the thread can sleep again."""
        self.reader.setblocking(False)
        try:
            self.reader.recv(4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        self.reader.close()
        self._writer.close()


class Listener:
    """Publishes other stores' commits on the database `target` to `signals`, until `stop`.

    sender: the id by which this store recognises its own notifications, and skips them.
    Raise psycopg.Error if it cannot connect at first. Later it reconnects as often as necessary.
    """

    def __init__(self, target: Target, sender: str, signals: Signals) -> None:
        self._requests = _Requests()
        connection = _listening(target)
        thread = threading.Thread(
            target=_serve,
            args=(connection, target, sender, signals, self._requests),
            name="leyden-store-listener",
            daemon=True,
        )
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._requests, thread)

    def spans_were_added(self) -> None:
        """Notify the other stores of new spans soon. Safe in any thread."""
        if not self._requests.spans:
            self._requests.spans = True
            self._requests.wake()

    def check_spans_soon(self) -> None:
        """Wake the callers that wait for spans, soon. Safe from any thread."""
        if not self._requests.check:
            self._requests.check = True
            self._requests.wake()

    def stop(self) -> None:
        """Announce pending news, and end the thread. Safe to repeat."""
        self._finalizer()


def _stop(requests: _Requests, thread: threading.Thread) -> None:
    requests.stopped.set()
    requests.wake()
    if thread is not threading.current_thread():
        thread.join()
    requests.close()


def _listening(target: Target) -> Any:
    """Return a connection that receives the notifications of the database's stores."""
    connection = connect(target)
    try:
        connection.execute(f'LISTEN "{target.channel}"')
        connection.execute("SET synchronous_commit TO off")  # a crash loses notifications, so every waiter looks again
    except BaseException:
        connection.close()
        raise
    return connection


def _serve(connection: Any, target: Target, sender: str, signals: Signals, requests: _Requests) -> None:
    """Receive notifications until the listener is stopped, and reconnect when the connection is lost."""
    while True:
        try:
            _receive(connection, target, sender, signals, requests)
            connection.close()
            return
        except psycopg().Error as error:
            connection.close()
            logger.warning(
                "%s: lost the connection that listens for news: %s", target.url, " ".join(str(error).split())
            )
        connection = _listening_again(target, requests)
        if connection is None:
            return
        signals.wake_all()


def _listening_again(target: Target, requests: _Requests) -> Any | None:
    """Return a new connection as soon as one can be made; None if the listener is stopped first."""
    pause = 0.01
    while not requests.stopped.wait(pause):
        try:
            return _listening(target)
        except psycopg().Error:
            pause = min(2 * pause, _MAX_RECONNECT_PAUSE_SECONDS)
    return None


def _receive(connection: Any, target: Target, sender: str, signals: Signals, requests: _Requests) -> None:
    """Publish notifications to `signals` until the listener is stopped.

    At most every _PAUSE_SECONDS, announce this process's new spans to the other stores (`requests.spans`) and wake
    local waiters (`requests.check`). Raise psycopg.Error when the connection is lost.
    """
    announced_at = 0.0
    news = True
    """Whether a notification may be there."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection.fileno(), selectors.EVENT_READ)
        selector.register(requests.reader, selectors.EVENT_READ)
        while True:
            stopped = requests.stopped.is_set()
            requested = requests.spans or requests.check
            if not (stopped or news):
                ready = selector.select(
                    max(0.0, announced_at + _PAUSE_SECONDS - time.monotonic()) if requested else None
                )
                news = any(key.fileobj == connection.fileno() for key, _ in ready)
            requests.drain()
            if news or stopped:
                for notification in connection.notifies(timeout=0):
                    _publish(notification.payload, sender, signals)
                news = False
            if stopped or ((requests.spans or requests.check) and time.monotonic() >= announced_at + _PAUSE_SECONDS):
                announced_at = time.monotonic()
                if requests.check:
                    requests.check = False
                    signals.publish(0, (), True)
                if requests.spans:
                    requests.spans = False  # before the announcement, because more may be added meanwhile
                    try:
                        for payload in news_of(sender, 0, (), True):
                            connection.execute("SELECT pg_notify(%s, %s)", [target.channel, payload])
                    except BaseException:
                        requests.spans = True
                        raise
                    news = True  # the query may have read notifications, for which the socket then wakes no thread
            if stopped:
                return


def _publish(payload: str, sender: str, signals: Signals) -> None:
    """Publish another store's notification. Wake every waiter if it holds no news (`news_of`) or is unreadable."""
    try:
        origin, *news = json.loads(payload)
        if origin == sender:
            return
        if news:
            signals.publish(*news)
            return
    except (ValueError, TypeError):
        logger.warning(
            "received a notification that no Leyden store sent, so every waiter reads again: %.100s", payload
        )
    signals.wake_all()
