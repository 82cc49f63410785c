"""Configuration files of `leyden rl`: YAML or JSON, sections as in Qlib's, checked key by key before anything is started.

    _base_: common.yaml            # or a list; this file's values come before theirs, the first one's before the next one's
    policy:
      _delete_: true               # replaces the base's `policy` instead of being merged into it
      class: PPO
      kwargs: {lr: 0.0001}

It knows which keys there are and how components are made of `{class, module_path, kwargs}`; what is run with them is in `run`.
To add a key, add a field to its section's dataclass; to give a class a short name, add it to `_CLASSES`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import yaml

from leyden.errors import ConfigError

_Section = TypeVar("_Section")
_HERE: Final = "leyden.rl.order_execution"
_CLASSES: Final[Mapping[str, tuple[str, ...]]] = {
    "leyden.rl.policy": ("AllOne", "DQN", "PPO", "RandomPolicy"),
    f"{_HERE}.data": ("BarsProcessedDataProvider",),
    f"{_HERE}.interpreter": (
        "CategoricalActionInterpreter",
        "CurrentStepStateInterpreter",
        "DummyStateInterpreter",
        "FullHistoryStateInterpreter",
        "TwapRelativeActionInterpreter",
    ),
    f"{_HERE}.network": ("Recurrent",),
    f"{_HERE}.reward": ("PAPenaltyReward", "PPOReward"),
}
SHORT_NAMES: Final[Mapping[str, str]] = {name: module for module, names in _CLASSES.items() for name in names}
"""The classes that need no module_path, and where each is."""


@dataclass(frozen=True)
class Component:
    """A class and what it is made with."""

    class_: str
    module_path: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    place: str = "component"
    """Where it stands in the file, for errors."""

    def takes(self, name: str) -> bool:
        """Whether the class has an argument of this name."""
        try:
            taken = inspect.signature(self._load()).parameters
        except (TypeError, ValueError):  # a class of C
            return True
        return name in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())

    def build(self, **more: Any) -> Any:
        """An instance. more: arguments that only the caller knows; one that the class does not take is left out."""
        cls = self._load()
        kwargs = {name: _built(value, f"{self.place}.kwargs.{name}") for name, value in self.kwargs.items()}
        try:
            taken = inspect.signature(cls).parameters
        except (TypeError, ValueError):  # a class of C
            return cls(**kwargs)
        anything = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        if not anything and (unknown := [name for name in kwargs if name not in taken]):
            possible = ", ".join(name for name in taken if name not in more)
            raise ConfigError(
                f"{self.place}.kwargs has {unknown[0]!r}, which {self.class_} does not take; possible: {possible}"
            )
        kwargs |= {name: value for name, value in more.items() if name in taken or anything}
        needed = [
            name
            for name, each in taken.items()
            if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        ]
        if missing := [name for name in needed if name not in kwargs]:
            raise ConfigError(f"{self.place}.kwargs lacks {missing[0]!r}, which {self.class_} needs")
        try:
            return cls(**kwargs)
        except ConfigError as error:
            raise ConfigError(f"{self.place}: {error}") from error

    def _load(self) -> Any:
        module_path = self.module_path or SHORT_NAMES.get(self.class_)
        if module_path is None:
            raise ConfigError(
                f"{self.place}.class is {self.class_!r}; give its module_path, or one of {', '.join(sorted(SHORT_NAMES))}"
            )
        try:
            module = importlib.import_module(module_path)
        except ImportError as error:
            hint = "; Leyden's own classes need no module_path" if self.class_ in SHORT_NAMES else ""
            raise ConfigError(f"{self.place}.module_path {module_path!r} cannot be imported: {error}{hint}") from error
        try:
            return getattr(module, self.class_)
        except AttributeError:
            raise ConfigError(f"{self.place}.class: {module_path} has no {self.class_!r}") from None


def _built(value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        return value
    mapping = cast("dict[str, Any]", value)
    return _component(mapping, place).build() if "class" in mapping else mapping


@dataclass(frozen=True)
class Runtime:
    """`runtime`."""

    seed: int = 0
    use_cuda: bool = False


@dataclass(frozen=True)
class Env:
    """`env`."""

    concurrency: int = 1
    parallel_mode: Literal["dummy", "thread", "subproc", "shmem"] = "dummy"
    extra_module_paths: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class SimulatorOptions:
    """`simulator`: minutes in a bar, minutes in a step, how much of the market's volume a tick may trade."""

    data_granularity: int = 1
    time_per_step: int = 30
    vol_limit: float | None = None


@dataclass(frozen=True)
class Source:
    """`data.source`. order_dir has `train`, `valid` and `test`: a .csv or .parquet each, or directories of such files."""

    order_dir: str
    feature_root_dir: str
    feature_columns_today: list[str] = field(default_factory=list[str])
    feature_columns_yesterday: list[str] = field(default_factory=list[str])
    default_start_time_index: int = 0
    default_end_time_index: int | None = None


@dataclass(frozen=True)
class Data:
    """`data`."""

    source: Source


@dataclass(frozen=True)
class TrainerOptions:
    """`trainer`; an epoch is an iteration: collect, then update."""

    max_epoch: int
    episode_per_collect: int
    batch_size: int | None = None
    repeat_per_collect: int | None = None
    """For this and batch_size, None means the default of the policy's `update`."""
    val_every_n_epoch: int | None = None
    earlystop_patience: int | None = None
    checkpoint_path: str | None = None
    checkpoint_every_n_iters: int = 1
    buffer_size: int | None = None


@dataclass(frozen=True)
class RunConfig:
    """A whole configuration."""

    data: Data
    policy: Component
    state_interpreter: Component
    action_interpreter: Component
    trainer: TrainerOptions
    runtime: Runtime = field(default_factory=Runtime)
    env: Env = field(default_factory=Env)
    simulator: SimulatorOptions = field(default_factory=SimulatorOptions)
    reward: Component | None = None
    network: Component | None = None


def load_config(path: str | Path) -> RunConfig:
    """The configuration in a file, checked. Raises ConfigError, naming the file, the key and what is possible."""
    content = read_config(path)
    try:
        return _section(RunConfig, content, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_config(path: str | Path) -> dict[str, Any]:
    """A file's content with that of its bases, unchecked. Raises ConfigError for a file that is missing, no mapping, or its own base."""
    return _read(Path(path), ())


def _read(path: Path, inside: tuple[Path, ...]) -> dict[str, Any]:
    path = path.absolute()
    if path in inside:
        raise ConfigError(f"{path} is its own base, by way of {' -> '.join(each.name for each in inside)}")
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path} is no .yaml, .yml or .json file")
    try:
        with path.open(encoding="utf-8") as file:  # YAML's errors name the file that it reads
            content: Any = (
                json.load(file, object_pairs_hook=_without_repeats)
                if path.suffix == ".json"
                else yaml.load(file, _Loader)
            )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not written correctly: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no sections; it must be a mapping such as 'policy: ...'")
    config = cast("dict[str, Any]", content)
    bases = config.pop("_base_", [])
    for base in [bases] if isinstance(bases, str) else bases:
        config = _merged(_read(path.parent / base, (*inside, path)), config)
    return _without_marks(config)


class _Loader(yaml.SafeLoader):
    """Refuse a mapping with a repeated key. YAML's own loader silently takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        _refuse_repeats(keys)
        return super().construct_mapping(node, deep=deep)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeats([key for key, _ in pairs])
    return dict(pairs)


def _refuse_repeats(keys: list[Any]) -> None:
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one mapping; leave one of them out")


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` over `base`, mapping by mapping. A mapping with `_delete_` replaces the base's. (Qlib's parser forgets to.)"""
    merged = dict(base)
    for name, value in own.items():
        before = merged.get(name)
        inner = cast("dict[str, Any]", value) if isinstance(value, dict) else {"_delete_": True}
        if isinstance(before, dict) and not inner.get("_delete_"):
            merged[name] = _merged(cast("dict[str, Any]", before), inner)
        else:
            merged[name] = value
    return merged


def _without_marks(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    mapping = cast("dict[str, Any]", config)
    return {name: _without_marks(value) for name, value in mapping.items() if name != "_delete_"}


def _component(content: Mapping[str, Any], place: str) -> Component:
    possible = ("class", "module_path", "kwargs")
    if unknown := [name for name in content if name not in possible]:
        raise ConfigError(f"unknown key {place}.{unknown[0]}; possible: {', '.join(possible)}")
    name, module_path, kwargs = (
        content.get("class"),
        content.get("module_path"),
        cast("Any", content.get("kwargs") or {}),
    )
    if not isinstance(name, str):
        raise ConfigError(f"{place}.class is {name!r}; it must be a class's name")
    if not isinstance(kwargs, dict):
        raise ConfigError(f"{place}.kwargs is {kwargs!r}; it must be a mapping of names to values")
    return Component(name, module_path, cast("dict[str, Any]", kwargs), place)


def _section(cls: type[_Section], content: Any, place: str) -> _Section:
    if not isinstance(content, dict):
        raise ConfigError(f"{place or 'the file'} is {content!r}; it must be a mapping")
    given = cast("dict[str, Any]", content)
    fields = {each.name: each for each in dataclasses.fields(cast(Any, cls))}
    prefix = f"{place}." if place else ""
    if unknown := [name for name in given if name not in fields]:
        raise ConfigError(f"unknown key {prefix}{unknown[0]}; possible: {', '.join(fields)}")
    for name, each in fields.items():
        if name not in given and each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name} is missing")
    hints = typing.get_type_hints(cls)
    return cls(**{name: _value(hints[name], value, f"{prefix}{name}") for name, value in given.items()})


def _value(kind: Any, value: Any, place: str) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and types.NoneType in options:
        return None
    kind = next(option for option in options if option is not types.NoneType)
    if kind is Component:
        if not isinstance(value, dict):
            raise ConfigError(f"{place} is {value!r}; it must be a mapping with class, module_path, kwargs")
        return _component(cast("dict[str, Any]", value), place)
    if dataclasses.is_dataclass(kind):
        return _section(cast("type[Any]", kind), value, place)
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise ConfigError(f"{place} is {value!r}; possible: {', '.join(map(str, typing.get_args(kind)))}")
        return value
    if typing.get_origin(kind) is list:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[Any]", value)):
            raise ConfigError(f"{place} is {value!r}; it must be a list of strings")
        return cast("list[str]", value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind]
        raise ConfigError(f"{place} is {value!r}; it must be {words}{' or null' if types.NoneType in options else ''}")
    return value
