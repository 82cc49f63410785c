"""`@algo`: make an algorithm of a function. The function gets the keyword arguments that it names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from leyden.algorithm.algorithm import Algorithm, Dataset
from leyden.errors import ConfigError, InvalidArgument

_SOURCES: dict[str, Callable[[FunctionalAlgorithm], Any]] = {
    "store": lambda algorithm: algorithm.get_store(),
    "collector": lambda algorithm: algorithm.collector,
    "evaluator": lambda algorithm: algorithm.evaluator,
    "adapter": lambda algorithm: algorithm.get_adapter(),
    "llm_proxy": lambda algorithm: algorithm.get_llm_proxy(),
    "initial_resources": lambda algorithm: algorithm.get_initial_resources(),
    "run": lambda algorithm: algorithm.get_run(),
}
_DATASETS = ("train_dataset", "val_dataset")


class FunctionalAlgorithm(Algorithm):
    """An algorithm that calls a function, with those of these keyword arguments that it names: store, collector,
    evaluator, adapter, llm_proxy, initial_resources, run, train_dataset and val_dataset.

    A function that takes `run` can be started again after a failure. Then `run.resume` is true, `run.directory` holds
    the files that it wrote, and ids derived from `run.run_id` find the rollouts that it had enqueued.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._parameters = _check_parameters(function)
        self.uses_gateway = "llm_proxy" in self._parameters
        self.resumable = "run" in self._parameters
        functools.update_wrapper(self, function)

    @property
    def function(self) -> Callable[..., Any]:
        return self._function

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> Awaitable[Any] | Any:
        """Call the function, and return its result.

        Raise InvalidArgument (a TypeError) for a data set that was given but that the function does not name.
        """
        given = dict(zip(_DATASETS, (train_dataset, val_dataset), strict=True))
        for name, dataset in given.items():
            if dataset is not None and name not in self._parameters:
                raise InvalidArgument(
                    f"{name} was given, but algorithm {self._function.__qualname__!r} does not accept it; "
                    f"add a keyword parameter {name!r} to the function, or do not pass the data set"
                )
        values: dict[str, Any] = {name: get(self) for name, get in _SOURCES.items() if name in self._parameters}
        values.update({name: dataset for name, dataset in given.items() if name in self._parameters})
        return self._function(**values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _check_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters for which there is an argument. Raise ConfigError for another parameter
    without a default, and for one that is positional only.
    """
    possible = (*_SOURCES, *_DATASETS)
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # `*args` and `**kwargs` are given nothing
        by_position = parameter.kind is parameter.POSITIONAL_ONLY
        if by_position or (parameter.name not in possible and parameter.default is parameter.empty):
            raise ConfigError(
                f"algorithm {function.__qualname__!r} has a parameter {str(parameter)!r} that nothing can be passed to; "
                f"possible: {', '.join(possible)}, or any with a default value"
            )
        if parameter.name in possible:
            names.append(parameter.name)
    return frozenset(names)


def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make an algorithm of a sync or async function.

        @algo
        async def search(*, store, initial_resources, train_dataset): ...

    Raise ConfigError for a parameter without a default that `FunctionalAlgorithm` does not list.
    """
    return FunctionalAlgorithm(function)
