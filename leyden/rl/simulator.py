"""The simulator: one instance is one trajectory.

It knows its own state and how an action changes it; what a policy sees and may do is the interpreters' affair, what that is worth the
reward's. To add one, subclass `Simulator`; `leyden.rl.env.check_simulator` runs it once and says what is wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from leyden.rl.component import EnvComponent

InitialStateType = TypeVar("InitialStateType")
"""What a simulator is made from: one item of the data set. Anything that can be pickled."""
StateType = TypeVar("StateType")
ActType = TypeVar("ActType")


class Simulator(EnvComponent, ABC, Generic[InitialStateType, StateType, ActType]):
    """One trajectory. There is no reset: a new trajectory is a new instance.

    Only `step` changes it; everyone else reads `get_state()` and `done()`. `env` is set after `__init__` and before anything else is
    called: `self.env.logger` notes values, `self.env.status` is the episode so far.
    """

    def __init__(self, initial: InitialStateType) -> None:
        """initial: an item of the data set."""

    @abstractmethod
    def step(self, action: ActType) -> None:
        """Carry out an action, as the action interpreter made it."""

    @abstractmethod
    def get_state(self) -> StateType:
        """The state now."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the trajectory has ended, for whatever reason."""

    def truncated(self) -> bool:
        """Whether it was ended by a limit (of time, of data) and not by the task: its last state still has a value to bootstrap from.

        True ends the trajectory too, also where `done()` says False.
        """
        return False
