"""Start one program, keep the head and tail of its output, limit its memory, and end it with all of its descendants.

It is a separate process between the runner and the program, started by `program.py`. It imports only the standard
library, and little of that, because each attempt pays for its start. It reads and writes `marshal`, because the same
Python is at both ends.

It adopts orphaned descendants of the program (a Linux "child subreaper"), so that a grandchild in its own session is
found as well. It ends all of them when the program has ended, when the runner requests it (by a byte, or the end, of
its standard input), when the runner dies in any way, and when together they exceed the memory limit. Then it writes one
report to its standard output and ends. It knows no attempt, no model and no reward.

On systems other than Linux nothing is adopted: the program's process group is ended, and the memory is not watched.
"""

# ruff: noqa: PTH101, PTH104, PTH106, PTH108, PTH112, PTH114, PTH123, PTH208 -- pathlib would add a third to the time of its start

from __future__ import annotations

import ctypes
import marshal
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # at run time it would add a sixth to the time of its start
    import signal
    from typing import Any
else:  # `signal` makes enums of its numbers, which takes a third of the time of its start
    import _signal as signal

_SUBREAPER, _PARENT_DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG
_REAL_TIME_LIMIT = 15  # RLIMIT_RTTIME
_LINUX = sys.platform == "linux"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEMORY_SECONDS = 0.1
"""Seconds between two checks of the memory."""
_KILL_AGAIN_SECONDS = 0.02
"""Seconds between two SIGKILLs, because a killed process may have forked meanwhile."""
_UNKILLABLE_SECONDS = 5.0
"""The seconds that killed processes may take to end. One that hangs in the kernel is named in the report and left."""
_READ_BYTES = 64 * 2**10
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class NotStarted(Exception):
    """The program or its folder does not exist, or the program may not be run."""


class Kept:
    """The head and the tail of a stream, `limit` bytes together, and the stream's length in bytes."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self.head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Add the next bytes of the stream. The first half of the limit is kept, and the latest half.

        The tail is trimmed when it is four times too long, so that bytes are seldom moved.
        """
        self.total += len(data)
        room = self._half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    @property
    def tail(self) -> bytes:
        """Return the kept bytes after the head."""
        return bytes(self._tail[-self._half :])


class Supervisor:
    """One program and its descendants."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._kept = {name: Kept(spec["output_bytes"]) for name in ("stdout", "stderr")}
        self._streams: dict[int, Kept] = {}
        self._poll = select.poll()
        self._wake = _wake_pipe()
        self._poll.register(self._wake, select.POLLIN)
        self._pid = 0
        self._status: int | None = None
        """The program's status, as `wait` gives it; None while it runs."""
        self._cause: str | None = None
        """Why the supervisor ends the program: "memory" or "request"; None: it ended by itself, or runs."""
        self._kill_at: float | None = None
        """The time at which SIGKILL follows SIGTERM; None if no signal was sent."""
        self._check_at = 0.0
        """The time of the next check of the memory."""
        self._memory_bytes = 0
        """The most resident memory that all processes had together, in bytes."""
        self._cpu_seconds = 0.0
        self._childless = False
        """Whether the program and all its descendants have ended."""

    def run(self) -> dict[str, Any]:
        """Start the program, wait until all of its processes have ended, and return the report without the output."""
        try:
            self._start()
        except NotStarted as error:
            return {"error": str(error)}
        self._watch_runner()
        began = time.monotonic()
        seconds = None
        # until killed processes have had their time to end
        while not self._childless and (
            self._kill_at is None or time.monotonic() <= self._kill_at + _UNKILLABLE_SECONDS
        ):
            self._handle_events()
            self._reap()
            if seconds is None and self._status is not None:
                seconds = time.monotonic() - began
            self._take_due_steps()
        for fd in list(self._streams):
            for _ in range(64):  # more than a pipe holds; a process that could not be killed may write for ever
                if not self._read(fd):
                    break
        return self._head(time.monotonic() - began if seconds is None else seconds)

    def output(self) -> bytes:
        """Return the kept output of all streams, in the order in which `_head` counts their bytes."""
        return b"".join(bytes(kept.head) + kept.tail for kept in self._kept.values())

    def kill(self) -> None:
        """Send SIGKILL once to every descendant."""
        self._signal_all(signal.SIGKILL)

    def _head(self, seconds: float) -> dict[str, Any]:
        """Return the report, without the kept output, of a program that ran for `seconds`."""
        code = None if self._status is None else os.waitstatus_to_exitcode(self._status)
        return {
            "pid": self._pid,
            "exit_code": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "cause": self._cause,
            "seconds": seconds,
            "cpu_seconds": self._cpu_seconds,
            "memory_bytes": self._memory_bytes,
            "left": [] if self._childless else self._processes(),
            **{name: [len(kept.head), len(kept.tail), kept.total] for name, kept in self._kept.items()},
        }

    # ---- start -----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Fork the program and poll its output. Raise NotStarted if it could not be executed. A pipe that closes on
        exec carries the child's error: no bytes mean that the program runs.
        """
        pipes = {name: os.pipe() for name in self._kept}
        failed_read, failed_write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _become(self._spec, pipes["stdout"][1], pipes["stderr"][1], failed_write)
        os.close(failed_write)
        for name, (read, write) in pipes.items():
            os.close(write)
            os.set_blocking(read, False)
            self._streams[read] = self._kept[name]
            self._poll.register(read, select.POLLIN)
        with open(failed_read, "rb") as failed:
            if reason := failed.read():
                os.waitpid(self._pid, 0)
                raise NotStarted(reason.decode())

    def _watch_runner(self) -> None:
        """Watch for the runner's death: the end of standard input, and on Linux its pidfd. A forked child of the runner
        may hold the other end of standard input open, so its end alone is no proof.
        """
        self._poll.register(0, select.POLLIN)
        if not _LINUX:
            return
        runner = self._spec["runner_pid"]
        try:
            self._poll.register(os.pidfd_open(runner), select.POLLIN)
        except OSError:  # before Linux 5.3
            pass
        if os.getppid() != runner:  # the runner died before this watch began
            self._cause = "request"

    # ---- while it runs ---------------------------------------------------------------------------

    def _handle_events(self) -> None:
        """Wait for output, a signal or the runner's end, and handle it. The runner's end is a request to stop."""
        for fd, _ in self._poll.poll(self._milliseconds()):
            if fd in self._streams:
                self._read(fd)
            elif fd == self._wake:
                taken = os.read(fd, 512)
                if any(number in taken for number in _STOP_SIGNALS):
                    self._stop("request")
            else:
                self._poll.unregister(fd)
                self._stop("request")

    def _milliseconds(self) -> float | None:
        """Return the time until the next step that no event announces; None without one."""
        now = time.monotonic()
        if self._kill_at is not None:
            return 1000 * max(self._kill_at - now, _KILL_AGAIN_SECONDS)
        if self._spec["memory_bytes"] is not None:
            return 1000 * max(self._check_at - now, 0.0)
        return None

    def _read(self, fd: int) -> bool:
        """Read once. Return whether there may be more to read."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        self._streams[fd].add(data)
        if not data:
            self._poll.unregister(fd)
            del self._streams[fd]
            os.close(fd)
        return bool(data)

    def _reap(self) -> None:
        """Collect the ended children, and notice when there is no child left."""
        try:
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if not pid:
                    return
                self._cpu_seconds += usage.ru_utime + usage.ru_stime
                if pid == self._pid:
                    self._status = status
        except ChildProcessError:
            self._childless = True

    def _take_due_steps(self) -> None:
        """Run the due actions: check the memory limit, send SIGTERM to remaining processes, later SIGKILL. Processes
        that together exceed the memory limit get SIGKILL at once.
        """
        now = time.monotonic()
        if self._kill_at is None:
            if self._spec["memory_bytes"] is not None and now >= self._check_at:
                self._check_at = now + _MEMORY_SECONDS
                self._memory_bytes = max(self._memory_bytes, held := sum(map(_resident_bytes, self._processes())))
                if held > self._spec["memory_bytes"]:
                    self._stop("memory")
            if not self._childless and (self._status is not None or self._cause is not None):
                self._kill_at = now
                if self._cause != "memory":
                    self._signal_all(signal.SIGTERM)
                    self._kill_at += self._spec["grace_seconds"]
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()

    def _stop(self, cause: str) -> None:
        """Note why the program is ended, unless it has ended or is being ended already."""
        if self._status is None and self._cause is None:
            self._cause = cause

    # ---- the program's processes -----------------------------------------------------------------

    def _processes(self) -> list[int]:
        """Return the ids of all descendants, of which orphans are children of this process. On systems other than
        Linux, return the program's id alone, while it runs.
        """
        if not _LINUX:
            return [self._pid] if self._status is None else []
        found: list[int] = []
        unread = [os.getpid()]
        while unread:
            children = _children(unread.pop())
            found += children
            unread += children
        return found

    def _signal_all(self, number: int) -> None:
        send = os.kill if _LINUX else os.killpg
        for pid in self._processes():
            try:
                send(pid, number)
            except OSError:  # gone, or another user's
                pass


def _become(spec: dict[str, Any], stdout: int, stderr: int, failed: int) -> None:
    """Execute the program in the forked child, in its own session. Never returns.

    stdout, stderr, failed: descriptors to write to. A failure to execute goes to `failed`, as text.
    """
    what = f"command {spec['command'][0]!r}"
    try:
        os.setsid()
        if _LINUX:
            _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if spec["sandbox"] is None:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, which a program would inherit
                signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(spec["stdin"] or os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        if spec["sandbox"] is not None:
            _enter_sandbox(spec["sandbox"], failed)
        try:
            os.chdir(spec["cwd"])
        except OSError:
            what = f"cwd {spec['cwd']!r}"
            raise
        os.execvpe(spec["command"][0], spec["command"], spec["env"])
    except (OSError, ValueError) as error:
        os.write(failed, f"{what}: {getattr(error, 'strerror', None) or error}".encode())
    finally:
        os._exit(127)


def _enter_sandbox(arguments: list[str], failed: int) -> None:
    """Become the sandbox's door. Its command would start another Python, which takes longer than the sandbox."""
    os.close(failed)
    signal.set_wakeup_fd(-1)  # a signal of the program must not be one to the supervisor
    for number in (signal.SIGCHLD, *_STOP_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    try:
        sys.path.append(arguments[0])
        __import__("namespaces").main(arguments[1])
    except Exception as error:  # noqa: BLE001 -- a program's process ends here
        os.write(2, f"leyden sandbox: {error!r}\n".encode())


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Delete a file or a folder, however deep or unreadable the folders are that a program left in it; what the system
    refuses stays. A folder in a folder is first moved up, so that no path grows too long.
    """
    root, moved, number = os.fspath(path), os.urandom(8).hex(), 0
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            if os.path.islink(folder) or not os.path.isdir(folder):
                os.unlink(folder)
                continue
            os.chmod(folder, 0o700)
            with os.scandir(folder) as entries:
                below = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for each, is_folder in below:
                try:
                    if not is_folder:
                        os.unlink(each)
                    elif folder == root:
                        folders.append(each)
                    else:
                        os.chmod(each, 0o700)
                        number += 1
                        os.rename(each, f"{root}/{moved}-{number}")
                        folders.append(f"{root}/{moved}-{number}")
                except OSError:
                    pass
            if folder != root:
                os.rmdir(folder)
        except OSError:
            pass
    try:
        os.rmdir(root)
    except OSError:
        pass


def _children(pid: int) -> list[int]:
    """Return the children of each thread of `pid`; none if the process is gone."""
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as listed:
                children += map(int, listed.read().split())
    except OSError:
        pass
    return children


def _resident_bytes(pid: int) -> int:
    """Return the memory that a process uses now; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as sizes:
            return int(sizes.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _drop_mark() -> None:
    """Remove the runner's mark (`leyden._lib.host.orphans`), a resource limit, from this process, so that it is not
    killed with the runner's processes and can end the program.
    """
    import resource

    _, most = resource.getrlimit(_REAL_TIME_LIMIT)
    try:
        resource.setrlimit(_REAL_TIME_LIMIT, (most, most))
    except (ValueError, OSError):
        pass  # a sandbox (gVisor) that has no such limit, and so no mark


def _wake_pipe() -> int:
    """Return the reading end of a pipe into which each handled signal writes its number."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_STOP_SIGNALS):
        signal.signal(number, lambda number, frame: None)
    return read


def main(spec_path: str) -> None:
    """Run the program that the file describes, and write the report to standard output.

    The file is deleted once it is read, because it holds the program's keys.
    """
    if _LINUX:
        _prctl(_SUBREAPER, 1)
        _drop_mark()
    with open(spec_path, "rb") as file:
        spec: dict[str, Any] = marshal.load(file)
    os.unlink(spec_path)
    supervisor = Supervisor(spec)
    try:
        head = supervisor.run()
    except BaseException:
        supervisor.kill()
        raise
    if head.get("cause") == "request" or os.getppid() != spec["runner_pid"]:
        # The runner may have died, or be about to, and then would not delete the folder itself.
        remove_tree(spec["directory"])
    try:
        with open(1, "wb", closefd=False) as report:
            marshal.dump({**head, "output": supervisor.output()}, report)
    except BrokenPipeError:
        pass
    os._exit(0)  # at once, because the runner waits for this process when it has read the report
