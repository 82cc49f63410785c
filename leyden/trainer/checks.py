"""Check a trainer's arguments before anything starts.

Each error says what was given and what is possible.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

from leyden.errors import ConfigError
from leyden.execution import ExecutionStrategy
from leyden.runner import Runner
from leyden.types import NamedResources, Resource, Retention

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
    """Raise ConfigError for an option of the trainer that its runner has with another value,
    because it would have no effect.
    """
    for name, value in options.items():
        if value is not None and getattr(runner, name, value) != value:
            raise ConfigError(
                f"{name}={value!r}, but the runner given has {name}={getattr(runner, name)!r}; set it on the runner only"
            )


def require_followed(strategy: ExecutionStrategy, **options: Any) -> None:
    """Raise ConfigError for an option of the trainer that its strategy does not have, or has with
    another value, because it would have no effect.

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


def check_dataset(name: str, dataset: object) -> None:
    """Raise ConfigError for a data set without a length or items by index (a generator), and for
    text and dicts, which are mistakes although they have both.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, str | bytes | Mapping):
        lines = f", for example the lines of the file: [json.loads(line) for line in open({dataset!r:.200})]"
        raise ConfigError(f"{name} is a {kind}; give a list of tasks{lines if isinstance(dataset, str) else ''}")
    if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"{name} is a {type(dataset).__name__}; give a list, or anything else with a length and items by index"
        )


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
    """Raise ConfigError if a command of `leyden` is importing the file that calls `fit`, because an
    import must not start a run.
    """
    if (command := imported_by.get()) is not None:
        raise ConfigError(
            f"the file starts a run when {command} imports it; put the lines that start it under "
            "`if __name__ == '__main__':`"
        )
