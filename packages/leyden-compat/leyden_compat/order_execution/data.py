"""Features for state interpreters (`ProcessedDataProvider`), and orders from files (`load_orders`).

Both read the formats of `bars.py`. To read features from elsewhere, subclass `ProcessedDataProvider`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from leyden.errors import ConfigError
from leyden_compat.order_execution.bars import Bars, bars_of, check_one_source, load_bars, previous_features, read_table
from leyden_compat.order_execution.objects import Order, OrderDir, as_time

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class IntradayProcessedData:
    """Features of each tick of an order's days."""

    today: Array
    """(ticks, features): the features of the tick."""
    yesterday: Array
    """(ticks, features): features of as many ticks before the order's days."""


class ProcessedDataProvider(ABC):
    """Provides features for state interpreters, which read them at every step: cache slow ones."""

    @abstractmethod
    def get_data(self, stock_id: str, date: Any, feature_dim: int, time_index: Array) -> IntradayProcessedData:
        """Return the features of the ticks of an order's days, the future ones too.

        The caller hides those of the future.
        date: the first day.
        time_index: (ticks,), the beginnings of the ticks.
        feature_dim: the number of features that the caller expects.
        """


class BarsProcessedDataProvider(ProcessedDataProvider):
    """Provides columns of files of bars, unchanged.

    Networks learn better from returns and ratios than from prices; write such features into separate files.

    data_dir: a directory with `<stock_id>.parquet` or `.csv`.
    data: instead of `data_dir`, the bars by stock, or the bars of the only stock.
    feature_columns_today: the names of the columns.
    feature_columns_yesterday: as many names of columns for the time before. If the bars lack `close_1`, it stands for
        `close` in as many bars just before the order's days. None: the names of today's columns, with `_1`.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        feature_columns_today: Sequence[str] = ("open", "high", "low", "close", "volume"),
        feature_columns_yesterday: Sequence[str] | None = None,
        *,
        data: Bars | Mapping[str, Bars] | None = None,
    ) -> None:
        check_one_source(data_dir, data)
        self._data_dir, self._data = data_dir, data
        self._today = tuple(feature_columns_today)
        before = [f"{name}_1" for name in self._today]
        self._yesterday = tuple(before if feature_columns_yesterday is None else feature_columns_yesterday)

    def get_data(self, stock_id: str, date: Any, feature_dim: int, time_index: Array) -> IntradayProcessedData:
        """Return the columns at the ticks of `time_index`.

        Raise ConfigError unless there are `feature_dim` columns, and all ticks in the bars.
        """
        for name, columns in (("feature_columns_today", self._today), ("feature_columns_yesterday", self._yesterday)):
            if len(columns) != feature_dim:
                raise ConfigError(f"{name} has {len(columns)} columns, data_dim is {feature_dim}; they must be equal")
        bars = bars_of(stock_id, self._data_dir, self._data)
        first = bars.between(time_index[0], time_index[0]).start
        part = slice(first, first + len(time_index))
        if not np.array_equal(bars.times[part], time_index):
            raise ConfigError(
                f"{bars.source} has not the ticks {time_index[0]} to {time_index[-1]} that the simulator's bars have; give both "
                "the same bars"
            )
        return IntradayProcessedData(bars.matrix(self._today, part), previous_features(bars, self._yesterday, part))


_DIRECTIONS: Final = {"0": OrderDir.SELL, "1": OrderDir.BUY, "sell": OrderDir.SELL, "buy": OrderDir.BUY}


def load_orders(
    path: str | Path,
    data_dir: str | Path | None = None,
    *,
    start_time_index: int = 0,
    end_time_index: int | None = None,
    tick: np.timedelta64 | None = None,
) -> list[Order]:
    """Return the orders in a CSV or Parquet file, or in all such files of a directory, by name.

    Columns: `stock_id` or `instrument`; `amount`; `direction` or `order_type` (0 or sell, 1 or buy); and either
    `start_time` and `end_time`, or `date` (or `datetime`). A row whose amount is 0 is left out.

    data_dir: the directory of the bars, whose ticks are needed for orders with a `date`.
    start_time_index, end_time_index: the ticks of the day, from 0, of an order with a `date`: its first one, and the
        one before which it ends (None: the day's end).
    tick: the length of a tick; None: one minute.
    Raise ConfigError, which names file and row, for an order that is impossible, and if there is none.
    """
    path = Path(path)
    files = sorted(each for each in path.iterdir() if each.suffix in (".csv", ".parquet")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ConfigError(
            f"there are no orders at {path}; give a .csv or .parquet file of orders, or a directory of such files"
        )
    tick = np.timedelta64(1, "m") if tick is None else tick
    orders: list[Order] = []
    for file in files:
        table = {name.strip(): column for name, column in read_table(file).items()}
        times = _times_of_rows(table, file, data_dir, start_time_index, end_time_index, tick)
        stocks, amounts, directions = (
            _column(table, names, file)
            for names in (("stock_id", "instrument"), ("amount",), ("direction", "order_type"))
        )
        for row in range(len(stocks)):
            try:
                if (amount := _amount(amounts[row])) == 0:
                    continue
                stock = str(stocks[row])
                orders.append(Order(stock, amount, _direction(directions[row]), *times(stock, row)))
            except ValueError as error:
                raise ConfigError(f"{file}, row {row + 1}: {error}") from error
    if not orders:
        raise ConfigError(f"{path} has no order with an amount above 0")
    return orders


def _column(table: Mapping[str, Array], names: Sequence[str], file: Path) -> Array:
    """Return the first of these columns that a table has. Raise ConfigError if it has none."""
    there = [name for name in names if name in table]
    if len(there) > 1 and any(map(str.__ne__, map(str, table[there[0]]), map(str, table[there[1]]))):
        raise ConfigError(f"{file} has both {there[0]!r} and {there[1]!r}, with different values; keep one of them")
    if there:
        return table[there[0]]
    raise ConfigError(f"{file} has no column {' or '.join(map(repr, names))}; it has {', '.join(table)}")


def _amount(value: Any) -> float:
    text = str(value).strip()
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"the amount is {text!r}; it must be a number" if text else "the amount is empty") from None


def _direction(value: Any) -> OrderDir:
    text = str(value).strip().lower()
    try:
        return _DIRECTIONS[text.removesuffix(".0")]
    except KeyError:
        raise ConfigError(f"the direction is {text!r}; it must be one of {', '.join(_DIRECTIONS)}") from None


def _times_of_rows(
    table: Mapping[str, Array],
    file: Path,
    data_dir: str | Path | None,
    start_index: int,
    end_index: int | None,
    tick: np.timedelta64,
) -> Callable[[str, int], tuple[np.datetime64, np.datetime64]]:
    """Return a function of (stock, row) that returns the start and the end of an order.

    They are read from the columns `start_time` and `end_time` if the file has them. Otherwise they are the day's ticks
    from `start_index` to before `end_index`, with a last `tick` added.
    """
    if "start_time" in table or "end_time" in table:
        starts, ends = _column(table, ["start_time"], file), _column(table, ["end_time"], file)
        return lambda stock, row: (as_time(starts[row], "start_time"), as_time(ends[row], "end_time"))
    dates = _column(table, ["date", "datetime"], file)
    if data_dir is None:
        raise ConfigError(
            f"{file} has dates, but no start_time and end_time; give data_dir, so that the day's ticks are known"
        )

    def times(stock: str, row: int) -> tuple[np.datetime64, np.datetime64]:
        """Return start and end of an order from the bars of its day."""
        bars = load_bars(data_dir, stock)
        day = as_time(dates[row], "date")
        ticks = bars.times[bars.days(day, day + np.timedelta64(1, "us"))]
        if not len(ticks):
            raise ConfigError(
                f"{bars.source} has no bars on {day.astype('datetime64[D]')}, which may be a holiday; its bars are from "
                f"{bars.times[0]} to {bars.times[-1]}"
            )
        ticks = ticks[start_index:end_index]
        if not len(ticks):
            raise ConfigError(
                f"{bars.source} has no tick {start_index} to {end_index} on {day.astype('datetime64[D]')}"
            )
        return ticks[0], ticks[-1] + tick

    return times
