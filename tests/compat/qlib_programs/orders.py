"""Order execution with pickled tables, as Qlib's tests have it: simulator, interpreters, TWAP, PPO.

    python -m leyden.compat orders.py FOLDER KIND

Writes small tables in the format of Qlib's data, reads them, and prints "done KIND".
"""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from qlib.backtest import Order
from qlib.config import C
from qlib.log import set_log_with_config
from qlib.rl.data import pickle_styled
from qlib.rl.data.pickle_styled import PickleProcessedDataProvider
from qlib.rl.order_execution import *  # noqa: F403 -- as programs of Qlib do
from qlib.rl.trainer import backtest, train
from qlib.rl.utils import ConsoleWriter, CsvWriter, EnvWrapperStatus

FOLDER, KIND = Path(sys.argv[1]), sys.argv[2]
DAY = pd.Timestamp("2013-12-11")
FEATURES = ["$high", "$low", "$open", "$close", "$volume"]
N_ORDERS = 24


def write_data():
    draw = np.random.default_rng(0)
    for name in ("backtest", "processed", "order"):
        (FOLDER / name).mkdir()
    times = pd.date_range(DAY + pd.Timedelta(hours=9, minutes=30), periods=390, freq="min")
    for stock in ("AAL", "MSFT"):
        index = pd.MultiIndex.from_product([[stock], times, [DAY]], names=["instrument", "datetime", "date"])
        price = 25 + np.cumsum(draw.normal(0, 0.01, 390))
        bars = {"$close0": price, "$volume0": draw.integers(1000, 9000, 390).astype(float)}
        pd.DataFrame(bars, index=index).to_pickle(FOLDER / "backtest" / f"{stock}.pkl")
        features = {f"{name}{ending}": draw.uniform(0.5, 1.5, 390) for name in FEATURES for ending in ("", "_1")}
        pd.DataFrame(features, index=index).to_pickle(FOLDER / "processed" / f"{stock}.pkl")
        days = pd.MultiIndex.from_product([[stock], [DAY] * (N_ORDERS // 2)], names=["instrument", "datetime"])
        orders = {"amount": draw.integers(10, 99, N_ORDERS // 2).astype(float), "order_type": [0, 1] * (N_ORDERS // 4)}
        pd.DataFrame(orders, index=days).to_pickle(FOLDER / "order" / f"{stock}.pkl")


class Env(NamedTuple):
    status: EnvWrapperStatus


def env_of(order, step, done=False):
    rest = {"initial_state": order, "obs_history": [], "action_history": [], "reward_history": []}
    return Env(EnvWrapperStatus(cur_step=step, done=done, **rest))


def inspect_data():
    data = pickle_styled.load_simple_intraday_backtest_data(FOLDER / "backtest", "AAL", "2013-12-11", "close", 0)
    assert len(data) == 390
    provider = PickleProcessedDataProvider(FOLDER / "processed")
    data = provider.get_data("AAL", "2013-12-11", 5, data.get_time_index())
    assert len(data.today) == len(data.yesterday) == 390
    assert list(data.today.columns) == list(data.yesterday.columns) == FEATURES


def first_step():
    order = Order("AAL", 30.0, 0, pd.Timestamp("2013-12-11 00:00:00"), pd.Timestamp("2013-12-11 23:59:59"))
    simulator = SingleAssetOrderExecutionSimple(order, FOLDER)  # noqa: F405
    state = simulator.get_state()
    assert state.cur_time == pd.Timestamp("2013-12-11 09:30:00")
    assert state.position == 30.0 and len(state.history_exec) == 0

    simulator.step(15.0)
    state = simulator.get_state()
    table = pd.read_pickle(FOLDER / "backtest" / "AAL.pkl").droplevel(["instrument", "date"])
    assert len(state.history_exec) == 30
    assert state.history_exec.index[0] == pd.Timestamp("2013-12-11 09:30:00")
    assert state.history_exec["market_volume"].iloc[0] == table["$volume0"].iloc[0]
    assert (state.history_exec["deal_amount"] == 0.5).all()
    assert abs(state.history_exec["trade_value"].iloc[0] - 0.5 * table["$close0"].iloc[0]) < 1e-9
    assert state.history_exec["ffr"].iloc[0] == 1 / 60
    assert state.history_steps["market_volume"].iloc[0] == table["$volume0"].iloc[:30].sum()
    mean = state.history_steps["trade_price"].iloc[0]
    assert abs(mean - table["$close0"].iloc[:30].mean()) < 1e-9
    assert abs(simulator.twap_price - table["$close0"].mean()) < 1e-9
    assert state.history_steps["pa"].iloc[0] == (mean / simulator.twap_price - 1) * 10000
    assert state.cur_time == pd.Timestamp("2013-12-11 10:00:00") and order.start_time.year == 2013


def stop_early():
    order = Order("AAL", 1.0, 1, pd.Timestamp("2013-12-11 00:00:00"), pd.Timestamp("2013-12-11 23:59:59"))
    simulator = SingleAssetOrderExecutionSimple(order, FOLDER)  # noqa: F405
    try:
        simulator.step(2.0)
    except ValueError:
        simulator.step(1.0)
    try:
        simulator.step(1.0)
    except AssertionError:
        return
    raise RuntimeError("a step after the order's end is an error")


def interpreters():
    order = Order("AAL", 15.0, 1, pd.Timestamp("2013-12-11 10:15:00"), pd.Timestamp("2013-12-11 15:44:59"))
    simulator = SingleAssetOrderExecutionSimple(order, FOLDER)  # noqa: F405
    assert len(simulator.ticks_for_order) == 330
    full = FullHistoryStateInterpreter(13, 390, 5, PickleProcessedDataProvider(FOLDER / "processed"))  # noqa: F405
    step, action = CurrentStepStateInterpreter(13), CategoricalActionInterpreter(20)  # noqa: F405
    full.env = step.env = env_of(order, 0)
    obs = full(simulator.get_state())
    assert obs["cur_tick"] == 45 and obs["position_history"][0] == 15.0
    assert np.all(obs["data_processed"][:45]) and not np.any(obs["data_processed"][45:])
    assert step(simulator.get_state())["acquiring"] == 1

    simulator.step(5.0)
    full.env = env_of(order, 1)
    obs = full(simulator.get_state())
    assert obs["cur_tick"] == 60 and obs["position_history"][:2].tolist() == [15.0, 10.0]
    assert action(simulator.get_state(), 1) == 15 / 20
    for _ in range(10):
        simulator.step(0.0)
    simulator.step(5.0)
    full.env = env_of(order, 12, simulator.done())
    assert full.env.status["done"] and full(simulator.get_state())["cur_tick"] == 375

    policy = PPO(Recurrent(full.observation_space), full.observation_space, action.action_space, 1e-3)  # noqa: F405
    assert 0 <= policy({"obs": [obs]})["act"].item() <= 20


def twap(orders, interpreter):
    rule = TwapRelativeActionInterpreter()  # noqa: F405
    policy = AllOne(interpreter.observation_space, rule.action_space)  # noqa: F405
    writers = [ConsoleWriter(total_episodes=len(orders)), CsvWriter(FOLDER / "output")]
    simulator = partial(SingleAssetOrderExecutionSimple, data_dir=FOLDER, ticks_per_step=30)  # noqa: F405
    backtest(simulator, interpreter, rule, orders, policy, writers, concurrency=4, finite_env_type=KIND)
    metrics = pd.read_csv(FOLDER / "output" / "result.csv")
    assert len(metrics) == len(orders) == N_ORDERS
    assert np.isclose(metrics["ffr"].mean(), 1.0) and np.allclose(metrics["pa"], 0.0, atol=2e-3)


class Half(NonLearnablePolicy):  # noqa: F405
    """Always the middle action, as a rule that Qlib's users write."""

    def forward(self, batch, state=None, **kwargs):
        return {"act": np.full(len(batch), 2)}


class Patience(PAPenaltyReward):  # noqa: F405
    """A reward of one's own, which reads the data frames."""

    def reward(self, simulator_state):
        last = simulator_state.history_steps.iloc[-1]
        assert isinstance(simulator_state.history_exec.index, pd.DatetimeIndex)
        self.log("left", float(last["position"]))
        return super().reward(simulator_state)


def learn(orders, interpreter):
    torch.manual_seed(0)
    action = CategoricalActionInterpreter(4)  # noqa: F405
    simulator = partial(SingleAssetOrderExecutionSimple, data_dir=FOLDER, ticks_per_step=30)  # noqa: F405
    backtest(simulator, interpreter, action, orders[:4], Half(interpreter.observation_space, action.action_space), [])
    policy = PPO(Recurrent(interpreter.observation_space), interpreter.observation_space, action.action_space, 1e-4)  # noqa: F405
    before = policy.state_dict()
    before = {name: value.clone() for name, value in before.items() if hasattr(value, "clone")}
    train(
        simulator,
        interpreter,
        action,
        orders,
        policy,
        Patience(),
        vessel_kwargs={"episode_per_iter": 12, "update_kwargs": {"batch_size": 64, "repeat": 2}},
        trainer_kwargs={"max_iters": 1, "loggers": ConsoleWriter(total_episodes=12), "finite_env_type": KIND},
    )
    assert any(not torch.equal(value, before[name]) for name, value in policy.state_dict().items() if name in before)


if __name__ == "__main__":
    write_data()
    set_log_with_config(C.logging_config)
    inspect_data()
    first_step()
    stop_early()
    interpreters()
    found = pickle_styled.load_orders(FOLDER / "order")
    state_interpreter = FullHistoryStateInterpreter(13, 390, 5, PickleProcessedDataProvider(FOLDER / "processed"))  # noqa: F405
    twap(found, state_interpreter)
    learn(found, state_interpreter)
    print("done", KIND)
