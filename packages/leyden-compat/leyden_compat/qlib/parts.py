"""Qlib's parts of an environment: simulator, interpreters, reward and auxiliary information.

They differ from Leyden's in three ways. Spaces may be those of the old `gym`. `env` may be any object with the
attributes that the part reads, such as a named tuple in a test. `Simulator` takes keyword arguments, and a method that
a simulator leaves out raises NotImplementedError when it is called.
"""

from __future__ import annotations

import functools
from typing import Any, cast

from leyden.errors import ConfigError
from leyden.rl import parts
from leyden_compat.qlib.spaces import as_gymnasium

StateType, ActType, ObsType = parts.StateType, parts.ActType, parts.ObsType
PolicyActType, AuxInfoType = parts.PolicyActType, parts.AuxInfoType
SimulatorState = parts.StateType


class AnyEnv:
    """A mixin for Qlib's parts, whose `env` may be any object. A weak reference is kept to an `EnvWrapper`."""

    def _take_env(self, env: Any) -> None:
        try:
            cast(Any, super())._take_env(env)
        except ConfigError:
            object.__setattr__(self, "_env_reference", lambda: env)


class _OldSpaces:
    """Lets `observation_space` and `action_space` of a subclass be spaces of the old `gym`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("observation_space", "action_space"):
            own = cls.__dict__.get(name)
            if isinstance(own, property) and own.fget is not None:
                setattr(cls, name, property(_converted(own.fget)))
            elif own is not None:
                setattr(cls, name, as_gymnasium(own))


def _converted(read: Any) -> Any:
    @functools.wraps(read)
    def converted(self: Any) -> Any:
        return as_gymnasium(read(self))

    return converted


class Simulator(AnyEnv, parts.Simulator[parts.InitialStateType, parts.StateType, parts.ActType]):
    """A simulator of one episode, made for each seed."""

    def __init__(self, initial: Any = None, **kwargs: Any) -> None:
        """Accept the initial state and any other argument, without using them."""

    def step(self, action: Any) -> None:
        """Carry out an action."""
        raise NotImplementedError(f"{type(self).__name__} has no step(action)")

    def get_state(self) -> Any:
        """Return the current state."""
        raise NotImplementedError(f"{type(self).__name__} has no get_state()")

    def done(self) -> bool:
        """Return whether the episode has ended."""
        raise NotImplementedError(f"{type(self).__name__} has no done()")


class Interpreter(AnyEnv, _OldSpaces, parts.Interpreter):
    """Base class of Qlib's interpreters of states and of actions."""


class StateInterpreter(AnyEnv, _OldSpaces, parts.StateInterpreter[parts.StateType, parts.ObsType]):
    """The base class of interpreters that make observations of the simulator's states."""


class ActionInterpreter(
    AnyEnv, _OldSpaces, parts.ActionInterpreter[parts.StateType, parts.PolicyActType, parts.ActType]
):
    """The base class of interpreters that turn the policy's actions into the simulator's."""


class Reward(AnyEnv, parts.Reward[parts.StateType]):
    """The base class of rewards, which compute a number for each step of an episode."""


class RewardCombination(AnyEnv, parts.RewardCombination[parts.StateType]):
    """A weighted sum of several rewards; each of them is logged under its name."""


class AuxiliaryInfoCollector(AnyEnv, parts.AuxiliaryInfoCollector[parts.StateType, parts.AuxInfoType]):
    """The base class of collectors of further information about each step."""
