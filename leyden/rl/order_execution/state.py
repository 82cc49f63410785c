"""What a simulator of order execution says of itself: `SAOEState`, with its histories and metrics (SAOE: single-asset order execution)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from leyden.rl.order_execution.bars import IntradayBacktestData
from leyden.rl.order_execution.objects import Order, OrderDir, Time


class SAOEMetrics(TypedDict):
    """A step, a tick or a whole order in numbers."""

    stock_id: str
    datetime: Any
    """When it began."""
    direction: OrderDir
    market_volume: Any
    """What the market traded, summed."""
    market_price: Any
    """The mean of the ticks' prices."""
    amount: Any
    """What the policy wanted to trade."""
    inner_amount: Any
    """What was tried."""
    deal_amount: Any
    """What was traded."""
    trade_price: Any
    """The mean price of what was traded; 0 where nothing was."""
    trade_value: Any
    """Price times amount, summed."""
    position: Any
    """What is left to trade, afterwards."""
    ffr: Any
    """Fulfilled: what was traded of the whole order's amount, 0 to 1."""
    pa: Any
    """Price advantage over the order's TWAP in basis points; positive is better, whichever the direction."""


class History(Mapping[str, NDArray[Any]]):
    """Columns that grow at their end; a longer one is a new `History`, so that a state does not change. Names: those of `SAOEMetrics`.

    `history["pa"]` is a column, (rows,); `len(history)` is the number of its rows; `history.last` are the newest rows alone.
    """

    def __init__(self, chunks: tuple[SAOEMetrics, ...] = ()) -> None:
        self._chunks = chunks
        self._columns: dict[str, NDArray[Any]] = {}

    def plus(self, chunk: SAOEMetrics) -> History:
        """With one row more (its values are scalars), or several (its `datetime` and others are arrays of one length)."""
        return History((*self._chunks, chunk))

    @property
    def last(self) -> SAOEMetrics:
        """What was added last. Raises LookupError if nothing was."""
        return self._chunks[-1]

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in SAOEMetrics.__annotations__:
            raise KeyError(name)
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
        """Rows, not columns."""
        return sum(np.size(chunk["datetime"]) for chunk in self._chunks)


class SAOEState(NamedTuple):
    """Where the execution of an order is."""

    order: Order
    cur_time: Time
    """When the next step begins; the order's end when there is none."""
    cur_step: int
    """Steps made."""
    position: float
    """Left to trade."""
    history_exec: History
    """A row for each tick."""
    history_steps: History
    """A row for each step."""
    metrics: SAOEMetrics | None
    """Of the whole order; None until it is done."""
    backtest_data: IntradayBacktestData
    ticks_per_step: int
    ticks_index: NDArray[Any]
    """The ticks of the order's days, (ticks,)."""
    ticks_for_order: NDArray[Any]
    """Those of them in which it may trade."""

    @property
    def n_steps(self) -> int:
        """Steps from the first to the last tick that it may trade in, however the policy trades."""
        first, last = np.searchsorted(self.ticks_index, self.ticks_for_order[[0, -1]])
        return int(last) // self.ticks_per_step - int(first) // self.ticks_per_step + 1
