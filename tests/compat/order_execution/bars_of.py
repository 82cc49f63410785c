"""Made-up bars that tests of order execution share."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from leyden_compat.order_execution import Bars, Order, OrderDir

__all__ = ["day", "order", "six_ticks", "write_days"]


def day(price: list[float], volume: list[float], date: str = "2020-01-02") -> Bars:
    """Minutes from 9:30 on."""
    times = np.datetime64(f"{date}T09:30", "us") + np.arange(len(price)) * np.timedelta64(1, "m")
    return Bars(times, {"close": np.array(price), "volume": np.array(volume)}, "made-up bars")


def six_ticks() -> Bars:
    return day([10.0, 11.0, 12.0, 11.0, 10.0, 9.0], [100.0, 200.0, 300.0, 200.0, 100.0, 50.0])


def order(amount: float = 6.0, direction: OrderDir = OrderDir.SELL, start: str = "09:30", end: str = "09:36") -> Order:
    return Order("X", amount, direction, np.datetime64(f"2020-01-02T{start}"), np.datetime64(f"2020-01-02T{end}"))


def write_days(folder: Path, days: int = 12, ticks: int = 12, seed: int = 0) -> None:
    """Bars of a stock X in CSV, and orders for the days: `folder/bars/X.csv`, `folder/orders/{train,valid,test}.csv`."""
    rng = np.random.default_rng(seed)
    (folder / "bars").mkdir(parents=True)
    (folder / "orders").mkdir()
    dates = [np.datetime64("2020-01-01") + np.timedelta64(number, "D") for number in range(days)]
    with (folder / "bars" / "X.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["datetime", "$close", "$volume", "move"])
        price = 100.0
        for date in dates:
            for tick in range(ticks):
                move = rng.normal(0, 0.5)
                price += move
                table.writerow(
                    [f"{date} 09:{30 + tick}:00", f"{price:.4f}", int(rng.integers(500, 1500)), f"{move:.4f}"]
                )
    third = days // 3
    for name, part in (("train", dates[:third]), ("valid", dates[third : 2 * third]), ("test", dates[2 * third :])):
        with (folder / "orders" / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["instrument", "date", "amount", "order_type"])
            for number, date in enumerate(part):
                table.writerow(["X", date, 100.0, number % 2])
