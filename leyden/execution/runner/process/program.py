"""Run one program under its supervisor, and read the supervisor's report.

It knows processes and pipes, and neither attempts nor rewards. The supervisor is a separate process, so that a program
that writes gigabytes costs the runner's event loop nothing, and so that a killed runner does not leave the program
running.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import marshal
import os
import signal
import subprocess
import sys
from asyncio import StreamReader, StreamReaderProtocol
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from leyden._lib.host.orphans import RUNNER_MARK, kill_marked
from leyden.errors import ProcessFailed
from leyden.execution.sandbox.sandbox import ENTRY

DIRECTORY = "LEYDEN_DIRECTORY"
"""The environment variable that holds the program's private folder. All its processes inherit it, so they are
recognised by it."""

_SUPERVISE = "import sys; sys.path.append(sys.argv[1]); from supervisor import main; main(sys.argv[2])"
"""The command that imports the supervisor. Python would compile a script at each start, and keeps the compiled form of
an import."""
_SPEC = "spec"
"""The file name, in the private folder, of the program's description for the supervisor."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run, and its limits."""

    command: list[str]
    env: Mapping[str, str]
    cwd: str
    directory: str
    """A folder that is private to this program. The supervisor's description of the program lies in it until the
    supervisor has read and deleted it."""
    stdin: str | None
    """The file that is the program's standard input. None: its input is empty."""
    memory_bytes: int | None
    """The limit of resident memory of all its processes together; None: no limit."""
    output_bytes: int
    """How much of its standard output, and of its standard error, is kept: one half from the head,
    one from the tail."""
    grace_seconds: float
    """Seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class ProcessOutput:
    """The output and the end of a program."""

    command: list[str]
    directory: Path
    """The program's private folder (`LEYDEN_DIRECTORY`), which is deleted after the attempt."""
    exit_code: int | None
    """The exit code; None if a signal ended the program."""
    signal: str | None
    """The name of the signal that ended the program, such as `SIGKILL`."""
    cause: Literal["memory", "request"] | None
    """Why Leyden ended the program: "memory" (its limit), or "request" (the end of its time or of the run). None: it
    ended by itself."""
    stdout: str
    """The head and the tail, with a note that counts the bytes left out in between."""
    stderr: str
    """The head and the tail, like `stdout`."""
    stdout_bytes: int
    """The number of bytes that the program wrote to standard output, kept or not."""
    stderr_bytes: int
    """The number of bytes that the program wrote to standard error, kept or not."""
    seconds: float
    """Seconds from the program's start to its end."""
    cpu_seconds: float
    """Seconds of CPU time of all the program's processes."""
    memory_bytes: int
    """The most resident memory that its processes held together at any of the checks; 0 without a limit, because then
    nothing is checked."""
    left: list[int]
    """The ids of processes that could not be ended: they hang in the kernel, or belong to another user."""
    pid: int
    folder: Path | None = None
    """The attempt's copy of the agent's `folder`, as the program left it; None without one."""
    task: Any = None
    """The attempt's task."""


class RunningProgram:
    """A program from its start to its end. Create and use it in one event loop."""

    def __init__(self, program: Program) -> None:
        """Start the program. Raise OSError if the system cannot start another process."""
        self._program = program
        spec = Path(program.directory) / _SPEC
        sandbox = program.command[len(ENTRY) :] if program.command[: len(ENTRY)] == ENTRY else None
        spec.write_bytes(marshal.dumps({**asdict(program), "sandbox": sandbox, "runner_pid": os.getpid()}))
        # Its own session: Ctrl-C in the terminal reaches only the runner, which ends the program in good order. An
        # empty context: the supervisor belongs to no attempt. Without the runner's mark: whoever kills a runner's
        # marked processes must spare the supervisor, which ends the program and then itself.
        self._supervisor = contextvars.Context().run(
            subprocess.Popen,
            [sys.executable, "-I", "-S", "-c", _SUPERVISE, str(Path(__file__).parent), str(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != RUNNER_MARK},
        )
        assert self._supervisor.stdout is not None
        self._report = asyncio.ensure_future(_read_to_end(self._supervisor.stdout))
        self._report.add_done_callback(lambda _: self._release_supervisor())

    async def output(self) -> ProcessOutput:
        """Wait until the program ends, and return its output. Cancelling the wait leaves the program running.

        Raise ProcessFailed if the program could not be started, or its supervisor ended without a report; the program's
        processes are then killed.
        """
        await asyncio.wait({self._report})
        try:
            report: dict[str, Any] = marshal.loads(self._report.result())
        except (EOFError, ValueError, TypeError):  # there is no report, or it breaks off
            status = self._supervisor.wait()
            kill_marked(DIRECTORY, self._program.directory)
            raise ProcessFailed(
                f"{self._program.command[0]!r} was killed, because its supervisor ended without a report, with the exit "
                f"status {status}; did the system run out of memory, or did somebody kill it?"
            ) from None
        return _output(report, self._program)

    async def stop(self) -> ProcessOutput:
        """End the program with all of its descendants, and return its output.

        Cancelling the call does not matter to the program: the supervisor ends it all the same.
        """
        self._request_stop()
        return await self.output()

    def _request_stop(self) -> None:
        control = self._supervisor.stdin
        assert control is not None
        if not control.closed:
            with control, contextlib.suppress(BrokenPipeError):  # the supervisor has ended meanwhile
                control.write(b"stop")

    def _release_supervisor(self) -> None:
        """Let the supervisor end, and wait for it, which takes a moment at most. Called when the report is complete, or
        the event loop ends.
        """
        self._request_stop()
        self._supervisor.wait()


async def _read_to_end(pipe: IO[bytes]) -> bytes:
    reader = StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: StreamReaderProtocol(reader), pipe)
    try:
        return await reader.read()
    finally:
        transport.close()


def _output(report: dict[str, Any], program: Program) -> ProcessOutput:
    """Return the supervisor's report as a ProcessOutput. Raise ProcessFailed if the program did not start.

    The report's "output" is the head and tail of stdout, then of stderr, without separators; "stdout" and "stderr" are
    (bytes of the head, bytes of the tail, bytes written).
    """
    if "error" in report:
        raise ProcessFailed(f"the program could not be started: {report['error']}")
    kept: bytes = report.pop("output")
    counts = [report.pop(name) for name in ("stdout", "stderr")]
    number = report.pop("signal")
    texts: list[str] = []
    for first, last, total in counts:
        left_out = total - first - last
        gap = f"\n... ({left_out:,} bytes left out) ...\n".encode() if left_out else b""
        texts.append((kept[:first] + gap + kept[first : first + last]).decode(errors="replace"))
        kept = kept[first + last :]
    return ProcessOutput(
        command=program.command,
        directory=Path(program.directory),
        signal=None if number is None else _signal_name(number),
        stdout=texts[0],
        stderr=texts[1],
        stdout_bytes=counts[0][2],
        stderr_bytes=counts[1][2],
        **report,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
