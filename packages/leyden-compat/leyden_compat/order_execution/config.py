"""Configuration files of `leyden rl`: YAML or JSON, with sections as in Qlib's.

    _base_: common.yaml      # or a list; this file overrides it, and a base the next one
    policy:
      _delete_: true         # replaces the base's `policy` instead of being merged into it
      class: PPO
      kwargs: {lr: 0.0001}

Every key is checked before anything is started. This module knows the keys, and makes components of `{class,
module_path, kwargs}`; `run.py` trains and tests with them. To add a key, add a field to the model of its section. To
give a class a short name, add it to `_CLASSES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from leyden._lib.components import accepts, check_arguments, load_class, resolve_name
from leyden._lib.json import Json, is_object
from leyden._lib.options import nearest
from leyden.errors import ConfigError
from leyden.rl.env.factory import ENV_KINDS

_HERE: Final = "leyden_compat.order_execution"
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
SHORT_NAMES: Final[Mapping[str, str]] = {
    name: f"{module}.{name}" for module, names in _CLASSES.items() for name in names
}
"""The import paths of the classes that need no module_path."""


class _Section(BaseModel):
    """The base of sections. Unknown keys raise an error, and no value is converted."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, content: object) -> object:
        """Refuse an unknown key before any other error, because it often explains a missing one."""
        possible = [field.alias or name for name, field in cls.model_fields.items()]
        if is_object(content) and (unknown := [key for key in content if key not in possible]):
            hint, keys = nearest(str(unknown[0]), possible), f"possible: {', '.join(possible)}"
            message = f"{unknown[0]}; {keys if hint == keys else f'{hint} {keys}'}"
            raise PydanticCustomError("unknown_key", "{message}", {"message": message})
        return content


SectionType = TypeVar("SectionType", bound=_Section)


class ComponentSection(_Section):
    """A class and its arguments: `{class, module_path, kwargs}`."""

    class_: str = Field(alias="class")
    module_path: str | None = None
    kwargs: Annotated[dict[str, Any], BeforeValidator(lambda kwargs: {} if kwargs is None else kwargs)] = {}

    def takes(self, name: str, *, where: str) -> bool:
        """Return whether the section's class has an argument of this name.

        where: where the component stands in the file, for messages.
        """
        return accepts(self._load(where), name)

    def build(self, where: str, **known: Any) -> Any:
        """Return an instance of the section's class.

        where: where the component stands in the file, for messages.
        known: arguments to use where the file gives none; those that the class does not take are left out.
        Raise ConfigError if the class cannot be imported, or for a wrong argument.
        """
        cls = self._load(where)
        arguments = {name: value for name, value in known.items() if accepts(cls, name)}
        arguments |= {name: _built(value, f"{where}.kwargs.{name}") for name, value in self.kwargs.items()}
        check_arguments(cls, arguments, spec_name=f"{where}.kwargs", remedy="add it to the file")
        try:
            return cls(**arguments)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    def _load(self, where: str) -> Any:
        """Return the section's class. Raise ConfigError if it cannot be imported."""
        if self.module_path is None:
            return resolve_name(self.class_, spec_name=f"{where}.class", registry=SHORT_NAMES)
        try:
            return load_class(f"{self.module_path}:{self.class_}")
        except ConfigError as error:
            hint = f"; {self.class_} is Leyden's own and needs no module_path" if self.class_ in SHORT_NAMES else ""
            raise ConfigError(f"{where}.module_path: {error}{hint}") from error


def _built(value: Any, where: str) -> Any:
    return _parse(ComponentSection, value, where).build(where) if is_object(value) and "class" in value else value


def _check_env_kind(name: str) -> str:
    if name not in ENV_KINDS and "." not in name:  # a path is imported later, when `extra_module_paths` are known
        raise ValueError(f"possible: {', '.join(ENV_KINDS)}, or the import path of a class")
    return name


class RuntimeSection(_Section):
    """The section `runtime` of a configuration."""

    seed: int = 0
    """The seed of Python's, NumPy's and torch's generators, and of the policy."""
    use_cuda: bool = False
    """Whether the network is on the GPU."""


class EnvSection(_Section):
    """The section `env` of a configuration."""

    concurrency: int = 1
    """The number of simulators that run at once."""
    parallel_mode: Annotated[str, AfterValidator(_check_env_kind)] = "dummy"
    """The kind of vectorised environment: a name in `ENV_KINDS`, or the import path of a class."""
    extra_module_paths: list[str] = []
    """Folders that modules are imported from too."""


class SimulatorSection(_Section):
    """The section `simulator` of a configuration."""

    data_granularity: int = 1
    """Minutes in a bar."""
    time_per_step: int = 30
    """Minutes in a step."""
    vol_limit: float | None = None
    """The share of the market's volume that a tick may trade; None: no limit."""


class SourceSection(_Section):
    """The section `data.source` of a configuration."""

    order_dir: str
    """A folder with `train`, `valid` and `test`, each a .csv or .parquet file, or a folder of such files."""
    feature_root_dir: str
    """The folder of the files of bars."""
    feature_columns_today: list[str] = []
    feature_columns_yesterday: list[str] = []
    default_start_time_index: int = 0
    """The minute of the day at which an order with a date and no times begins."""
    default_end_time_index: int | None = None
    """The minute of the day before which such an order ends; None: at the day's end."""


class DataSection(_Section):
    """The section `data` of a configuration."""

    source: SourceSection


class TrainerSection(_Section):
    """The section `trainer` of a configuration. An epoch is an iteration: collect, then update."""

    max_epoch: int
    episode_per_collect: int
    batch_size: int | None = None
    """None: the default of the policy's `update`."""
    repeat_per_collect: int | None = None
    """None: the default of the policy's `update`."""
    val_every_n_epoch: int | None = None
    """None: no validation."""
    earlystop_patience: int | None = None
    """Stop after this many validations without a better price advantage; None: never."""
    checkpoint_path: str | None = None
    """The run's folder, in which to train or whose policy to test, unless the command line names one;
    None: a new folder."""
    checkpoint_every_n_iters: int = 1
    buffer_size: int | None = None
    """Transitions in the policy's buffer; None: room for a collect, at least 20,000."""


class RunConfig(_Section):
    """The content of a configuration file of `leyden rl train` and `leyden rl backtest`."""

    data: DataSection
    policy: ComponentSection
    state_interpreter: ComponentSection
    action_interpreter: ComponentSection
    trainer: TrainerSection
    runtime: RuntimeSection = RuntimeSection()
    env: EnvSection = EnvSection()
    simulator: SimulatorSection = SimulatorSection()
    reward: ComponentSection | None = None
    network: ComponentSection | None = None


def load_config(path: str | Path) -> RunConfig:
    """Return the configuration in a file, with that of its bases.

    Raise ConfigError, which names the file and the key, if it cannot be read or a key is wrong.
    """
    content = read_config(path)
    try:
        return _parse(RunConfig, content, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_config(path: str | Path) -> Json:
    """Return the content of a file with that of its bases. Its keys are not checked.

    Raise ConfigError for a file that cannot be read, is no mapping, or is its own base.
    """
    return _read(Path(path), ())


def _read(path: Path, inside: tuple[Path, ...]) -> Json:
    """Return the content of a file over that of its bases.

    inside: the files whose base this one is, the outermost first.
    """
    path = path.absolute()
    if path in inside:
        raise ConfigError(f"{path} is its own base, by way of {' -> '.join(each.name for each in inside)}")
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path} is no .yaml, .yml or .json file; give one of these")
    try:
        with path.open(encoding="utf-8") as file:  # YAML's errors name the file that it reads
            config: object = (
                json.load(file, object_pairs_hook=_without_repeats)
                if path.suffix == ".json"
                else yaml.load(file, _Loader)
            )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not written correctly: {error}") from None
    if not is_object(config):
        raise ConfigError(f"{path} holds no sections; it must be a mapping such as 'policy: ...'")
    bases = config.pop("_base_", [])
    for base in [bases] if isinstance(bases, str) else bases:
        config = _merged(_read(path.parent / base, (*inside, path)), config)
    return _without_marks(config)


class _Loader(yaml.SafeLoader):
    """Raises ValueError for a repeated key. YAML's own loader silently takes the last value."""

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


def _merged(base: Json, own: Json) -> Json:
    """Return `own` merged into `base`, mapping by mapping; values of `own` win.

    A mapping with `_delete_: true` replaces the base's mapping, which Qlib's parser does not do.
    """
    merged = dict(base)
    for name, value in own.items():
        before = merged.get(name)
        if is_object(before) and is_object(value) and not value.get("_delete_"):
            value = _merged(before, value)
        merged[name] = value
    return merged


def _without_marks(config: Any) -> Any:
    """Return the content without the keys `_delete_`."""
    if not is_object(config):
        return config
    return {name: _without_marks(value) for name, value in config.items() if name != "_delete_"}


_WANTED: Final[Mapping[str, str]] = {
    "bool_type": "true or false",
    "dict_type": "a mapping of names to values",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a mapping",
    "string_type": "a string",
}
"""The kind of value that is wanted, by the type of pydantic's error."""


def _parse(kind: type[SectionType], content: Any, where: str) -> SectionType:
    """Return a section, read from the content of the file at `where`.

    Raise ConfigError for the first key that is wrong.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    at = ".".join([*([where] if where else []), *map(str, first["loc"])])
    match first["type"]:
        case "unknown_key":
            raise ConfigError(f"unknown key {at + '.' if at else ''}{first['msg']}")
        case "missing":
            raise ConfigError(f"{at} is missing; add it to the file")
        case "value_error":
            raise ConfigError(f"{at} is {first['input']!r}; {first.get('ctx', {})['error']}")
        case wrong:
            raise ConfigError(
                f"{at or 'the file'} is {first['input']!r}; it must be {_WANTED.get(wrong, first['msg'])}"
            )
