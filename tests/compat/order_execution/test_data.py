"""Bars and orders from files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from leyden.errors import ConfigError
from leyden_compat.order_execution import BarsProcessedDataProvider, OrderDir, load_bars, load_orders
from tests.compat.order_execution.bars_of import write_days

DAILY = "date,other,close,$volume,name\n2020-01-02,9,10.5,100,x\n2020-01-03,9,11,,y\n"


def test_bars_are_kept_until_their_file_changes(tmp_path: Path) -> None:
    (tmp_path / "A.csv").write_text(DAILY)
    first = load_bars(tmp_path, "A")
    assert load_bars(str(tmp_path), "A") is first
    (tmp_path / "A.csv").write_text(DAILY.replace("10.5", "12.5"))
    os.utime(tmp_path / "A.csv", ns=(1, 1))
    assert load_bars(tmp_path, "A")["close"][0] == 12.5
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "A.csv").write_text(DAILY.replace("10.5", "7"))
    assert load_bars(tmp_path / "other", "A")["close"][0] == 7


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "is empty"),
        ("date,close,volume\n", "no bars"),
        ("date,close\n2020-01-01,1\n", "no column 'volume'"),
        ("when,close,volume\n2020-01-01,1,1\n", "no column 'datetime' or 'date'"),
        ("date,close,volume\n2020-01-01,1\n", "line 2: 2 values for 3 columns"),
        ("date,close,volume\n2020-01-01,one,1\n", "close of row 1 is 'one'"),
        ("date,close,volume\nyesterday,1,1\n", "times are written as"),
        ("date,close,volume\n2020-01-02,1,1\n2020-01-01,1,1\n", "do not increase"),
        ("date,close,volume\n2020-01-02,1,-1\n", "a volume is below 0"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name_and_fault(tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / "A.csv").write_text(content)
    with pytest.raises(ConfigError, match=fault) as caught:
        load_bars(tmp_path, "A")
    assert "A.csv" in str(caught.value)


def test_columns_may_have_qlibs_names_and_names_are_no_features(tmp_path: Path) -> None:
    (tmp_path / "A.csv").write_text(DAILY)
    bars = load_bars(tmp_path, "A")
    assert bars["$close"].tolist() == bars["close"].tolist() == [10.5, 11.0]
    assert np.isnan(bars["volume"][1])
    assert "name" not in bars.columns
    with pytest.raises(ConfigError, match="has no column 'vwap'"):
        bars["vwap"]


def test_a_stock_without_a_file_says_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "A.csv").write_text(DAILY)
    with pytest.raises(ConfigError, match=r"no B\.parquet or B\.csv .* there is A\.csv"):
        load_bars(tmp_path, "B")
    (tmp_path / "A.parquet").write_bytes(b"PAR")
    with pytest.raises(ConfigError, match=r"both A\.parquet and A\.csv"):
        load_bars(tmp_path, "A")


def test_features_of_the_time_before_are_read_or_looked_up(tmp_path: Path) -> None:
    write_days(tmp_path, days=3, ticks=4)
    bars = load_bars(tmp_path / "bars", "X")
    today = bars.times[4:8]
    provider = BarsProcessedDataProvider(tmp_path / "bars", ["$close"], ["$close_1"])
    data = provider.get_data("X", today[0], 1, today)
    assert data.today[:, 0].tolist() == bars["close"][4:8].tolist()
    assert data.yesterday[:, 0].tolist() == bars["close"][:4].tolist()
    assert not provider.get_data("X", bars.times[0], 1, bars.times[:4]).yesterday.any()
    with pytest.raises(ConfigError, match="has not the ticks"):
        provider.get_data("X", today[0], 1, today + np.timedelta64(1, "s"))


def test_orders_are_of_days_or_of_times(tmp_path: Path) -> None:
    write_days(tmp_path, days=6, ticks=12)
    path = tmp_path / "orders" / "train.csv"
    one, two = load_orders(path, tmp_path / "bars", start_time_index=2, end_time_index=11)
    assert (one.stock_id, one.amount, one.direction, two.direction) == ("X", 100.0, OrderDir.SELL, OrderDir.BUY)
    assert (str(one.start_time)[:16], str(one.end_time)[:16]) == ("2020-01-01T09:32", "2020-01-01T09:41")
    path.write_text(
        "stock_id,amount,direction,start_time,end_time\nX,5,buy,2020-01-01,2020-01-09\nX,0,sell,2020-01-01,2020-01-09\n"
    )
    (only,) = load_orders(path)
    assert (only.direction, str(only.end_time)[:10]) == (OrderDir.BUY, "2020-01-09")
    assert len(load_orders(tmp_path / "orders", tmp_path / "bars")) == 1 + 2 + 2


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (
            "stock_id,amount,direction,start_time,end_time\nX,5,hold,2020-01-01,2020-01-09\n",
            "row 1: the direction is 'hold'",
        ),
        (
            "stock_id,amount,direction,start_time,end_time\nX,many,buy,2020-01-01,2020-01-09\n",
            "row 1: the amount is 'many'; it must be a number",
        ),
        ("stock_id,amount,direction,start_time\nX,5,buy,2020-01-01\n", "no column 'end_time'"),
        ("stock_id,amount,date\nX,5,2020-01-01\n", "give data_dir"),
        ("stock_id,amount,direction,start_time,end_time\n", "no order with an amount above 0"),
    ],
)
def test_orders_that_cannot_be_read_are_named(tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / "orders.csv").write_text(content)
    with pytest.raises(ConfigError, match=fault):
        load_orders(tmp_path / "orders.csv")
    with pytest.raises(ConfigError, match="there are no orders at"):
        load_orders(tmp_path / "missing")
