"""The configuration that a trainer's run records: the trainer's arguments, resolved to JSON."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from leyden._lib.components import arguments_of
from leyden.agent import FunctionalLitAgent, LitAgent
from leyden.algorithm import Algorithm, Dataset
from leyden.algorithm.decorator import FunctionalAlgorithm
from leyden.training.runs.run_code import describe_code
from leyden.training.runs.run_description import (
    NOT_DEFAULT,
    changed_options,
    describe,
    describe_dataset,
    describe_model,
    describe_program,
    import_path,
)


def code_of(trainer: Any, agent: LitAgent[Any]) -> dict[str, Any]:
    """Return the code that decides what a trainer's run does (`describe_code`)."""
    return describe_code(agent, trainer.algorithm, trainer.adapter, trainer.runner, trainer.hooks, trainer.callbacks)


def agent_name(agent: LitAgent[Any]) -> str:
    return import_path(agent.function if isinstance(agent, FunctionalLitAgent) else agent)


def run_config(
    algorithm: Algorithm | None,
    *,
    agent: LitAgent[Any],
    code: dict[str, Any],
    train_dataset: Dataset[Any] | None,
    val_dataset: Dataset[Any] | None,
    strategy: object,
    adapter: object,
    tracer: object,
    n_runners: int,
    concurrency: int,
    max_rollouts: int | None,
    trainer_options: dict[str, Any],
) -> dict[str, Any]:
    """Return the configuration that a run of `fit` records, as JSON.

    It includes digests of the data sets, which take at most about a second each.
    code: from `code_of`.
    trainer_options: the trainer's options that are not defaults, by dotted path.
    """
    described = algorithm_config(algorithm)
    function = agent.function if isinstance(agent, FunctionalLitAgent) else None
    data = {"train": train_dataset, "val": val_dataset}
    return {
        **described,
        "agent": {
            "name": agent_name(agent),
            "options": describe(_values_of(function)) if function else {},
        },
        "code": code,
        NOT_DEFAULT: {
            **({} if function else changed_options(agent, "agent")),
            **described[NOT_DEFAULT],
            **trainer_options,
        },
        "data": {name: None if dataset is None else describe_dataset(dataset) for name, dataset in data.items()},
        "strategy": import_path(type(strategy)),
        "strategy_options": _options(strategy),
        "adapter": _component(adapter),
        "tracer": None if tracer is None else _component(tracer),
        "n_runners": n_runners,
        "concurrency": concurrency,
        "max_rollouts": max_rollouts,
        **describe_program(),
    }


def _values_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the values that a function has beside its code: its defaults, and variables of a function around it."""
    if not inspect.isfunction(plain := inspect.unwrap(function)):
        return {}
    defaults = {name: each.default for name, each in inspect.signature(plain).parameters.items()}
    given = {name: each for name, each in defaults.items() if each is not None and each is not inspect.Parameter.empty}
    for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable without a value yet
            given[name] = cell.cell_contents
    return given


def _component(made: object) -> dict[str, Any]:
    return {"name": import_path(type(made)), "options": _options(made)}


def _options(component: object) -> dict[str, Any]:
    plain = (bool, int, float, str, list, tuple, type(None))
    attributes: dict[str, Any] = getattr(component, "__dict__", {})
    return describe({name: each for name, each in attributes.items() if name[0] != "_" and isinstance(each, plain)})


def algorithm_config(algorithm: Algorithm | None) -> dict[str, Any]:
    """Return the algorithm's import path and options, its options that are not defaults by dotted path, its model, and
    its seed, as JSON. Without an algorithm, or if it has no model or seed, the value is None.
    """
    if algorithm is None:
        return {"algorithm": None, "model": None, "seed": None, NOT_DEFAULT: {}}
    if isinstance(algorithm, FunctionalAlgorithm):
        name, options = import_path(algorithm.function), dict[str, Any]()
    else:
        name, options = import_path(type(algorithm)), arguments_of(algorithm)
    model = algorithm.trained_model()
    seed = getattr(algorithm, "seed", options.get("seed"))
    return {
        "algorithm": {
            "name": name,
            "options": describe(options),
            "credit": describe(algorithm.credit_assignment()),
        },
        "model": None if model is None else describe_model(model),
        "seed": describe(seed),
        NOT_DEFAULT: changed_options(algorithm, "algorithm"),
    }
