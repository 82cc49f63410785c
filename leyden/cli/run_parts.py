"""From the settings of `leyden run` to the parts of a run: an agent with its data, and a trainer.

`Start` is what was given on the command line, as settings. `Job` is what these settings mean, ready to begin.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from leyden._lib.annotations import Builder, OptionPath
from leyden._lib.components import Component, Registry, load_class
from leyden._lib.config_file import ConfigFile, parse_value, read_config_file
from leyden._lib.text import text_of
from leyden.cli.inputs import load_agent, load_object, load_tasks
from leyden.errors import HIDDEN, ConfigError
from leyden.training.runs.run_description import hides
from leyden.training.runs.start import SECTIONS, check_sections, option_path, with_option

_COMMAND = "leyden run"
_DATA_FILES = (".jsonl", ".json", ".csv")
_DATA: Registry = {"harbor": "leyden.execution.task_folders.HarborTasks"}
_AGENTS: Registry = {
    "harness": "leyden.execution.harness.Harness",
    "process": "leyden.execution.runner.process.ProcessAgent",
}
_POLICIES: Registry = {"ppo": "leyden.rl.PPO", "dqn": "leyden.rl.DQN", "random": "leyden.rl.RandomPolicy"}


@dataclass(frozen=True, slots=True)
class Start:
    """The settings of a run, and where they come from."""

    source: str
    """The file, absolute, or `file.py:function` or `module:function`."""
    folder: Path
    """The folder that relative paths mean."""
    settings: dict[str, Any]
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    """The values of `--set`, by their paths."""
    file: ConfigFile | None = None

    def where(self, path: OptionPath) -> str:
        """Return where the value at a path was given, for messages."""
        name = ".".join(path)
        by_option = [each for each in self.overrides if f"{name}.".startswith(f"{each}.")]
        if by_option:
            return f"--set {by_option[-1]}" + ("" if by_option[-1] == name else f": {name}")
        place = self.source if self.file is None else self.file.where(path)
        return f"{place}: {name}" if name else place


def read_start(target: str, overrides: Sequence[str]) -> Start:
    """Return the settings of a file, or what a function returns, with the options of `--set`.

    target: a file's path, `module:function` or `file.py:function`. An override with the name of a parameter of the
        function is its argument.
    Raise ConfigError for a target or an override that cannot be read.
    """
    given = dict(map(_override, overrides))
    source, colon, _ = target.rpartition(":")
    if not colon:
        path = Path(target)
        file = read_config_file(path)
        return with_overrides(Start(str(path.absolute()), path.absolute().parent, file.content, file=file), given)
    is_file = source.endswith(".py")
    made = _called(load_object(target, command=_COMMAND), target, given)
    place = Path(source).absolute() if is_file else Path.cwd()
    name = f"{place}:{target.rpartition(':')[2]}" if is_file else target
    return with_overrides(Start(name, place.parent if is_file else place, made), given)


def _override(text: str) -> tuple[str, Any]:
    """Return the path and the value of one `--set`."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set is {text!r}; write --set PATH=VALUE, such as trainer.n_runners=4")
    return path.strip(), parse_value(value, name=f"--set {path.strip()}")


def _called(function: Any, target: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a function returns. Its arguments are taken out of `given`."""
    if not callable(function):
        raise ConfigError(
            f"{target} is a {type(function).__name__}, and no function that returns the settings of a run"
        )
    import inspect

    parameters = inspect.signature(function).parameters.values()
    takes = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    arguments = {name: given.pop(name) for name in takes if name in given}
    missing = [each.name for each in parameters if each.name in takes and each.default is each.empty]
    if missing := [name for name in missing if name not in arguments]:
        raise ConfigError(f"{target} needs {', '.join(missing)}; give --set {missing[0]}=...")
    made = function(**arguments)
    if not isinstance(made, Mapping):
        raise ConfigError(
            f"{target} returned a {type(made).__name__}; it must return a mapping with the sections {', '.join(SECTIONS)}"
        )
    return dict(cast("Mapping[str, Any]", made))


def with_overrides(start: Start, given: Mapping[str, Any]) -> Start:
    """Return a start in which these options have these values. Raise ConfigError for a path that names none."""
    settings, overrides = start.settings, dict(start.overrides)
    for name, value in given.items():
        path = option_path(name, settings)
        settings = with_option(settings, path, value)
        overrides[".".join(path)] = value
    check_sections(settings, start.source)
    return Start(start.source, start.folder, settings, overrides, start.file)


# ---- the parts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is ready to begin: an agent with its data and trainer."""

    trainer: Any
    agent: Any
    train: Any
    val: Any

    def check(self) -> None:
        """Raise ConfigError for any mistake that can be found without starting something."""
        self.trainer.check(self.agent, self.train, self.val)

    def run(self, *, resume: bool = False) -> Any:
        return self.trainer.fit(self.agent, self.train, self.val, resume=resume)

    def in_words(self) -> str:
        data = [f"{name} {len(each):,} tasks" for name, each in (("train", self.train), ("val", self.val)) if each]
        algorithm = type(self.trainer.algorithm).__name__ if self.trainer.algorithm is not None else "no algorithm"
        return ", ".join([f"agent {getattr(self.agent, '__name__', type(self.agent).__name__)}", *data, algorithm])


def job_of(start: Start) -> Job:
    """Return the run that the settings mean. The current folder must be the start's.

    Raise ConfigError, with the place, for an option that is unknown or wrong.
    """
    settings = start.settings
    builder = Builder(
        registry_of=registry_of,
        load=_load,
        where=start.where,
        show=lambda path, value: HIDDEN if path and hides(path[-1]) else text_of(repr, value)[:200],
        deferred={("trainer", "strategy"), ("trainer", "runner")},
    )
    if settings.get("agent") is None:
        raise ConfigError(f"{start.source} has no agent; add one, such as agent: agent.py:agent")
    from leyden.algorithm import Algorithm
    from leyden.trainer import Trainer

    options = _mapping(settings.get("trainer"), builder, "trainer")
    if "algorithm" in options:
        raise builder.error(("trainer", "algorithm"), "the algorithm is a section of its own; move it out of trainer")
    given = builder.options(Trainer, options, ("trainer",))
    if settings.get("algorithm") is not None:
        given["algorithm"] = builder.value(Algorithm, settings["algorithm"], ("algorithm",))
    agent = _agent(settings["agent"], builder)
    data = {name: _data(settings.get(name), builder, name) for name in ("train", "val")}
    return Job(builder.called(Trainer, given, ("trainer",)), agent, data["train"], data["val"])


def _mapping(given: Any, builder: Builder, section: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise builder.error((section,), f"it is {given!r:.200}; it must be a mapping of options")
    return dict(cast("Mapping[str, Any]", given))


def _agent(given: Any, builder: Builder) -> Any:
    from leyden.agent import LitAgent

    if isinstance(given, str):
        try:
            return load_agent(given, command=_COMMAND)
        except ConfigError as error:
            raise builder.error(("agent",), str(error)) from error
    return builder.value(LitAgent, given, ("agent",))


def _data(given: Any, builder: Builder, section: str) -> Any:
    """Return a data set: the tasks of a file, or an object of a Python file, called if it is a function."""
    if given is None or not isinstance(given, str | Mapping):
        return given
    try:
        if isinstance(given, str):
            if ":" not in given or given.endswith(_DATA_FILES):
                return load_tasks(Path(given), option="")
            found = load_object(given, command=_COMMAND)
            return found() if callable(found) else found
    except ConfigError as error:
        raise builder.error((section,), str(error)) from error
    return builder.object_of(_DATA, cast("Mapping[str, Any]", given), (section,))


def _load(path: str) -> Any:
    return load_object(path, command=_COMMAND) if ":" in path else load_class(path)


@functools.cache
def registry_of(kind: type) -> Registry | None:
    """Return the components of a class, by their short names; None for a class without a registry."""
    from leyden import training
    from leyden.objectives import advantages, losses
    from leyden.trainer import component_registry as registries

    name = f"{kind.__module__.split('.')[0]}.{kind.__name__}"
    by_class: dict[str, Registry] = {
        "leyden.Algorithm": registries.AlgorithmRegistry,
        "leyden.Tracer": registries.TracerRegistry,
        "leyden.TraceAdapter": registries.AdapterRegistry,
        "leyden.LightningStore": registries.StoreRegistry,
        "leyden.Runner": registries.RunnerRegistry,
        "leyden.ExecutionStrategy": registries.ExecutionStrategyRegistry,
        "leyden.LitAgent": _AGENTS,
        "leyden.Policy": _POLICIES,
    }
    if name in by_class:
        return by_class[name]
    if name == "leyden.PolicyBackend":
        return registries.registry_of_kind("engine")
    if name in ("leyden.Advantages", "leyden.Loss"):
        known = advantages.ESTIMATORS if kind.__name__ == "Advantages" else losses.LOSSES
        return {each: entry.constants for each, entry in known.items()}
    if name in ("leyden.Callback", "leyden.LogWriter"):
        public: dict[str, Component] = {each: getattr(training, each) for each in dir(training) if each[0].isupper()}
        return {
            each: found
            for each, found in public.items()
            if isinstance(found, type) and issubclass(found, kind) and found is not kind
        }
    return None
