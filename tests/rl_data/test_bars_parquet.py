"""Bars and orders of order execution in Parquet files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from leyden.errors import ConfigError
from leyden_compat.order_execution import load_bars, load_orders


def test_csv_and_parquet_say_the_same(tmp_path: Path) -> None:
    times = np.array(["2020-01-02", "2020-01-03"], "datetime64[ns]")
    bars = {"datetime": times, "$close": [10.5, 11.0], "volume": [100.0, None], "name": ["x", "y"]}
    parquet.write_table(arrow.table(bars), tmp_path / "A.parquet")
    (tmp_path / "B.csv").write_text("date,close,volume\n2020-01-02,10.5,100\n2020-01-03,11,\n")
    one, two = load_bars(tmp_path, "A"), load_bars(tmp_path, "B")
    assert one.times.tolist() == two.times.tolist()
    assert one["close"].tolist() == two["close"].tolist()
    assert np.array_equal(one["volume"], two["volume"], equal_nan=True)
    assert "name" not in one.columns


def test_orders_are_read_from_parquet_as_from_csv(tmp_path: Path) -> None:
    start, end = np.array(["2020-01-02"], "datetime64[us]"), np.array(["2020-01-04"], "datetime64[us]")
    columns = {"stock_id": ["A"], "amount": [3.0], "direction": [1], "start_time": start, "end_time": end}
    parquet.write_table(arrow.table(columns), tmp_path / "one.parquet")
    (tmp_path / "two.csv").write_text("stock_id,amount,direction,start_time,end_time\nA,3,buy,2020-01-02,2020-01-04\n")
    assert load_orders(tmp_path / "one.parquet") == load_orders(tmp_path / "two.csv")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "A.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ConfigError, match=r"A\.parquet cannot be read as Parquet"):
        load_bars(tmp_path, "A")


def test_times_with_a_zone_are_refused_with_the_remedy(tmp_path: Path) -> None:
    times = arrow.array([0, 60_000_000], arrow.timestamp("us", tz="America/New_York"))
    parquet.write_table(
        arrow.table({"datetime": times, "close": [1.0, 2.0], "volume": [1.0, 1.0]}), tmp_path / "A.parquet"
    )
    with pytest.raises(ConfigError, match=r"'datetime' has the time zone America/New_York; .*tz_localize\(None\)"):
        load_bars(tmp_path, "A")
    orders = {"stock_id": ["A"], "amount": [1.0], "direction": [0], "start_time": times[:1], "end_time": times[1:]}
    parquet.write_table(arrow.table(orders), tmp_path / "orders.parquet")
    with pytest.raises(ConfigError, match="'start_time' has the time zone"):
        load_orders(tmp_path / "orders.parquet")


def test_dates_as_numbers_and_double_columns(tmp_path: Path) -> None:
    def write(name: str, columns: dict[str, object]) -> None:
        parquet.write_table(arrow.table(columns), tmp_path / f"{name}.parquet")

    write("A", {"date": [20200102, 20200103], "close": [1.0, 2.0], "volume": [1.0, 1.0]})
    assert load_bars(tmp_path, "A").times[1] == np.datetime64("2020-01-03")
    write("B", {"date": [1577957400, 1577957460], "close": [1.0, 2.0], "volume": [1.0, 1.0]})
    with pytest.raises(ConfigError, match="is the number 1577957400"):
        load_bars(tmp_path, "B")
    write("C", {"date": [20200102], "close": [1.0], "$close": [2.0], "volume": [1.0]})
    with pytest.raises(ConfigError, match=r"the columns 'close' and '\$close'"):
        load_bars(tmp_path, "C")
