"""`@algo`: a function is given what it names, and what cannot be given is an error when it is decorated."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

import leyden as ly
from leyden.adapter import TraceToTriplet
from leyden.algorithm import Run
from leyden.errors import ConfigError
from leyden.store import InMemoryLightningStore


@ly.rollout
async def agent(task: int) -> float:
    return float(task)


def test_every_parameter_that_is_named_is_given_and_no_other() -> None:
    seen: dict[str, Any] = {}

    @ly.algo
    def everything(
        *,
        store: Any,
        collector: Any,
        adapter: Any,
        llm_proxy: Any,
        initial_resources: Any,
        run: Any,
        train_dataset: Any,
        val_dataset: Any,
        tuning: int = 7,
    ) -> None:
        seen.update(locals())

    prompt = {"prompt": ly.PromptTemplate(template="hi")}
    ly.Trainer(algorithm=everything, store="memory", initial_resources=prompt).fit(agent, [1], val_dataset=[2])
    assert isinstance(seen["store"], InMemoryLightningStore)
    assert isinstance(seen["collector"], ly.RolloutCollector)
    assert isinstance(seen["adapter"], TraceToTriplet)
    assert isinstance(seen["llm_proxy"], ly.LLMProxy)
    assert isinstance(seen["run"], Run)
    assert seen["initial_resources"] == prompt
    assert (seen["train_dataset"], seen["val_dataset"], seen["tuning"]) == ([1], [2], 7)


def test_data_sets_that_were_not_given_are_none_or_the_functions_own_default_is_not_asked() -> None:
    seen: list[Any] = []

    @ly.algo
    async def reads(*, train_dataset: Any = None, val_dataset: Any = None) -> None:
        seen.append((train_dataset, val_dataset))

    ly.Trainer(algorithm=reads, store="memory").fit(agent, [1])
    assert seen == [([1], None)]


@pytest.mark.parametrize("name", ["train_dataset", "val_dataset"])
def test_a_data_set_that_was_given_but_is_not_accepted_is_a_type_error(name: str) -> None:
    @ly.algo
    async def deaf(*, store: Any) -> None: ...

    data: dict[str, Any] = {name: [1]}
    with pytest.raises(TypeError, match=f"{name} was given, but algorithm .*deaf"):
        ly.Trainer(algorithm=deaf, store="memory").fit(agent, **data)


def test_only_an_algorithm_that_names_the_gateway_has_one_made() -> None:
    @ly.algo
    def with_gateway(llm_proxy: Any) -> None: ...

    @ly.algo
    def without(store: Any) -> None: ...

    assert (with_gateway.uses_gateway, without.uses_gateway) == (True, False)


@pytest.mark.parametrize(
    ("function", "parameter"),
    [
        (lambda trainset: None, "trainset"),
        (lambda store, /: None, "store"),
    ],
)
def test_a_parameter_that_nothing_can_be_given_to_is_refused_when_decorated(function: Any, parameter: str) -> None:
    with pytest.raises(ConfigError, match=f"'{parameter}'.*possible: store, collector, evaluator, adapter"):
        ly.algo(function)


def test_args_and_kwargs_of_an_algorithm_are_given_nothing() -> None:
    @ly.algo
    def both(*args: Any, train_dataset: Any, **others: Any) -> Any:
        return args, list(train_dataset), others

    assert ly.Trainer(algorithm=both, store="memory").fit(ly.rollout(lambda task: 1.0), [1]).result == ((), [1], {})


def test_the_function_stays_callable_and_known_by_its_name() -> None:
    @ly.algo
    def double(*, tuning: int = 2) -> Any:
        """Twice as much."""
        return 2 * tuning

    assert double(tuning=21) == 42
    assert (double.__name__, inspect.getdoc(double)) == ("double", "Twice as much.")  # type: ignore[attr-defined]
    assert not double.is_async()


def test_what_the_function_raises_ends_the_fit_with_exactly_that() -> None:
    @ly.algo
    async def broken(*, store: Any) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        ly.Trainer(algorithm=broken, store="memory").fit(agent)


async def test_an_asynchronous_function_runs_on_the_callers_loop() -> None:
    loops: list[Any] = []

    @ly.algo
    async def notes(*, store: Any) -> None:
        loops.append(asyncio.get_running_loop())

    await ly.Trainer(algorithm=notes, store="memory").afit(agent)
    assert loops == [asyncio.get_running_loop()]
