"""`LitAgent`: the user's code, as a class.

An agent gets a task, resources and the rollout, does its work, and answers with what `result.py` allows. It knows no store and no
algorithm. Trainer and runner are remembered weakly, for users; no part of Leyden reads them.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

from leyden.errors import ConfigError
from leyden.options import NamedOptions
from leyden.tracer import Tracer
from leyden.types import AttemptedRollout, NamedResources

T = TypeVar("T")

_ASYNC_METHODS = ("rollout_async", "training_rollout_async", "validation_rollout_async")


class LitAgent(NamedOptions, Generic[T]):
    """Override `rollout` or `rollout_async`; the training and validation variants are the same unless overridden too.

    An agent with any `_async` method overridden is an async one, of which hundreds run in one event loop; the others run in threads.
    """

    _trainer: weakref.ref[Any] | None = None
    _runner: weakref.ref[Any] | None = None

    def rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Do the work, blocking. Returns None, a number, rewards by name, or spans (see `result.py`)."""
        raise ConfigError(self._lacks("rollout"))

    def training_rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """What is run in mode `train`."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """What is run in every other mode."""
        return self.rollout(task, resources, rollout)

    async def rollout_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Like `rollout`, awaiting."""
        raise ConfigError(self._lacks("rollout_async"))

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """What is run in mode `train`."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """What is run in every other mode."""
        return await self.rollout_async(task, resources, rollout)

    def is_async(self) -> bool:
        """Whether `run_async` is to be awaited; otherwise `run` is to be called."""
        return any(getattr(type(self), name) is not getattr(LitAgent, name) for name in _ASYNC_METHODS)

    def run(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """The method for the rollout's mode, of a sync agent."""
        method = self.training_rollout if rollout.mode == "train" else self.validation_rollout
        return method(task, resources, rollout)

    async def run_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """The method for the rollout's mode, of an async agent."""
        method = self.training_rollout_async if rollout.mode == "train" else self.validation_rollout_async
        return await method(task, resources, rollout)

    def check_resources(self, resources: NamedResources) -> None:
        """Raise MissingResource if the agent needs something that is not among `resources`. A class may say so by overriding this."""

    def set_trainer(self, trainer: Any) -> None:
        """Remember the trainer, weakly."""
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """The trainer. Raises ConfigError outside a run."""
        return self._alive(self._trainer, "trainer")

    def set_runner(self, runner: Any) -> None:
        """Remember the runner, weakly."""
        self._runner = weakref.ref(runner)

    def get_runner(self) -> Any:
        """The runner. Raises ConfigError outside a run."""
        return self._alive(self._runner, "runner")

    @property
    def tracer(self) -> Tracer:
        """What records this agent's work. Raises ConfigError outside a run."""
        return self.get_runner().tracer

    def _alive(self, reference: weakref.ref[Any] | None, noun: str) -> Any:
        found = None if reference is None else reference()
        if found is None:
            raise ConfigError(f"{type(self).__name__} has no {noun}: it is set while a run is under way")
        return found

    def _lacks(self, method: str) -> str:
        return f"{type(self).__name__} was asked for {method}(), which it does not have; override it, or the variant for this mode"

    def __getstate__(self) -> dict[str, Any]:
        """Without the weak references, which belong to this process."""
        return {name: value for name, value in vars(self).items() if name not in ("_trainer", "_runner")}


def check_resources(agent: LitAgent[Any], resources: NamedResources) -> None:
    """Raise MissingResource if `agent` needs a resource that is not among `resources`; to be called before a run starts."""
    agent.check_resources(resources)
