"""`ProcessAgent`: one attempt is one run of a program, whose output, exit code or reports give the reward.

It combines the files and variables (`process_environment.py`), the address for reports (`endpoint.py`) and the running
program (`program.py`), and decides whether the end of the program is a result. To read a reward from somewhere else,
give a function as `reward`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, cast

from leyden._lib.options import check_number
from leyden._lib.text import shown
from leyden.agent import LitAgent
from leyden.errors import ConfigError, ProcessFailed
from leyden.execution.runner.calls import call_sync
from leyden.execution.runner.process.endpoint import AttemptReports
from leyden.execution.runner.process.process_environment import Folder, own_resources, variables
from leyden.execution.runner.process.program import DIRECTORY, ProcessOutput, Program, RunningProgram
from leyden.execution.runner.process.reported_reward import FORMS, read_reward
from leyden.execution.runner.process.supervisor import remove_tree
from leyden.execution.sandbox import Sandbox
from leyden.execution.sandbox.namespaces import LIMITED, REFUSED
from leyden.execution.sandbox.sandbox import mapping
from leyden.tracing import active_trace
from leyden.types import LLM, AttemptedRollout, Attributes, NamedResources, semconv

RewardSource = Literal["exit_code", "last_line", "event"] | Callable[[ProcessOutput], Any]
"""The source of a program's reward: its exit code, the last line of its output, an event that it posts, or a function
of its output."""

_SOURCES: Final = ("exit_code", "last_line", "event")
_GRACE_SECONDS = 0.5
"""Seconds between SIGTERM and SIGKILL. They must be less than the second for which a runner waits for a cancelled
agent."""
_COULD_NOT_RUN: Final = {126: "the command cannot be executed", 127: "the command was not found"}
"""Exit codes by which shells, `env` and similar programs report a failed start. They are no reward of an agent."""
_DOCKER_FAILED: Final = 125
_SANDBOX_ENDS: Final = {
    f"signal {REFUSED}": "was not started: its sandbox could not be built",
    f"signal {LIMITED}": "exceeded a limit of its sandbox",
}
_WORK = "work"
"""The copy of `folder`, in the attempt's private folder."""
_SANDBOXES: Final = {"namespace": Sandbox(), "docker": Sandbox(image="debian:stable-slim")}
_LAST_LINES = 5
"""The number of lines of standard error in a message."""
_LAST_CHARACTERS = 1000
"""The number of characters of those lines."""


class ProcessAgent(LitAgent[Any]):
    """Any program as an agent.

    The program finds the task on its standard input and in a file. The model, the address for rewards and the address
    for OpenTelemetry are in its environment. Its descendants end with it.
    """

    auxiliary: Sequence[str] = ()
    """Regular expressions of the instructions of calls that are beside the program's task (`leyden.adapter.roles`)."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        reward: RewardSource = "exit_code",
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        folder: str | os.PathLike[str] | Callable[[Any], str | os.PathLike[str]] | None = None,
        task_on_stdin: bool = True,
        pin_sampling: bool = True,
        spans: Literal["all", "model"] = "all",
        max_spans: int = 10_000,
        memory_bytes: int | None = None,
        output_bytes: int = 2**20,
        sandbox: Sandbox | Literal["namespace", "docker", "none"] = "none",
    ) -> None:
        """command: the program and its arguments; a line for a shell is ["sh", "-c", line].
        reward: where the reward comes from. "exit_code": 1.0 for exit code 0, else 0.0. "last_line": the last non-empty
            line of standard output. "event": the last reward that the program posts. A function (or a coroutine
            function) of its ProcessOutput: the returned value, which is treated like the return value of any agent.
        env: variables to add; the value None removes a variable.
        cwd: the folder that the program runs in; None: the runner's.
        folder: a folder, or a function of the task that names one, of which each attempt gets a copy to run in. The
            copy is deleted after the reward was read from it (`ProcessOutput.folder`). In a sandbox, `cwd` says where
            the program sees the copy, such as /app.
        task_on_stdin: whether standard input holds the task; otherwise it is empty.
        pin_sampling: whether the gateway uses the model's `sampling_parameters` in place of what the program asks for:
            temperature and top_p, and max_tokens as an upper limit. If these have a temperature, other parameters of
            the program that change the distribution are left out.
        spans: which OpenTelemetry spans of the program are kept: "all", or "model" for those of generative models
            (`gen_ai.*`) and Leyden's own. A coding agent may send a thousand of other kinds.
        max_spans: how many spans of the program are kept, besides rewards; the record counts the others.
        memory_bytes: the limit of resident memory of all the program's processes together; a program above it is
            killed. Checked ten times a second, on Linux only.
        output_bytes: how much of standard output, and of standard error, is kept: one half from the head, one from the
            tail.
        sandbox: what the program may see and use. "none": all that the runner may. "namespace" is Sandbox(): private
            files, processes and network; it can write to `cwd`, and sees of the runner's variables only PATH and the
            language. "docker" is Sandbox(image="debian:stable-slim").
        Raise ConfigError for an option out of its range.
        """
        self.command = _checked_command(command)
        if not callable(reward) and reward not in _SOURCES:
            raise ConfigError(f"reward is {reward!r}; possible: {', '.join(map(repr, _SOURCES))}, or a function")
        if spans not in ("all", "model"):
            raise ConfigError(f"spans is {spans!r}; possible: 'all', 'model'")
        check_number("max_spans", max_spans, at_least=0)
        if memory_bytes is not None and memory_bytes < 1:
            raise ConfigError(f"memory_bytes is {memory_bytes}; it must be at least 1, or None for no limit")
        if output_bytes < 1024:
            raise ConfigError(f"output_bytes is {output_bytes}; it must be at least 1024")
        self.reward, self.memory_bytes, self.output_bytes = reward, memory_bytes, output_bytes
        self.env = dict(env or {})
        self.cwd, self.folder = None if cwd is None else os.fspath(cwd), folder
        self.spans, self.max_spans = spans, max_spans
        self.task_on_stdin, self.pin_sampling = task_on_stdin, pin_sampling
        if isinstance(cast(object, sandbox), Sandbox) or sandbox in tuple(_SANDBOXES):
            self.sandbox = _SANDBOXES[sandbox] if isinstance(sandbox, str) else sandbox
            self.sandbox.check()
        elif sandbox == "none":
            self.sandbox = None
            if cwd is not None and folder is not None:
                raise ConfigError(
                    f"the program runs in cwd={self.cwd!r} or in a copy of folder={folder!r:.200}; give one of them, or a sandbox, in "
                    "which the copy can stand at `cwd`"
                )
        else:
            raise ConfigError(
                f"sandbox is {sandbox!r:.200}; possible: 'none', 'namespace', 'docker', or a leyden Sandbox"
            )

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Run the program to its end and return its reward; None if the reward was posted already.

        Raise ProcessFailed if the program ends without a result. Cancelling the call ends the program. The program's
        private folder is deleted in any case.
        """
        folder = Folder(Path(tempfile.mkdtemp(prefix="leyden-")))
        try:
            resources = own_resources(resources, rollout, pin_sampling=self.pin_sampling)
            folder.write(task, resources)
            work = None if self.folder is None else await self._copied_folder(task, folder.path)
            trace = active_trace("ProcessAgent")
            with trace.operation(semconv.PROCESS) as step, closing(self._reports()) as posted:
                env = variables(folder, resources, rollout, posted, self.env, sandboxed=self.sandbox is not None)
                urls = {each.endpoint for each in resources.values() if isinstance(each, LLM)} | {posted.url}
                command = _checked_command(self.prepare(task, folder.path, env))
                step.set({semconv.PROCESS_COMMAND: command})
                if self.auxiliary:
                    step.set({semconv.AUXILIARY: list(self.auxiliary)})
                program = self._program(command, folder, work, env, urls)
                running = RunningProgram(program)
                try:
                    output = await running.output()
                except asyncio.CancelledError:
                    step.set(_attributes(await running.stop()))
                    raise
                step.set(_attributes(output))
                if posted.left_out:
                    step.set({semconv.SPANS_LEFT_OUT: posted.left_out})
                return await self._result(replace(output, command=command, folder=work, task=task), posted)
        finally:
            await asyncio.to_thread(remove_tree, folder.path)

    def prepare(self, task: Any, directory: Path, env: dict[str, str]) -> Sequence[str]:
        """Return the command of one attempt: by default the agent's. Override it for a program whose task or model is
        in its arguments or in files.

        directory: the attempt's private folder (`LEYDEN_DIRECTORY`), in which to write such files.
        env: the program's environment, which may be changed: it has the model's name, address and key.
        """
        return self.command

    def _reports(self) -> AttemptReports:
        return AttemptReports(only_of_models=self.spans == "model", max_spans=self.max_spans)

    async def _copied_folder(self, task: Any, directory: Path) -> Path:
        """Return the attempt's own copy of `folder`. A cancelled call ends the copying, which would go on in what is
        deleted. Raise ConfigError if there is no such folder.
        """
        unwanted = threading.Event()
        copy = asyncio.ensure_future(asyncio.to_thread(self._copy_folder, task, directory, unwanted))
        try:
            return await asyncio.shield(copy)
        finally:
            unwanted.set()
            await asyncio.wait([copy])

    def _copy_folder(self, task: Any, directory: Path, unwanted: threading.Event) -> Path:
        source = Path(self.folder(task) if callable(self.folder) else cast("str", self.folder)).resolve()
        if not source.is_dir():
            raise ConfigError(f"folder of the program is {str(source)!r}, which is no folder")
        work = directory / _WORK

        def left_out(folder: str, names: Sequence[str]) -> Sequence[str]:
            return names if unwanted.is_set() else _special_files(folder, names)

        try:
            shutil.copytree(source, work, symlinks=True, ignore=left_out)
        except shutil.Error as error:
            _, _, why = error.args[0][0]
            raise ConfigError(f"folder of the program {str(source)!r} could not be copied: {why}") from error
        _keep_links_inside(source, work)
        return work

    def _program(
        self, command: list[str], folder: Folder, work: Path | None, env: Mapping[str, str], urls: Iterable[str]
    ) -> Program:
        """Return the program to start for one attempt, with its files in `folder`. A sandbox lets it reach `urls`."""
        if self.memory_bytes is not None and sys.platform != "linux":
            raise ConfigError(f"memory_bytes={self.memory_bytes:,} needs Linux; leave it out on {sys.platform}")
        cwd, directory = str(work or self.cwd or Path.cwd()), str(folder.path)
        if self.sandbox is not None:
            inside, sandbox = self.cwd or (None if work is None else str(work)), self.sandbox
            if work is not None and self.cwd is not None:
                sandbox = replace(sandbox, write={**mapping(sandbox.write), self.cwd: str(work)})
            command = sandbox.wrap(
                command,
                directory=directory,
                cwd=inside,
                env={**env, "PWD": inside or directory},
                urls=urls,
                memory_bytes=self.memory_bytes,
            )
            env, cwd = {DIRECTORY: directory}, "/"
        else:
            env = {**env, "PWD": cwd}  # programs believe it, and the runner's is another
        return Program(
            command=command,
            env=env,
            cwd=cwd,
            directory=directory,
            stdin=str(folder.task) if self.task_on_stdin else None,
            memory_bytes=self.memory_bytes,
            output_bytes=self.output_bytes,
            grace_seconds=_GRACE_SECONDS,
        )

    async def _result(self, output: ProcessOutput, posted: AttemptReports) -> Any:
        """Return the attempt's reward; None with reward="event", which recorded it when it was posted. Raise
        ProcessFailed if the program's end gives no reward.
        """

        def failed(why: str) -> ProcessFailed:
            return ProcessFailed(f"`{_shown_command(output.command)}` {why}{_last_words(output)}")

        source = self.reward
        if why := self._failure(output):
            raise failed(why)
        if callable(source):
            if inspect.iscoroutinefunction(source) or inspect.iscoroutinefunction(type(source).__call__):
                return await source(output)
            # in a thread, because a slow function must not hold up the other attempts
            return await call_sync(lambda: source(output), None, name=f"reward-{output.pid}")
        if source == "exit_code":
            return 1.0 if output.exit_code == 0 else 0.0
        if source == "last_line":
            lines = output.stdout.strip().splitlines()
            if not lines:
                raise failed("wrote nothing to its standard output, whose last line is to be its reward")
            try:
                return read_reward(lines[-1])
            except (ValueError, RecursionError):
                raise failed(f"ended with the line {shown(lines[-1])}, which is no reward; possible: {FORMS}") from None
        if not posted.rewards:
            raise failed("ended without a reward: with reward='event' it posts one to $LEYDEN_REWARD_URL")
        return None

    def _failure(self, output: ProcessOutput) -> str | None:
        """Return why the program counts as failed, as a phrase that follows its name; None if it did not. An exit code
        alone is a failure only if the reward does not come from the exit code.
        """
        if output.cause == "memory":
            return (
                f"was ended: its processes together held more than memory_bytes={self.memory_bytes:,}; "
                "raise the limit, or let the program hold less"
            )
        if output.cause == "request":
            return "was ended from outside: its supervisor received a signal to stop; run the rollout again"
        if self.sandbox is not None and output.signal in _SANDBOX_ENDS:
            return _SANDBOX_ENDS[output.signal]
        if self.sandbox is not None and self.sandbox.image is not None and output.exit_code == _DOCKER_FAILED:
            return f"was not started: Docker failed (exit code {_DOCKER_FAILED})"
        if output.signal is not None:
            return f"was killed by {output.signal}{_HINTS.get(output.signal, '')}"
        if output.exit_code in _COULD_NOT_RUN:
            return f"exited with code {output.exit_code}: {_COULD_NOT_RUN[output.exit_code]}"
        if self.reward in ("last_line", "event") and output.exit_code != 0:
            return f"exited with code {output.exit_code}"
        return None


_HINTS: Final = {"SIGKILL": ", which Leyden did not send: the system does when memory runs out"}


def _checked_command(command: Sequence[str]) -> list[str]:
    """Return the command as a list. Raise ConfigError for a string, and for anything but strings."""
    if isinstance(command, str):
        raise ConfigError(
            f"command is the string {command!r:.200}; give a list: {command.split()!r:.200}, or ['sh', '-c', ...] for a shell"
        )
    parts = list(command)
    if not parts or not all(isinstance(cast(object, part), str) and "\0" not in part for part in parts):
        raise ConfigError(f"command is {parts!r:.200}; it must be a list of strings, the program first")
    return parts


def _attributes(output: ProcessOutput) -> Attributes:
    """Return a span's attributes about an ended program. Absent values are left out."""
    values: dict[str, Any] = {
        semconv.PROCESS_PID: output.pid,
        semconv.PROCESS_EXIT_CODE: output.exit_code,
        semconv.PROCESS_SIGNAL: output.signal,
        semconv.PROCESS_CAUSE: output.cause,
        semconv.PROCESS_STDOUT: output.stdout,
        semconv.PROCESS_STDERR: output.stderr,
        semconv.PROCESS_STDOUT_BYTES: output.stdout_bytes,
        semconv.PROCESS_STDERR_BYTES: output.stderr_bytes,
        semconv.PROCESS_CPU_SECONDS: output.cpu_seconds,
        semconv.PROCESS_MEMORY_BYTES: output.memory_bytes or None,
        semconv.PROCESS_LEFT: output.left or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _shown_command(command: Sequence[str]) -> str:
    line = shlex.join(command)
    return line if len(line) <= 100 else f"{line[:100]}..."


def _last_words(output: ProcessOutput) -> str:
    """Return the end of the program's standard error, on one line, to end a message; "" if it wrote none."""
    lines = [line.strip() for line in output.stderr.strip().splitlines()][-_LAST_LINES:]
    if not lines:
        return ""
    return f"; its stderr ends: {' | '.join(lines)[-_LAST_CHARACTERS:]}"


def _special_files(folder: str, names: Sequence[str]) -> list[str]:
    """Return the sockets, pipes and devices of a folder: a copy of one is none."""
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if not (path.is_symlink() or path.is_file() or path.is_dir())]


def _keep_links_inside(source: Path, copy: Path) -> None:
    """Let each link of a copied folder lead to where it led: to the copy's own file if that is in the folder, so that a
    program does not write to the original.
    """
    for folder, folders, files in os.walk(copy):
        for link in (Path(folder, name) for name in (*folders, *files)):
            if not link.is_symlink():
                continue
            original = source / link.relative_to(copy)
            target = Path(os.path.normpath(original.parent / link.readlink()))
            is_inside = target.is_relative_to(source)
            if is_inside == link.readlink().is_absolute():
                to = os.path.relpath(copy / target.relative_to(source), link.parent) if is_inside else target
                link.unlink()
                link.symlink_to(to)
