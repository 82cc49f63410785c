"""What a policy sees, what its actions mean, what a step is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden_compat.order_execution import (
    Bars,
    BarsProcessedDataProvider,
    CategoricalActionInterpreter,
    CurrentStepStateInterpreter,
    DummyStateInterpreter,
    FullHistoryStateInterpreter,
    OrderDir,
    PAPenaltyReward,
    PPOReward,
    SingleAssetOrderExecutionSimple,
    TwapRelativeActionInterpreter,
)
from tests.compat.order_execution.bars_of import order, six_ticks


def two_days() -> Bars:
    times = np.concatenate(
        [np.datetime64(f"2020-01-0{day}T09:30", "us") + np.arange(6) * np.timedelta64(1, "m") for day in (1, 2)]
    )
    return Bars(times, {"close": np.arange(1.0, 13.0), "volume": np.full(12, 100.0)}, "two days")


def simulator(bars: Bars | None = None, **options: Any) -> SingleAssetOrderExecutionSimple:
    return SingleAssetOrderExecutionSimple(order(**options), data=bars or six_ticks(), ticks_per_step=2)


def full(**options: Any) -> FullHistoryStateInterpreter:
    provider = BarsProcessedDataProvider(
        data=options.pop("data", two_days()), feature_columns_today=["close", "volume"]
    )
    return FullHistoryStateInterpreter(
        **({"max_step": 3, "data_ticks": 6, "data_dim": 2, "processed_data_provider": provider} | options)
    )


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.sampled_from(OrderDir))
def test_every_observation_is_in_its_space(parts: list[float], direction: OrderDir) -> None:
    interpreters = (full(), full(max_step=5, data_ticks=9), CurrentStepStateInterpreter(3), DummyStateInterpreter())
    made = simulator(two_days(), direction=direction)
    for part in (*parts, None):
        for interpreter in interpreters:
            obs = interpreter(made.get_state())  # raises unless it is valid
            assert interpreter.observation_space.contains(obs)
            assert all(array.dtype in (np.float32, np.int32) for array in obs.values())
        if part is None or made.done():
            break
        made.step(min(made.position, part * made.order.amount))


def test_the_history_shows_what_was_and_nothing_of_the_future() -> None:
    made, interpreter = simulator(two_days()), full()
    first = interpreter(made.get_state())
    assert len(first) == 9
    assert not first["data_processed"].any()
    assert first["data_processed_prev"][:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    made.step(2.0)
    obs = interpreter(made.get_state())
    assert obs["data_processed"][:, 0].tolist() == [7, 8, 0, 0, 0, 0]
    assert (int(obs["cur_tick"]), int(obs["cur_step"]), int(obs["num_step"]), int(obs["acquiring"])) == (2, 1, 3, 0)
    assert (float(obs["target"]), float(obs["position"]), obs["position_history"].tolist()) == (6.0, 4.0, [6, 4, 0])
    made.step(2.0)
    made.step(2.0)
    end = interpreter(made.get_state())
    assert (int(end["cur_tick"]), int(end["cur_step"])) == (5, 2)  # inside the space, after the end too
    assert end["position_history"].tolist() == [6, 4, 2]


def test_no_future_price_changes_an_observation() -> None:
    other = two_days()
    changed = Bars(other.times, {"close": np.where(np.arange(12) < 8, other["close"], 99.0), "volume": other["volume"]})
    for bars in (other, changed):
        made = simulator(bars)
        made.step(2.0)
    one, two = (full(data=bars).interpret(made.get_state()) for bars in (other, changed))
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_what_has_no_room_is_named() -> None:
    made = simulator(two_days())
    with pytest.raises(ConfigError, match="6 ticks, data_ticks is 4"):
        full(data_ticks=4)(made.get_state())
    with pytest.raises(ConfigError, match="2 columns, data_dim is 5"):
        full(data_dim=5)(made.get_state())
    made.step(1.0)
    made.step(1.0)
    with pytest.raises(ConfigError, match="2 steps, max_step is 1"):
        CurrentStepStateInterpreter(1)(made.get_state())


def test_categories_are_parts_of_the_order_and_the_last_step_takes_the_rest() -> None:
    interpreter = CategoricalActionInterpreter(4, max_step=3)
    assert interpreter.action_values == [0, 0.25, 0.5, 0.75, 1]
    assert interpreter.action_space.n == 5
    made = simulator()
    assert interpreter(made.get_state(), 1) == 1.5
    made.step(interpreter(made.get_state(), np.int64(3)))
    assert interpreter(made.get_state(), 4) == 1.5  # no more than is left
    made.step(0.0)
    assert interpreter(made.get_state(), 0) == 1.5  # the last step
    assert CategoricalActionInterpreter([0.5, 1.0]).interpret(made.get_state(), 0) == 1.5
    with pytest.raises(ConfigError, match="fractions"):
        CategoricalActionInterpreter([0.5, 2.0])


@pytest.mark.parametrize(
    ("start", "end"), [("09:30", "09:36"), ("09:31", "09:36"), ("09:31", "09:35"), ("09:33", "09:34")]
)
def test_one_times_twap_trades_equal_parts_in_every_step(start: str, end: str) -> None:
    made, interpreter = simulator(start=start, end=end), TwapRelativeActionInterpreter()
    while not made.done():
        made.step(interpreter(made.get_state(), np.array(1, np.float32)))
    amounts = made.history_steps["amount"]
    assert amounts == pytest.approx(np.full(len(amounts), 6.0 / len(amounts)))
    assert made.position == 0.0


def test_an_action_of_zero_waits_and_a_large_one_takes_all() -> None:
    made, interpreter = simulator(), TwapRelativeActionInterpreter()
    assert interpreter(made.get_state(), np.array(0, np.float32)) == 0
    assert interpreter(made.get_state(), np.array(100, np.float32)) == 6.0


def test_the_reward_is_the_advantage_by_parts_less_the_penalty() -> None:
    made = simulator()
    plain, penal = PAPenaltyReward(penalty=0.0), PAPenaltyReward(penalty=10.0, scale=0.5)
    total = 0.0
    for amount in (1.0, 3.0, 0.5):  # the last step trades 2
        made.step(amount)
        dealt = made.history_exec.last["deal_amount"]
        advantage = plain(made.get_state())
        assert penal(made.get_state()) == pytest.approx(0.5 * (advantage - 10 * sum((part / 6) ** 2 for part in dealt)))
        total += advantage
    assert made.metrics is not None
    assert total == pytest.approx(made.metrics["pa"])


@pytest.mark.parametrize(
    ("amounts", "direction", "expected"),
    [
        ((0.0, 6.0, 0.0), OrderDir.SELL, 0.0),  # 11.5 to 10.5: better, by less than a tenth
        ((0.0, 0.0, 6.0), OrderDir.SELL, -1.0),
        ((0.0, 0.0, 6.0), OrderDir.BUY, 1.0),  # 10.5 to 9.5
    ],
)
def test_the_three_valued_reward_comes_once_at_the_end(
    amounts: tuple[float, ...], direction: OrderDir, expected: float
) -> None:
    made, reward, given = simulator(direction=direction), PPOReward(max_step=3), []
    for amount in amounts:
        if not made.done():
            made.step(amount)
            given.append(reward(made.get_state()))
    assert given[:-1] == [0.0] * (len(given) - 1)
    assert given[-1] == expected
