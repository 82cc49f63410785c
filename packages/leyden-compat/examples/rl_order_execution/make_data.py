"""Write daily bars of the S&P 500, 1999 to 2018, with features, and orders to train and test on.

    pip install arch
    python packages/leyden-compat/examples/rl_order_execution/make_data.py .leyden/sp500

The package `arch` has the data, so no network is needed. A day's features are computed from earlier
days alone. An order sells or buys one unit within ten trading days. Training orders begin on every
day of 1999 to 2012 and end within these years. Test orders, of 2013 to 2018, do not overlap.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from arch.data import sp500

DAYS, LAST_TRAINING_YEAR = 10, 2012


def known_before(close: np.ndarray, volume: np.ndarray) -> dict[str, np.ndarray]:
    """Return features of shape (days,), computed from the days before; 0 where there are too few."""
    n = len(close)
    features = {name: np.zeros(n) for name in ("return_1", "return_5", "above_mean_20", "volatility_20", "volume_20")}
    for day in range(21, n):
        returns = np.diff(np.log(close[day - 21 : day]))
        deviation = returns.std()
        features["return_1"][day] = returns[-1] / deviation
        features["return_5"][day] = returns[-5:].sum() / deviation / 5**0.5
        features["above_mean_20"][day] = np.log(close[day - 1] / close[day - 20 : day].mean()) / deviation / 20**0.5
        features["volatility_20"][day] = np.log(deviation / 0.01)
        features["volume_20"][day] = np.log(volume[day - 1] / volume[day - 20 : day].mean())
    return features


def main(folder: Path) -> None:
    frame = sp500.load()
    dates = frame.index.to_numpy().astype("datetime64[D]")
    bars = {name.lower(): frame[name].to_numpy(float) for name in ("Open", "High", "Low", "Close", "Volume")}
    columns = bars | known_before(bars["close"], bars["volume"])
    (folder / "bars").mkdir(parents=True, exist_ok=True)
    (folder / "orders").mkdir(exist_ok=True)
    with (folder / "bars" / "SP500.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["date", *columns])
        table.writerows(
            [date, *(repr(float(column[row])) for column in columns.values())] for row, date in enumerate(dates)
        )
    years = dates.astype("datetime64[Y]").astype(int) + 1970
    first_test_day = int(np.searchsorted(years, LAST_TRAINING_YEAR + 1))
    write_orders(folder / "orders" / "train.csv", dates, range(21, first_test_day - DAYS + 1))
    write_orders(folder / "orders" / "test.csv", dates, range(first_test_day, len(dates) - DAYS + 1, DAYS))


def write_orders(path: Path, dates: np.ndarray, starts: range) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["stock_id", "amount", "direction", "start_time", "end_time"])
        for start in starts:
            end = dates[start + DAYS - 1] + np.timedelta64(1, "D")
            table.writerows(["SP500", 1, direction, dates[start], end] for direction in ("sell", "buy"))
    print(f"{path}: {2 * len(starts)} orders")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".leyden/sp500"))
