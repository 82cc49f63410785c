"""Child processes: how they are started, watched and ended.

`Child` runs a Python function in its own process and exchanges messages with it. `Command` runs a program, relays its
log and keeps its last lines. A child of either kind leaves Ctrl-C and SIGTERM to this process, ends when this process
does, and leaves nothing behind when it is closed.

In the child, the function receives a `Parent` as its first argument. A program of Leyden that is started as a `Command`
calls `end_with_parent` itself; a foreign program is started with `guard=True`.

This module knows neither stores nor agents nor simulators: what a child does, which messages it exchanges and whether
another one replaces it belongs to the package that starts it. `Backoff` says how long to wait before the next start.

A start method other than `fork` imports the main script in the child. A script that starts children at its top level
would therefore start them again: call `exit_if_starting` before the first start, and compare the exit code with
`GUARD_MISSING`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import current_process
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from leyden.errors import ChildDied, ConfigError

StartMethod: TypeAlias = Literal["forkserver", "spawn", "fork"]

GUARD_MISSING: Final = 78
"""Exit code of a child whose main script starts children at its top level."""
_LAST_LINES: Final = 30
"""How many lines of a program's standard error are kept for messages."""
_PARENT_POLL_SECONDS: Final = 5.0
"""Seconds between two checks of the parent's id on a system without pidfds."""
_URL_POLL_SECONDS: Final = 0.1
_OBITUARY_SECONDS: Final = 5.0
"""How long to wait for the end of a process that has closed its output or was asked to end."""


class PipeEnd:
    """One end of a pipe in each direction, with the methods of a `multiprocessing` connection.

    Two pipes cost three fifths of the CPU of the socket pair that `multiprocessing.Pipe()` makes.
    """

    def __init__(self, incoming: Connection[Any, Any], outgoing: Connection[Any, Any]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self.poll, self.recv, self.recv_bytes = incoming.poll, incoming.recv, incoming.recv_bytes
        self.send, self.send_bytes = outgoing.send, outgoing.send_bytes
        self.fileno, self.write_fileno = incoming.fileno, outgoing.fileno

    @property
    def closed(self) -> bool:
        return self._incoming.closed

    def close(self) -> None:
        """Close both directions. Safe to repeat."""
        self._incoming.close()
        self._outgoing.close()

    def __reduce__(self) -> tuple[type[PipeEnd], tuple[Connection[Any, Any], Connection[Any, Any]]]:
        return PipeEnd, (self._incoming, self._outgoing)


_parent_ends: weakref.WeakSet[PipeEnd] = weakref.WeakSet()
"""The pipes to the children of this process. A forked child closes its copies."""


def describe_exit(code: int | None) -> str:
    """Return how a process ended, as a verb phrase: `ended with exit code 3`, `was killed by SIGKILL`."""
    if code is None:
        return "has not ended"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True, slots=True)
class ChildFailure:
    """The error that ended a child, as text, because an exception may not be picklable."""

    headline: str
    """Type and message of the error, in one line."""
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Describe an error in the `except` block that caught it."""
        return cls(traceback.format_exception_only(error)[-1].strip(), traceback.format_exc())


@dataclass(slots=True)
class Backoff:
    """Pauses between restarts, which double while the child dies soon after its start."""

    first_seconds: float = 0.1
    max_seconds: float = 10.0
    quick_seconds: float = 1.0
    """A child that worked for less than this time counts as dead at once."""
    quick_deaths: int = 0
    """The number of children in a row that died at once."""

    def pause_after(self, worked_seconds: float, *, excused: bool = False) -> float:
        """Count a death, and return the seconds to wait before the next start.

        excused: the death has a cause that the next start avoids, so it is neither counted nor does it end the row of
            quick deaths.
        """
        if not excused:
            self.quick_deaths = self.quick_deaths + 1 if worked_seconds < self.quick_seconds else 0
        return min(self.first_seconds * 2 ** max(0, self.quick_deaths - 1), self.max_seconds)


# ---- a Python function in its own process ---------------------------------------------------


def known_start_method(method: StartMethod | None) -> StartMethod:
    """Return a start method of this platform; None selects forkserver, or spawn where there is none. Raise ConfigError
    for one that the platform lacks.
    """
    possible = [each for each in get_args(StartMethod) if each in multiprocessing.get_all_start_methods()]
    if method is not None and method not in possible:
        raise ConfigError(f"start_method is {method!r}; possible here: {', '.join(map(repr, possible))}")
    return method or possible[0]


def require_importable_main(method: StartMethod, *, remedy: str) -> None:
    """Raise ConfigError if a child would have to import a main script that is no file.

    remedy: the alternative to a child process, for the error's text.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    if method != "fork" and script is not None and script.startswith("<"):
        origin = "standard input" if script == "<stdin>" else script
        raise ConfigError(
            f"this program comes from {origin}, which no child process can import; save it in a file and run that file, or {remedy}"
        )


def preload(modules: Sequence[str]) -> None:
    """Let the forkserver import modules once for all its children. Do nothing if it runs already."""
    server: Any = forkserver
    if getattr(server._forkserver, "_forkserver_pid", None) is None:  # it has no public name
        multiprocessing.set_forkserver_preload(list(modules))


def exit_if_starting(name_prefix: str = "") -> None:
    """End this process with `GUARD_MISSING` if it is a child that still imports the main script.

    name_prefix: only if the child's name begins with it.
    """
    process = current_process()
    if getattr(process, "_inheriting", False) and process.name.startswith(name_prefix):
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(GUARD_MISSING)


def missing_guard(remedy: str) -> ConfigError:
    """Return the error for a child that ended with `GUARD_MISSING`; `remedy` is the alternative to a guard."""
    return ConfigError(
        "the main script starts child processes at its top level, and each child imports it; put that part under "
        f"`if __name__ == '__main__':`, or {remedy}"
    )


class Child:
    """A Python function in its own process, and this process's end of the pipe to it.

    The function is called as `target(parent, *args)`, and the process ends when it returns. All methods that wait block
    the calling thread, except `attend`.
    """

    def __init__(
        self,
        target: Callable[..., object],
        args: Sequence[Any] = (),
        *,
        name: str,
        start_method: StartMethod = "spawn",
        daemon: bool = True,
    ) -> None:
        """Start the process.

        target: a function at the top of a module. `start_method="fork"` takes any function.
        args: picklable values; `start_method="fork"` takes any.
        daemon: True forbids the child to start children by `multiprocessing`. The child ends with this process in
            either case.
        """
        context: Any = multiprocessing.get_context(start_method)
        to_child, from_child = context.Pipe(duplex=False), context.Pipe(duplex=False)
        ours, theirs = PipeEnd(from_child[0], to_child[1]), PipeEnd(to_child[0], from_child[1])
        _parent_ends.add(ours)
        self.connection = ours
        """This end of the pipes."""
        process = context.Process(
            target=_run, args=(theirs, os.getpid(), target, tuple(args)), name=name, daemon=daemon
        )
        # The child inherits the block until `_run` has its handler. Otherwise a service manager, which sends SIGTERM to
        # all processes at once, could kill a child that has just begun.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            theirs.close()
        self._process: Any = process
        self.pid: int = process.pid
        self._exit_code: int | None = None

    def send(self, message: Any) -> None:
        """Send a message. If the child has ended, the message is lost, and `attend` or `receive` reports the end."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """Return the child's next message. Raise TimeoutError if none arrives, EOFError if the child closed its end."""
        if timeout_seconds is not None and not self.connection.poll(timeout_seconds):
            raise TimeoutError
        return self.connection.recv()

    def attend(self, on_message: Callable[[Any], object]) -> asyncio.Future[int]:
        """Pass the child's messages to a function, on the running event loop, until the child has ended.

        Return a future of the exit code. It is done when the process has ended and all of its messages are delivered;
        the child is closed then. To end an attended child, use `stop`.
        """
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self.connection, self._on_readable)
        self._loop.add_reader(self._process.sentinel, self._end)
        return self._ended

    def deliver(self) -> None:
        """Pass the messages that have arrived to the function that `attend` was given."""
        while not self.connection.closed and self.connection.poll() and self._on_readable():
            pass

    async def stop(self, grace_seconds: float) -> int:
        """End an attended child: hang up, wait for its end, kill it if it takes longer. Return its exit code."""
        self._hang_up_on_loop()
        await asyncio.wait({self._ended}, timeout=grace_seconds)
        self.kill()
        return await asyncio.shield(self._ended)

    def _on_readable(self) -> bool:
        """Deliver one message. Return False, and hang up, if there will be no more."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self._hang_up_on_loop()
            return False
        self._on_message(message)
        return True

    def _hang_up_on_loop(self) -> None:
        if not self.connection.closed:
            self._loop.remove_reader(self.connection)
            self.hang_up()

    def _end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self.deliver()
        self._hang_up_on_loop()
        self.exit_code(None)
        self._ended.set_result(self.close())

    def exit_code(self, timeout_seconds: float | None = 0.0) -> int | None:
        """Wait for the end of the process (None: without limit), and return its exit code; None if it is still running.
        A negative code is the signal that killed the child.
        """
        if self._exit_code is None:
            self._process.join(timeout_seconds)
            self._exit_code = self._process.exitcode
        return self._exit_code

    def describe_end(self, timeout_seconds: float, *, remedy: str) -> str:
        """Wait for the end of the process, and return how it ended as a verb phrase (`describe_exit`).

        remedy: the alternative to a guard in the main script, for the error's text.
        Raise ConfigError if the main script lacks its guard.
        """
        code = self.exit_code(timeout_seconds)
        if code == GUARD_MISSING:
            raise missing_guard(remedy)
        return describe_exit(code)

    def terminate(self) -> None:
        """Send SIGTERM, which a child ignores unless its function handles it."""
        if self._exit_code is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._exit_code is None:
            with contextlib.suppress(ValueError):  # closed by another thread
                self._process.kill()

    def hang_up(self) -> None:
        """Close this end of the pipe, so that a child that waits for messages ends."""
        self.connection.close()

    def close(self, grace_seconds: float = 0.0) -> int:
        """Hang up, wait for the child's end, kill it if it takes longer, and return its exit code. Safe to repeat."""
        self.hang_up()
        code = self.exit_code(max(0.0, grace_seconds))
        if code is None:
            self._process.kill()
            self._process.join()
            code = self._exit_code = int(self._process.exitcode)
        self._process.close()
        return code


class Parent:
    """The process that started this one, as its child sees it."""

    def __init__(self, connection: PipeEnd, pid: int) -> None:
        self.connection = connection
        """The child's end of the pipes."""
        self.pid = pid
        self._sending = threading.RLock()  # a signal handler may send while this thread sends

    def send(self, message: Any) -> None:
        """Send a message, from any thread. If the parent has gone, the message is lost."""
        with self._sending, contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self, timeout_seconds: float | None = None) -> Any:
        """Return the parent's next message. Raise TimeoutError if none arrives, EOFError if the parent has gone."""
        try:
            with _descriptor_of(self.pid) as parent:
                messages = self.connection.fileno()
                readable = wait([messages] if parent is None else [messages, parent], timeout_seconds)
            if not readable:
                raise TimeoutError
            if messages not in readable:  # the parent has gone, and another process has its end of the pipe
                raise EOFError
            return self.connection.recv()
        except ProcessLookupError:
            raise EOFError from None

    def has_ended(self, within_seconds: float) -> bool:
        """Return whether the parent's process has ended, waiting at most `within_seconds` for its end.

        On a system without pidfds (other than Linux) it returns at once.
        """
        try:
            with _descriptor_of(self.pid) as process:
                if process is None:
                    os.kill(self.pid, 0)
                    return False
                return bool(wait([process], within_seconds))
        except ProcessLookupError:
            return True

    async def gone(self) -> None:
        """Return when the parent has hung up or gone. For a child that receives no messages."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.suppress(ProcessLookupError), _descriptor_of(self.pid) as parent:
            ends = [end for end in (self.connection.fileno(), parent) if end is not None]
            for end in ends:
                loop.add_reader(end, over.set)
            try:
                await over.wait()
            finally:
                for end in ends:
                    loop.remove_reader(end)


def end_with_parent(parent_pid: int, *, also: int | None = None, end: Callable[[], object] | None = None) -> None:
    """Watch the parent from a thread, and end this process when the parent has gone, however it ended.

    also: a descriptor whose readability means the same, such as a pipe to the parent.
    end: the function that ends this process; None: at once, with exit code 1. It runs in the watching thread, also
        while the main thread is busy in C code that releases the lock.
    """

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError), _descriptor_of(parent_pid) as parent:
            watched = [each for each in (parent, also) if each is not None]
            while not select.select(watched, [], [], None if parent is not None else _PARENT_POLL_SECONDS)[0]:
                if os.getppid() != parent_pid:
                    break
        os._exit(1) if end is None else end()

    threading.Thread(target=watch, name="leyden-parent", daemon=True).start()


@contextlib.contextmanager
def _descriptor_of(pid: int) -> Generator[int | None]:
    """Yield a descriptor that is readable once the process has ended; None on a system without pidfds. Raise
    ProcessLookupError if it has ended already.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except AttributeError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _run(connection: PipeEnd, parent_pid: int, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Run in the child: undo what a fork inherited, leave signals to the parent, call the function."""
    for end in list(_parent_ends):
        end.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent received the signal too, and decides. Programs that the child starts inherit SIG_IGN, but no handler.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    target(Parent(connection, parent_pid), *args)


# ---- a program -----------------------------------------------------------------------------------


class Command:
    """A program in its own process group. Its standard error is relayed line by line.

    Ctrl-C in a terminal does not reach it: this process ends it in good order.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        relay: Callable[[str], object],
        environment: Mapping[str, str] | None = None,
        on_death: Callable[[str], object] = lambda obituary: None,
        guard: bool = False,
        inherits: Sequence[int] = (),
    ) -> None:
        """Start the program.

        name: what errors and logs call the process, such as "engine process".
        relay: called with each line of standard error, in a thread of this object.
        environment: the variables of the program; None: those of this process.
        on_death: called once with `obituary()` if the program ends and `close` was not called, in a thread of this
            object.
        guard: start the program through a process that ends it when this process ends. For a program that does not call
            `end_with_parent`. Its standard output is relayed too, and it has no input.
        inherits: descriptors of this process that the program gets, under the same numbers.
        """
        self.name, self._relay, self._on_death = name, relay, on_death
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._closing = False
        guarded = [sys.executable, "-P", "-m", __name__, str(os.getpid()), "--", *command]
        self._process = subprocess.Popen(
            guarded if guard else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if guard else subprocess.PIPE,
            env=environment,
            start_new_session=True,
            pass_fds=inherits,
        )
        lines = self._process.stdout if guard else self._process.stderr
        self._reader = threading.Thread(target=self._read, args=(lines,), name=f"leyden-{name}-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def write_line(self, line: str) -> None:
        """Write a line to standard input. Raise ChildDied if the program has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ChildDied(self.obituary()) from error

    def read_line(self) -> str:
        """Return the next line of standard output. Raise ChildDied if the program ends before it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildDied(self.obituary())
        return line.decode()

    def wait_for_url(self, url: str, timeout_seconds: float) -> None:
        """Return when the program's server answers a GET of the URL with a status below 500. Raise ChildDied, with the
        program's last lines, if it ends before that or the time is over.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            if self._process.poll() is not None:
                raise ChildDied(self.obituary())
            try:
                with urllib.request.urlopen(url, timeout=max(0.1, deadline - time.monotonic())):
                    return
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    return
            except OSError:
                pass  # it does not listen yet
            if time.monotonic() >= deadline:
                raise ChildDied(
                    f"the {self.name} (pid {self.pid}) does not serve {url} after {timeout_seconds:g} s; {self._last_words()}"
                )
            time.sleep(_URL_POLL_SECONDS)

    def wait(self) -> int:
        """Wait until the program ends by itself, and return its exit code."""
        return self._process.wait()

    def obituary(self) -> str:
        """Return how the program ended, with its last lines, as text for an error.

        Wait a few seconds for its end; the text of a program that goes on says so.
        """
        try:
            code = self._process.wait(timeout=_OBITUARY_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the {self.name} (pid {self.pid}) does not answer, but lives"
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=_OBITUARY_SECONDS)
        return f"the {self.name} (pid {self.pid}) {describe_exit(code)}; {self._last_words()}"

    def close(self, grace_seconds: float) -> int:
        """Close standard input, wait for the program's end, kill its process group, and return its exit code.

        A program of Leyden ends when its input does (`end_with_parent`). For any other program, the process of
        `guard=True` sends it SIGTERM then, and kills it some seconds later. Safe to repeat.
        """
        self._closing = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            code = self._process.wait(timeout=grace_seconds)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait() if code is None else code
        self._reader.join(_OBITUARY_SECONDS)  # a process that left the group may hold the pipe
        self._process.stdout.close()
        return code

    def _read(self, lines: Any) -> None:
        with lines:
            for raw in lines:
                line = raw.decode(errors="replace").rstrip()
                self._last_lines.append(line)
                self._relay(line)
        self._process.wait()
        if not self._closing:
            self._on_death(self.obituary())

    def _last_words(self) -> str:
        return "the last lines of its standard error:\n" + ("\n".join(self._last_lines) or "(none)")


def _guard(parent_pid: int, command: Sequence[str]) -> int:
    """Run a foreign program and return its exit code. End it when standard input closes or the parent has gone."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    ending = threading.Event()

    def end() -> None:
        """Terminate the program, kill the rest of the process group, and so end this process."""
        ending.set()
        process.terminate()
        try:
            process.wait(_OBITUARY_SECONDS)
        finally:
            os.killpg(0, signal.SIGKILL)  # the program's own children too

    end_with_parent(parent_pid, also=sys.stdin.fileno(), end=end)
    code = process.wait()
    if ending.is_set():
        threading.Event().wait()  # `end` kills this process
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    logging.captureWarnings(True)
    sys.exit(_guard(int(sys.argv[1]), sys.argv[3:]))
