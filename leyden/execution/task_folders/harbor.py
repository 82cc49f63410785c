"""`HarborTasks`: the tasks of a folder in Harbor's format, and the agent that works on them.

An attempt has a copy of the task's files, in a sandbox, at the path that the task's Dockerfile names. When the agent
has ended, its files are taken out, and the tests run on them in a sandbox of their own. So the agent sees neither tests
nor solution, and nothing that it has started is there when they run.
"""

from __future__ import annotations

import asyncio
import copy
import fnmatch
import json
import os
import stat
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, overload

from leyden._lib.numbers import finite_number
from leyden._lib.options import nearest
from leyden.agent import LitAgent
from leyden.errors import ConfigError, ProcessFailed
from leyden.execution.runner.process import ProcessAgent, ProcessOutput, remove_tree, take_work
from leyden.execution.sandbox import Sandbox
from leyden.execution.sandbox.sandbox import mapping
from leyden.execution.task_folders.folder import TaskFolder, read_task
from leyden.types import AttemptedRollout, NamedResources, ProxyLLM, semconv

_SHOWN = 5
_REWARD_BYTES: Final = 2**20


class HarborTasks(Sequence[dict[str, str]]):
    """The tasks of a folder in Harbor's format, as a dataset; `agent` makes the agent that works on them.

    Each item is {"task": name, "instruction": text}. Items can be selected by slices, shuffled and split like any list.
    """

    def __init__(self, folder: str | os.PathLike[str], *, only: str = "*") -> None:
        """folder: a task, or a folder of tasks.
        only: a pattern of the names to take, such as "boltons-*".
        Raise ConfigError if there is none, and for a task that cannot run here, with the reason.
        """
        self.tasks = {task.name: task for task in map(read_task, task_paths(Path(folder), only))}
        bad = [f"{task.name}: {task.faults[0]}" for task in self.tasks.values() if task.faults]
        if bad:
            more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            raise ConfigError(
                f"{len(bad)} of {len(self.tasks)} tasks in {folder} cannot run here: {'; '.join(bad[:_SHOWN])}{more}. "
                f"`leyden tasks check {folder}` shows all; only= takes the others"
            )
        self._items = [{"task": name, "instruction": task.instruction} for name, task in self.tasks.items()]

    @overload
    def __getitem__(self, index: int) -> dict[str, str]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, str]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, str] | list[dict[str, str]]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def agent(self, program: ProcessAgent) -> LitAgent[dict[str, str]]:
        """Return the agent that runs `program` on a task and is rewarded by the task's tests.

        program: a ProcessAgent or a harness with a sandbox. It gets the instruction as its task, in the task's working
            directory; its own `reward` is not used.
        Raise ConfigError if it has no sandbox, or one that shows the tests.
        """
        if program.sandbox is None:
            raise ConfigError(
                "the program has no sandbox, so it could read the tests and could not find the task's files where the task says; "
                "give it sandbox='namespace'"
            )
        return TaskAgent(self.tasks, program)


def task_paths(folder: Path, only: str = "*") -> list[Path]:
    """Return the tasks of a folder: the folder itself if it is a task, else the folders in it whose name matches the
    pattern `only`. Raise ConfigError if there is none.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    if (folder / "task.toml").exists() or (folder / "instruction.md").exists():
        return [folder.resolve()]
    paths = [path.resolve() for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    found = [path for path in paths if fnmatch.fnmatchcase(path.name, only)]
    if not found:
        raise ConfigError(f"{folder} has no task {'at all' if only == '*' else f'with a name like {only!r}'}")
    return found


class TaskAgent(LitAgent[dict[str, str]]):
    """A program that works on tasks of a folder. Made by `HarborTasks.agent`."""

    def __init__(self, tasks: Mapping[str, TaskFolder], program: ProcessAgent) -> None:
        self._tasks, self._program = tasks, program

    async def rollout_async(
        self, task: dict[str, str], resources: NamedResources, rollout: AttemptedRollout
    ) -> dict[str, float]:
        """Run the program until it ends or its time is over, and return the reward of the task's tests.

        With a model behind a gateway, an attempt that made no call of it fails: its reward would be of no agent.
        Raise ProcessFailed if the program ends without a result, or the tests write no reward.
        """
        rollout.config.require_model_call |= any(isinstance(each, ProxyLLM) for each in resources.values())
        name = task.get("task", "")
        if name not in self._tasks:
            raise ConfigError(f"there is no task {name!r}{nearest(name, self._tasks)}")
        chosen = self._tasks[name]
        async with attempt_folder(chosen) as folder:
            program = self._program_in(chosen, folder)
            with suppress(TimeoutError):  # as in Harbor, what is done by then counts
                async with asyncio.timeout(chosen.config.agent.timeout_sec):
                    await program.rollout_async(task["instruction"], resources, rollout)
            return await tested(chosen, folder)

    def _program_in(self, task: TaskFolder, folder: Path) -> ProcessAgent:
        program = copy.copy(self._program)
        sandbox = program.sandbox
        assert sandbox is not None
        program.sandbox = _sandbox(sandbox, task, read={}, write={task.image.workdir: folder / "work"})
        program.cwd, program.folder, program.reward = task.image.workdir, None, _no_reward
        given = _variables(task, task.config.agent.env)
        program.env = {**{name: given[name] for name in given if not name.startswith(_OF_ATTEMPT)}, **program.env}
        program.memory_bytes = program.memory_bytes or task.memory_bytes
        return program


_OF_ATTEMPT = ("OPENAI_", "ANTHROPIC_", "LEYDEN_", "OTEL_")
"""How the variables begin that the attempt gives a program, and that a task cannot change: else its calls would go
elsewhere."""


def _no_reward(_: ProcessOutput) -> None:
    """Return no reward of the program itself, because the tests give it."""


# ---- one attempt ---------------------------------------------------------------------------------


@asynccontextmanager
async def attempt_folder(task: TaskFolder) -> AsyncGenerator[Path]:
    """Make a folder for an attempt, in which `work` is a copy of the task's files, and delete it afterwards."""
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="leyden-task-"))
    try:
        await asyncio.to_thread(task.image.copy_to, folder / "work")
        yield folder
    finally:
        await asyncio.to_thread(remove_tree, folder)


async def solved(task: TaskFolder, folder: Path) -> ProcessOutput:
    """Run the reference solution on an attempt's files."""
    sandbox = _sandbox(
        Sandbox(), task, read={"/solution": task.path / "solution"}, write={task.image.workdir: folder / "work"}
    )
    return await sandbox.run(
        ["bash", "/solution/solve.sh"],
        cwd=task.image.workdir,
        env=_variables(task, task.config.solution.env),
        timeout_seconds=task.config.agent.timeout_sec,
        memory_bytes=task.memory_bytes,
    )


async def tested(task: TaskFolder, folder: Path) -> dict[str, float]:
    """Run the tests on a copy of an attempt's files, and return the rewards that they write, "primary" first; 0 if they
    exceed their time or a limit. Raise ProcessFailed if they write none.
    """
    tests = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=folder))
    await asyncio.to_thread((tests / "logs").mkdir)
    await asyncio.to_thread(take_work, folder / "work", tests / "work")
    sandbox = _sandbox(
        Sandbox(),
        task,
        read={"/tests": task.path / "tests"},
        write={task.image.workdir: tests / "work", "/logs/verifier": tests / "logs"},
    )
    output = await sandbox.run(
        ["bash", "/tests/test.sh"],
        cwd=task.image.workdir,
        env=_variables(task, task.config.verifier.env),
        timeout_seconds=task.config.verifier.timeout_sec,
        memory_bytes=task.memory_bytes,
    )
    if output.cause is not None or output.signal is not None:
        return {semconv.PRIMARY_REWARD: 0.0}
    try:
        return _rewards(tests / "logs")
    except ValueError as error:
        raise ProcessFailed(f"the tests of task {task.name} {error}; {_last_words(output)}") from None


def _sandbox(sandbox: Sandbox, task: TaskFolder, *, read: Mapping[str, Path], write: Mapping[str, Path]) -> Sandbox:
    """Return the sandbox with these paths, and the Python environment that Leyden runs in. Raise ConfigError if the
    sandbox would show the task's own folder.
    """

    python = {path: path for path in (sys.base_prefix, sys.prefix) if path not in ("/usr", "/")}
    given = {**python, **mapping(sandbox.read), **mapping(sandbox.write)}
    for path in ("/usr", *given.values()):
        if task.path.is_relative_to(Path(path).resolve()):
            raise ConfigError(
                f"task {task.name} is in {path}, which the program can read; move the tasks to another folder"
            )
    return replace(
        sandbox,
        read={**python, **mapping(sandbox.read), **{inside: str(path) for inside, path in read.items()}},
        write={**mapping(sandbox.write), **{inside: str(path) for inside, path in write.items()}},
    )


def _variables(task: TaskFolder, own: dict[str, str]) -> dict[str, str]:
    """Return a phase's variables. PATH begins with the Python environment that Leyden runs in."""
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", **task.variables(own)}


def _rewards(logs: Path) -> dict[str, float]:
    """Return the numbers in reward.json, and the one in reward.txt as "reward"; "reward", or the only one, becomes the
    primary one. Raise ValueError, with the reason, if there is none.
    """
    named: dict[str, float] = {}
    text, scalar = _text(logs / "reward.json"), _text(logs / "reward.txt")
    try:
        if text is not None:
            fields: Any = json.loads(text)
            named = {name: finite_number(value) for name, value in fields.items() if type(value) in (int, float)}
        if scalar is not None:
            named.setdefault("reward", finite_number(float(scalar)))
    except (ValueError, AttributeError) as error:
        raise ValueError(f"wrote a reward that is none: {error}") from None
    if not named:
        raise ValueError("wrote no reward to /logs/verifier/reward.txt or reward.json")
    primary = "reward" if len(named) > 1 else next(iter(named))
    if primary not in named:
        raise ValueError(f"wrote the rewards {sorted(named)} and none called 'reward'")
    return {semconv.PRIMARY_REWARD: named.pop(primary), **named}


def _text(path: Path) -> str | None:
    """Return the text of a file that code under test may have written; None if it is no regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        return file.read(_REWARD_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def _last_words(output: ProcessOutput) -> str:
    lines = (output.stdout + output.stderr).strip().splitlines()[-_SHOWN:]
    return f"exit code {output.exit_code}, last lines: {' | '.join(lines)[-500:]}"
