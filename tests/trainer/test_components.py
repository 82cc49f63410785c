"""Every documented form of a spec gives an instance, and every other one an error that says what is possible."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from leyden._lib.components import (
    ComponentRegistry,
    accepts,
    build_component,
    check_arguments,
    instantiate_component,
    register_name,
)
from leyden.adapter import LlmProxyTraceToTriplet, TraceAdapter
from leyden.algorithm import Algorithm, Baseline
from leyden.errors import ConfigError
from leyden.trainer import instantiate_from_spec, register_component, registered_components
from leyden.trainer.component_registry import AlgorithmRegistry


def build(spec: Any, **options: Any) -> Any:
    return build_component(spec, expected_type=Algorithm, spec_name="algorithm", registry=AlgorithmRegistry, **options)


@pytest.mark.parametrize(
    "spec",
    [
        Baseline(n_epochs=1),
        Baseline,
        lambda: Baseline(),
        "baseline",
        "leyden.algorithm.Baseline",
        "leyden.algorithm:Baseline",
        {"type": "leyden.algorithm.Baseline", "n_epochs": 1},
        {"type": "baseline"},
        {"name": "baseline", "n_epochs": 1},
        {"type": Baseline},
    ],
)
def test_every_documented_spec_gives_an_instance(spec: Any) -> None:
    built = build(spec)
    assert isinstance(built, Baseline) and built.n_epochs == 1


def test_an_instance_is_used_as_it_is_and_none_means_the_default() -> None:
    baseline = Baseline()
    assert build(baseline) is baseline
    assert build(None, allow_none=True) is None
    assert build(None, allow_none=True, default_factory=lambda: baseline) is baseline
    assert build(None, default_factory=lambda: baseline) is baseline


def test_optional_defaults_fill_only_what_the_class_accepts_and_the_spec_left_open() -> None:
    assert build("baseline", optional_defaults={"n_epochs": 3, "no_such_option": 1}).n_epochs == 3
    assert build({"type": "baseline", "n_epochs": 2}, optional_defaults={"n_epochs": 3}).n_epochs == 2


def test_an_optional_default_that_is_a_function_is_called_only_if_it_is_used() -> None:
    for default in (lambda: 11, functools.partial(int, "11"), Eleven().value):
        assert build("baseline", optional_defaults={"n_epochs": default}).n_epochs == 11
    unused = {"n_epochs": lambda: 1 / 0, "no_such_option": lambda: 1 / 0}
    assert build({"type": "baseline", "n_epochs": 2}, optional_defaults=unused).n_epochs == 2


class Eleven:
    def value(self) -> int:
        return 11


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("baselin", "did you mean 'baseline'?"),
        ("leyden.algorithm.NoSuch", "has no 'NoSuch'"),
        ("no_such_package.Thing", "cannot import"),
        ({"n_epochs": 1}, "does not say which component"),
        ({"type": "baseline", "n_epoch": 1}, "did you mean 'n_epochs'?"),
        ({"type": "policy_gradient"}, "needs backend"),
        ({"type": 42}, "42 is no class"),
        (42, "is no component"),
        (None, "algorithm is missing"),
        (lambda: LlmProxyTraceToTriplet(), "made a LlmProxyTraceToTriplet, not a Algorithm"),
    ],
)
def test_a_spec_that_means_nothing_is_refused_with_what_is_possible(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(spec)


def test_a_thing_of_another_kind_is_a_type_error_too() -> None:
    with pytest.raises(TypeError, match="not a TraceAdapter"):
        build_component(Baseline, expected_type=TraceAdapter, spec_name="adapter")


def test_a_dict_without_a_type_holds_the_arguments_of_the_default_class() -> None:
    built = build({"n_epochs": 3}, dict_requires_type=False, dict_default_cls=Baseline)
    assert isinstance(built, Baseline) and built.n_epochs == 3
    with pytest.raises(ConfigError, match="does not say which component"):
        build({"n_epochs": 3}, dict_default_cls=Baseline)
    with pytest.raises(ConfigError, match="does not say which component"):
        build({"n_epochs": 3}, dict_requires_type=False)
    with pytest.raises(TypeError, match="made a int"):
        build(None, default_factory=lambda: 3)


def test_a_spec_can_be_instantiated_without_an_expected_type() -> None:
    made = instantiate_from_spec({"type": "fractions.Fraction", "numerator": 3}, spec_name="share")
    assert made == 3
    assert instantiate_from_spec("baseline", spec_name="algorithm", registry=AlgorithmRegistry).n_epochs == 1


def slice_of(start: int, stop: int) -> tuple[int, int]:
    return start, stop


def any_options(**options: Any) -> dict[str, Any]:
    return options


@pytest.mark.parametrize(
    ("target", "name", "accepted"),
    [(Baseline, "n_epochs", True), (Baseline, "epochs", False), (any_options, "anything", True), (range, "stop", True)],
)
def test_a_class_accepts_its_arguments_a_function_of_any_options_all(target: Any, name: str, accepted: bool) -> None:
    assert accepts(target, name) is accepted


def test_arguments_are_checked_before_anything_is_made() -> None:
    with pytest.raises(ConfigError, match=r"policy: .*needs stop; add it to the file"):
        check_arguments(slice_of, {"start": 1}, spec_name="policy", remedy="add it to the file")
    check_arguments(range, {"no_such": 1}, spec_name="steps")  # a class of C describes no arguments
    assert instantiate_component(any_options, {"a": 1}, {"b": 2}) == {"a": 1}


def test_a_registry_refuses_a_second_meaning_of_a_name() -> None:
    registry: dict[str, Any] = {}
    register_name(registry, "mine", Baseline, kind="algorithm")
    register_name(registry, "mine", Baseline, kind="algorithm")
    with pytest.raises(ConfigError, match=r"the algorithm 'mine' is .*Baseline.* already"):
        register_name(registry, "mine", any_options, kind="algorithm")
    assert registry == {"mine": Baseline}


@pytest.fixture
def algorithms(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    known = ComponentRegistry("leyden.algorithms", AlgorithmRegistry)
    monkeypatch.setattr("leyden.trainer.component_registry.AlgorithmRegistry", known)
    monkeypatch.setattr("leyden.trainer.component_registry._REGISTRIES", {"algorithm": known})
    return known


@pytest.mark.parametrize("component", [Baseline, lambda: Baseline(), "leyden.algorithm.Baseline"])
def test_a_registered_component_is_found_by_its_name(algorithms: dict[str, Any], component: Any) -> None:
    register_component("algorithm", "mine", component)
    register_component("algorithm", "mine", component)
    assert registered_components("algorithm")["mine"] == component
    built = build_component("mine", expected_type=Algorithm, spec_name="algorithm", registry=algorithms)
    assert isinstance(built, Baseline)


def test_a_name_that_cannot_be_registered_says_why(algorithms: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'algorithms' is no kind of component; possible: algorithm"):
        register_component("algorithms", "mine", Baseline)
    with pytest.raises(ConfigError, match=r"the algorithm 'baseline' is 'leyden\.algorithm\.fast\.Baseline' already"):
        register_component("algorithm", "baseline", LlmProxyTraceToTriplet)
    for name in ("", "a.b", "a:b", "sqlite://x"):
        with pytest.raises(ConfigError, match="choose a name without dots"):
            register_component("algorithm", name, Baseline)
