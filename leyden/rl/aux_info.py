"""Auxiliary information: what is wanted of a state besides observation and reward, for each step, in `info["aux_info"]`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar, final

from leyden.rl.component import EnvComponent
from leyden.rl.simulator import StateType

AuxInfoType = TypeVar("AuxInfoType")


class AuxiliaryInfoCollector(EnvComponent, ABC, Generic[StateType, AuxInfoType]):
    """Reads a state after each step; what it returns can be pickled where environments are in worker processes."""

    @abstractmethod
    def collect(self, simulator_state: StateType) -> AuxInfoType:
        """What is wanted of this state."""

    @final
    def __call__(self, simulator_state: StateType) -> AuxInfoType:
        return self.collect(simulator_state)
