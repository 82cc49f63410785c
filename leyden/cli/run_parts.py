"""From the settings of `leyden run` to the parts of a run: an agent with its data, or a vessel, and a trainer.

`Start` is what was given on the command line, as settings. `Job` is what these settings mean, ready to begin.
"""

from __future__ import annotations

import functools
import inspect
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from leyden._lib.annotations import Builder, OptionPath, is_mapping, options_of
from leyden._lib.components import Component, Registry, load_class
from leyden._lib.config_file import ConfigFile, parse_value, read_config_file
from leyden._lib.json import is_list, is_object
from leyden._lib.text import text_of
from leyden.cli.inputs import load_agent, load_object, load_tasks
from leyden.engine.source import require_source
from leyden.errors import HIDDEN, ConfigError
from leyden.training.runs import RecordedRun, open_run
from leyden.training.runs.opening import differences
from leyden.training.runs.run_code import describe_code
from leyden.training.runs.run_description import describe_dataset, describe_model, hides, without_secrets
from leyden.training.runs.start import SECTIONS, check_sections, option_path, option_value, short_path, with_option

_COMMAND = "leyden run"
_DIGEST_SECONDS = 60.0
"""How long a sweep reads tasks to know them again; a run itself takes a second at most."""
_DATA_FILES = (".jsonl", ".json", ".csv")
DATA: Registry = {"harbor": "leyden.execution.task_folders.HarborTasks"}
_AGENTS: Registry = {
    "harness": "leyden.execution.harness.Harness",
    "process": "leyden.execution.runner.process.ProcessAgent",
}
OLD_NAMES = ("n_workers", "max_tasks", "triplet_exporter")
"""Options of earlier versions, which files do not have."""
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
    """The values of `--set` among the settings, by their paths."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """The arguments of the function that returned the settings, with its defaults."""
    file: ConfigFile | None = None
    recorded: RecordedRun | None = None
    """The run that is repeated or continued."""
    directory: Path | None = None
    """The folder of the run to continue; None for a new run."""
    changes: tuple[str, ...] = ()
    """How the settings that a function returns now differ from the recorded ones."""

    def where(self, path: OptionPath) -> str:
        """Return where the value at a path was given, for messages."""
        name = ".".join(path)
        by_option = [each for each in self.overrides if f"{name}.".startswith(f"{each}.")]
        if by_option:
            return f"--set {by_option[-1]}" + ("" if by_option[-1] == name else f": {name}")
        place = self.source if self.file is None else self.file.where(path)
        return f"{place}: {name}" if name else place


def read_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--set` by their paths. Raise ConfigError for a text of another form."""
    given: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"--set is {text!r}; write --set PATH=VALUE, such as trainer.progress=false")
        given = joined(given, {path.strip(): parse_value(value, name=f"--set {path.strip()}")})
    return given


def joined(given: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides of which the later ones count, however the option of an earlier one is spelled."""
    names = {short_path(each) for each in later}
    return {**{each: value for each, value in given.items() if short_path(each) not in names}, **later}


def read_start(target: str, given: Mapping[str, Any], recorded: Mapping[str, Any] | None = None) -> Start:
    """Return the settings of a file, or what a function returns, with the options of `--set`.

    target: a file's path, `module:function` or `file.py:function`. An override with the name of a parameter of the
        function is its argument.
    recorded: arguments of the function that count where none is given.
    Raise ConfigError for a target that cannot be read, and for an override of something that has no options.
    """
    source, colon, name = target.rpartition(":")
    if not colon:
        path = Path(target)
        file = read_config_file(path)
        return with_overrides(Start(str(path.absolute()), path.absolute().parent, file.content, file=file), given)
    path = Path(source).absolute()
    full_name, folder = (f"{path}:{name}", path.parent) if source.endswith(".py") else (target, Path.cwd())
    with chdir(folder if folder.is_dir() else Path.cwd()):  # a missing file is named below
        arguments, made = _called(load_object(full_name, command=_COMMAND), target, {**(recorded or {}), **given})
    if gone := sorted(set(recorded or ()) - arguments.keys()):
        raise ConfigError(f"{target} has no parameter {gone[0]!r} any more, with which it was called; run it anew")
    options = {path: value for path, value in given.items() if path not in arguments}
    return with_overrides(Start(full_name, folder, made, arguments=arguments), options)


def _called(function: Any, target: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments with which a function is called, and the settings that it returns for them."""
    if not callable(function):
        raise ConfigError(
            f"{target} is a {type(function).__name__}, and no function that returns the settings of a run"
        )
    known, _ = options_of(function)
    arguments = {name: given.get(name, option.default) for name, option in known.items()}
    for name, value in arguments.items():
        if value is inspect.Parameter.empty:
            raise ConfigError(f"{target} needs {name}; give --set {name}=...")
    made = function(**{name: given[name] for name in known if name in given})
    if not is_mapping(made):
        raise ConfigError(
            f"{target} returned a {type(made).__name__}; it must return a mapping with the sections {', '.join(SECTIONS)}"
        )
    return arguments, dict(made)


def with_overrides(start: Start, given: Mapping[str, Any]) -> Start:
    """Return a start in which these options have these values. Raise ConfigError for a path that names none."""
    settings, overrides = dict(start.settings), dict(start.overrides)
    for each, value in given.items():
        path = option_path(each, settings)
        settings, name = with_option(settings, path, value), ".".join(path)
        overrides = {other: held for other, held in overrides.items() if not f"{other}.".startswith(f"{name}.")}
        overrides[name] = value
    check_sections(settings, start.source)
    return replace(start, settings=settings, overrides=overrides)


# ---- recorded runs -------------------------------------------------------------------------------


def record_of(start: Start) -> dict[str, Any]:
    """Return what a run records of its start (`started_from`), without secrets. The current folder is the command's."""
    hidden: list[list[str]] = []
    arguments = {name: value for name, value in start.arguments.items() if _is_json(value)}
    parts = {"settings": start.settings, "overrides": start.overrides, "arguments": arguments}
    recorded = without_secrets(parts, hidden=hidden)
    return {"file": start.source, "folder": str(start.folder), "cwd": str(Path.cwd()), **recorded, "hidden": hidden}


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def read_recorded(source: str, given: Mapping[str, Any], *, resume: bool) -> Start:
    """Return the settings of a recorded run, with the options of `--set`. Secrets, which no run records, are those of
    its file, or of `--set`.

    resume: continue that run, in its folder.
    Raise ConfigError for a run that was not started by `leyden run`, for one with secrets that are not found, and with
    `resume` for one that cannot be continued.
    """
    run = open_run(source)
    name, config = run.record.name, run.record.config
    start: dict[str, Any] | None = config.get("start")
    if not is_object(start):
        command = shlex.join(config.get("command") or config.get("argv") or [])
        by = f"by a program: {command}" if command else "by a program"
        again = "run it again, with fit(..., resume=True) and its run_dir to continue" if resume else "run that again"
        raise ConfigError(f"run {name} was not started by leyden run, but {by}; {again}")
    if not all(is_object(start.get(each)) for each in ("settings", "overrides")) or not start.get("file"):
        raise ConfigError(f"what run {name} was started from is damaged in its run.json; run its file again")
    target = str(start["file"])
    # the first version recorded a folder in which it worked, and no list of what is hidden
    folder = Path(start.get("folder") or (config.get("cwd") if ":" in target else Path(target).parent) or ".")
    hidden = [tuple(each) for each in start.get("hidden", _with_stars(start))]
    if not folder.is_dir():
        raise ConfigError(
            f"run {name} was started from {target}, in {folder}, which is gone: put it back, or run another file"
        )
    changes: list[str] = []
    if ":" in target:
        hidden = [
            path[1:] if path[0] == "arguments" else (*path[1].split("."), *path[2:])
            for path in hidden
            if path[0] in ("arguments", "overrides")
        ]
        _require_given(hidden, given, start["settings"], name)
        with chdir(folder):
            made = read_start(target, joined(start["overrides"], given), start.get("arguments"))
        if not given.keys() & made.arguments.keys():
            before = with_overrides(Start(target, folder, start["settings"]), given).settings
            changes = differences(without_secrets(before), without_secrets(made.settings))
    else:
        hidden = [path[1:] for path in hidden if path[0] == "settings"]
        settings, missing = _with_secrets(start, hidden)
        _require_given(missing, given, settings, name)
        made = with_overrides(Start(target, folder, settings, start["overrides"]), given)
    options = made.settings.get("trainer")
    if is_object(options) and "trainer.run_dir" not in given:
        made.settings["trainer"] = {key: value for key, value in options.items() if key != "run_dir"}
    made = replace(made, recorded=run, changes=tuple(changes))
    if not resume:
        return made
    if run.directory is None:
        raise ConfigError(f"{source} is a store; give the folder or the name of the run to resume")
    if str(config.get("store", "")).startswith("memory:"):
        raise ConfigError(f"run {name} kept its rollouts in memory, and they are gone; repeat it without --resume")
    if run.state == "running":
        raise ConfigError(f"run {name} is still running; stop it first, or wait until it ends")
    return replace(made, directory=run.directory.absolute())


def _with_secrets(start: Mapping[str, Any], hidden: Sequence[OptionPath]) -> tuple[dict[str, Any], list[OptionPath]]:
    """Return recorded settings with the secrets that the run's file still has, and the paths of those that it lacks.

    A secret of `--set` is not in the file, and one beside which the file says something else may belong to that.
    """
    settings, missing = start["settings"], list[OptionPath]()
    try:
        content = read_config_file(Path(start["file"])).content if hidden else {}
    except ConfigError:
        content = {}
    shown = without_secrets(content)
    for path in hidden:
        by_option = any(f"{'.'.join(path)}.".startswith(f"{each}.") for each in start["overrides"])
        if not by_option and option_value(shown, path, HIDDEN * 2) == option_value(settings, path):
            settings = with_option(settings, path, option_value(content, path))
        else:
            missing.append(path)
    return settings, missing


def _require_given(
    missing: Sequence[OptionPath], given: Mapping[str, Any], settings: Mapping[str, Any], name: str
) -> None:
    """Raise ConfigError unless `--set` gives these secrets of a run, or the mappings around them."""
    paths = [option_path(each, settings) for each in given] + [(each,) for each in given]
    needed = [".".join(path) for path in missing if not any(path[: len(each)] == each for each in paths)]
    if needed:
        secrets = f"the secret{'s' * (len(needed) > 1)} {', '.join(needed)}"
        raise ConfigError(
            f"run {name} does not record {secrets}; give {' '.join(f'--set {each}=...' for each in needed)}"
        )


def _with_stars(value: Any, path: OptionPath = ()) -> Iterator[OptionPath]:
    if isinstance(value, str) and HIDDEN in value:
        yield path
    for name, each in value.items() if is_object(value) else enumerate(value) if is_list(value) else ():
        yield from _with_stars(each, (*path, str(name)))


# ---- the parts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is ready to begin: a trainer, and what its `fit` is given."""

    trainer: Any
    given: tuple[Any, ...]
    """Agent, training tasks and validation tasks; or a vessel."""
    data: Mapping[str, Any]
    """The tasks or initial states of each stage."""
    code: Mapping[str, Any]
    """From `describe_code`, as the run will record it."""
    in_words: str

    def check(self) -> None:
        """Raise ConfigError for any mistake that can be found without starting something."""
        self.trainer.check(*self.given)
        if isinstance(model := self._model(), str | Path):
            require_source(model)

    def identity(self) -> dict[str, Any]:
        """Return what decides the run's result beside its settings, as JSON: its code, its data and its model."""
        sized = {name: each for name, each in self.data.items() if hasattr(each, "__len__")}
        model, data = (
            self._model(),
            {name: describe_dataset(each, seconds=_DIGEST_SECONDS) for name, each in sized.items()},
        )
        return {"code": self.code, "data": data, "model": None if model is None else describe_model(model)}

    def _model(self) -> Any:
        return self.trainer.algorithm and self.trainer.algorithm.trained_model() if len(self.given) > 1 else None

    def estimate(self, runs: Path) -> str | None:
        """Return in words what the run will take, by earlier ones in the folder `runs`; None for a run in a simulator,
        which calls no model.
        """
        return self.trainer.estimate(*self.given, runs=runs) if len(self.given) > 1 else None

    def run(self, *, resume: bool = False) -> Any:
        return self.trainer.fit(*self.given, resume=resume)


def job_of(start: Start) -> Job:
    """Return the run that the settings mean. The current folder must be the start's.

    Raise ConfigError, with the place, for an option that is unknown or wrong.
    """
    builder = Builder(
        registry_of=registry_of,
        load=_load,
        where=start.where,
        show=lambda path, value: (
            HIDDEN if any(hides(each, value) for each in path) else text_of(repr, without_secrets(value))[:200]
        ),
        deferred={("trainer", "strategy"), ("trainer", "runner")},
    )
    return (_simulation if "vessel" in start.settings else _training)(start, builder)


def _training(start: Start, builder: Builder) -> Job:
    """Return a run that trains an agent."""
    from leyden.algorithm import Algorithm
    from leyden.trainer import Trainer
    from leyden.trainer.run_config import code_of

    settings = start.settings
    if settings.get("agent") is None:
        raise ConfigError(f"{start.source} has no agent; add one, such as agent: agent.py:agent")
    options = _mapping(settings.get("trainer"), builder, "trainer")
    if old := [name for name in options if name in OLD_NAMES]:
        raise builder.error(("trainer", old[0]), "that is an old name; use n_runners, max_rollouts and adapter")
    if "algorithm" in options:
        raise builder.error(("trainer", "algorithm"), "the algorithm is a section of its own; move it out of trainer")
    if is_mapping(store := options.get("store")):
        options["store"] = {"type": "sqlite", **store}
    given = builder.options(Trainer, options, ("trainer",))
    if settings.get("algorithm") is not None:
        given["algorithm"] = builder.value(Algorithm, settings["algorithm"], ("algorithm",))
    agent = _agent(settings["agent"], builder)
    train, val = (_data(settings.get(name), builder, (name,)) for name in ("train", "val"))
    trainer = builder.called(Trainer, given, ("trainer",))
    sets = {"train": train, "val": val}
    data = [f"{name} {len(each):,} tasks" for name, each in sets.items() if hasattr(each, "__len__")]
    algorithm = "no algorithm" if trainer.algorithm is None else type(trainer.algorithm).__name__
    return Job(trainer, (agent, train, val), sets, code_of(trainer, agent), ", ".join([algorithm, *data]))


def _simulation(start: Start, builder: Builder) -> Job:
    """Return a run that trains a policy in a simulator. Its folder has checkpoints, so that it can be resumed."""
    from leyden.rl import ActionInterpreter, StateInterpreter, Trainer, TrainingVessel, TrainingVesselBase
    from leyden.training import Checkpoint

    options = _mapping(start.settings["vessel"], builder, "vessel")
    kind, options = builder.component(TrainingVesselBase, {"type": TrainingVessel, **options}, ("vessel",))
    spaces: dict[str, Any] = {"network": None}
    for name, part, space in (
        ("state_interpreter", StateInterpreter, "observation"),
        ("action_interpreter", ActionInterpreter, "action"),
    ):
        if name in options:  # before the policy, which is made for its space
            options[name] = builder.value(part, options[name], ("vessel", name))
            spaces["obs_space" if space == "observation" else "action_space"] = getattr(
                options[name], f"{space}_space", None
            )
    for name in (each for each in options if each.endswith("_initial_states")):
        options[name] = _data(options[name], builder, ("vessel", name))
    vessel: Any = replace(builder, supplied=spaces).made(kind, options, ("vessel",))
    if issubclass(type(vessel), TrainingVessel):
        path = "vessel", "update_kwargs"
        vessel.update_kwargs = builder.options(vessel.policy.update, vessel.update_kwargs, path, partly=True)
    given = builder.options(Trainer, _mapping(start.settings.get("trainer"), builder, "trainer"), ("trainer",))
    trainer = builder.called(Trainer, given, ("trainer",))
    trainer.check(vessel)  # before the callback below, which does not end a run
    if trainer.run_dir is not None and not any(isinstance(each, Checkpoint) for each in trainer.callbacks):
        trainer.callbacks.append(Checkpoint(trainer.run_dir / "checkpoints"))
    states = {name: getattr(vessel, name, None) for name in options if name.endswith("_initial_states")}
    in_words = f"{type(vessel).__name__}, {type(vessel.policy).__name__}"
    return Job(trainer, (vessel,), states, describe_code(vessel), in_words)


def _mapping(given: Any, builder: Builder, section: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not is_mapping(given):
        raise builder.error((section,), f"it is {given!r:.200}; it must be a mapping of options")
    return dict(given)


def _agent(given: Any, builder: Builder) -> Any:
    from leyden.agent import LitAgent

    if isinstance(given, str):
        try:
            return load_agent(given, command=_COMMAND)
        except ConfigError as error:
            raise builder.error(("agent",), str(error)) from error
    return builder.value(LitAgent, given, ("agent",))


def _data(given: Any, builder: Builder, path: OptionPath) -> Any:
    """Return a data set: the tasks of a file, or an object of a Python file, called if it is a function."""
    if not isinstance(given, str) and not is_mapping(given):
        return given
    try:
        if isinstance(given, str):
            if ":" not in given or given.endswith(_DATA_FILES):
                return load_tasks(Path(given), option="")
            found = load_object(given, command=_COMMAND)
            return found() if callable(found) else found
    except ConfigError as error:
        raise builder.error(path, str(error)) from error
    return builder.object_of(DATA, given, path)


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
