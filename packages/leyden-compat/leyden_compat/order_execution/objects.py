"""`Order`: an amount to trade within a given time, which is the initial state of an episode.

Times are `numpy.datetime64` in microseconds, without a time zone, on the clock of the bars.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Final, cast

import numpy as np
from numpy.typing import NDArray

from leyden._lib.options import check_number
from leyden.errors import ConfigError

EPS: Final = 1e-12
"""Amounts below this count as 0, relative to the order's amount, or to 1 for small orders."""

Time = np.datetime64
_ZONE: Final = re.compile(r"[T ]\d\d?:?\d\d.*?(?:[Zz]|[+-]\d\d(?::?\d\d)?)$")
"""The end of a text that gives a time with its time zone."""
_DIGITS: Final = re.compile(r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")
_NO_ZONE: Final = "with a time zone; give the time on the bars' clock, without one (pandas: `.dt.tz_localize(None)` keeps the local time)"


class OrderDir(IntEnum):
    """The direction of an order, numbered as in Qlib's order files."""

    SELL = 0
    BUY = 1


@dataclass(frozen=True)
class Order:
    """An order to trade an amount of one asset in [start_time, end_time).

    amount: units of the asset, above 0.
    start_time, end_time: anything that `numpy.datetime64` accepts, such as "2020-01-02 09:30".
    Raise ConfigError for an impossible amount, direction or time.
    """

    stock_id: str
    amount: float
    direction: OrderDir
    start_time: Time
    end_time: Time

    SELL: ClassVar[OrderDir] = OrderDir.SELL
    BUY: ClassVar[OrderDir] = OrderDir.BUY

    def __post_init__(self) -> None:
        """Convert amount, direction and times, and check them."""
        check_number(f"amount of the order for {self.stock_id}", self.amount, above=0)
        if self.direction not in (0, 1):
            raise ConfigError(
                f"direction of the order for {self.stock_id} is {self.direction!r}; choose OrderDir.SELL or OrderDir.BUY"
            )
        object.__setattr__(self, "amount", float(self.amount))
        object.__setattr__(self, "direction", OrderDir(self.direction))
        object.__setattr__(self, "start_time", as_time(self.start_time, "start_time"))
        object.__setattr__(self, "end_time", as_time(self.end_time, "end_time"))
        if self.end_time <= self.start_time:
            raise ConfigError(
                f"the order for {self.stock_id} ends at {self.end_time}, which is not after its start, {self.start_time}; give a "
                "later end_time"
            )

    @property
    def sign(self) -> int:
        """1 for a purchase, -1 for a sale."""
        return 1 if self.direction == OrderDir.BUY else -1

    @property
    def tolerance(self) -> float:
        """A position below this counts as 0, because sums of floats of the order's size are not exact."""
        return EPS * max(1.0, self.amount)

    def __str__(self) -> str:
        return (
            f"{self.direction.name.lower()} {self.amount:g} {self.stock_id} from {self.start_time} to {self.end_time}"
        )


def as_time(value: Any, name: str = "time") -> Time:
    """Return a time as `datetime64[us]`. A number of eight digits is a date: 20200102.

    name: what the time is, for messages.
    Raise ConfigError if the value is no time, has a time zone, or is another number, which may count seconds,
    milliseconds or something else.
    """
    plain = plain_time(value, name)
    try:
        time = np.datetime64(plain, "us")
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{name} is {value!r}, which is no time: {error}; give one such as '2020-01-02 09:30'"
        ) from None
    if np.isnat(time):
        raise ConfigError(f"{name} is {value!r}, which is no time; give one such as '2020-01-02 09:30'")
    return time


def as_times(values: Any, name: str = "times") -> NDArray[np.datetime64]:
    """Return times as an array of `datetime64[us]`, by the rules of `as_time`."""
    array = np.asarray(values)
    if array.dtype.kind == "M":
        return array.astype("datetime64[us]")
    plain = [plain_time(value, name) for value in array.tolist()]
    try:
        return np.array(plain, "datetime64[us]")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name}: {error}; times are written as 2020-01-02 or 2020-01-02 09:30:00") from None


def plain_time(value: Any, name: str) -> Any:
    """Return a value that NumPy reads as the time that is meant. Raise ConfigError for a number that is no date, and
    for a time zone, which NumPy would drop after a shift to UTC.
    """
    if isinstance(value, np.integer | np.floating | np.str_):
        value = cast(Any, value).item()
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        raise ConfigError(f"{name} is {value}, {_NO_ZONE}")
    if isinstance(value, str):
        text = value.strip()
        if _ZONE.search(text):
            raise ConfigError(f"{name} is {text!r}, {_NO_ZONE}")
        if not _DIGITS.fullmatch(text):
            return text
        number = float(text)
    elif isinstance(value, int | float):
        number = float(value)
    else:
        return value
    if number == number // 1 and len(digits := f"{number:.0f}") == 8:
        with contextlib.suppress(ValueError):
            return datetime.datetime.strptime(digits, "%Y%m%d")
    raise ConfigError(
        f"{name} is the number {value!r}, which may count seconds, milliseconds or something else; give a date such as 20200102, "
        "a text such as '2020-01-02 09:30', or a numpy.datetime64"
    )
