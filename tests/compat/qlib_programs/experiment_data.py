"""Data of an experiment of order execution, made by Qlib's own code, in the layout of Qlib's own example.

    python experiment_data.py FOLDER

Needs pyqlib, and runs without the alias. Writes Qlib's store of two stocks with bars of five minutes (`bin`), a
pickled data set of each (`pickle/feature`, `pickle/backtest`) and pickled tables of orders (`orders/train` and so on).
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import qlib
from qlib.contrib.ops.high_freq import BFillNan, Cut, Date, DayLast, FFillNan, IsInf, IsNull, Select
from qlib.utils import init_instance_by_config

FOLDER = Path(sys.argv[1])
STOCKS = ["SH600000", "SZ000001"]
DAYS = pd.bdate_range("2021-06-01", periods=30)
TICKS = [
    day + pd.Timedelta(start) + pd.Timedelta(minutes=5 * bar)
    for day in DAYS
    for start in ("9h30m", "13h")
    for bar in range(24)
]
FIRST_COMPLETE = 12
"""The first day with features: those before it have no earlier days to be divided by."""


def write_store(root, rng):
    for name in ("calendars", "instruments", *(f"features/{stock.lower()}" for stock in STOCKS)):
        (root / name).mkdir(parents=True)
    (root / "calendars/5min.txt").write_text("".join(f"{tick}\n" for tick in TICKS))
    (root / "instruments/all.txt").write_text("".join(f"{stock}\t{TICKS[0]}\t{TICKS[-1]}\n" for stock in STOCKS))
    for stock in STOCKS:
        close = 20 * np.exp(np.cumsum(rng.normal(0, 1e-3, len(TICKS))))
        columns = {"open": close - 0.01, "high": close + 0.02, "low": close - 0.02, "close": close}
        columns |= {"volume": rng.uniform(1e4, 2e4, len(TICKS)), "factor": np.ones(len(TICKS))}
        for name, values in columns.items():  # a file is the place of its first value in the calendar, and the values
            np.r_[0, values].astype("<f4").tofile(root / f"features/{stock.lower()}/{name}.5min.bin")


def write_data_set(kind, stock, handler, columns, **options):
    module = "qlib.contrib.data.highfreq_handler"
    times = {"start_time": TICKS[0], "end_time": TICKS[-1]}
    kwargs = {**times, "instruments": [stock], "day_length": 48, "freq": "5min", "columns": columns, **options}
    config = {"class": "DatasetH", "module_path": "qlib.data.dataset"}
    config["kwargs"] = {"handler": {"class": handler, "module_path": module, "kwargs": kwargs}, "segments": {}}
    data_set = init_instance_by_config(config)
    data_set.config(dump_all=True, recursive=True)
    (FOLDER / "pickle" / kind).mkdir(parents=True, exist_ok=True)
    data_set.to_pickle(FOLDER / "pickle" / kind / f"{stock}.pkl")


def write_orders(rng):
    for tag, days in (("train", DAYS[FIRST_COMPLETE:22]), ("valid", DAYS[22:25]), ("test", DAYS[25:])):
        (FOLDER / "orders" / tag).mkdir(parents=True)
        for stock in STOCKS:
            rows = [
                {"date": day, "instrument": stock, "$close0": 20.0, "amount": rng.uniform(100, 900), "order_type": side}
                for day in days
                for side in (0, 1)
            ]
            table = pd.DataFrame(rows).set_index(["date", "instrument"])
            table.to_pickle(FOLDER / "orders" / tag / f"{stock}.pkl.target")


if __name__ == "__main__":
    generator = np.random.default_rng(0)
    write_store(FOLDER / "bin", generator)
    operators = [DayLast, FFillNan, BFillNan, Date, Select, IsNull, IsInf, Cut]
    qlib.init(provider_uri={"5min": str(FOLDER / "bin")}, region="cn", custom_ops=operators, expression_cache=None,
              kernels=1)  # fmt: skip
    for one in STOCKS:
        normed = {"class": "HighFreqNorm", "module_path": "qlib.contrib.data.highfreq_processor"}
        normed["kwargs"] = {"feature_save_dir": f"{FOLDER}/stat-{one}/", "norm_groups": {"price": 8, "volume": 2}}
        fitted = {"fit_start_time": TICKS[0], "fit_end_time": TICKS[-1], "infer_processors": [normed]}
        write_data_set("feature", one, "HighFreqGeneralHandler", ["$open", "$high", "$low", "$close"], **fitted)
        write_data_set("backtest", one, "HighFreqGeneralBacktestHandler", ["$close", "$volume"])
    write_orders(generator)
