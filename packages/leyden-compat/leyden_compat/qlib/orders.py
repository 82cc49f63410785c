"""Qlib's order execution, on pandas.

Orders have timestamps and a state's histories are data frames. Data may be pickled tables as well as CSV and Parquet
files. The simulator of `leyden_compat.order_execution` does the arithmetic.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np

from leyden.errors import ConfigError
from leyden.rl.parts import ActionInterpreter, Reward, StateInterpreter
from leyden.training import LogLevel
from leyden_compat import order_execution as native
from leyden_compat.order_execution import Bars, OrderDir, SAOEMetrics, load_bars
from leyden_compat.order_execution.state import History, SAOEState
from leyden_compat.qlib.configuration import init_instance_by_config
from leyden_compat.qlib.parts import AnyEnv, Simulator
from leyden_compat.qlib.tables import pandas, read_pickle

DealPriceType = Literal["bid_or_ask", "bid_or_ask_fill", "close"]
"""The price of an order: `bid_or_ask` is the bid for a sale and the ask for a purchase, `bid_or_ask_fill` the same with
the other side where that price is 0, `close` the close."""

_SUFFIXES: Final = (".pkl", ".pkl.backtest")
"""The possible suffixes of a pickled table."""
_FEATURES: Final = {
    5: ["$high", "$low", "$open", "$close", "$volume"],
    6: ["$high", "$low", "$open", "$close", "$vwap", "$volume"],
    16: [f"${name}" for name in ("open", "high", "low", "close", "vwap", "bid", "ask", "volume")]
    + [f"${side}V{level}" for side in ("bid", "ask") for level in ("", "1", "3", "5")],
}
"""The names of a table's features by their number. The tables themselves may lack the names."""


# ---- orders --------------------------------------------------------------------------------------


@dataclass
class Order:
    """An amount of one asset to trade between two times.

    start_time, end_time: timestamps of pandas; the end is exclusive.
    """

    stock_id: str
    amount: float
    direction: OrderDir
    start_time: Any
    end_time: Any
    deal_amount: float = 0.0
    factor: float | None = None

    SELL: ClassVar[OrderDir] = OrderDir.SELL
    BUY: ClassVar[OrderDir] = OrderDir.BUY

    def __post_init__(self) -> None:
        if self.direction not in (0, 1):
            raise NotImplementedError(f"direction is {self.direction!r}; choose Order.SELL or Order.BUY")

    @property
    def sign(self) -> int:
        """1 for a purchase, -1 for a sale."""
        return self.direction * 2 - 1

    @property
    def amount_delta(self) -> float:
        """The signed amount to trade: positive for a purchase."""
        return self.amount * self.sign

    @property
    def deal_amount_delta(self) -> float:
        """The signed amount that was traded: positive for a purchase."""
        return self.deal_amount * self.sign

    @property
    def date(self) -> Any:
        """The day of the order, at midnight."""
        return pandas().Timestamp(self.start_time.replace(hour=0, minute=0, second=0))

    @property
    def key_by_day(self) -> tuple[Any, ...]:
        """Stock, day and direction."""
        return self.stock_id, self.date, self.direction

    @property
    def key(self) -> tuple[Any, ...]:
        """Stock, times and direction."""
        return self.stock_id, self.start_time, self.end_time, self.direction


def native_order(order: Any) -> native.Order:
    """Return Leyden's order for one of Qlib or of this module."""
    if isinstance(order, native.Order):
        return order
    direction = OrderDir(int(order.direction))
    return native.Order(order.stock_id, order.amount, direction, order.start_time, order.end_time)


def load_orders(order_path: str | Path, start_time: Any = None, end_time: Any = None) -> Sequence[Any]:
    """Return the orders in a pickled table, or in all pickled tables of a directory in the order of their names.

    start_time, end_time: the time of day when each order begins and ends; by default the whole day. A row whose amount
    is 0 is left out. CSV and Parquet files are read by `leyden_compat.order_execution.load_orders`, without these
    times.
    """
    frames, path = pandas(), Path(order_path)
    if path.suffix in (".csv", ".parquet") or any(each.suffix in (".csv", ".parquet") for each in _files(path)[:1]):
        return native.load_orders(path)
    table = read_orders(path)
    table = table.rename(columns={"date": "datetime"})
    start = frames.Timestamp("0:00:00") if start_time is None else start_time
    end = frames.Timestamp("23:59:59") if end_time is None else end_time
    rows = zip(
        table["instrument"], table["amount"], table["order_type"], frames.to_datetime(table["datetime"]), strict=True
    )
    return [
        make_order(stock, amount, direction, _at(day, start), _at(day, end))
        for stock, amount, direction, day in rows
        if amount > 0
    ]


def read_orders(path: Path) -> Any:
    """Return the table of orders in a pickle, or the concatenated tables of a directory in the order of their names.
    Raise ConfigError for an empty directory.
    """
    if not (files := _files(path)):
        raise ConfigError(f"there are no orders in {path}; give a pickled table of orders, or a directory of them")
    return pandas().concat([read_pickle(file) for file in files]).reset_index()


def make_order(stock_id: str, amount: float, direction: Any, start_time: Any, end_time: Any) -> Any:
    """Return a `qlib.backtest.Order`: Qlib's own if pyqlib is installed, otherwise this module's."""
    make: Any = importlib.import_module("qlib.backtest.decision").Order
    return make(stock_id, amount, OrderDir(int(direction)), start_time, end_time)


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def _at(day: Any, time: Any) -> Any:
    return day.replace(hour=time.hour, minute=time.minute, second=time.second)


# ---- tables --------------------------------------------------------------------------------------


class BaseIntradayBacktestData:
    """Base class of a day's bars."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} bars)"

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} has no __len__()")

    def get_deal_price(self) -> Any:
        """Return the price of each tick, by time."""
        raise NotImplementedError(f"{type(self).__name__} has no get_deal_price()")

    def get_volume(self) -> Any:
        """Return the market's volume in each tick, by time."""
        raise NotImplementedError(f"{type(self).__name__} has no get_volume()")

    def get_time_index(self) -> Any:
        """Return the beginning of each tick."""
        raise NotImplementedError(f"{type(self).__name__} has no get_time_index()")


class BaseIntradayProcessedData:
    """Base class of a day's features."""

    today: Any
    """The features, by time."""
    yesterday: Any
    """The features of the day before."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.today)} ticks)"


class ProcessedDataProvider(native.ProcessedDataProvider):
    """The base class of sources of features, for state interpreters."""

    def get_data(self, stock_id: str, date: Any, feature_dim: int, time_index: Any) -> Any:
        """Return an object with the features of a day (`today`) and of the day before (`yesterday`).

        feature_dim: the number of features.
        time_index: the beginning of each tick of the day.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_data()")


class DataframeIntradayBacktestData(BaseIntradayBacktestData):
    """The bars of a day in a data frame, whose index is their times."""

    def __init__(self, df: Any, price_column: str = "$close0", volume_column: str = "$volume0") -> None:
        self.df, self.price_column, self.volume_column = df, price_column, volume_column

    def __len__(self) -> int:
        return len(self.df)

    def get_deal_price(self) -> Any:
        """Return the price of each tick, by time."""
        return self.df[self.price_column]

    def get_volume(self) -> Any:
        """Return the market's volume in each tick, by time."""
        return self.df[self.volume_column]

    def get_time_index(self) -> Any:
        """Return the beginning of each tick."""
        return self.df.index


class SimpleIntradayBacktestData(DataframeIntradayBacktestData):
    """The bars of a day in the pickled table `<data_dir>/<stock_id>.pkl`.

    deal_price: the price at which ticks trade. "close"; "bid_or_ask": the bid for a sale, the ask for a purchase;
        "bid_or_ask_fill": the same, and the other one where it is missing.
    order_dir: the order's side, which only the last two need.
    """

    def __init__(
        self,
        data_dir: Path | str,
        stock_id: str,
        date: Any,
        deal_price: DealPriceType = "close",
        order_dir: int | None = None,
    ) -> None:
        super().__init__(_day(_read_table(Path(data_dir) / stock_id), stock_id, date))
        self.data = self.df
        self.deal_price_type: DealPriceType = deal_price
        self.order_dir = order_dir

    def get_deal_price(self) -> Any:
        """Return the price of each tick, by time.

        Raise ValueError if the price depends on the order's side, and the side is unknown.
        """
        if self.deal_price_type == "close":
            return self.df["$close0"]
        if self.deal_price_type not in ("bid_or_ask", "bid_or_ask_fill"):
            raise ValueError(f"deal_price is {self.deal_price_type!r}; choose close, bid_or_ask or bid_or_ask_fill")
        if self.order_dir is None:
            raise ValueError(f"deal_price {self.deal_price_type!r} depends on the order's side; give order_dir")
        own, other = ("$bid0", "$ask0") if self.order_dir == OrderDir.SELL else ("$ask0", "$bid0")
        price = self.df[own]
        return price if self.deal_price_type == "bid_or_ask" else price.replace(0, np.nan).fillna(self.df[other])


@lru_cache(maxsize=100)
def load_simple_intraday_backtest_data(
    data_dir: Path, stock_id: str, date: Any, deal_price: DealPriceType = "close", order_dir: int | None = None
) -> SimpleIntradayBacktestData:
    """Return the bars of a day. They are kept in memory, so that a file that changes later is not read again."""
    return SimpleIntradayBacktestData(data_dir, stock_id, date, deal_price, order_dir)


class PickleIntradayProcessedData(BaseIntradayProcessedData):
    """The features of a day (`today`) and of the day before (`yesterday`), from the pickled table
    `<data_dir>/<stock_id>.pkl`.

    feature_dim: the number of features: 5, 6 or 16.
    time_index: the beginning of each tick of the day.
    Raise ConfigError for another number of features or of ticks.
    """

    def __init__(self, data_dir: Path | str, stock_id: str, date: Any, feature_dim: int, time_index: Any) -> None:
        frames = pandas()
        if feature_dim not in _FEATURES:
            raise ConfigError(f"a table of {feature_dim} features is not known; known are those of 5, 6 and 16")
        names, ticks = _FEATURES[feature_dim], len(time_index)
        path = Path(data_dir) / stock_id
        table = _read_table(path)
        if table.index.nlevels == 3:
            day = table.loc[frames.IndexSlice[stock_id, :, date]]
            self.today, before = day[names], day[[f"{name}_1" for name in names]]
            self.yesterday = before.set_axis(names, axis=1)
        else:  # one column: all of today's numbers, then all of yesterday's
            numbers = table.loc[frames.IndexSlice[stock_id, date]].to_numpy()
            if numbers.size != 2 * ticks * feature_dim:
                raise ConfigError(
                    f"{path} has {numbers.size} numbers of {date}; {ticks} ticks of {feature_dim} features are "
                    f"{2 * ticks * feature_dim}, for two days"
                )
            parts = numbers.reshape(2, ticks, feature_dim)
            self.today, self.yesterday = (frames.DataFrame(part, time_index, names) for part in parts)
        if len(self.today) != ticks:
            raise ConfigError(f"{path} has {len(self.today)} ticks on {date}, and the bars have {ticks}")


@lru_cache(maxsize=100)
def _processed(data_dir: Path, stock_id: str, date: Any, feature_dim: int, ticks: Any) -> PickleIntradayProcessedData:
    """Return the features of a day, cached.

    ticks: a tuple, because an index cannot be hashed.
    """
    return PickleIntradayProcessedData(data_dir, stock_id, date, feature_dim, pandas().DatetimeIndex(ticks))


def load_pickle_intraday_processed_data(
    data_dir: Path, stock_id: str, date: Any, feature_dim: int, time_index: Any
) -> PickleIntradayProcessedData:
    """Return the features of a day and of the day before, which are kept in memory."""
    return _processed(Path(data_dir), stock_id, pandas().Timestamp(date), feature_dim, tuple(time_index))


class PickleProcessedDataProvider(ProcessedDataProvider):
    """Features of pickled tables, for state interpreters."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    def get_data(self, stock_id: str, date: Any, feature_dim: int, time_index: Any) -> Any:
        """Return an object with the features of a day (`today`) and of the day before (`yesterday`).

        feature_dim: the number of features.
        time_index: the beginning of each tick of the day.
        """
        return load_pickle_intraday_processed_data(self._data_dir, stock_id, date, feature_dim, time_index)


class HandlerIntradayProcessedData(BaseIntradayProcessedData):
    """Columns of a day (`today`) and of the day before (`yesterday`) in the pickled data set or table
    `<data_dir>/feature/<stock_id>.pkl`.

    backtest: read the folder `backtest/` instead of `feature/`.
    index_only: keep the times of the ticks without any column.
    """

    def __init__(
        self,
        data_dir: Path | str,
        stock_id: str,
        date: Any,
        feature_columns_today: Sequence[str],
        feature_columns_yesterday: Sequence[str],
        backtest: bool = False,
        index_only: bool = False,
    ) -> None:
        folder = Path(data_dir) / ("backtest" if backtest else "feature")
        day = _day(_read_table(folder / stock_id), stock_id, pandas().Timestamp(date))
        self.today, self.yesterday = (
            day[[] if index_only else list(columns)] for columns in (feature_columns_today, feature_columns_yesterday)
        )


def load_handler_intraday_processed_data(
    data_dir: Path,
    stock_id: str,
    date: Any,
    feature_columns_today: Sequence[str],
    feature_columns_yesterday: Sequence[str],
    backtest: bool = False,
    index_only: bool = False,
) -> HandlerIntradayProcessedData:
    """Return the columns of a day and of the day before, which are kept in memory."""
    columns = tuple(feature_columns_today), tuple(feature_columns_yesterday)
    return _handler_data(Path(data_dir), stock_id, pandas().Timestamp(date), *columns, backtest, index_only)


@lru_cache(maxsize=100)
def _handler_data(*arguments: Any) -> HandlerIntradayProcessedData:
    return HandlerIntradayProcessedData(*arguments)


class HandlerProcessedDataProvider(ProcessedDataProvider):
    """Features of pickled data sets, for state interpreters."""

    def __init__(
        self,
        data_dir: str,
        feature_columns_today: Sequence[str],
        feature_columns_yesterday: Sequence[str],
        backtest: bool = False,
    ) -> None:
        self.data_dir, self.backtest = Path(data_dir), backtest
        self.feature_columns_today, self.feature_columns_yesterday = feature_columns_today, feature_columns_yesterday

    def get_data(self, stock_id: str, date: Any, feature_dim: int, time_index: Any) -> Any:
        """Return an object with the columns of a day (`today`) and of the day before (`yesterday`). `feature_dim` and
        `time_index` have no effect.
        """
        columns = self.feature_columns_today, self.feature_columns_yesterday
        return load_handler_intraday_processed_data(self.data_dir, stock_id, date, *columns, backtest=self.backtest)


def _day(table: Any, stock_id: str, date: Any) -> Any:
    if "date" in table.index.names:
        return table.loc[pandas().IndexSlice[stock_id, :, date]]
    rows = table.xs(stock_id, level="instrument")
    return rows[rows.index.normalize() == date]


@lru_cache(maxsize=10)
def _read_table(stem: Path) -> Any:
    """Return a pickled table with dates as pandas' timestamps, sorted by its index. Tables are kept in memory, as in
    Qlib, so that a file that changes later is not read again.

    stem: the path without its suffix.
    """
    found = [path for suffix in _SUFFIXES if (path := stem.with_name(stem.name + suffix)).exists()]
    if not found:
        raise FileNotFoundError(f"there is no {stem}.pkl, nor {stem}.pkl.backtest")
    if len(found) > 1:
        raise ValueError(f"there are both {found[0].name} and {found[1].name} in {stem.parent}; keep one of them")
    frames, table = pandas(), read_pickle(found[0])
    names = table.index.names
    table = table.reset_index()
    for name in ("date", "datetime"):
        if name in table:
            table[name] = frames.to_datetime(table[name])
    return table.set_index(names).sort_index()


# ---- the simulator -------------------------------------------------------------------------------


class _State:
    """The fields of `SAOEState`, with timestamps, indices and data frames of pandas.

    Times and histories are converted when they are first read.
    """

    def __init__(self, state: SAOEState, simulator: SingleAssetOrderExecutionSimple) -> None:
        self.native = state
        """The state as Leyden's interpreters and rewards read it."""
        self.order, self.backtest_data = simulator.order, simulator.backtest_data
        self.ticks_index, self.ticks_for_order = simulator.ticks_index, simulator.ticks_for_order
        self.cur_step, self.position = state.cur_step, state.position
        self.ticks_per_step, self.metrics = state.ticks_per_step, _with_timestamp(state.metrics)

    @cached_property
    def cur_time(self) -> Any:
        """The beginning of the next step; the order's end if there is none."""
        return pandas().Timestamp(self.native.cur_time)

    @cached_property
    def history_exec(self) -> Any:
        return _frame(self.native.history_exec)

    @cached_property
    def history_steps(self) -> Any:
        return _frame(self.native.history_steps)


def _with_timestamp(metrics: SAOEMetrics | None) -> Any:
    return None if metrics is None else {**metrics, "datetime": pandas().Timestamp(metrics["datetime"])}


def _frame(history: History) -> Any:
    columns = {name: history[name] for name in SAOEMetrics.__annotations__}
    return pandas().DataFrame(columns).set_index("datetime")


class SingleAssetOrderExecutionSimple(Simulator[Any, Any, float]):
    """Execute one order on the bars of one asset.

    data_dir: a directory with `<stock_id>.parquet` or `.csv`, or with pickled tables in `backtest/`.
    feature_columns_today, feature_columns_yesterday: ignored, because `backtest_data` has all columns.
    data_granularity: the minutes in a bar.
    ticks_per_step: the minutes in a step.
    vol_threshold: the greatest share of the market's volume; None: no limit.
    """

    def __init__(
        self,
        order: Any,
        data_dir: Path,
        feature_columns_today: Sequence[str] = (),
        feature_columns_yesterday: Sequence[str] = (),
        data_granularity: int = 1,
        ticks_per_step: int = 30,
        vol_threshold: float | None = None,
    ) -> None:
        super().__init__(order)
        self.order, self.data_dir, self.vol_threshold = order, Path(data_dir), vol_threshold
        self.backtest_data = self.get_backtest_data()
        self.ticks_index = self.backtest_data.get_time_index()
        price, volume = self.backtest_data.get_deal_price(), self.backtest_data.get_volume()
        bars = Bars(np.asarray(self.ticks_index), {"close": np.asarray(price), "volume": np.asarray(volume)})
        self._inner = native.SingleAssetOrderExecutionSimple(
            native_order(order),
            data_granularity=data_granularity,
            ticks_per_step=ticks_per_step,
            vol_threshold=vol_threshold,
            data=bars,
        )
        self.ticks_for_order = pandas().DatetimeIndex(self._inner.ticks_for_order)
        self.ticks_per_step, self.twap_price = self._inner.ticks_per_step, self._inner.twap_price

    def get_backtest_data(self) -> Any:
        """Return the bars of the order's day. Override it to read them from elsewhere."""
        order = native_order(self.order)
        stem = self.data_dir / order.stock_id
        if any(stem.with_name(stem.name + suffix).is_file() for suffix in (".parquet", ".csv")):
            bars = load_bars(self.data_dir, order.stock_id)
            part = bars.days(order.start_time, order.end_time)
            columns = {f"${name}": column[part] for name, column in bars.columns.items()}
            table = pandas().DataFrame(columns, pandas().DatetimeIndex(bars.times[part]))
            return DataframeIntradayBacktestData(table, "$close", "$volume")
        day = pandas().Timestamp(order.start_time.astype("datetime64[D]"))
        return load_simple_intraday_backtest_data(
            self.data_dir / "backtest", order.stock_id, day, "close", int(order.direction)
        )

    def step(self, action: float) -> None:
        """Trade `action` units.

        After the last step, the environment's logger gets the histories and the order's metrics. Raise AssertionError
        if the order is done, and ValueError for more units than are left.
        """
        self._inner.step(action)
        if self.done() and (env := self.env) is not None:
            env.logger.add_any("history_steps", self.history_steps, loglevel=LogLevel.DEBUG)
            env.logger.add_any("history_exec", self.history_exec, loglevel=LogLevel.DEBUG)
            metrics: dict[str, Any] = self.metrics or {}
            for name, value in metrics.items():
                add = env.logger.add_scalar if isinstance(value, float) else env.logger.add_any
                add(name, value)

    def done(self) -> bool:
        """Return whether everything is traded, or the time is over."""
        return self._inner.done()

    def get_state(self) -> Any:
        """Return the current state, which later steps do not change."""
        return _State(self._inner.get_state(), self)

    @property
    def position(self) -> float:
        """The amount that is left to trade."""
        return self._inner.position

    @property
    def cur_step(self) -> int:
        """The number of steps made."""
        return self._inner.cur_step

    @property
    def cur_time(self) -> Any:
        """The beginning of the next step."""
        return pandas().Timestamp(self._inner.cur_time)

    @property
    def metrics(self) -> Any:
        """The metrics of the whole order; None until it is done."""
        return _with_timestamp(self._inner.metrics)

    @property
    def history_exec(self) -> Any:
        """A DataFrame of the metrics (`SAOEMetrics`) of each tick so far, by time."""
        return _frame(self._inner.history_exec)

    @property
    def history_steps(self) -> Any:
        """A DataFrame of the metrics (`SAOEMetrics`) of each step so far, by time."""
        return _frame(self._inner.history_steps)


# ---- interpreters and rewards --------------------------------------------------------------------


class _StateInterpreter(AnyEnv, StateInterpreter[Any, Any]):
    """A mixin for Leyden's state interpreters, which then also read states with pandas' objects."""

    def interpret(self, simulator_state: Any) -> Any:
        return super().interpret(_native(simulator_state))


class _ActionInterpreter(AnyEnv, ActionInterpreter[Any, Any, float]):
    """A mixin for Leyden's action interpreters, which then also read states with pandas' objects."""

    def interpret(self, simulator_state: Any, action: Any) -> float:
        return super().interpret(_native(simulator_state), action)


class _Reward(AnyEnv, Reward[Any]):
    """A mixin for Leyden's rewards, which then also read states with pandas' objects."""

    def reward(self, simulator_state: Any) -> float:
        return super().reward(_native(simulator_state))


def _native(state: Any) -> Any:
    """Return a state in the form that Leyden's interpreters and rewards read.

    state: one of this module's simulator, of Leyden's simulator, or of Qlib's backtest.
    """
    of_qlib = isinstance(state, SAOEState) and not isinstance(state.history_steps, History)
    return _state_from_pandas(state) if of_qlib else getattr(state, "native", state)


def _state_from_pandas(state: Any) -> SAOEState:
    """Convert a state with pandas' times, ticks and histories into one with Leyden's arrays."""
    steps, ticks = state.history_steps, state.history_exec
    # Leyden's histories have one part for each step, of which rewards read the newest alone.
    newest = ticks.index >= steps.index[-1] if len(steps) else np.ones(len(ticks), bool)
    return state._replace(
        order=native_order(state.order),
        cur_time=np.datetime64(state.cur_time),
        ticks_index=np.asarray(state.ticks_index),
        ticks_for_order=np.asarray(state.ticks_for_order),
        history_exec=History((_columns(ticks[~newest]), _columns(ticks[newest]))),
        history_steps=History((_columns(steps[:-1]), *(_columns(row) for row in [steps[-1:]] if len(steps)))),
    )


def _columns(table: Any) -> Any:
    """Return the columns of a table of metrics as arrays, or as scalars if it has just one row."""
    columns = {name: np.asarray(column) for name, column in table.reset_index().items()}
    return {name: column[0] for name, column in columns.items()} if len(table) == 1 else columns


class DummyStateInterpreter(_StateInterpreter, native.DummyStateInterpreter):
    """Observe nothing."""


class CurrentStepStateInterpreter(_StateInterpreter, native.CurrentStepStateInterpreter):
    """Observe the progress of the order, and no market."""


class FullHistoryStateInterpreter(_StateInterpreter, native.FullHistoryStateInterpreter):
    """Observe the features of all ticks so far and of the day before, and all positions so far.

    processed_data_provider: a provider, or a configuration of one.
    """

    def __init__(self, max_step: int, data_ticks: int, data_dim: int, processed_data_provider: Any) -> None:
        provider = init_instance_by_config(processed_data_provider, accept_types=native.ProcessedDataProvider)
        super().__init__(max_step, data_ticks, data_dim, _OfPandas(provider))


class _OfPandas(ProcessedDataProvider):
    """Wraps a provider that expects its date and its ticks as pandas' objects."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def get_data(self, stock_id: str, date: Any, feature_dim: int, time_index: Any) -> Any:
        frames = pandas()
        return self._provider.get_data(stock_id, frames.Timestamp(date), feature_dim, frames.DatetimeIndex(time_index))


class CategoricalActionInterpreter(_ActionInterpreter, native.CategoricalActionInterpreter):
    """Action k trades `values[k]` of the order's amount, or the rest if that is less."""


class TwapRelativeActionInterpreter(_ActionInterpreter, native.TwapRelativeActionInterpreter):
    """Action 1 trades an equal part of the rest in each remaining step.

    Steps are counted as in Qlib, all of the same length. If an order begins between two steps, the simulator makes one
    step more than this count.
    """

    def interpret(self, simulator_state: Any, action: Any) -> float:
        """Return the units to trade: `action` times an equal part of the rest, at most the rest."""
        state = _native(simulator_state)
        left = max(math.ceil(len(state.ticks_for_order) / state.ticks_per_step) - state.cur_step, 1)
        return min(state.position, state.position / left * float(action))


class PAPenaltyReward(_Reward, native.PAPenaltyReward):
    """The step's price advantage, less a penalty for trading much in few ticks."""


class PPOReward(_Reward, native.PPOReward):
    """Rate the order once, at its end, by its mean price."""
