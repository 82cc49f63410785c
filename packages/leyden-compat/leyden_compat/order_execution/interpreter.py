"""Interpreters of order execution: observations of an order's state, and the amounts that actions trade.

Observations are 32-bit arrays. Steps that have not been made and ticks of the future are zeros. To observe something
else, subclass `StateInterpreter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from leyden._lib.options import check_number
from leyden.errors import ConfigError
from leyden.rl.parts import ActionInterpreter, StateInterpreter
from leyden_compat.order_execution.data import ProcessedDataProvider
from leyden_compat.order_execution.objects import EPS, OrderDir
from leyden_compat.order_execution.state import SAOEState

Array = NDArray[Any]
Observation = dict[str, Array]


class DummyStateInterpreter(StateInterpreter[SAOEState, Observation]):
    """Observes nothing, for policies that ignore observations, such as `AllOne`."""

    def __init__(self) -> None:
        limits = np.iinfo(np.int32)
        self._space = spaces.Dict({"DUMMY": spaces.Box(limits.min, limits.max, (), np.int32)})

    @property
    def observation_space(self) -> spaces.Dict:
        """A space of one number."""
        return self._space

    def interpret(self, simulator_state: SAOEState) -> Observation:
        """Return the number 1, whatever the state is."""
        return {"DUMMY": np.array(1, np.int32)}


class CurrentStepStateInterpreter(StateInterpreter[SAOEState, Observation]):
    """Observes the progress of the order, and not the market.

    The observation has five numbers: `acquiring` (1 for a purchase), `cur_step` (steps made), `num_step` (`max_step`),
    `target` (the order's amount) and `position` (the amount that is left).

    max_step: the number of steps of the longest order.
    """

    def __init__(self, max_step: int) -> None:
        check_number("max_step", max_step, at_least=1, whole=True)
        self.max_step = max_step
        self._space = spaces.Dict(_order_spaces(max_step))

    @property
    def observation_space(self) -> spaces.Dict:
        """A Dict of five numbers."""
        return self._space

    def interpret(self, simulator_state: SAOEState) -> Observation:
        """Return the five numbers of the order.

        After the last step, `cur_step` is still `max_step - 1`. Raise ConfigError for an order with more steps than
        `max_step`.
        """
        return _order_numbers(simulator_state, self.max_step)


class FullHistoryStateInterpreter(StateInterpreter[SAOEState, Observation]):
    """Observes the market's features so far and before the order's days, and all positions so far.

    The observation has the five numbers of `CurrentStepStateInterpreter`, and four parts more: `data_processed`,
    (data_ticks, data_dim), which is 0 from the current tick on; `data_processed_prev`, (data_ticks, data_dim);
    `cur_tick`; and `position_history`, (max_step,).

    max_step: the number of steps of the longest order.
    data_ticks: the number of ticks of the longest day, or of all days of an order that spans several. Shorter days are
        filled up with 0.
    data_dim: the number of features.
    processed_data_provider: provides the features.
    """

    def __init__(
        self, max_step: int, data_ticks: int, data_dim: int, processed_data_provider: ProcessedDataProvider
    ) -> None:
        for name, value in (("max_step", max_step), ("data_ticks", data_ticks), ("data_dim", data_dim)):
            check_number(name, value, at_least=1, whole=True)
        self.max_step, self.data_ticks, self.data_dim = max_step, data_ticks, data_dim
        self.processed_data_provider = processed_data_provider
        data = spaces.Box(-np.inf, np.inf, (data_ticks, data_dim), np.float32)
        self._space = spaces.Dict(
            {
                "data_processed": data,
                "data_processed_prev": data,
                "cur_tick": spaces.Box(0, data_ticks - 1, (), np.int32),
                "position_history": spaces.Box(-EPS, np.inf, (max_step,), np.float32),
                **_order_spaces(max_step),
            }
        )

    @property
    def observation_space(self) -> spaces.Dict:
        """A Dict of nine parts."""
        return self._space

    def interpret(self, simulator_state: SAOEState) -> Observation:
        """Return the features and positions so far, and the five numbers of the order.

        Raise ConfigError for an order with more ticks than `data_ticks`, or more steps than `max_step`.
        """
        state = simulator_state
        order, ticks = state.order, state.ticks_index
        if len(ticks) > self.data_ticks:
            raise ConfigError(
                f"the days of the order to {order} have {len(ticks)} ticks, data_ticks is {self.data_ticks}; give "
                f"data_ticks={len(ticks)} or more"
            )
        known = int(np.searchsorted(ticks, state.cur_time))
        date = order.start_time.astype("datetime64[D]")
        processed = self.processed_data_provider.get_data(order.stock_id, date, self.data_dim, ticks)
        # one longer than the observation: after the last step there is a position that is not
        # observed
        positions = np.zeros(self.max_step + 1, np.float32)
        numbers = _order_numbers(state, self.max_step)
        positions[0] = order.amount
        positions[1 : state.cur_step + 1] = state.history_steps["position"]
        return {
            "data_processed": self._filled(processed.today, known),
            "data_processed_prev": self._filled(processed.yesterday, len(ticks)),
            "cur_tick": np.array(min(known, self.data_ticks - 1), np.int32),
            "position_history": positions[: self.max_step],
            **numbers,
        }

    def _filled(self, features: Array, known: int) -> Array:
        filled = np.zeros((self.data_ticks, self.data_dim), np.float32)
        filled[:known] = np.nan_to_num(features[:known])
        return filled


def _order_spaces(max_step: int) -> dict[str, spaces.Space[Any]]:
    return {
        "acquiring": spaces.Discrete(2),
        "cur_step": spaces.Box(0, max_step - 1, (), np.int32),
        "num_step": spaces.Box(max_step, max_step, (), np.int32),
        "target": spaces.Box(-EPS, np.inf, (), np.float32),
        "position": spaces.Box(-EPS, np.inf, (), np.float32),
    }


def _order_numbers(state: SAOEState, max_step: int) -> Observation:
    """Return the numbers that all orders' observations have. Raise ConfigError for too many steps."""
    if state.cur_step > max_step:
        raise ConfigError(
            f"the order to {state.order} has made {state.cur_step} steps, max_step is {max_step}; give "
            f"max_step={state.n_steps} or more"
        )
    return {
        "acquiring": np.array(state.order.direction == OrderDir.BUY, np.int32),
        "cur_step": np.array(min(state.cur_step, max_step - 1), np.int32),
        "num_step": np.array(max_step, np.int32),
        "target": np.array(state.order.amount, np.float32),
        "position": np.array(max(0.0, state.position), np.float32),
    }


class CategoricalActionInterpreter(ActionInterpreter[SAOEState, int, float]):
    """Action k trades the fraction `values[k]` of the order's amount, or all that is left if that is less.

    values: fractions, or a whole number n for 0, 1/n, ..., 1.
    max_step: the number of steps of an order, of which the last one trades all that is left. None: leave that to the
        simulator.
    """

    def __init__(self, values: int | Sequence[float], max_step: int | None = None) -> None:
        if isinstance(values, int):
            check_number("values", values, at_least=1, whole=True)
            values = [part / values for part in range(values + 1)]
        if not values or not all(0 <= value <= 1 for value in values):
            raise ConfigError(
                f"values is {values!r}; give fractions of the order's amount, 0 to 1, or a number of parts"
            )
        check_number("max_step", max_step, at_least=1, whole=True, or_none="no last step")
        self.action_values = [float(value) for value in values]
        self.max_step = max_step
        self._space = spaces.Discrete(len(self.action_values))

    @property
    def action_space(self) -> spaces.Discrete:
        """A Discrete space with an action for each value."""
        return self._space

    def interpret(self, simulator_state: SAOEState, action: int) -> float:
        """Return the amount to trade: `values[action]` of the order, at most the remaining amount."""
        if self.max_step is not None and simulator_state.cur_step >= self.max_step - 1:
            return simulator_state.position
        return min(simulator_state.position, simulator_state.order.amount * self.action_values[int(action)])


class TwapRelativeActionInterpreter(ActionInterpreter[SAOEState, float, float]):
    """An action is a multiple of the equal share: the remaining amount, divided by the remaining steps.

    Action 1 trades that share, 2 twice as much, 0 nothing. With the policy `AllOne` this is the baseline TWAP, the
    time-weighted average price.
    """

    def __init__(self) -> None:
        self._space = spaces.Box(0, np.inf, (), np.float32)

    @property
    def action_space(self) -> spaces.Box:
        """A Box of one number, 0 or more."""
        return self._space

    def interpret(self, simulator_state: SAOEState, action: float) -> float:
        """Return the amount to trade: `action` times the equal share, at most the remaining amount.

        A shorter first step counts as one of the remaining steps.
        """
        left = simulator_state.n_steps - simulator_state.cur_step
        return min(simulator_state.position, simulator_state.position / left * float(action))
