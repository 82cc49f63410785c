"""The simulator of one order, against a slow one in plain Python, and by hand."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.errors import ConfigError, InvalidTrade, OrderDone
from leyden_compat.order_execution import (
    Bars,
    Order,
    OrderDir,
    SAOEMetrics,
    SingleAssetOrderExecutionSimple,
    price_advantage,
)
from tests.compat.order_execution.bars_of import day, order, six_ticks


def simulator(*, bars: Bars | None = None, of: Order | None = None, **options: Any) -> SingleAssetOrderExecutionSimple:
    return SingleAssetOrderExecutionSimple(of or order(), data=bars or six_ticks(), **({"ticks_per_step": 2} | options))


# ---- by hand -----------------------------------------------------------------------------------------------------------


def test_six_ticks_by_hand() -> None:
    made = simulator()
    for amount in (1.0, 3.0, 2.0):
        assert not made.done()
        made.step(amount)
    state = made.get_state()
    assert made.done()
    assert (state.position, state.cur_step, state.cur_time) == (0.0, 3, np.datetime64("2020-01-02T09:36"))
    assert state.history_exec["deal_amount"].tolist() == [0.5, 0.5, 1.5, 1.5, 1.0, 1.0]
    assert state.history_exec["position"].tolist() == [5.5, 5.0, 3.5, 2.0, 1.0, 0.0]
    assert state.history_steps["position"].tolist() == [5.0, 2.0, 0.0]
    assert state.history_steps["trade_price"].tolist() == [10.5, 11.5, 9.5]
    assert state.history_steps["ffr"].tolist() == pytest.approx([1 / 6, 3 / 6, 2 / 6])
    mean_price = 63 / 6  # what TWAP gets
    price = (0.5 * 10 + 0.5 * 11 + 1.5 * 12 + 1.5 * 11 + 10 + 9) / 6
    assert state.metrics is not None
    assert state.metrics == {
        "stock_id": "X",
        "datetime": np.datetime64("2020-01-02T09:30"),
        "direction": OrderDir.SELL,
        "market_volume": 950.0,
        "market_price": mean_price,
        "amount": 6.0,
        "inner_amount": 6.0,
        "deal_amount": 6.0,
        "trade_price": pytest.approx(price),
        "trade_value": pytest.approx(6 * price),
        "position": 0.0,
        "ffr": 1.0,
        "pa": pytest.approx((price / mean_price - 1) * 10_000),
    }
    assert set(state.metrics) == set(SAOEMetrics.__annotations__)
    assert set(state.history_exec) == set(SAOEMetrics.__annotations__)


def test_the_last_step_trades_all_that_is_left_in_its_last_tick() -> None:
    made = simulator()
    made.step(0.0)
    made.step(0.0)
    assert made.get_state().history_steps["pa"].tolist() == [0.0, 0.0]  # nothing traded is no advantage
    made.step(1.0)
    assert made.get_state().history_exec["deal_amount"].tolist() == [0, 0, 0, 0, 0.5, 5.5]
    assert made.position == 0.0


def test_a_tick_trades_at_most_its_part_of_the_markets_volume() -> None:
    made = simulator(of=order(1000.0), vol_threshold=0.1)
    made.step(1000.0)
    made.step(500.0)
    made.step(0.0)
    assert made.get_state().history_exec["deal_amount"].tolist() == [10, 20, 30, 20, 0, 5]
    assert made.done()
    assert made.position == 915
    assert made.metrics is not None
    assert made.metrics["ffr"] == pytest.approx(0.085)
    assert made.metrics["amount"] == 1500


def test_steps_end_at_multiples_of_their_length_in_the_day() -> None:
    made = simulator(of=order(start="09:31", end="09:36"))
    times = []
    while not made.done():
        times.append(made.cur_time)
        made.step(0.5)
    assert [str(time)[11:16] for time in times] == ["09:31", "09:32", "09:34"]
    assert made.get_state().n_steps == 3


def test_an_order_that_ends_inside_a_step_ends_there() -> None:
    made = simulator(of=order(start="09:30", end="09:35"))
    sizes = []
    while not made.done():
        before = len(made.history_exec)
        made.step(1.0)
        sizes.append(len(made.history_exec) - before)
    assert sizes == [2, 2, 1]
    assert made.cur_time == np.datetime64("2020-01-02T09:35")


def test_minutes_of_a_step_are_bars_times_granularity() -> None:
    made = simulator(ticks_per_step=10, data_granularity=5)
    made.step(2.0)
    assert len(made.history_exec) == 2
    with pytest.raises(ConfigError, match="multiple of data_granularity"):
        simulator(ticks_per_step=7, data_granularity=5)


@pytest.mark.parametrize("amount", [7.0, -1.0, math.nan, math.inf])
def test_an_amount_that_cannot_be_traded_is_refused_and_changes_nothing(amount: float) -> None:
    made = simulator()
    with pytest.raises(InvalidTrade, match=r"order to sell 6 X"):
        made.step(amount)
    assert (made.position, made.cur_step, len(made.history_exec)) == (6.0, 0, 0)
    made.step(6.0)
    with pytest.raises(OrderDone):
        made.step(0.0)


def test_a_state_does_not_change_when_the_simulator_does() -> None:
    made = simulator()
    made.step(1.0)
    state = made.get_state()
    made.step(1.0)
    assert len(state.history_exec) == 2
    assert state.cur_step == len(state.history_steps) == 1
    assert pickle.loads(pickle.dumps(state)).history_exec["position"].tolist() == [5.5, 5.0]


def test_a_large_order_is_done_although_its_parts_do_not_add_up_exactly() -> None:
    amount = 1e9 / 3
    made = simulator(bars=day([10.0] * 60, [1e9] * 60), of=order(amount, end="10:30"), ticks_per_step=7)
    while not made.done():
        made.step(min(made.position, amount / 9))
    assert made.position == 0.0


def test_an_order_that_no_bar_is_in_names_itself_and_the_bars() -> None:
    with pytest.raises(ConfigError, match=r"made-up bars has no tick .* 2020-01-02T09:35"):
        simulator(of=order(start="10:00", end="11:00"))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"ticks_per_step": 0}, "ticks_per_step is 0"),
        ({"vol_threshold": 0}, "vol_threshold is 0"),
        ({"data": None}, "either data_dir"),
        ({"data": {"Y": None}}, "no bars of X; it has those of Y"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        SingleAssetOrderExecutionSimple(order(), **({"data": six_ticks()} | options))


def test_orders_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="not after"):
        order(start="09:36", end="09:30")
    with pytest.raises(ConfigError, match="amount of the order for X is 0"):
        order(0)
    with pytest.raises(ConfigError, match="direction"):
        Order("X", 1.0, 3, np.datetime64("2020-01-01"), np.datetime64("2020-01-02"))  # type: ignore[arg-type]


# ---- price advantage ---------------------------------------------------------------------------------------------------


def test_buying_below_and_selling_above_the_baseline_are_advantages() -> None:
    assert price_advantage(9.9, 10.0, OrderDir.BUY) == pytest.approx(100)
    assert price_advantage(9.9, 10.0, OrderDir.SELL) == pytest.approx(-100)
    assert price_advantage(9.9, 0.0, OrderDir.SELL) == 0.0
    assert price_advantage(math.nan, 10.0, OrderDir.SELL) == 0.0
    assert price_advantage(np.array([9.9, np.nan]), 10.0, OrderDir.BUY).tolist() == pytest.approx([100, 0])
    assert price_advantage(np.array([9.9, 9.0]), 0.0, 1).tolist() == [0, 0]
    with pytest.raises(ConfigError, match="direction"):
        price_advantage(1.0, 1.0, 2)


# ---- against plain Python ----------------------------------------------------------------------------------------------


def slow(
    price: list[float],
    volume: list[float],
    first: int,
    last: int,
    per_step: int,
    amount: float,
    limit: float | None,
    wishes: list[float],
) -> tuple[list[float], list[float], float]:
    """What each tick trades, what is left after each step, and the price advantage of a sale: written again, one tick at a time."""
    left, at, dealt, after, paid = amount, first, [], [], 0.0
    for wish in wishes:
        if left <= 0 or at > last:
            break
        ticks = [at]
        while (ticks[-1] + 1) % per_step and ticks[-1] < last:
            ticks.append(ticks[-1] + 1)
        want = min(wish * amount, left)
        traded = []
        for tick in ticks:
            most = math.inf if limit is None else limit * volume[tick]
            traded.append(min(want / len(ticks), most))
        if ticks[-1] == last:
            most = math.inf if limit is None else limit * volume[last]
            traded[-1] = min(traded[-1] + left - math.fsum(traded), most)
        dealt += traded
        left -= math.fsum(traded)
        left = 0.0 if abs(left) < 1e-9 * amount else left
        paid += math.fsum(price[tick] * part for tick, part in zip(ticks, traded, strict=True))
        after.append(left)
        at = ticks[-1] + 1
    twap = math.fsum(price[first : last + 1]) / (last + 1 - first)
    sold = math.fsum(dealt)
    return dealt, after, (paid / sold / twap - 1) * 10_000 if sold > 0 else 0.0


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    n = draw(st.integers(1, 24))
    price = draw(st.lists(st.floats(0.5, 500), min_size=n, max_size=n))
    volume = draw(st.lists(st.integers(0, 10**6).map(float), min_size=n, max_size=n))
    first = draw(st.integers(0, n - 1))
    last = draw(st.integers(first, n - 1))
    wishes = draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    limit = draw(st.none() | st.floats(0.01, 1))
    return price, volume, first, last, draw(st.integers(1, 9)), draw(st.floats(0.01, 1e6)), limit, wishes


@settings(max_examples=150)
@given(cases())
def test_it_trades_what_a_plain_loop_over_ticks_trades(case: tuple[Any, ...]) -> None:
    price, volume, first, last, per_step, amount, limit, wishes = case
    dealt, after, advantage = slow(*case)
    start = np.datetime64("2020-01-02T09:30", "us")
    minute = np.timedelta64(1, "m")
    of = Order("X", amount, OrderDir.SELL, start + first * minute, start + (last + 1) * minute)
    made = SingleAssetOrderExecutionSimple(of, data=day(price, volume), ticks_per_step=per_step, vol_threshold=limit)
    for wish in wishes:
        if made.done():
            break
        made.step(min(wish * amount, made.position))
    assert made.done()
    state = made.get_state()
    tiny = 1e-9 * amount
    assert state.history_exec["deal_amount"] == pytest.approx(dealt, rel=1e-9, abs=tiny)
    assert state.history_steps["position"] == pytest.approx(after, rel=1e-9, abs=tiny)
    assert state.metrics is not None
    if math.fsum(dealt) > 1e-6 * amount:
        assert state.metrics["pa"] == pytest.approx(advantage, rel=1e-6, abs=1e-5)
    assert state.cur_step <= state.n_steps
    if limit is None:
        assert state.position == 0.0
        assert state.metrics["ffr"] == pytest.approx(1.0)
