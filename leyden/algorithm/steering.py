"""`AlgorithmOptions`: the options of an algorithm that may change between two of its steps.

An algorithm declares them (`Algorithm.changeable`). To check a value, a second algorithm is made with it, by the
constructor that has made the first one; to set it, the attributes that the option decides are copied from the second
to the first. So a value that a new run would refuse is refused here, with the same message.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from leyden._lib.annotations import as_option
from leyden._lib.components import arguments_of
from leyden._lib.json import is_object
from leyden._lib.options import option_names
from leyden.algorithm.algorithm import Algorithm
from leyden.training.callbacks import HookResult
from leyden.training.runs.start import option_path

_SECTION = "algorithm."


def steerable(algorithm: Algorithm | None) -> AlgorithmOptions | str:
    """Return the options of an algorithm; a text says why there are none, and its run can only be stopped."""
    if algorithm is None:
        return "the run has no algorithm whose steps could be steered; it can only be stopped"
    if algorithm.steps_option is None:
        name = getattr(algorithm, "__name__", type(algorithm).__name__)
        return f"{name} owns its loop, and Leyden does not know where a step of it ends; the run can only be stopped"
    return AlgorithmOptions(algorithm)


class AlgorithmOptions:
    """A `Steerable` of an algorithm that has steps."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._accepted = set(option_names(type(algorithm)))
        """The arguments of the constructor."""
        self._changed: dict[str, Any] = {}
        """New values of arguments of the constructor."""
        self._originals: dict[str, Any] = {}
        """Attributes as they were before the first change."""

    @property
    def steps_path(self) -> str:
        return f"{_SECTION}{self._algorithm.steps_option}"

    def full_path(self, path: str) -> str:
        return ".".join(option_path(path, {}))

    def settings(self) -> Mapping[str, Any]:
        algorithm, found = self._algorithm, dict[str, Any]()
        for path, attributes in algorithm.changeable_options().items():
            head, _, leaf = path.partition(".")
            held = getattr(algorithm, head if hasattr(algorithm, head) else attributes[0])
            found[_SECTION + path] = getattr(held, leaf) if leaf else held
        return found

    def why_fixed(self, path: str) -> str | None:
        name, section = path.removeprefix(_SECTION), path.split(".", 1)[0]
        if section != "algorithm":
            return f"the {section} holds from the start of the process"
        head = name.split(".", 1)[0]
        held: Any = getattr(self._algorithm, head, None)
        leaf = name.partition(".")[2].split(".")[0]
        if head not in self._accepted or (leaf and not is_object(held) and not hasattr(held, leaf)):
            return None
        new = f"a new run takes it: leyden run --from RUN --set {name}=..."
        return f"{self._algorithm.fixed_options.get(head, 'it holds from the first step to the last')}; {new}"

    def checked(self, path: str, value: Any) -> Any:
        head, _, leaf = path.removeprefix(_SECTION).partition(".")
        holder: Any = self._algorithm
        held: Any = getattr(holder, head) if leaf else holder
        value = as_option(held.__class__, leaf or head, value)
        self._algorithm.check_change(self._changed_to(path, value)[1])
        return value

    def change(self, path: str, value: Any, n_finished: int) -> HookResult:
        changed, made = self._changed_to(path, value)
        for name in self._algorithm.changeable_options()[path.removeprefix(_SECTION)]:
            self._originals.setdefault(name, getattr(self._algorithm, name))
            setattr(self._algorithm, name, getattr(made, name))
        self._changed |= changed
        return self._algorithm.options_changed(n_finished)

    def reset(self) -> None:
        for name, value in self._originals.items():
            setattr(self._algorithm, name, value)
        self._originals, self._changed = {}, {}

    def _arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments as they are now. A component that was given as a dict is the one made of
        it, which is not made again.
        """
        given = {**arguments_of(self._algorithm), **self._changed}
        made = {name: getattr(self._algorithm, name, None) for name, each in given.items() if isinstance(each, Mapping)}
        return {**given, **{name: each for name, each in made.items() if each is not None}}

    def _changed_to(self, path: str, value: Any) -> tuple[dict[str, Any], Algorithm]:
        """Return the changed argument of the constructor, and an algorithm that was made with it."""
        head, _, leaf = path.removeprefix(_SECTION).partition(".")
        if leaf:
            held = getattr(self._algorithm, head)
            assert is_dataclass(held) and not isinstance(held, type)
            value = replace(held, **{leaf: value})
        arguments = self._arguments()
        if head in self._accepted:
            return {head: value}, type(self._algorithm)(**{**arguments, head: value})
        made = copy.copy(self._algorithm)  # a subclass whose constructor has other arguments
        setattr(made, head, value)
        return {}, made
