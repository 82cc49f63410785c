"""Qlib's nested executors below a simulator, and a policy in its backtest: a day, 30 minutes, a minute.

    python -m leyden.compat nested.py FOLDER

Needs pyqlib. Writes a stock's data in the format of Qlib's own store, and prints "done".
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from qlib.backtest.decision import Order, OrderDir
from qlib.backtest.executor import SimulatorExecutor
from qlib.rl.order_execution import CategoricalActionInterpreter
from qlib.rl.order_execution.simulator_qlib import SingleAssetOrderExecution

FOLDER = Path(sys.argv[1])
DAYS = ["2019-03-01", "2019-03-04", "2019-03-05"]
AMOUNT = 2100.0


def write_data():
    minutes = [
        time
        for day in DAYS
        for start, end in (("09:30", "11:29"), ("13:00", "14:59"))
        for time in pd.date_range(f"{day} {start}", f"{day} {end}", freq="min")
    ]
    for freq, calendar in (("1min", minutes), ("day", DAYS)):
        for name in ("calendars", "instruments", "features/sh600000"):
            (FOLDER / freq / name).mkdir(parents=True)
        (FOLDER / freq / f"calendars/{freq}.txt").write_text("".join(f"{each}\n" for each in calendar))
        (FOLDER / freq / "instruments/all.txt").write_text(f"SH600000\t{DAYS[0]}\t{DAYS[-1]}\n")
        n = len(calendar)
        price = 11 + np.cumsum(np.random.default_rng(0).normal(0, 0.01, n))
        columns = dict.fromkeys(("open", "high", "low", "close", "vwap"), price)
        columns |= {"ask": price + 0.01, "bid": price - 0.01, "volume": np.full(n, 1e4), "factor": np.ones(n)}
        columns |= {name: np.full(n, 5e3) for name in ("askv1", "bidv1")} | {"change": np.zeros(n)}
        for name, values in columns.items():  # a file is the place of its first value in the calendar, and the values
            np.r_[0, values].astype("<f4").tofile(FOLDER / freq / f"features/sh600000/{name}.{freq}.bin")


def executor(kind, step, strategy=None, inner=None, **options):
    kwargs = {"time_per_step": step, "track_data": True, **options}
    if inner is not None:
        kwargs |= {"inner_strategy": strategy, "inner_executor": inner}
    return {"class": kind, "module_path": "qlib.backtest.executor", "kwargs": kwargs}


def simulator(order):
    minute = executor("SimulatorExecutor", "1min", verbose=False, trade_type=SimulatorExecutor.TT_SERIAL,
                      generate_report=False)  # fmt: skip
    twap = {"class": "TWAPStrategy", "module_path": "qlib.contrib.strategy.rule_strategy"}
    proxy = {"class": "ProxySAOEStrategy", "module_path": "qlib.rl.order_execution.strategy"}
    day = pd.Timestamp(order.start_time.date())
    half_hour = executor("NestedExecutor", "30min", twap, minute)
    whole = executor("NestedExecutor", "1day", proxy, half_hour, start_time=day, end_time=day)
    exchange = {
        "freq": "1min",
        "codes": [order.stock_id],
        "limit_threshold": ("$ask == 0", "$bid == 0"),
        "deal_price": ("If($ask == 0, $bid, $ask)", "If($bid == 0, $ask, $bid)"),
        "volume_threshold": {
            "all": ("cum", "0.2 * DayCumsum($volume, '9:30', '14:29')"),
            "buy": ("current", "$askv1"),
            "sell": ("current", "$bidv1"),
        },
        "open_cost": 0.0005,
        "close_cost": 0.0015,
        "min_cost": 5.0,
        "trade_unit": None,
    }
    qlib = {"provider_uri_day": str(FOLDER / "day"), "provider_uri_1min": str(FOLDER / "1min"),
            "feature_root_dir": str(FOLDER), "feature_columns_today": [], "feature_columns_yesterday": []}  # fmt: skip
    return SingleAssetOrderExecution(order=order, qlib_config=qlib, executor_config=whole, exchange_config=exchange)


def new_order():
    times = {"start_time": pd.Timestamp(f"{DAYS[1]} 09:30"), "end_time": pd.Timestamp(f"{DAYS[1]} 14:29")}
    return Order(stock_id="SH600000", amount=AMOUNT, direction=OrderDir.BUY, **times)


write_data()
simulated = simulator(new_order())
state = simulated.get_state()
assert (str(state.cur_time), state.position) == (f"{DAYS[1]} 09:30:00", AMOUNT)
simulated.step(300.0)
state = simulated.get_state()
assert (str(state.cur_time), state.position, len(state.history_exec)) == (f"{DAYS[1]} 10:00:00", AMOUNT - 300, 30)
assert (state.history_exec["deal_amount"] == 10).all()
assert state.history_steps["ffr"].iloc[0] == 300 / AMOUNT

simulated = simulator(new_order())
for _ in range(7):
    simulated.step(AMOUNT / 7)
state = simulated.get_state()
assert simulated.done() and abs(state.position) < 1e-4 and len(state.history_exec) == 210
assert abs(state.metrics["ffr"] - 1) < 1e-4 and abs(state.metrics["pa"]) < 1e-3
assert np.isclose(state.metrics["trade_price"], state.backtest_data.get_deal_price().mean(), atol=1e-4)

simulated = simulator(new_order())
interpret = CategoricalActionInterpreter(values=3)
for step in range(7):
    simulated.step(interpret(simulated.get_state(), 1))
    assert np.isclose(simulated.get_state().position, max(AMOUNT - AMOUNT / 3 * (step + 1), 0.0), atol=1e-3)
print("done")
