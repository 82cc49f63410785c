"""Does a policy that has seen 1999 to 2012 execute orders of 2013 to 2018 better than TWAP?

    python packages/leyden-compat/examples/rl_order_execution/make_data.py .leyden/sp500     # needs arch
    python packages/leyden-compat/examples/rl_order_execution/train.py .leyden/sp500

PPO with seeds 0 to 4 is compared with two rules. A step is a day, and an action is a part of the
order, traded at that day's close. The last day trades the rest.

It prints the price advantage over the window's mean close in basis points: the mean over the test's
windows, each the mean of its sale and its purchase, and the standard error of that mean. Windows do
not overlap, so their errors are nearly independent.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
from gymnasium import spaces

from leyden.rl import PPO, AllOne, StateInterpreter, Trainer, TrainingVessel, backtest
from leyden_compat.order_execution import (
    CategoricalActionInterpreter,
    DummyStateInterpreter,
    OrderDir,
    PAPenaltyReward,
    SAOEState,
    SingleAssetOrderExecutionSimple,
    TwapRelativeActionInterpreter,
    load_orders,
)
from leyden_compat.order_execution.run import OrdersWriter

DAYS = 10
FEATURES = ("return_1", "return_5", "above_mean_20", "volatility_20", "volume_20")
PARTS = (0.0, 0.1, 0.25, 0.5, 1.0)


class Known(StateInterpreter):
    """The state before a day's trading: direction, days and position left, the market's features."""

    observation_space = spaces.Box(-np.inf, np.inf, (4 + len(FEATURES),), np.float32)

    def interpret(self, simulator_state: SAOEState) -> np.ndarray:
        state = simulator_state
        day = min(state.cur_step, DAYS - 1)
        prices = state.backtest_data.get_deal_price()[:day]
        since_start = 20 * np.log(prices[-1] / prices.mean()) if len(prices) else 0.0
        buys = 1.0 if state.order.direction == OrderDir.BUY else -1.0
        own = (buys, 1 - day / DAYS, state.position / state.order.amount, since_start)
        return np.array([*own, *state.backtest_data.today[day]], np.float32)


class BuyFirstSellLast:
    """A rule that is right in a market that rises, and knows nothing else."""

    def __init__(self, obs_space, action_space):
        self.rule = AllOne(obs_space, action_space)

    def __getattr__(self, name):
        return getattr(self.rule, name)

    def act(self, obs, *, explore):
        chosen = self.rule.act(obs, explore=explore)
        return chosen._replace(actions=np.where(obs[:, 0] > 0, len(PARTS) - 1, 0))


def advantage(rows: list[float]) -> tuple[float, float]:
    """Return mean and standard error over windows; the orders of one window are neighbours."""
    windows = np.array(rows).reshape(-1, 2).mean(axis=1)
    return float(windows.mean()), float(windows.std(ddof=1) / len(windows) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument(
        "--penalty",
        type=float,
        default=10.0,
        help="of PAPenaltyReward: what trading all in one day costs, in basis points",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    simulator_fn = partial(
        SingleAssetOrderExecutionSimple,
        data_dir=options.data / "bars",
        feature_columns_today=FEATURES,
        ticks_per_step=1,
    )
    train, test = (load_orders(options.data / "orders" / f"{name}.csv") for name in ("train", "test"))
    actions = CategoricalActionInterpreter(PARTS, max_step=DAYS)
    print(
        f"{len(train)} orders to train on, {len(test)} to test on: {len(test) // 2} windows of {DAYS} days", flush=True
    )

    def measure(name, policy, state_interpreter, action_interpreter, orders=test):
        writer = OrdersWriter(options.data / f"{name}.csv", orders)
        backtest(
            simulator_fn,
            state_interpreter,
            action_interpreter,
            orders,
            policy,
            writer,
            finite_env_type="dummy",
            concurrency=8,
        )
        return advantage(writer.column("pa"))

    twap = TwapRelativeActionInterpreter()
    nothing = DummyStateInterpreter()
    figures = {
        "TWAP": measure("twap", AllOne(nothing.observation_space, twap.action_space), nothing, twap),
        "buy first, sell last": measure(
            "wait", BuyFirstSellLast(Known.observation_space, actions.action_space), Known(), actions
        ),
    }
    trained_on = {}
    for seed in range(options.seeds):
        policy = PPO(
            None, Known.observation_space, actions.action_space, lr=3e-4, gae_lambda=0.95, eps_clip=0.2, seed=seed
        )
        vessel = TrainingVessel(
            simulator_fn=simulator_fn, state_interpreter=Known(), action_interpreter=actions, policy=policy,
            reward=PAPenaltyReward(penalty=options.penalty, scale=0.01), train_initial_states=train, episode_per_iter=400,
            update_kwargs={"batch_size": 400, "repeat": 4}, seed=seed,
        )  # fmt: skip
        Trainer(max_iters=options.iterations, finite_env_type="dummy", concurrency=16).fit(vessel)
        figures[f"PPO, seed {seed}"] = measure(f"ppo{seed}", policy, Known(), actions)
        seen = [order for start in range(0, len(train) - 1, 2 * DAYS) for order in train[start : start + 2]]
        trained_on[seed] = measure(f"ppo{seed}-train", policy, Known(), actions, seen)
        print(
            f"seed {seed}: {trained_on[seed][0]:+.2f} +- {trained_on[seed][1]:.2f} on what it was trained on",
            flush=True,
        )
    for name, (mean, error) in figures.items():
        print(f"{name:22} {mean:+7.2f} +- {error:5.2f} basis points")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
