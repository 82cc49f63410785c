"""One task's folder: read its files, and say what is wrong with them before anything runs.

| file | is |
|---|---|
| `instruction.md` | what the agent is told |
| `task.toml` | limits and variables; unknown fields are ignored, as Harbor does |
| `environment/` | the Dockerfile and the files that it copies |
| `tests/test.sh` | run after the agent has ended; writes the reward |
| `solution/solve.sh` | the reference solution |
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from leyden._lib.text import fault_reason
from leyden.errors import ConfigError
from leyden.execution.task_folders.image import Image, read_image

_MEBIBYTE = 2**20
_Seconds = Field(default=600.0, gt=0, allow_inf_nan=False)


class _Phase(BaseModel):
    timeout_sec: float = _Seconds
    env: dict[str, str] = {}
    environment_mode: str | None = None


class _Environment(BaseModel):
    docker_image: str | None = None
    env: dict[str, str] = {}
    memory_mb: int = Field(default=2048, gt=0)
    gpus: int = 0
    mcp_servers: list[Any] = []
    healthcheck: dict[str, Any] | None = None


class _Config(BaseModel):
    """The fields of `task.toml` that are used."""

    metadata: dict[str, Any] = {}
    agent: _Phase = Field(default_factory=_Phase)
    verifier: _Phase = Field(default_factory=_Phase)
    solution: _Phase = Field(default_factory=_Phase)
    environment: _Environment = Field(default_factory=_Environment)


@dataclass(slots=True)
class TaskFolder:
    """A task as its files describe it."""

    path: Path
    instruction: str = ""
    config: _Config = field(default_factory=_Config)
    image: Image = field(default_factory=Image)
    faults: list[str] = field(default_factory=list[str])
    """What is wrong with the files, or keeps the task from running here; empty if it can run."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def memory_bytes(self) -> int:
        return self.config.environment.memory_mb * _MEBIBYTE

    def variables(self, own: dict[str, str]) -> dict[str, str]:
        """Return the variables of the image, the environment and one phase. `${NAME}` and `${NAME:-default}` are those
        of this process. Raise ConfigError for one that is not set.
        """

        def resolved(match: re.Match[str]) -> str:
            value = os.environ.get(match[1], match[2])
            if value is None:
                raise ConfigError(f"task {self.name} needs the variable {match[1]}, which is not set")
            return value

        pattern = r"\$\{(\w+)(?::-([^}]*))?\}"
        given = {**self.config.environment.env, **own}
        return {**self.image.env, **{name: re.sub(pattern, resolved, value) for name, value in given.items()}}


def read_task(path: Path) -> TaskFolder:
    """Return a task with all of its faults."""
    task = TaskFolder(path)
    task.faults.extend(_bad_files(path))
    try:
        task.instruction = (path / "instruction.md").read_text(encoding="utf-8")
    except UnicodeDecodeError:
        task.faults.append("instruction.md is not UTF-8")
    except OSError as error:
        task.faults.append(f"no instruction: instruction.md: {error.strerror}")
    else:
        if not task.instruction.strip():
            task.faults.append("no instruction: instruction.md is empty")
    try:
        task.config = _Config.model_validate(tomllib.loads((path / "task.toml").read_text(encoding="utf-8")))
    except OSError as error:
        task.faults.append(f"task.toml: {error.strerror}")
    except ValidationError as error:
        task.faults.extend(
            f"task.toml: {'.'.join(map(str, fault['loc']))}: {fault_reason(fault)}"
            for fault in error.errors(include_url=False)
        )
    except ValueError as error:  # TOML or UTF-8
        task.faults.append(f"task.toml cannot be read: {error}")
    if (path / "steps").is_dir():
        task.faults.append("has several steps, which are not supported")
    elif not (path / "tests" / "test.sh").is_file():
        task.faults.append("without tests: there is no tests/test.sh")
    environment = task.config.environment
    for needed, what in (
        (environment.gpus, "a GPU"),
        (environment.mcp_servers, "MCP servers"),
        (environment.healthcheck, "a health check"),
        (task.config.verifier.environment_mode == "separate" or (path / "tests" / "Dockerfile").exists(), "another image for its tests"),
    ):  # fmt: skip
        if needed:
            task.faults.append(f"needs Docker: it asks for {what}")
    task.image = read_image(path / "environment", environment.docker_image)
    task.faults.extend(task.image.faults)
    return task


def _bad_files(path: Path) -> Iterator[str]:
    """Yield what is wrong with the files of a task: links that lead out, special files, and hidden files that the agent
    would see.
    """
    hidden: dict[bytes, str] = {}
    root = path.resolve()
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            file = Path(folder, name)
            shown = file.relative_to(path)
            if file.is_symlink():
                if not file.resolve().is_relative_to(root):
                    yield f"{shown} is a symbolic link out of the task, to {file.readlink()}"
            elif not file.is_dir() and not stat.S_ISREG(file.stat().st_mode):
                yield f"{shown} is no regular file"
            elif shown.parts[0] in ("tests", "solution") and file.is_file() and file.stat().st_size > 0:
                hidden[file.read_bytes()] = str(shown)
    for file in (path / "environment").rglob("*"):
        if (
            file.is_symlink()
            and file.resolve().is_relative_to(root)
            and not file.resolve().is_relative_to(root / "environment")
        ):
            yield f"{file.relative_to(path)} shows the agent {file.readlink()}"
        elif file.is_file() and not file.is_symlink() and (same := hidden.get(file.read_bytes())):
            yield f"the agent can see {same}: {file.relative_to(path)} is equal to it"
