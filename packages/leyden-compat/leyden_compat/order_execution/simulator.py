"""`SingleAssetOrderExecutionSimple`: the execution of an order, tick by tick, on historical bars.

The order does not move the market. The simulator knows no policy: an action is an amount to trade in the next step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from leyden._lib.options import check_number
from leyden.errors import ConfigError, InvalidTrade, OrderDone
from leyden.rl.parts import Simulator
from leyden.training import LogLevel
from leyden_compat.order_execution.bars import Bars, IntradayBacktestData, bars_of
from leyden_compat.order_execution.objects import Order, OrderDir, Time
from leyden_compat.order_execution.state import History, SAOEMetrics, SAOEState

Array = NDArray[Any]
BASIS_POINTS = 10_000


class SingleAssetOrderExecutionSimple(Simulator[Order, SAOEState, float]):
    """Executes one order on the bars of one asset.

    The amount of a step is split evenly over its ticks, each of which trades at its close. A tick without a close
    trades nothing; the others share its part. A tick trades at most `vol_threshold` of the market's volume. The last
    tick with a close trades all that is left, within that limit. Steps end at multiples of `ticks_per_step` of the
    day's ticks, so an order that begins between two of them has a shorter first step.

    data_dir: a directory with `<stock_id>.parquet` or `.csv`.
    data: instead of `data_dir`, the bars by stock, or the bars of the only stock.
    feature_columns_today, feature_columns_yesterday: the columns of `backtest_data.today` and `.yesterday`.
    data_granularity: the minutes in a bar (or another unit, which `ticks_per_step` shares).
    ticks_per_step: the minutes in a step; a multiple of data_granularity.
    vol_threshold: the greatest share of the market's volume that a tick trades; None: no limit.
    Raise ConfigError if the bars have no tick in the order's time.
    """

    def __init__(
        self,
        order: Order,
        data_dir: str | Path | None = None,
        feature_columns_today: Sequence[str] = (),
        feature_columns_yesterday: Sequence[str] = (),
        data_granularity: int = 1,
        ticks_per_step: int = 30,
        vol_threshold: float | None = None,
        *,
        data: Bars | Mapping[str, Bars] | None = None,
    ) -> None:
        super().__init__(order)
        check_number("data_granularity", data_granularity, at_least=1, whole=True)
        check_number("ticks_per_step", ticks_per_step, at_least=1, whole=True)
        check_number("vol_threshold", vol_threshold, above=0, or_none="no limit")
        if ticks_per_step % data_granularity:
            raise ConfigError(
                f"ticks_per_step is {ticks_per_step}; it must be a multiple of data_granularity, {data_granularity}"
            )
        bars = bars_of(order.stock_id, data_dir, data)
        self.order = order
        self.ticks_per_step = ticks_per_step // data_granularity
        self.vol_threshold = vol_threshold
        days = bars.days(order.start_time, order.end_time)
        self.backtest_data = IntradayBacktestData(
            bars, days, tuple(feature_columns_today), tuple(feature_columns_yesterday)
        )
        self.ticks_index = self.backtest_data.get_time_index()
        self._price = self.backtest_data.get_deal_price()
        self._volume = self.backtest_data.get_volume()
        traded = bars.between(order.start_time, order.end_time)
        self._at, self._end = traded.start - days.start, traded.stop - days.start
        if self._at >= self._end:
            raise ConfigError(
                f"{bars.source} has no tick in the time of the order to {order}; its bars are from {bars.times[0]} to {bars.times[-1]}"
            )
        self.ticks_for_order = self.ticks_index[self._at : self._end]
        if not np.isfinite(self._price[self._at : self._end]).any():
            raise ConfigError(
                f"{bars.source} has no price (close) in the time of the order to {order}, so nothing can be traded"
            )
        self.twap_price = _mean(self._price[self._at : self._end])
        self.position = order.amount
        self.cur_step = 0
        self.history_exec, self.history_steps = History(), History()
        self.metrics: SAOEMetrics | None = None

    @property
    def cur_time(self) -> Time:
        """The beginning of the next step; the order's end if there is none."""
        return self.ticks_index[self._at] if self._at < self._end else self.order.end_time

    def step(self, action: float) -> None:
        """Trade an amount within the market's limit. The last step trades all that is left instead.

        action: units of the asset.
        Raise InvalidTrade, and change nothing, if the amount is negative or more than is left. Raise OrderDone if there
        is no further step.
        """
        if self.done():
            raise OrderDone(f"the order to {self.order} is done; its simulator takes no further step")
        amount = float(action)
        start = self._at
        stop: int = min((start // self.ticks_per_step + 1) * self.ticks_per_step, self._end)
        price, volume = self._price[start:stop], self._volume[start:stop]
        if not math.isfinite(amount) or amount < -self.order.tolerance:
            raise self._invalid(amount)
        traded = self._split(amount, price, volume, last=stop == self._end)
        tolerance = self.order.tolerance
        if not (traded >= -tolerance).all() or traded.sum() > self.position + tolerance:
            raise self._invalid(amount)
        left = self.position - np.cumsum(traded)
        left[np.abs(left) < self.order.tolerance] = 0.0
        self.history_exec = self.history_exec.plus(self._ticks(start, stop, traded, left))
        self.position = float(left[-1])
        self.history_steps = self.history_steps.plus(
            self._summary(self.ticks_index[start], volume, price, amount, traded)
        )
        self._at = stop
        self.cur_step += 1
        if self.done():
            self._finish()

    def done(self) -> bool:
        """Return whether everything is traded, or the time is over."""
        return self.position <= 0 or self._at >= self._end

    def get_state(self) -> SAOEState:
        """Return the current state, which later steps do not change."""
        return SAOEState(
            order=self.order,
            cur_time=self.cur_time,
            cur_step=self.cur_step,
            position=self.position,
            history_exec=self.history_exec,
            history_steps=self.history_steps,
            metrics=self.metrics,
            backtest_data=self.backtest_data,
            ticks_per_step=self.ticks_per_step,
            ticks_index=self.ticks_index,
            ticks_for_order=self.ticks_for_order,
        )

    def _split(self, amount: float, price: Array, volume: Array, *, last: bool) -> Array:
        """Return the amount that each tick of a step trades, (ticks,), within the market's limit. A tick without a
        price trades nothing.

        last: it is the order's last step, so its last tick with a price trades all that is left.
        """
        priced = np.isfinite(price)
        traded = np.zeros(len(price))
        if not priced.any():
            return traded
        limit = (
            np.full(len(price), np.inf) if self.vol_threshold is None else self.vol_threshold * np.nan_to_num(volume)
        )
        traded[priced] = np.minimum(amount / priced.sum(), limit[priced])
        if last:
            final = int(np.flatnonzero(priced)[-1])
            traded[final] = min(traded[final] + self.position - traded.sum(), limit[final])
        return traded

    def _invalid(self, amount: float) -> InvalidTrade:
        return InvalidTrade(
            f"step {self.cur_step} of the order to {self.order} would trade {amount!r} with {self.position!r} left; "
            "an amount is at least 0 and at most what is left"
        )

    def _ticks(self, start: int, stop: int, traded: Array, left: Array) -> SAOEMetrics:
        """Return the metrics of each tick from `start` to `stop`, as arrays of shape (ticks,).

        traded: the amount dealt in each tick.
        left: the position after it.
        """
        price = self._price[start:stop]
        return SAOEMetrics(
            stock_id=self.order.stock_id,
            datetime=self.ticks_index[start:stop],
            direction=self.order.direction,
            market_volume=self._volume[start:stop],
            market_price=price,
            amount=traded,
            inner_amount=traded,
            deal_amount=traded,
            trade_price=price,
            trade_value=_value(price, traded),
            position=left,
            ffr=traded / self.order.amount,
            pa=price_advantage(price, self.twap_price, self.order.direction),
        )

    def _summary(self, time: Time, volume: Array, price: Array, amount: float, traded: Array) -> SAOEMetrics:
        """Return the metrics of several ticks together: totals, and prices weighted by the amounts.

        If nothing was traded, price and price advantage are 0.
        time: the beginning of the first tick.
        volume, price, traded: (ticks,).
        amount: the amount of the action.
        """
        total = float(traded.sum())
        value = float(_value(price, traded).sum())
        nothing = total < self.order.tolerance
        trade_price = 0.0 if nothing else value / total
        return SAOEMetrics(
            stock_id=self.order.stock_id,
            datetime=time,
            direction=self.order.direction,
            market_volume=float(np.nansum(volume)),
            market_price=_mean(price),
            amount=amount,
            inner_amount=total,
            deal_amount=total,
            trade_price=trade_price,
            trade_value=value,
            position=self.position,
            ffr=total / self.order.amount,
            # in Qlib the price 0 counts as real, so buying nothing has an advantage of 10,000 basis
            # points
            pa=0.0 if nothing else price_advantage(trade_price, self.twap_price, self.order.direction),
        )

    def _finish(self) -> None:
        """Set the metrics of the whole order. In an environment, log them and the histories."""
        ticks = self.history_exec
        wanted = float(self.history_steps["amount"].sum())
        self.metrics = self._summary(
            self.ticks_index[0], ticks["market_volume"], ticks["market_price"], wanted, ticks["deal_amount"]
        )
        if (env := self.env) is None:
            return
        env.logger.add_any("history_steps", self.history_steps, loglevel=LogLevel.DEBUG)
        env.logger.add_any("history_exec", self.history_exec, loglevel=LogLevel.DEBUG)
        for name, value in self.metrics.items():
            if isinstance(value, float):
                env.logger.add_scalar(name, value)
            else:
                env.logger.add_any(name, value)


def _mean(price: Array) -> float:
    known = price[np.isfinite(price)]
    return float(known.mean()) if len(known) else math.nan


def _value(price: Array, traded: Array) -> Array:
    """Return the value of what each tick traded: 0 where nothing was, also without a price."""
    return np.where(traded == 0, 0.0, price * traded)


@overload
def price_advantage(exec_price: float, baseline_price: float, direction: OrderDir | int) -> float: ...
@overload
def price_advantage(exec_price: Array, baseline_price: float, direction: OrderDir | int) -> Array: ...
def price_advantage(exec_price: float | Array, baseline_price: float, direction: OrderDir | int) -> float | Array:
    """Return how much better than a baseline a price is, in basis points.

    The advantage is `(1 - price / baseline) * 10000` for a purchase, and the negative of that for a sale. It is 0 if
    the baseline is 0 or either price is unknown (NaN). Raise ConfigError for an unknown direction.
    """
    if direction not in (OrderDir.BUY, OrderDir.SELL):
        raise ConfigError(f"direction is {direction!r}; choose OrderDir.SELL or OrderDir.BUY")
    scalar = not isinstance(exec_price, np.ndarray)
    if baseline_price == 0:
        return 0.0 if scalar else np.zeros_like(exec_price)
    better = (1 - exec_price / baseline_price) * BASIS_POINTS * (1 if direction == OrderDir.BUY else -1)
    advantage = np.nan_to_num(better, nan=0.0)
    return float(advantage) if scalar else advantage
