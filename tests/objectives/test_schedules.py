"""Learning rates of constant, linear and cosine schedules with a warm-up."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.objectives.schedules import SCHEDULES, default_learning_rate, learning_rate_at


def rates(total: int, **options: Any) -> list[float]:
    return [learning_rate_at(step, total, 2.0, **options) for step in range(total)]


def test_without_options_the_rate_is_constant():
    assert rates(3) == [2.0, 2.0, 2.0]


def test_the_warm_up_rises_evenly_and_reaches_the_full_rate_with_its_last_step():
    assert rates(6, warmup=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_a_linear_schedule_falls_evenly_to_its_final_fraction():
    assert rates(5, kind="linear") == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert rates(6, warmup=1, kind="linear", final_fraction=0.5) == pytest.approx([2.0, 2.0, 1.75, 1.5, 1.25, 1.0])


def test_a_cosine_schedule_is_half_a_wave():
    wanted = [1.0 + math.cos(math.pi * step / 8) for step in range(9)]
    assert rates(9, kind="cosine") == pytest.approx(wanted)


@given(
    total=st.integers(1, 50),
    warmup=st.integers(0, 49),
    kind=st.sampled_from(SCHEDULES),
    final=st.floats(0, 1),
)
def test_a_rate_never_exceeds_its_base_and_falls_after_the_warm_up(total: int, warmup: int, kind: str, final: float):
    warmup = min(warmup, total - 1)
    found = rates(total, warmup=warmup, kind=kind, final_fraction=final)
    assert all(0 <= rate <= 2.0 + 1e-12 for rate in found)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(found[warmup:], found[warmup + 1 :], strict=False))
    assert learning_rate_at(total + 7, total, 2.0, warmup=warmup, kind=kind, final_fraction=final) == found[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "cosin"}, "did you mean 'cosine'"),
        ({"final_fraction": 1.5}, "final_fraction"),
        ({"warmup": -1}, "warmup"),
        ({"warmup": 5, "kind": "linear"}, "leaves none for a linear decay"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        learning_rate_at(0, 5, 1.0, **options)


@pytest.mark.parametrize(
    ("n_weights", "rate", "of_adapter"),
    [
        (117_000, 1e-3, 1e-3),
        (1_000_000, 1e-3, 1e-3),
        (134_515_008, 3e-5, 3e-4),
        (268_098_176, 1e-5, 1e-4),
        (8_000_000_000, 1e-6, 1e-5),
        (None, 1e-5, 1e-4),
    ],
)
def test_the_default_rate_follows_the_models_size_and_whether_an_adapter_is_trained(
    n_weights: int | None, rate: float, of_adapter: float
):
    assert default_learning_rate(n_weights, adapter=False) == rate
    assert default_learning_rate(n_weights, adapter=True) == of_adapter


@given(st.integers(1, 10**12), st.integers(1, 10**12), st.booleans())
def test_a_larger_model_never_gets_a_larger_default_rate(one: int, other: int, adapter: bool):
    small, large = sorted((one, other))
    assert default_learning_rate(small, adapter=adapter) >= default_learning_rate(large, adapter=adapter) >= 1e-6
