"""Pickle a payload for another process, and name the part that cannot be pickled.

Decorated agents at the top of a module are pickled by name. Functions and classes of a script or a notebook, lambdas
and closures are pickled by value (cloudpickle). This module knows no process. To make another kind of object picklable,
give it `__reduce__`.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType
from typing import Any, cast

from leyden._lib.pickling import CloudPickler
from leyden.agent import FunctionalLitAgent
from leyden.errors import ConfigError
from leyden.execution.execution_strategy import PortableRunnerBundle


@dataclass(frozen=True, slots=True)
class Payload:
    """The objects that a runner's process receives."""

    bundle: PortableRunnerBundle
    store: Any
    """A store, or a server of one, which is unpacked as its client."""


def pack(payload: Payload, *, imports_main: bool = True) -> bytes:
    """Return the payload as bytes, for `unpack` in another process.

    imports_main: whether the other process imports this one's main script if possible. Otherwise objects of the script
        are pickled by value.
    Raise ConfigError, which names the part that cannot be pickled.
    """
    main = sys.modules["__main__"]
    has_source = getattr(main, "__spec__", None) is not None or getattr(main, "__file__", None) is not None
    by_name = imports_main and has_source
    try:
        return _dumps(payload, by_name)
    except Exception as error:
        name, culprit = _culprit(payload, by_name)
        raise ConfigError(
            f"{name} (a {type(culprit).__name__}) cannot go to another process: {error}. Make it where it is needed (in the agent, in "
            "a hook's method, at the top of a module), or use strategy='shm'"
        ) from error


def unpack(packed: bytes) -> Payload:
    """Return the payload. Raise any error that its parts raise when they are recreated."""
    return cast(Payload, pickle.loads(packed))


class _Pickler(CloudPickler):
    """Pickles decorated agents of the main script by value, unless the script can be imported."""

    def __init__(self, file: io.BytesIO, main_by_name: bool) -> None:
        super().__init__(file)
        self._main_by_name = main_by_name

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionalLitAgent) and obj.__module__ == "__main__" and not self._main_by_name:
            return obj.reduce_by_value()
        return super().reducer_override(obj)


def _dumps(thing: Any, main_by_name: bool) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, main_by_name).dump(thing)
    return buffer.getvalue()


def _culprit(payload: Payload, main_by_name: bool) -> tuple[str, Any]:
    """Return the smallest part that cannot be pickled, and its name for a message. Descends from the payload into the
    first part that cannot be pickled, until there is none.
    """
    name, thing, seen = "the runners' payload", cast(Any, payload), set[int]()
    while True:
        seen.add(id(thing))
        parts = (
            (part, value)
            for part, value in _parts(thing)
            if id(value) not in seen and not _is_picklable(value, main_by_name)
        )
        part, value = next(parts, ("", None))
        if not part:
            return name, thing
        name = part if isinstance(thing, Payload) or thing is payload.bundle else f"{part} of {name}"
        thing = value


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(thing):
        yield from ((field.name, getattr(thing, field.name)) for field in fields(thing))
    elif isinstance(thing, list | tuple):
        yield from ((f"item {index}", item) for index, item in enumerate(cast(Sequence[Any], thing)))
    elif isinstance(thing, FunctionalLitAgent):
        yield "function", thing.function
    elif isinstance(thing, FunctionType):
        yield from inspect.getclosurevars(thing).nonlocals.items()
    elif hasattr(thing, "__dict__") and not isinstance(thing, type):
        yield from cast(dict[str, Any], vars(thing)).items()


def _is_picklable(thing: Any, main_by_name: bool) -> bool:
    try:
        _dumps(thing, main_by_name)
    except Exception:  # noqa: BLE001 -- any error means that it cannot be pickled
        return False
    return True
