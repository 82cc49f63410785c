"""Rewards of a step of an order's execution. To add one, subclass `Reward`."""

from __future__ import annotations

import math

import numpy as np

from leyden._lib.options import check_number
from leyden.errors import InvalidTrade
from leyden.rl.parts import Reward
from leyden_compat.order_execution.objects import OrderDir
from leyden_compat.order_execution.state import SAOEState


class PAPenaltyReward(Reward[SAOEState]):
    """The step's price advantage, weighted by the traded amount, less a penalty for trading much in few ticks.

    `scale * (pa * dealt / order - penalty * sum over the step's ticks of (dealt / order)^2)`

    `pa` is the price advantage of the step's mean price over the order's TWAP, in basis points. Over an episode, the
    first terms add up to the order's price advantage. Both terms are logged, as `reward/pa` and `reward/penalty`. Qlib
    weights by the wanted amount, which is another one only if the market's volume or the last step changes it.

    penalty: the weight of the penalty.
    scale: a factor of both terms.
    """

    def __init__(self, penalty: float = 100.0, scale: float = 1.0) -> None:
        check_number("penalty", penalty)
        check_number("scale", scale)
        self.penalty, self.scale = penalty, scale

    def reward(self, simulator_state: SAOEState) -> float:
        """Return the weighted price advantage of the last step, less the penalty.

        Raise InvalidTrade if the reward is not finite.
        """
        whole = simulator_state.order.amount
        step = simulator_state.history_steps.last
        pa = step["pa"] * step["deal_amount"] / whole
        dealt = np.asarray(simulator_state.history_exec.last["deal_amount"])
        penalty = -self.penalty * float(((dealt / whole) ** 2).sum())
        if not math.isfinite(pa + penalty):
            raise InvalidTrade(
                f"the reward of step {simulator_state.cur_step} of the order to {simulator_state.order} is {pa + penalty}; look "
                "for prices that are 0, negative or missing in the bars of that day"
            )
        if self.env is not None:
            self.log("reward/pa", pa)
            self.log("reward/penalty", penalty)
        return (pa + penalty) * self.scale


class PPOReward(Reward[SAOEState]):
    """Rates the order once, at its end, by its average price; 0 before.

    The reward is 1 if the order's average price is at least 1.1 times as good as the market's mean price, 0 if it is at
    least as good, else -1 ("An End-to-End Optimal Trade Execution Framework based on Proximal Policy Optimization",
    IJCAI 2020).

    max_step: the number of steps of an order.
    start_time_index, end_time_index: the first and the last tick that count for the market's mean, from 0 at the
        beginning of the order's days.
    """

    def __init__(self, max_step: int, start_time_index: int = 0, end_time_index: int = 239) -> None:
        check_number("max_step", max_step, at_least=1, whole=True)
        check_number("start_time_index", start_time_index, at_least=0, whole=True)
        check_number("end_time_index", end_time_index, at_least=start_time_index, whole=True)
        self.max_step = max_step
        self.start_time_index, self.end_time_index = start_time_index, end_time_index

    def reward(self, simulator_state: SAOEState) -> float:
        """Return -1, 0 or 1 at the order's end, and 0 before.

        The order's average price is divided by the market's mean for a sale, and the other way round for a purchase.
        The reward is -1 for a ratio below 1, 0 below 1.1, else 1. Qlib returns it at the step before the last, and
        again at the last.
        """
        state = simulator_state
        if state.metrics is None and state.cur_step < self.max_step:
            return 0.0
        dealt = state.history_exec["deal_amount"]
        price = state.history_exec["market_price"]
        mine = float(np.average(price, weights=dealt if dealt.sum() > 0 else None))  # None: if nothing was traded
        days = state.backtest_data.get_deal_price()[self.start_time_index : self.end_time_index + 1]
        market = float(days.mean())
        better, worse = (mine, market) if state.order.direction == OrderDir.SELL else (market, mine)
        ratio = better / worse if worse else 1.0
        if ratio < 1.0:
            return -1.0
        return 0.0 if ratio < 1.1 else 1.0
