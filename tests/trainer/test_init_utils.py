"""Every documented form of a spec gives an instance, and every other one an error that says what is possible."""

from __future__ import annotations

import re
from typing import Any

import pytest

from leyden.adapter import LlmProxyTraceToTriplet, TraceAdapter
from leyden.algorithm import Algorithm, Baseline
from leyden.errors import ConfigError
from leyden.trainer.init_utils import build_component
from leyden.trainer.registry import AlgorithmRegistry


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
    assert build(None) is None
    assert build(None, default_factory=lambda: baseline) is baseline


def test_optional_defaults_fill_only_what_the_class_accepts_and_the_spec_left_open() -> None:
    assert build("baseline", optional_defaults={"n_epochs": 3, "no_such_option": 1}).n_epochs == 3
    assert build({"type": "baseline", "n_epochs": 2}, optional_defaults={"n_epochs": 3}).n_epochs == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("baselin", "did you mean 'baseline'?"),
        ("leyden.algorithm.NoSuch", "has no 'NoSuch'"),
        ("no_such_package.Thing", "cannot import"),
        ({"n_epochs": 1}, "does not say which component"),
        ({"type": "baseline", "n_epoch": 1}, "did you mean 'n_epochs'?"),
        ({"type": "policy_gradient"}, "needs backend"),
        (42, "is no component"),
        (lambda: LlmProxyTraceToTriplet(), "made a LlmProxyTraceToTriplet, not a Algorithm"),
    ],
)
def test_a_spec_that_means_nothing_is_refused_with_what_is_possible(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(spec)


def test_a_thing_of_another_kind_is_a_type_error_too() -> None:
    with pytest.raises(TypeError, match="not a TraceAdapter"):
        build_component(Baseline, expected_type=TraceAdapter, spec_name="adapter")
