"""Check a trainer's arguments before anything starts.

Each error says what was given and what is possible.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Generator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

from leyden.errors import ConfigError
from leyden.execution import ExecutionStrategy
from leyden.execution.runner import Runner
from leyden.types import NamedResources, Resource, Retention
from leyden.types.checks import json_value

imported_by: ContextVar[str | None] = ContextVar("leyden_imported_by", default=None)
"""The command that imports the user's file at the moment; None if there is none."""

_LONGEST_NAME = 200

_busy: set[int] = set()
_busy_lock = threading.Lock()


@contextlib.contextmanager
def exclusively(*parts: Any) -> Generator[None]:
    """Reserve the components for one run. Raise ConfigError while another run uses one of them."""
    given = {id(part): type(part).__name__ for part in parts if part is not None}
    with _busy_lock:
        for name in (name for key, name in given.items() if key in _busy):
            raise ConfigError(f"this {name} is in a run already; make another {name}, or wait until that run has ended")
        _busy.update(given)
    try:
        yield
    finally:
        with _busy_lock:
            _busy.difference_update(given)


def require_used(runner: Runner[Any], **options: Any) -> None:
    """Raise ConfigError for an option of the trainer that has no effect, because its runner has another value."""
    for name, value in options.items():
        if value is not None and getattr(runner, name, value) != value:
            raise ConfigError(
                f"{name}={value!r}, but the runner given has {name}={getattr(runner, name)!r}; set it on the runner only"
            )


def require_followed(strategy: ExecutionStrategy, **options: Any) -> None:
    """Raise ConfigError for an option of the trainer that its strategy does not have, or has with another value,
    because it would have no effect.

    options: by the strategy's names.
    """
    kind = type(strategy).__name__
    for name, value in options.items():
        if value is None:
            continue
        if not hasattr(strategy, name):
            raise ConfigError(f"{name}={value!r}, but {kind} has no such option; leave it out, or use strategy='cs'")
        if getattr(strategy, name) != value:
            raise ConfigError(
                f"{name}={value!r}, but the strategy given has {name}={getattr(strategy, name)!r}; set it on the strategy only"
            )


_CHECKED_TASKS = 10_000
"""So many tasks of a data set that is no list are read to check them before a run. The others are checked when they are
read."""


def checked_dataset(name: str, dataset: Any, *, as_tasks: bool) -> Any:
    """Return a data set: any object with a length and items by index, or None.

    as_tasks: the items are tasks, so each must be a JSON value. The items of a list are returned as JSON has them, for
        example `np.int64(1)` as 1.
    Raise ConfigError, which says how to make a list, for anything else (tables, dicts, sets, texts, generators), and
    with the number and the field for a task that is no JSON value.
    """
    if dataset is None:
        return None
    kind = f"{type(dataset).__module__.partition('.')[0]} {type(dataset).__name__}".removeprefix("builtins ")
    if (remedy := _as_list(dataset)) is not None:
        raise ConfigError(f"{name} is a {kind}; give a list of tasks{remedy}")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(f"{name} is a {kind}; give a list, or anything else with a length and items by index")
    if not as_tasks:
        return dataset
    if isinstance(dataset, list | tuple):
        given = cast("Sequence[Any]", dataset)
        tasks = [json_value(task, f"task {index} of {name}") for index, task in enumerate(given)]
        return cast(Any, dataset) if all(map(operator.is_, tasks, given)) else tasks
    tasks = _JsonTasks(dataset, name)
    for index in range(min(len(tasks), _CHECKED_TASKS)):
        _ = tasks[index]  # raises for a task that is no JSON value
    return tasks


class _JsonTasks(Sequence[Any]):
    """A data set whose items are read one at a time, each as JSON has it."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset, name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return json_value(self._dataset[index], f"task {index} of {self._name}")


def _as_list(given: Any) -> str | None:
    """Return how to make a list of an object that only looks like a data set, for a message; None for a data set."""
    if isinstance(given, str):
        return f", for example the lines of the file: [json.loads(line) for line in open({given!r:.200})]"
    if isinstance(given, bytes | bytearray | memoryview):
        return ""
    if callable(getattr(given, "collect", None)) and hasattr(given, "lazy"):  # a lazy frame of polars
        return ": .collect().to_dicts()"
    if hasattr(given, "iloc"):  # pandas
        return ': .to_dict("records")' if hasattr(given, "columns") else ": .tolist()"
    for method in ("to_dicts", "to_pylist"):  # polars, Arrow
        if callable(getattr(given, method, None)):
            return f": .{method}()"
    for method in ("to_list", "tolist"):  # columns of polars, arrays, tensors
        if hasattr(given, "dtype") and callable(getattr(given, method, None)):
            return f": .{method}()"
    if isinstance(given, Mapping):
        parts = cast("Mapping[Any, Any]", given)
        if parts and all(isinstance(part, list | tuple) for part in parts.values()):
            return ", such as [dict(zip(columns, row)) for row in zip(*columns.values())] of a dict of columns"
        if parts and all(hasattr(part, "__getitem__") and not isinstance(part, str) for part in parts.values()):
            return f": one of its parts, such as [{next(iter(parts))!r}], or [task] for one task"
        return ": [task] for one task"
    if isinstance(given, set | frozenset):
        return ": sorted(tasks)"
    if hasattr(given, "__iter__") and not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        return ": list(tasks)"
    return None


def as_tuple(given: Any) -> tuple[Any, ...]:
    """Return the items of a sequence, or one object as a tuple."""
    return tuple(cast(Sequence[Any], given)) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)


def checked_name(name: Any) -> str | None:
    """Return the run's name, or None. Raise ConfigError unless a store can keep it."""
    if name is None or (isinstance(name, str) and name.isprintable() and 0 < len(name) <= _LONGEST_NAME):
        return name
    raise ConfigError(
        f"name is {name!r:.200}; give 1 to {_LONGEST_NAME} printable characters, or None for the folder's name"
    )


def checked_run_dir(run_dir: Any) -> Path | None:
    """Return the run's directory as a path, or None. Raise ConfigError for an empty one."""
    if run_dir is None:
        return None
    if not isinstance(run_dir, str | Path) or not str(run_dir):
        raise ConfigError(f"run_dir is {run_dir!r}; give the path of a directory, or None for a new one under .leyden/")
    return Path(run_dir)


def checked_retention(retention: Any) -> Retention | None:
    """Return the retention, or None. Raise ConfigError for anything else."""
    if retention is None or isinstance(retention, Retention):
        return retention
    raise ConfigError(f"retention is {retention!r:.200}; give a Retention, for example Retention(max_rollouts=100_000)")


def checked_resources(resources: Any) -> NamedResources | None:
    """Return resources by name, or None. Raise ConfigError for other objects."""
    if resources is None:
        return None
    if not isinstance(resources, Mapping):
        raise ConfigError(
            f"initial_resources is a {type(resources).__name__}; give a dict of resources by name, for example "
            "{'prompt': PromptTemplate(template='...')}"
        )
    checked: dict[str, Any] = {}
    for name, resource in cast(Mapping[Any, Any], resources).items():
        if not isinstance(name, str) or not isinstance(resource, Resource):
            raise ConfigError(
                f"initial_resources[{name!r}] is a {type(resource).__name__}; possible: LLM, ProxyLLM, PromptTemplate"
            )
        checked[name] = resource
    return checked


def check_not_imported() -> None:
    """Raise ConfigError if a command is importing the file that calls `fit`: an import must not start a run."""
    if (command := imported_by.get()) is not None:
        raise ConfigError(
            f"the file starts a run when {command} imports it; put the lines that start it under "
            "`if __name__ == '__main__':`"
        )
