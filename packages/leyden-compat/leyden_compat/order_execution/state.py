"""`SAOEState`, the state of a simulator of order execution, with its histories and metrics.

SAOE, as in Qlib, means single-asset order execution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from leyden_compat.order_execution.bars import IntradayBacktestData
from leyden_compat.order_execution.objects import Order, OrderDir, Time


class SAOEMetrics(TypedDict):
    """The metrics of a step, of a whole order, or of several ticks as arrays (ticks,)."""

    stock_id: str
    datetime: Any
    """The beginning of the step, the order or the tick."""
    direction: OrderDir
    market_volume: Any
    """The sum of the market's volume in the ticks."""
    market_price: Any
    """The mean of the market's price in the ticks."""
    amount: Any
    """The amount that the policy wanted to trade."""
    inner_amount: Any
    """The amount that the simulator tried to trade; here the traded amount. Qlib's name."""
    deal_amount: Any
    """The amount that was traded."""
    trade_price: Any
    """The mean price of the traded amount; 0 if nothing was traded."""
    trade_value: Any
    """The sum of price times amount."""
    position: Any
    """The amount that is left to trade afterwards."""
    ffr: Any
    """The fulfilled fraction: the traded amount over the order's amount, 0 to 1."""
    pa: Any
    """The price advantage over the order's TWAP in basis points; positive is better for purchases and for sales."""


class History(Mapping[str, NDArray[Any]]):
    """A table with the columns of `SAOEMetrics`, and a row for each step or tick.

    `history["pa"]` is a column, (rows,); `len(history)` is the number of rows; `history.last` holds the newest rows. A
    history does not change: `plus` returns a longer one.
    """

    def __init__(self, chunks: tuple[SAOEMetrics, ...] = ()) -> None:
        self._chunks = chunks
        self._columns: dict[str, NDArray[Any]] = {}

    def plus(self, chunk: SAOEMetrics) -> History:
        """Return this history with rows added: one if the chunk holds scalars, several if it holds arrays."""
        return History((*self._chunks, chunk))

    @property
    def last(self) -> SAOEMetrics:
        """The rows that were added last. Raises IndexError if there are none."""
        return self._chunks[-1]

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a column, (rows,). A value that a chunk has once is repeated for each of its rows."""
        if name not in SAOEMetrics.__annotations__:
            raise KeyError(f"{name!r} is no column; there are {', '.join(SAOEMetrics.__annotations__)}")
        if name not in self._columns:
            chunks: list[Any] = list(self._chunks)
            parts: list[NDArray[Any]] = [
                np.broadcast_to(chunk[name], (np.size(chunk["datetime"]),)) for chunk in chunks
            ]
            self._columns[name] = np.concatenate(parts) if parts else np.zeros(0)
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(SAOEMetrics.__annotations__)

    def __len__(self) -> int:
        """Return the number of rows, not of columns."""
        return sum(np.size(chunk["datetime"]) for chunk in self._chunks)


class SAOEState(NamedTuple):
    """The state of an order's execution."""

    order: Order
    cur_time: Time
    """The beginning of the next step; the order's end if there is none."""
    cur_step: int
    """The number of steps made."""
    position: float
    """The amount that is left to trade."""
    history_exec: History
    """A row for each tick."""
    history_steps: History
    """A row for each step."""
    metrics: SAOEMetrics | None
    """The metrics of the whole order; None until it is done."""
    backtest_data: IntradayBacktestData
    ticks_per_step: int
    ticks_index: NDArray[Any]
    """The beginnings of the ticks of the order's days, (ticks,)."""
    ticks_for_order: NDArray[Any]
    """The beginnings of the ticks in which the order may trade."""

    @property
    def n_steps(self) -> int:
        """The number of steps that the order's time has, even if the policy is done earlier."""
        first, last = np.searchsorted(self.ticks_index, self.ticks_for_order[[0, -1]])
        return int(last) // self.ticks_per_step - int(first) // self.ticks_per_step + 1
