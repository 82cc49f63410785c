"""One notion of a number, whatever library made the value, at every door that takes one."""

import datetime
import decimal
import enum
import fractions
import math
import subprocess
import sys
from typing import Any

import pytest

import leyden as ly
from leyden._lib.numbers import as_number, exact_number, finite_number, mean_of
from leyden.agent import result_spans
from leyden.agent.emitter import emit_reward
from leyden.errors import ConfigError, InvalidEmission, InvalidMetrics, InvalidReturn
from leyden.execution.runner.process.reported_reward import read_reward
from leyden.legacy.types import RolloutLegacy
from leyden.training import LogCollector, MetricsAggregator
from leyden.training.metrics import clean_metrics
from leyden.types import Attempt, AttemptedRollout, Feedback, get_rewards_from_span

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

ROLLOUT = AttemptedRollout(
    rollout_id="ro-1",
    input=None,
    start_time=0.0,
    attempt=Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0),
)


class Convertible:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __float__(self) -> float:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Index:
    def __index__(self) -> int:
        return 2**53 + 1


class Level(enum.IntEnum):
    HIGH = 2


HALVES = [
    0.5,
    np.float16(0.5),
    np.float32(0.5),
    np.longdouble(0.5),
    np.array(0.5),
    np.array([[0.5]]),
    np.ma.array(0.5),
    np.array(decimal.Decimal("0.5"), dtype=object),
    torch.tensor(0.5),
    torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True),
    decimal.Decimal("0.5"),
    fractions.Fraction(1, 2),
    Convertible(0.5),
]
WHOLE = [(1, 1), (np.int64(3), 3), (np.uint8(3), 3), (torch.tensor(7), 7), (Level.HIGH, 2), (Index(), 2**53 + 1)]
NOT_ONE = [
    ("0.5", "is '0.5' \\(a str\\), which is no number"),
    (np.str_("1"), "which is no number"),
    (b"1", "which is no number"),
    (None, "is None"),
    ([0.5], "which is no number"),
    ({"a": 1}, "which is no number"),
    (object(), "which is no number"),
    (Convertible, "which is no number"),
    (1j, "which is no number"),
    (np.complex64(1), "which is no number"),
    (torch.tensor(1j), "which is no number"),
    (np.array("1"), "which is no number"),
    (np.array(None), "which is no number"),
    (np.datetime64(1, "ns"), "which is no number"),
    (np.timedelta64(1, "ns"), "which is no number"),
    (datetime.timedelta(1), "which is no number"),
    (np.ma.masked, "is masked, so it holds no number"),
    (np.ma.array([1.0], mask=[True]), "is masked"),
    (np.array([1.0, 2.0]), "has 2 elements, not one number"),
    (np.zeros((0, 3)), "has 0 elements"),
    (torch.zeros(2, 2), "has 4 elements"),
    (torch.empty((), device="meta"), "which is no number: "),
    (Convertible(RuntimeError("no")), "which is no number: no"),
    (decimal.Decimal("sNaN"), "which is no number"),
    (decimal.Decimal("1e400"), "more than a float can hold"),
    (fractions.Fraction(10**400), "more than a float can hold"),
    (np.longdouble("1e4000"), "more than a float can hold"),
    (10**400, "more than a float can hold"),
]
NOT_FINITE = [math.nan, -math.inf, np.float32("nan"), np.array(np.inf), torch.tensor(math.nan), decimal.Decimal("NaN")]


@pytest.mark.parametrize("value", HALVES, ids=lambda value: type(value).__name__)
def test_one_number_of_any_library_is_that_number(value: Any) -> None:
    assert as_number(value) == finite_number(value) == exact_number(value) == 0.5
    assert type(as_number(value)) is type(finite_number(value)) is float


@pytest.mark.parametrize(("value", "number"), WHOLE, ids=lambda value: type(value).__name__)
def test_a_whole_number_stays_one(value: Any, number: int) -> None:
    assert as_number(value) == exact_number(value) == number
    assert type(as_number(value)) is int


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True)], ids=lambda value: type(value).__name__)
def test_a_bool_counts_as_one_or_zero(value: Any) -> None:
    assert as_number(value) is True
    assert finite_number(value) == 1.0
    assert type(finite_number(value)) is float


@pytest.mark.filterwarnings("ignore:Warning. converting a masked element")
@pytest.mark.parametrize(("value", "message"), NOT_ONE)
def test_what_holds_no_single_number_is_refused_by_what_it_is(value: Any, message: str) -> None:
    for read in (as_number, finite_number):
        with pytest.raises(ValueError, match=message):
            read(value)


@pytest.mark.parametrize("value", NOT_FINITE, ids=repr)
def test_only_a_finite_number_is_finite(value: Any) -> None:
    assert not math.isfinite(as_number(value))
    for read in (finite_number, exact_number):
        with pytest.raises(ValueError, match="which is no finite number"):
            read(value)


def test_what_a_float_would_round_is_not_exact() -> None:
    assert exact_number(decimal.Decimal("0.1")) == 0.1
    assert exact_number(10**400) == 10**400
    for value in (fractions.Fraction(1, 3), decimal.Decimal("0.10000000000000000001")):
        with pytest.raises(ValueError, match="which a float would round"):
            exact_number(value)


def of_an_agent(value: Any) -> float:
    (span,) = result_spans(value, ROLLOUT)
    return get_rewards_from_span(span)["primary"]


def of_an_agent_by_name(value: Any) -> float:
    (span,) = result_spans({"a": value}, ROLLOUT)
    return get_rewards_from_span(span)["a"]


def emitted(value: Any) -> float:
    return get_rewards_from_span(emit_reward(value, propagate=False))["primary"]


def emitted_by_name(value: Any) -> float:
    return get_rewards_from_span(emit_reward({"a": 1.0, "b": value}, primary_key="a", propagate=False))["b"]


def annotated(value: Any) -> Any:
    return ly.emit_annotation({"a": {"b": value}}, propagate=False).attributes["a.b"]


def annotated_in_a_list(value: Any) -> Any:
    attribute: Any = ly.emit_annotation({"a": [value, 1.0]}, propagate=False).attributes["a"]
    return attribute[0]


def fed_back(value: Any) -> Any:
    return Feedback(rollout_id="ro-1", source="user", value=value).value


DOORS = [
    of_an_agent,
    of_an_agent_by_name,
    emitted,
    emitted_by_name,
    annotated,
    annotated_in_a_list,
    fed_back,
]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_every_door_takes_the_same_numbers(door: Any) -> None:
    assert [door(value) for value in HALVES] == [0.5] * len(HALVES)
    assert [door(value) for value, _ in WHOLE] == [number for _, number in WHOLE[:-1]] + [pytest.approx(2**53)]
    assert door(np.bool_(False)) == 0.0
    for value in (np.array([1.0, 2.0]), np.datetime64(1, "ns"), *NOT_FINITE):
        with pytest.raises((InvalidReturn, InvalidEmission, ConfigError, ValueError)):
            door(value)


def test_metrics_take_the_same_numbers() -> None:
    for value in HALVES:
        collector, aggregator = LogCollector(), MetricsAggregator()
        collector.add_scalar("x", value)
        aggregator.add({"x": value})
        assert collector.logs()["x"][1] == clean_metrics({"x": value}, source="a step")["x"] == 0.5
        assert aggregator.metrics() == ({} if getattr(value, "ndim", 0) else {"x": 0.5})  # an array may be a batch
    for value in (np.array([1.0, 2.0]), np.datetime64(1, "ns"), 1j):
        with pytest.raises(InvalidMetrics, match="a step: metric 'x'"):
            clean_metrics({"x": value}, source="a step")


def test_a_report_of_the_old_protocol_takes_the_same_numbers() -> None:
    for value in HALVES:
        assert RolloutLegacy(rollout_id="ro-1", final_reward=value).final_reward == 0.5
    with pytest.raises(ValueError, match=r"final_reward\n.*has 2 elements, not one number"):
        RolloutLegacy(rollout_id="ro-1", final_reward=np.array([1.0, 2.0]))


def test_a_program_s_reward_is_a_number_of_json() -> None:
    assert [read_reward(text) for text in ("true", '{"reward": false}', ".5", "1")] == [True, False, 0.5, 1]
    for text in ('"1"', "null", "1" + 400 * "0"):
        with pytest.raises(ValueError):
            read_reward(text)


def test_reading_numbers_loads_no_numeric_library() -> None:
    code = "import sys, leyden._lib.numbers; print(sorted({'numpy', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([1e308, 1e308], 1e308),
        ([sys.float_info.max] * 5, sys.float_info.max),
        ([1e308, -1e308], 0.0),
        ([1e308, 1e308, -1e308], 1e308 / 3),
        ([5e-324, 5e-324], 5e-324),
        ([0.1] * 10, 0.1),
        ([math.inf, 1.0], math.inf),
        ([math.inf, 1e308, 1e308], math.inf),
    ],
)
def test_a_mean_lies_between_its_values_whatever_their_sum(values: list[float], mean: float) -> None:
    assert mean_of(values) == pytest.approx(mean, rel=1e-15)


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf, -math.inf], [math.nan, 1e308, 1e308]])
def test_a_mean_without_a_meaning_is_nan(values: list[float]) -> None:
    assert math.isnan(mean_of(values))
