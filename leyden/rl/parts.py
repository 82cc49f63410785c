"""The parts of a simulator agent: simulator, interpreters, reward and auxiliary information.

A simulator is one trajectory; it knows its own state and how an action changes it. The state interpreter turns that
state into the policy's observation, and the action interpreter turns the policy's action into the simulator's. The
reward is a number for each step. None of them knows a policy, and interpreters and rewards hold no state of an episode.

To write a part, subclass its class here; `leyden.rl.check_simulator` runs a trajectory and reports its problems.
`EnvWrapper` sets a weak reference to itself in each part, so a part belongs to one environment at a time: the last one
that was made with it. A part that is copied or sent to another process arrives without the reference.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, final

import gymnasium

from leyden._lib.json import is_object
from leyden._lib.text import shown
from leyden.errors import ConfigError
from leyden.rl.spaces import Check, Layout, layout_of

if TYPE_CHECKING:
    from leyden.rl.env.wrapper import EnvWrapper

InitialStateType = TypeVar("InitialStateType")
"""The initial state that a simulator is made from: a picklable item of the data set."""
StateType = TypeVar("StateType")
ActType = TypeVar("ActType")
ObsType = TypeVar("ObsType")
PolicyActType = TypeVar("PolicyActType")
AuxInfoType = TypeVar("AuxInfoType")

_STAYS_HERE: Final = ("_env_reference", "_check", "_observation_layout")
"""Attributes that are not pickled: the reference, and the compiled checks of interpreters."""


class EnvComponent:
    """The base of all parts: it gives access to the environment, and logs values."""

    _env_reference: weakref.ref[EnvWrapper[Any, Any, Any, Any, Any]] | None = None

    @property
    def env(self) -> EnvWrapper[Any, Any, Any, Any, Any] | None:
        """The environment that holds this part, with its `logger` and its `status`.

        None before an `EnvWrapper` takes the part, and after that wrapper is gone.
        """
        return None if self._env_reference is None else self._env_reference()

    @env.setter
    def env(self, env: EnvWrapper[Any, Any, Any, Any, Any] | None) -> None:
        self._take_env(env)

    def log(self, name: str, value: float) -> None:
        """Log a number of this step for writers and the stage's metrics. Raise ConfigError outside an environment."""
        if (env := self.env) is None:
            raise ConfigError(
                f"{type(self).__name__}.log({name!r}) was called outside an environment; log from `step` or `reward`, while an "
                "EnvWrapper runs this part"
            )
        env.logger.add_scalar(name, value)

    def _take_env(self, env: EnvWrapper[Any, Any, Any, Any, Any] | None) -> None:
        if env is not None and not hasattr(type(env), "is_running"):
            raise ConfigError(
                f"{type(self).__name__}.env is the EnvWrapper that runs it, and was set to {shown(env)}; keep what is yours under "
                "another name, such as self.game"
            )
        object.__setattr__(self, "_env_reference", None if env is None else weakref.ref(env))  # frozen dataclasses too

    def __getstate__(self) -> Any:
        state: Any = super().__getstate__()
        if is_object(state):
            return {name: value for name, value in state.items() if name not in _STAYS_HERE}
        return state


class Simulator(EnvComponent, ABC, Generic[InitialStateType, StateType, ActType]):
    """One trajectory. There is no reset: a new trajectory is a new instance.

    Only `step` changes the simulator; its environment reads `get_state()` and `done()`. `env` is set after `__init__`
    and before any other call. It has `self.env.logger`, which logs values, and `self.env.status`, which describes the
    episode so far.
    """

    def __init__(self, initial: InitialStateType) -> None:
        """Begin a trajectory.

        initial: an item of the data set.
        """

    @abstractmethod
    def step(self, action: ActType) -> None:
        """Carry out an action of the action interpreter."""

    @abstractmethod
    def get_state(self) -> StateType:
        """Return the current state."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the trajectory has ended, for any reason."""

    def truncated(self) -> bool:
        """Return whether a limit (of time, of data) ended the trajectory, and not the task.

        The last state of such a trajectory still has a value to bootstrap from. True ends the trajectory, even if
        `done()` is False.
        """
        return False


class Interpreter(EnvComponent, ABC):
    """The base of interpreters, which translate between simulator and policy.

    Each observation and action is checked against a space. The check is compiled when the space is first used, so the
    space must not change afterwards.
    """

    _check: Check | None = None


class StateInterpreter(Interpreter, Generic[StateType, ObsType]):
    """Turns a simulator's states into the policy's observations."""

    strict: bool = True
    """Whether an observation outside the space's bounds is an error.

    If False, observations are cast to the space's dtype, and the first one outside the bounds logs a warning. NaN and
    other shapes are errors in either case. A class or an instance may set it.
    """
    _observation_layout: Layout | None = None

    @property
    @abstractmethod
    def observation_space(self) -> gymnasium.Space[Any]:
        """The space of all observations."""

    @abstractmethod
    def interpret(self, simulator_state: StateType) -> ObsType:
        """Return the observation of a state. Make a new object each time, because buffers keep it."""

    @final
    def __call__(self, simulator_state: StateType) -> ObsType:
        """Return the observation of a state, checked against `observation_space`. Raise GymSpaceValidationError if the
        observation is not in the space.
        """
        obs = self.interpret(simulator_state)
        if not self.strict:
            return self.observation_layout.coerce(obs)
        self.validate(obs)
        return obs

    @property
    def observation_layout(self) -> Layout:
        """The layout of the observation space, which coerces observations if `strict` is False."""
        if (layout := self._observation_layout) is None:
            layout = layout_of(self.observation_space)
            object.__setattr__(self, "_observation_layout", layout)
        return layout

    def validate(self, obs: ObsType) -> None:
        """Raise GymSpaceValidationError unless the space contains the observation.

        Shape, dtype, bounds and NaN are checked.
        """
        if (check := self._check) is None:
            check = self.observation_layout.check
            object.__setattr__(self, "_check", check)
        check(obs)


class ActionInterpreter(Interpreter, Generic[StateType, PolicyActType, ActType]):
    """Turns the policy's actions into the simulator's."""

    @property
    @abstractmethod
    def action_space(self) -> gymnasium.Space[Any]:
        """The space of all actions of the policy."""

    @abstractmethod
    def interpret(self, simulator_state: StateType, action: PolicyActType) -> ActType:
        """Return the simulator's action.

        simulator_state: the state before the action.
        """

    @final
    def __call__(self, simulator_state: StateType, action: PolicyActType) -> ActType:
        """Return the simulator's action for an action of the policy. Raise GymSpaceValidationError if the policy's
        action is not in `action_space`.
        """
        self.validate(action)
        return self.interpret(simulator_state, action)

    def validate(self, action: PolicyActType) -> None:
        """Raise GymSpaceValidationError unless `action_space` contains the action."""
        if (check := self._check) is None:
            check = layout_of(self.action_space).check
            object.__setattr__(self, "_check", check)
        check(action)


class Reward(EnvComponent, ABC, Generic[StateType]):
    """Rates a step by the state that it led to."""

    @abstractmethod
    def reward(self, simulator_state: StateType) -> float:
        """Return the reward of the step that led to this state."""

    @final
    def __call__(self, simulator_state: StateType) -> float:
        return self.reward(simulator_state)


class RewardCombination(Reward[StateType]):
    """A weighted sum of rewards. Each weighted part is logged under its name.

    The parts have the `env` of the sum, so they can log values too.
    """

    def __init__(self, rewards: Mapping[str, tuple[Reward[StateType], float]]) -> None:
        """rewards: the reward and its weight, by name."""
        self.rewards = dict(rewards)

    def reward(self, simulator_state: StateType) -> float:
        total = 0.0
        for name, (part, weight) in self.rewards.items():
            value = part(simulator_state) * weight
            total += value
            self.log(name, value)
        return total

    def _take_env(self, env: EnvWrapper[Any, Any, Any, Any, Any] | None) -> None:
        super()._take_env(env)
        for part, _ in self.rewards.values():
            part.env = env


class AuxiliaryInfoCollector(EnvComponent, ABC, Generic[StateType, AuxInfoType]):
    """Reads further values of a state after each step, for `info["aux_info"]`."""

    @abstractmethod
    def collect(self, simulator_state: StateType) -> AuxInfoType:
        """Return the values of a state. If environments run in worker processes, they must be picklable."""

    @final
    def __call__(self, simulator_state: StateType) -> AuxInfoType:
        return self.collect(simulator_state)
