"""Interpreters: from a simulator's state to what a policy observes, from what a policy says to what a simulator does.

They hold no state of an episode and know no policy. Each call checks the observation, or the policy's action, against the space, by a
check compiled for that space (`leyden.rl.spaces.checker`); `StateInterpreter.strict = False` makes the check lenient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

import gymnasium

from leyden.rl.component import EnvComponent
from leyden.rl.simulator import ActType, StateType
from leyden.rl.spaces import Conformer, checker, conformer

ObsType = TypeVar("ObsType")
PolicyActType = TypeVar("PolicyActType")


class Interpreter(EnvComponent, ABC):
    """Between simulator and policy. Its space must stay what it was when it was first used."""

    _check: Callable[[Any], None] | None = None


class StateInterpreter(Interpreter, Generic[StateType, ObsType]):
    """From a simulator's state to an observation."""

    strict: bool = True
    """Whether an observation outside the space's bounds is an error.

    If False, observations are cast to the space's dtype, and the first one outside the bounds logs
    a warning. NaN and other shapes are errors in either case. A class or an instance may set it.
    """
    _conformer: Conformer | None = None

    @property
    @abstractmethod
    def observation_space(self) -> gymnasium.Space[Any]:
        """What every observation is an element of."""

    @abstractmethod
    def interpret(self, simulator_state: StateType) -> ObsType:
        """The observation. A new object each time: observations are kept."""

    @final
    def __call__(self, simulator_state: StateType) -> ObsType:
        """Interpret, then validate."""
        obs = self.interpret(simulator_state)
        if not self.strict:
            return self.conformer(obs)
        self.validate(obs)
        return obs

    @property
    def conformer(self) -> Conformer:
        """The lenient check, which is used unless `strict`."""
        if (conform := self._conformer) is None:
            conform = conformer(self.observation_space)
            object.__setattr__(self, "_conformer", conform)
        return conform

    def validate(self, obs: ObsType) -> None:
        """Raise GymSpaceValidationError for an observation that the space does not contain (NaN, bounds, shape, dtype)."""
        if (check := self._check) is None:
            check = checker(self.observation_space)
            object.__setattr__(self, "_check", check)
        check(obs)


class ActionInterpreter(Interpreter, Generic[StateType, PolicyActType, ActType]):
    """From a policy's action to a simulator's."""

    @property
    @abstractmethod
    def action_space(self) -> gymnasium.Space[Any]:
        """What every action of a policy is an element of."""

    @abstractmethod
    def interpret(self, simulator_state: StateType, action: PolicyActType) -> ActType:
        """What the simulator does, from the state before it."""

    @final
    def __call__(self, simulator_state: StateType, action: PolicyActType) -> ActType:
        """Validate, then interpret."""
        self.validate(action)
        return self.interpret(simulator_state, action)

    def validate(self, action: PolicyActType) -> None:
        """Raises GymSpaceValidationError for an action that the space does not contain."""
        if (check := self._check) is None:
            check = checker(self.action_space)
            object.__setattr__(self, "_check", check)
        check(action)
