"""Bars without a price, times with a zone, dates as numbers and columns that stand twice."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyden.errors import ConfigError, InvalidTrade
from leyden_compat.order_execution import Bars, Order, OrderDir, SingleAssetOrderExecutionSimple, load_bars, load_orders
from leyden_compat.order_execution.objects import as_time, as_times

TIMES = np.arange("2020-01-02T09:30", "2020-01-02T09:34", dtype="datetime64[m]")


def executed(closes: list[float], amounts: list[float], *, volumes: Any = 100.0, **options: Any) -> Any:
    volume = np.broadcast_to(np.asarray(volumes, np.float64), (len(closes),))
    bars = Bars(TIMES[: len(closes)], {"close": np.array(closes), "volume": volume})
    order = Order("X", 10, OrderDir.SELL, "2020-01-02 09:30", "2020-01-02 09:40")  # pyright: ignore[reportArgumentType]
    simulator = SingleAssetOrderExecutionSimple(order, data=bars, **{"ticks_per_step": 1, **options})
    for amount in amounts:
        simulator.step(amount)
    return simulator


NAN = math.nan


def test_what_was_not_traded_without_a_price_changes_no_metric() -> None:
    metrics = executed([NAN, 200, 200, 100], [0, 0, 0, 10]).metrics
    assert (metrics["trade_price"], metrics["trade_value"], metrics["ffr"]) == (100, 1000, 1)
    assert metrics["pa"] == pytest.approx(-4000)  # the mean of the known prices is 500 / 3
    assert metrics["market_price"] == pytest.approx(500 / 3)


@pytest.mark.parametrize(
    ("closes", "amounts", "price", "ffr"),
    [
        ([NAN, 100, 100, 100], [5, 5, 5], 100, 1.0),  # nothing in the first tick: all in the two after it
        ([100, NAN, 50, 50], [5, 5, 5], 75, 1.0),
        ([100, 100, 100, NAN], [0, 0, 5, 10], 100, 0.5),  # the last tick has no price: the rest stays
        ([100, NAN, NAN, NAN], [5, 5, 5, 5], 100, 0.5),
    ],
)
def test_nothing_is_traded_without_a_price(closes: Any, amounts: Any, price: float, ffr: float) -> None:
    simulator = executed(closes, amounts)
    assert (simulator.metrics["trade_price"], simulator.metrics["ffr"]) == (price, ffr)
    assert simulator.position == 10 * (1 - ffr)
    ticks = simulator.history_exec
    assert not ticks["deal_amount"][np.isnan(ticks["market_price"])].any()
    assert np.isfinite(ticks["trade_value"]).all()


def test_the_amount_of_a_step_goes_to_its_ticks_with_a_price() -> None:
    simulator = executed([100, NAN, 50, NAN], [10], ticks_per_step=4)
    assert simulator.history_exec["deal_amount"].tolist() == [5, 0, 5, 0]
    assert simulator.metrics["trade_price"] == 75
    limited = executed([100, NAN, 50, NAN], [10], ticks_per_step=4, vol_threshold=0.5, volumes=[4, 100, NAN, 100])
    assert limited.history_exec["deal_amount"].tolist() == [2, 0, 0, 0]  # an unknown volume is no limit to trade in
    assert limited.metrics["market_volume"] == 204


def test_an_order_without_any_price_and_infinite_bars_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no price \(close\) in the time of the order"):
        executed([NAN, NAN], [])
    for closes, volumes in (([math.inf, 1], 1), ([1, 1], [1, math.inf])):
        with pytest.raises(ConfigError, match="is infinite, at 2020-01-02T09:3"):
            executed(closes, [], volumes=volumes)


@pytest.mark.parametrize("amount", [NAN, math.inf, -math.inf, -1.0])
def test_an_amount_that_is_none_is_refused_also_without_a_price(amount: float) -> None:
    for closes in ([100, 100], [NAN, 100]):
        simulator = executed(closes, [])
        with pytest.raises(InvalidTrade, match="an amount is at least 0"):
            simulator.step(amount)
        assert (simulator.position, simulator.cur_step) == (10, 0)


@pytest.mark.parametrize("value", [20200102, "20200102", " 20200102", 20200102.0, np.int32(20200102), "2020-01-02"])
def test_eight_digits_are_a_date(value: Any) -> None:
    assert as_time(value) == as_times([value])[0] == np.datetime64("2020-01-02")
    assert as_times(np.array([value]))[0] == np.datetime64("2020-01-02")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1577957400, "is the number '?1577957400'?, which may count seconds"),
        ("1577957400000", "which may count seconds"),
        (1577957400000000000, "which may count seconds"),
        (1577957400.5, "which may count seconds"),
        ("1.5779574e9", "which may count seconds"),
        (20201332, "which may count seconds"),
        (43832, "which may count seconds"),
        ("2020", "which may count seconds"),
        ("20200102093000", "which may count seconds"),
        ("2020-01-02T09:30+08:00", "with a time zone; give the time on the bars' clock"),
        ("2020-01-02 09:30:00-0500", "with a time zone"),
        ("2020-01-02 09:30:00.25+00", "with a time zone"),
        ("2020-01-02T09:30Z", "with a time zone"),
        ("02.01.2020", "2020-01-02 09:30"),
    ],
)
def test_a_time_with_a_zone_and_a_number_that_is_no_date_are_refused_at_every_door(
    tmp_path: Path, value: Any, message: str
) -> None:
    day = str(value)
    (tmp_path / "X.csv").write_text(f"datetime,close,volume\n{day},1,1\n")
    (tmp_path / "orders.csv").write_text(f"stock_id,amount,direction,start_time,end_time\nX,1,0,{day},2030-01-01\n")
    doors: list[Any] = [
        lambda: as_time(value),
        lambda: as_times([value]),
        lambda: Bars(np.array([value]), {"close": np.ones(1), "volume": np.ones(1)}),
        lambda: Order("X", 1, OrderDir.BUY, value, "2030-01-01"),  # pyright: ignore[reportArgumentType]
        lambda: load_bars(tmp_path, "X"),
        lambda: load_orders(tmp_path / "orders.csv"),
    ]
    for door in doors:
        with pytest.raises(ConfigError, match=message):
            door()


def test_dates_of_eight_digits_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "X.csv").write_text("date,close,volume\n20200102,1,1\n20200103,1,1\n")
    assert load_bars(tmp_path, "X").times.tolist() == as_times(["2020-01-02", "2020-01-03"]).tolist()
    (tmp_path / "orders.csv").write_text("stock_id,amount,direction,date\nX,1,0,20200103\n")
    (order,) = load_orders(tmp_path / "orders.csv", tmp_path)
    assert order.start_time == np.datetime64("2020-01-03")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("datetime,$close,close,volume", r"the columns '\$close' and 'close'"),
        ("datetime,close,Close,volume", "the columns 'close' and 'Close'"),
        ("datetime,close,volume, volume", "the columns 'volume' and ' volume'"),
        ("datetime,close,volume,close", "the columns 'close' and 'close'"),
        ("\ufeffdatetime,datetime,close,volume", "the columns 'datetime' and 'datetime'"),
    ],
)
def test_a_column_that_stands_twice_is_named(tmp_path: Path, header: str, message: str) -> None:
    row = ",".join(["2020-01-02"] + ["1"] * 3)
    (tmp_path / "X.csv").write_text(f"{header}\n{row}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_bars(tmp_path, "X")


def test_two_names_of_one_thing_and_other_separators_and_encodings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the columns 'close' and '\$close'"):
        Bars(TIMES[:1], {"close": np.ones(1), "$close": np.ones(1), "volume": np.ones(1)})
    orders = tmp_path / "orders.csv"
    for content, message in (
        (
            b"stock_id,instrument,amount,direction,start_time,end_time\nX,Y,1,0,2020-01-02,2020-01-03\n",
            "both 'stock_id' and",
        ),
        (b"stock_id;amount\nX;1\n", "is separated by ';'"),
        (b"stock_id\tamount\nX\t1\n", r"is separated by '\\t'"),
        ("stock_id,amount,名\nX,1,名\n".encode("gbk"), "is not UTF-8"),
        (b"stock_id,amount,direction,start_time,end_time\nX,,0,2020-01-02,2020-01-03\n", "row 1: the amount is empty"),
    ):
        orders.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            load_orders(orders)


def test_a_holiday_is_named(tmp_path: Path) -> None:
    (tmp_path / "X.csv").write_text("date,close,volume\n2020-01-02,1,1\n2020-01-06,1,1\n")
    (tmp_path / "orders.csv").write_text("stock_id,amount,direction,date\nX,1,0,2020-01-04\n")
    with pytest.raises(
        ConfigError, match="has no bars on 2020-01-04, which may be a holiday; its bars are from 2020-01-02"
    ):
        load_orders(tmp_path / "orders.csv", tmp_path)
