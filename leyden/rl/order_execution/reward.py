"""Rewards of a step of an order's execution. To add one, subclass `Reward`."""

from __future__ import annotations

import math

import numpy as np

from leyden.errors import InvalidTrade
from leyden.options import check_number
from leyden.rl.order_execution.objects import OrderDir
from leyden.rl.order_execution.state import SAOEState
from leyden.rl.parts import Reward


class PAPenaltyReward(Reward[SAOEState]):
    """The step's price advantage, weighted by the traded amount, less a penalty for trading much in
    few ticks.

    `scale * (pa * dealt / order - penalty * sum over its ticks of (dealt / order)^2)`

    Over an episode, the first terms add up to the order's price advantage in basis points. Both
    terms are logged. Qlib weights by the wanted amount, which differs only if the market's volume
    or the last step changes it.
    """

    def __init__(self, penalty: float = 100.0, scale: float = 1.0) -> None:
        check_number("penalty", penalty)
        check_number("scale", scale)
        self.penalty, self.scale = penalty, scale

    def reward(self, simulator_state: SAOEState) -> float:
        """Return the step's price advantage, weighted by the part of the order that it traded, less
        the penalty.

        The penalty is `penalty` times the sum of each tick's squared part of the order. Both are
        scaled by `scale`. Raise InvalidTrade if the reward is not finite.
        """
        whole = simulator_state.order.amount
        step = simulator_state.history_steps.last
        pa = step["pa"] * step["deal_amount"] / whole
        dealt = np.asarray(simulator_state.history_exec.last["deal_amount"])
        penalty = -self.penalty * float(((dealt / whole) ** 2).sum())
        if not math.isfinite(pa + penalty):
            raise InvalidTrade(
                f"the reward of step {simulator_state.cur_step} of the order to {simulator_state.order} is {pa + penalty}"
            )
        if self.env is not None:
            self.log("reward/pa", pa)
            self.log("reward/penalty", penalty)
        return (pa + penalty) * self.scale


class PPOReward(Reward[SAOEState]):
    """Rate the order once, at its end, by its mean price; 0 before.

    1 if the price is better than 1.1 times the day's mean price, 0 if it is better, else -1.

    "An End-to-End Optimal Trade Execution Framework based on Proximal Policy Optimization" (IJCAI
    2020).

    max_step: the number of steps of an order.
    start_time_index, end_time_index: the first and last tick of the days that count for their mean.
    """

    def __init__(self, max_step: int, start_time_index: int = 0, end_time_index: int = 239) -> None:
        check_number("max_step", max_step, at_least=1, whole=True)
        check_number("start_time_index", start_time_index, at_least=0, whole=True)
        check_number("end_time_index", end_time_index, at_least=start_time_index, whole=True)
        self.max_step = max_step
        self.start_time_index, self.end_time_index = start_time_index, end_time_index

    def reward(self, simulator_state: SAOEState) -> float:
        """Return -1, 0 or 1 once, at the order's end; 0 before.

        It compares the order's average price with the market's mean, the better over the worse for
        its direction: -1 below 1, 0 below 1.1, else 1. Qlib gives it at the step before the last,
        and again at the last.
        """
        state = simulator_state
        if state.metrics is None and state.cur_step < self.max_step:
            return 0.0
        dealt = state.history_exec["deal_amount"]
        price = state.history_exec["market_price"]
        mine = float(np.average(price, weights=dealt if dealt.sum() > 0 else None))
        days = state.backtest_data.get_deal_price()[self.start_time_index : self.end_time_index + 1]
        market = float(days.mean())
        better, worse = (mine, market) if state.order.direction == OrderDir.SELL else (market, mine)
        ratio = better / worse if worse else 1.0
        if ratio < 1.0:
            return -1.0
        return 0.0 if ratio < 1.1 else 1.0
