"""`Harness`: a coding agent of the command line, started for each attempt with the attempt's own model.

What is special about a program stands in its module in `programs/`. To add one, write a module there with its
`HarnessProgram`, and add it to the table in `programs/__init__.py`.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

from leyden._lib.components import installed, load_installed
from leyden.errors import ConfigError
from leyden.execution.runner.process import ProcessAgent
from leyden.types import AttemptedRollout, NamedResources, ProxyLLM

logger = logging.getLogger(__name__)

_GROUP: Final = "leyden.harnesses"
"""The entry points with harnesses of other distributions."""


@dataclass(frozen=True, slots=True)
class Start:
    """The prompt, the model and the private home folder with which a harness's program starts in one attempt."""

    prompt: str
    """The task, in words."""
    model: str
    base_url: str
    """The attempt's address, which ends in /v1."""
    api_key: str
    home: Path
    """The attempt's own home folder, empty at first. A program finds its configuration there, never the user's."""
    env: dict[str, str]
    """The program's environment, which may be changed."""

    @property
    def root(self) -> str:
        """The attempt's address without the /v1, which Anthropic's clients add themselves."""
        return self.base_url.removesuffix("/v1")

    def write(self, name: str, text: str) -> Path:
        """Write a file below the home folder, and return its path."""
        file = self.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file


@dataclass(frozen=True, slots=True)
class HarnessProgram:
    """How one program is installed, started and pointed at a model."""

    name: str
    installer: Literal["npm", "pip"]
    package: str
    version: str
    """The version that was tested."""
    program: str = ""
    """The file name of its command."""
    arguments: Callable[[Start], Sequence[str]] = lambda start: [start.prompt]
    """Writes its configuration, and returns the arguments of its command."""
    dialect: Literal["chat/completions", "messages", "responses"] = "chat/completions"
    shell: str = ""
    """The name of its tool that runs a line of shell; "" without one."""
    shell_arguments: Callable[[str], Mapping[str, Any]] = lambda line: {"command": line}
    """The arguments with which a model calls that tool."""
    shell_text: Callable[[str], str] | None = None
    """For a program without tools: the text with which a model asks for a line of shell."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Its environment: no telemetry, no updates, no questions."""
    requirements: tuple[str, ...] = ()
    """Further packages that it needs, with their versions."""
    auxiliary: tuple[str, ...] = ()
    """Regular expressions of the instructions of calls beside its task, which the record alone does not show."""
    remarks: str = ""
    """What a user should know."""
    unsupported: str = ""
    """Why it cannot be used; "" if it can."""


class Harness(ProcessAgent):
    """A coding agent of the command line as an agent, unchanged: `Harness("pi", folder="task", reward=...)`.

    It works in a copy of a folder, with a home folder of its own, and calls the model that is trained. An attempt that
    the gateway has no call of fails. `leyden harness list` shows the programs, and `leyden harness check NAME` installs
    one and tries it.
    """

    def __init__(
        self,
        name: str,
        *,
        prompt: Callable[[Any], str] | None = None,
        program: str | os.PathLike[str] | None = None,
        arguments: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """name: a name of `leyden harness list`.
        prompt: a function of a task that returns what the agent is told. None: the task itself, if it is text, or its
            field `instruction` or `prompt`.
        program: the path of its command. None: that of `leyden harness check`, or one on PATH.
        arguments: further arguments of the command, the last ones.
        options: of `ProcessAgent`. By default standard input is empty, and of the program's spans only those of models
            are kept.
        Raise ConfigError for an unknown or unsupported name, and for a program that is not installed. Another version
        than the tested one is a warning, and an attempt fails whose program is not the one of the beginning any more.
        """
        from leyden.execution.harness.installed import find_program, package_version

        self.kind = harness_program(name)
        if self.kind.unsupported:
            raise ConfigError(f"the harness {name!r} cannot be used: {self.kind.unsupported}")
        self.prompt, self.arguments = prompt, list(arguments)
        found = find_program(self.kind) if program is None else Path(program)
        options.setdefault("task_on_stdin", False)
        options.setdefault("spans", "model")
        self.auxiliary = self.kind.auxiliary
        super().__init__([str(found)], **options)
        self._installed = _identity(self.command[0])
        if (version := package_version(self.kind, found)) != self.kind.version:
            logger.warning(
                "the harness %r at %s has version %s, and %s was tested; `leyden harness check %s` shows whether it works",
                *(name, found, version or "unknown", self.kind.version, name),
            )

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        # An agent that did not call its model has tried nothing, whatever its reward. A plain LLM records no calls.
        rollout.config.require_model_call |= any(isinstance(each, ProxyLLM) for each in resources.values())
        return await super().rollout_async(task, resources, rollout)

    def prepare(self, task: Any, directory: Path, env: dict[str, str]) -> Sequence[str]:
        if _identity(self.command[0]) != self._installed:
            raise ConfigError(
                f"{self.command[0]} is not the program of the beginning any more: it updated itself, or was installed anew; "
                f"install {self.kind.package} {self.kind.version}, and start again"
            )
        if (base_url := env.get("OPENAI_BASE_URL")) is None:
            raise ConfigError(f"the harness {self.kind.name!r} needs a model; give the run an LLM among its resources")
        home = directory / "home"
        home.mkdir()
        env |= {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local/share"),
        }
        env |= {"XDG_CACHE_HOME": str(home / ".cache"), "XDG_STATE_HOME": str(home / ".local/state"), "CI": "1"}
        env["TMPDIR"] = str(home / "tmp")  # where pi, for example, keeps all that a command printed
        (home / "tmp").mkdir()
        env |= {name: value for name, value in self.kind.env.items() if name not in self.env}
        prompt = _prompt(task) if self.prompt is None else self.prompt(task)
        start = Start(prompt, env["LEYDEN_MODEL"], base_url, env["OPENAI_API_KEY"], home, env)
        return [*self.command, *self.kind.arguments(start), *self.arguments]


def _identity(program: str) -> tuple[int, int, int] | None:
    """Return what changes with the file of a command; None without the file."""
    try:
        found = Path(program).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def harness_programs() -> dict[str, HarnessProgram | str]:
    """Return all harnesses by name; those of the entry points `leyden.harnesses` as import paths, not loaded."""
    from leyden.execution.harness.programs import PROGRAMS

    return {**{name: found[0].value for name, found in installed(_GROUP).items()}, **PROGRAMS}


def harness_program(name: str) -> HarnessProgram:
    """Return what is known of a harness. Raise ConfigError for an unknown name."""
    known = harness_programs()
    if (found := load_installed(_GROUP, name) if isinstance(known.get(name), str) else known.get(name)) is None:
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"no harness {name!r} is known; {f'did you mean {near[0]!r}? ' if near else ''}there are {', '.join(known)}"
        )
    if not isinstance(found, HarnessProgram):
        raise ConfigError(f"{name!r} of {_GROUP} is a {type(found).__name__}; it must be a HarnessProgram")
    return found


def _prompt(task: Any) -> str:
    if isinstance(task, str):
        return task
    if isinstance(task, Mapping):
        fields = cast("Mapping[str, Any]", task)
        for name in ("instruction", "prompt"):
            if isinstance(text := fields.get(name), str):
                return text
    raise ConfigError(
        f"the task {task!r:.200} is neither text nor has a text `instruction` or `prompt`; give Harness(prompt=) a function "
        "that makes one of it"
    )
