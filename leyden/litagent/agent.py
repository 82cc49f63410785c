"""`LitAgent`: override one method."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

from leyden.errors import ConfigError
from leyden.types import AttemptedRollout, NamedResources

__all__ = ["LitAgent"]

T = TypeVar("T")


class LitAgent(Generic[T]):
    """An agent. Override `rollout`, or `rollout_async`; the training and validation variants where those differ.

    A method takes the task, the resources by name, and the rollout with its attempt. It returns a reward (a number, or several by name),
    spans of its own, or None when the reward was emitted.
    """

    _trainer: weakref.ref[Any] | None = None
    _runner: weakref.ref[Any] | None = None

    def rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """One try at a task, synchronously; runs in a thread of its own."""
        raise ConfigError(f"{type(self).__name__} must override rollout() or rollout_async()")

    async def rollout_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """One try at a task, asynchronously; runs beside hundreds of others."""
        raise ConfigError(f"{type(self).__name__} must override rollout() or rollout_async()")

    def training_rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """What mode `train` runs."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """What every other mode runs."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """What mode `train` runs."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """What every other mode runs."""
        return await self.rollout_async(task, resources, rollout)

    def is_async(self) -> bool:
        """Whether any async method is overridden."""
        names = ("rollout_async", "training_rollout_async", "validation_rollout_async")
        return any(getattr(type(self), name) is not getattr(LitAgent, name) for name in names)

    def check(self, resources: NamedResources) -> None:
        """Raise MissingResource if the agent is known to need what `resources` does not hold; called before a run."""

    def run(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """The sync method for the rollout's mode."""
        method = self.training_rollout if rollout.mode == "train" else self.validation_rollout
        return method(task, resources, rollout)

    async def run_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """The async method for the rollout's mode."""
        method = self.training_rollout_async if rollout.mode == "train" else self.validation_rollout_async
        return await method(task, resources, rollout)

    def set_trainer(self, trainer: Any) -> None:
        """Remember the trainer, weakly; for users, no part of Leyden reads it."""
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """The trainer. Raises ConfigError when there is none."""
        return self._get(self._trainer, "trainer")

    def set_runner(self, runner: Any) -> None:
        """Remember the runner, weakly; for users, no part of Leyden reads it."""
        self._runner = weakref.ref(runner)

    def get_runner(self) -> Any:
        """The runner. Raises ConfigError when there is none."""
        return self._get(self._runner, "runner")

    def _get(self, reference: weakref.ref[Any] | None, what: str) -> Any:
        value = reference() if reference else None
        if value is None:
            raise ConfigError(f"{type(self).__name__} has no {what}; it has one while a Trainer or a runner runs it")
        return value
