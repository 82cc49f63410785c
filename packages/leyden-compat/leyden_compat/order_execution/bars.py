"""Bars: the market's prices and volumes in each tick, read from files, and the part of an order.

A file `<stock_id>.parquet` or `<stock_id>.csv` has a column `datetime` or `date`, then columns of numbers, at least
`close` and `volume`. Qlib's names (`$close`) are accepted too. This module knows no order and no simulator. To read
another format, add a line to `_READERS`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from leyden._lib.extras import import_optional
from leyden.errors import ConfigError
from leyden_compat.order_execution.objects import Time, as_times

Array = NDArray[Any]
TIME_COLUMNS: Final = ("datetime", "date")
_TIMES: Final = (*TIME_COLUMNS, "start_time", "end_time")
_KEPT_FILES: Final = 64
"""Files whose bars are cached."""


@dataclass(frozen=True, eq=False)
class Bars:
    """The bars of one asset, in order of time.

    times: (n,), the beginnings of the ticks; kept as datetime64[us].
    columns: arrays (n,) by name; kept as float64, and without `$` in their names.
    source: where they come from, for messages.
    Raise ConfigError unless all lengths are equal, times increase, close and volume are there, and no volume is
    negative.
    """

    times: Array
    columns: Mapping[str, Array]
    source: str = "bars"

    def __post_init__(self) -> None:
        """Convert times and columns, and check them."""
        object.__setattr__(self, "times", as_times(self.times, f"{self.source}: a time"))
        check_columns(list(self.columns), self.source)
        named = {name.removeprefix("$"): np.asarray(column, np.float64) for name, column in self.columns.items()}
        object.__setattr__(self, "columns", named)
        if len(self.times) == 0:
            raise ConfigError(f"{self.source} has no bars")
        if np.isnat(self.times).any() or not (np.diff(self.times) > np.timedelta64(0, "us")).all():
            raise ConfigError(f"{self.source}: the times of its bars do not increase; sort them, and leave doubles out")
        for name in ("close", "volume"):
            if name not in named:
                raise ConfigError(f"{self.source} has no column {name!r}; it has {', '.join(named) or 'none'}")
        for name, column in named.items():
            if column.shape != self.times.shape:
                raise ConfigError(
                    f"{self.source}: column {name!r} has shape {column.shape}, there are {len(self.times)} times"
                )
        for name in ("close", "volume"):
            if np.isinf(named[name]).any():
                raise ConfigError(f"{self.source}: {name} is infinite, at {self.times[np.isinf(named[name])][0]}")
        if (named["volume"] < 0).any():
            raise ConfigError(f"{self.source}: a volume is below 0, at {self.times[named['volume'] < 0][0]}")

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, name: str) -> Array:
        """Return a column, (n,), by its name with or without `$`. Raise ConfigError if it is missing."""
        try:
            return self.columns[name.removeprefix("$")]
        except KeyError:
            raise ConfigError(f"{self.source} has no column {name!r}; it has {', '.join(self.columns)}") from None

    def between(self, start: Time, end: Time) -> slice:
        """Return the indices of the bars that begin in [start, end)."""
        first, last = np.searchsorted(self.times, np.array([start, end]))
        return slice(int(first), int(last))

    def days(self, start: Time, end: Time) -> slice:
        """Return the indices of the bars of all calendar days that [start, end) touches."""
        microsecond = np.timedelta64(1, "us")  # an end at midnight does not touch the day that begins then
        first = start.astype("datetime64[D]")
        last = (end - microsecond).astype("datetime64[D]") + np.timedelta64(1, "D")
        return self.between(first, last)

    def matrix(self, names: Sequence[str], part: slice) -> Array:
        """Return these columns of the rows of `part`, as float64 of shape (rows, names)."""
        rows = len(range(*part.indices(len(self))))
        return np.stack([self[name][part] for name in names], axis=1) if names else np.zeros((rows, 0))


@dataclass(frozen=True, eq=False)
class IntradayBacktestData:
    """The bars of all days that an order touches, with its features. Columns have shape (ticks,)."""

    bars: Bars
    part: slice
    """The indices of the days' bars."""
    feature_columns_today: tuple[str, ...] = ()
    feature_columns_yesterday: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.part.stop - self.part.start

    def get_time_index(self) -> Array:
        """Return the beginning of each tick."""
        return self.bars.times[self.part]

    def get_deal_price(self) -> Array:
        """Return the price of a unit in each tick, which is the close."""
        return self.bars["close"][self.part]

    def get_volume(self) -> Array:
        """Return the market's volume in each tick."""
        return self.bars["volume"][self.part]

    @property
    def today(self) -> Array:
        """The features of the order's days, (ticks, feature_columns_today)."""
        return self.bars.matrix(self.feature_columns_today, self.part)

    @property
    def yesterday(self) -> Array:
        """The features of as many ticks before the order's days, (ticks, feature_columns_yesterday)."""
        return previous_features(self.bars, self.feature_columns_yesterday, self.part)


def previous_features(bars: Bars, names: Sequence[str], part: slice) -> Array:
    """Return features of the time before the bars of `part`, shape (ticks, names).

    A column that the bars have is read at `part`, as in Qlib, whose files have the value of the day before in columns
    such as `close_1`. If the bars lack `close_1`, `close` is read in as many bars just before `part`; bars before the
    first one are 0.
    """
    length = part.stop - part.start
    out = np.zeros((length, len(names)))
    for column, name in enumerate(names):
        plain = name.removeprefix("$")
        if plain not in bars.columns and plain.endswith("_1"):
            before = bars[plain.removesuffix("_1")][max(0, part.start - length) : part.start]
            if len(before):
                out[length - len(before) :, column] = before
        else:
            out[:, column] = bars[name][part]
    return out


def check_one_source(data_dir: str | Path | None, data: Bars | Mapping[str, Bars] | None) -> None:
    """Raise ConfigError unless exactly one of the two is given."""
    if (data_dir is None) == (data is None):
        raise ConfigError("give either data_dir, a directory of files of bars, or data, the bars themselves")


def bars_of(stock_id: str, data_dir: str | Path | None, data: Bars | Mapping[str, Bars] | None) -> Bars:
    """Return the bars of a stock. Raise ConfigError if there are none.

    data_dir: a directory of files of bars.
    data: instead of `data_dir`, the bars by stock, or the bars of the only stock.
    """
    check_one_source(data_dir, data)
    if data_dir is not None:
        return load_bars(data_dir, stock_id)
    if isinstance(data, Bars):
        return data
    assert data is not None
    if stock_id not in data:
        raise ConfigError(
            f"data has no bars of {stock_id}; it has those of {', '.join(sorted(data)[:5]) or 'no stock'}"
        )
    return data[stock_id]


def load_bars(data_dir: str | Path, stock_id: str) -> Bars:
    """Return the bars in `<data_dir>/<stock_id>.parquet` or `.csv`.

    The bars of 64 files are cached until the file changes. Raise ConfigError, which names the file, if it is missing or
    damaged.
    """
    folder = Path(data_dir)
    found = [path for suffix in _READERS if (path := folder / f"{stock_id}{suffix}").is_file()]
    if not found:
        there = sorted(path.name for path in folder.glob("*") if path.suffix in _READERS) if folder.is_dir() else []
        raise ConfigError(
            f"there is no {stock_id}.parquet or {stock_id}.csv in {folder}; there is {', '.join(there[:5]) or 'no file of bars'}"
            + (f" and {len(there) - 5} more" if len(there) > 5 else "")
        )
    if len(found) > 1:
        raise ConfigError(f"{folder} has both {found[0].name} and {found[1].name}; keep one of them")
    status = found[0].stat()
    return _cached_bars(str(found[0].absolute()), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=_KEPT_FILES)
def _cached_bars(path: str, mtime_ns: int, size: int) -> Bars:
    """Return the bars in a file.

    mtime_ns, size: parts of the cache's key, so a change is noticed.
    """
    table = read_table(Path(path))
    time_column = next((name for name in TIME_COLUMNS if name in table), None)
    if time_column is None:
        raise ConfigError(f"{path} has no column 'datetime' or 'date'; it has {', '.join(table)}")
    columns = {name: _numbers(column, name, path) for name, column in table.items() if name != time_column}
    return Bars(table[time_column], {name: column for name, column in columns.items() if column is not None}, path)


def read_table(path: Path) -> dict[str, Array]:
    """Return the columns of a CSV file, as text, or of a Parquet file, by name.

    Raise ConfigError for another kind of file, and for a damaged one.
    """
    try:
        reader = _READERS[path.suffix]
    except KeyError:
        raise ConfigError(f"{path} is neither .csv nor .parquet; convert it to one of them") from None
    return reader(path)


def _read_csv(path: Path) -> dict[str, Array]:
    """Return the columns of a CSV file as text, by name.

    Raise ConfigError for an empty file, and for a row that is too long or too short.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); convert it, for example with iconv") from None
    with io.StringIO(text, newline="") as file:
        rows: Iterator[list[str]] = csv.reader(file)
        header = next(rows, None)
        if not header:
            raise ConfigError(f"{path} is empty; its first line must name the columns")
        if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), None)):
            raise ConfigError(f"{path} is separated by {other!r}; separate its columns by commas")
        check_columns(header, str(path))
        content: list[list[str]] = []
        for number, row in enumerate(rows, start=2):
            if not row:
                continue
            if len(row) != len(header):
                raise ConfigError(f"{path}, line {number}: {len(row)} values for {len(header)} columns")
            content.append(row)
    return {
        name.strip(): np.array([row[column] for row in content], dtype=np.str_) for column, name in enumerate(header)
    }


def _read_parquet(path: Path) -> dict[str, Array]:
    parquet = import_optional("pyarrow.parquet", extra="export", needed_by=f"{path} (unless it is CSV)")
    try:
        table: Any = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error
    check_columns(table.column_names, str(path))
    for name in table.column_names:
        if name.strip() in _TIMES and (zone := getattr(table.schema.field(name).type, "tz", None)) is not None:
            raise ConfigError(
                f"{path}: the column {name!r} has the time zone {zone}; write it on the bars' clock, without one (pandas: "
                "`.dt.tz_localize(None)` keeps the local time)"
            )
    return {name: table.column(name).to_numpy() for name in table.column_names}


def check_columns(names: Sequence[str], source: str) -> None:
    """Raise ConfigError if a table has a column twice, also with `$`, spaces or other capitals."""
    seen: dict[str, str] = {}
    for name in names:
        plain = name.strip().removeprefix("$").casefold()
        if (other := seen.get(plain)) is not None:
            raise ConfigError(
                f"{source} has the columns {other!r} and {name!r}, one of which would hide the other; keep one"
            )
        seen[plain] = name


_READERS: Final[dict[str, Callable[[Path], dict[str, Array]]]] = {".parquet": _read_parquet, ".csv": _read_csv}


def _numbers(column: Array, name: str, path: str) -> Array | None:
    """Return a column as float64; None if it holds texts, such as the asset's name.

    Raise ConfigError for a text in a column that must hold numbers, such as `close`.
    """
    if column.dtype.kind in "biuf":
        return column.astype(np.float64)
    texts = [str(value).strip() for value in column]
    try:
        return np.array([float(text) if text and text != "None" else np.nan for text in texts])
    except ValueError:
        if name.removeprefix("$") in ("open", "high", "low", "close", "volume"):
            row = next(index for index, text in enumerate(texts) if not _is_number(text))
            raise ConfigError(f"{path}: {name} of row {row + 1} is {texts[row]!r}; it must be a number") from None
        return None


def _is_number(text: str) -> bool:
    try:
        float(text or "nan")
    except ValueError:
        return False
    return True
