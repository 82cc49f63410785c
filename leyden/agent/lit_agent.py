"""`LitAgent`: the user's code, as a class.

An agent gets a task, resources and the rollout, does its work, and returns None, a reward or spans. It knows no store
and no algorithm. It keeps weak references to its trainer and its runner for the user's code; no part of Leyden reads
them.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar, cast

from leyden._lib.components import KeepsArguments
from leyden._lib.options import NamedOptions
from leyden.errors import ConfigError
from leyden.tracing import Tracer
from leyden.types import AttemptedRollout, NamedResources

T = TypeVar("T")

_ASYNC_METHODS = ("rollout_async", "training_rollout_async", "validation_rollout_async")


class LitAgent(KeepsArguments, NamedOptions, Generic[T]):
    """The base class of an agent. Override `rollout` or `rollout_async`; the training and validation variants call it
    unless you override them too.

    An agent that overrides an `_async` method is asynchronous: hundreds of its rollouts run in one event loop. The
    rollouts of other agents run in threads.
    """

    _trainer: weakref.ref[Any] | None = None
    _runner: weakref.ref[Any] | None = None

    def rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Do the task, blocking, and return its reward.

        task: one element of the data set, as the user gave it.
        resources: the resources by name, such as an LLM and a prompt template.
        rollout: the rollout and its current attempt: ids, mode, metadata.

        Return a finite number, a dict of numbers by name, a span or a list of spans, or None if the reward was emitted
        (`emit_reward`) or there is none.
        """
        raise ConfigError(self._lacks("rollout"))

    def training_rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Run a task in mode `train`; `rollout` unless overridden."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Run a task in a mode other than `train`; `rollout` unless overridden."""
        return self.rollout(task, resources, rollout)

    async def rollout_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Do the task in a coroutine, as `rollout` does."""
        raise ConfigError(self._lacks("rollout_async"))

    async def training_rollout_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Run a task in mode `train`; `rollout_async` unless overridden."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Run a task in a mode other than `train`; `rollout_async` unless overridden."""
        return await self.rollout_async(task, resources, rollout)

    def is_async(self) -> bool:
        """Return whether a runner must await `run_async` instead of calling `run`."""
        return any(getattr(type(self), name) is not getattr(LitAgent, name) for name in _ASYNC_METHODS)

    def run(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Run one task of a synchronous agent: call the method for the rollout's mode."""
        method = self.training_rollout if rollout.mode == "train" else self.validation_rollout
        return method(task, resources, rollout)

    async def run_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Run one task of an asynchronous agent: await the method for the rollout's mode."""
        method = self.training_rollout_async if rollout.mode == "train" else self.validation_rollout_async
        return await method(task, resources, rollout)

    def check_resources(self, resources: NamedResources) -> None:
        """Raise MissingResource if the agent needs a resource that is not among `resources`.

        The default needs none. Override it in a class that does.
        """

    def set_trainer(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """Return the trainer. Raise ConfigError outside a run."""
        return self._alive(self._trainer, "trainer")

    def set_runner(self, runner: Any) -> None:
        self._runner = weakref.ref(runner)

    def get_runner(self) -> Any:
        """Return the runner. Raise ConfigError outside a run."""
        return self._alive(self._runner, "runner")

    @property
    def tracer(self) -> Tracer:
        """The tracer that records this agent's work. Raise ConfigError outside a run."""
        return self.get_runner().tracer

    def _alive(self, reference: weakref.ref[Any] | None, noun: str) -> Any:
        found = None if reference is None else reference()
        if found is None:
            raise ConfigError(f"{type(self).__name__} has no {noun}: it is set while a run is under way")
        return found

    def _lacks(self, method: str) -> str:
        return f"{type(self).__name__} was asked for {method}(), which it does not have; override it, or the variant for this mode"

    def __getstate__(self) -> dict[str, Any]:
        # without the weak references, which belong to this process
        return {name: value for name, value in vars(self).items() if name not in ("_trainer", "_runner", "_arguments")}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # without the arguments, which only describe the agent, and which a `__getstate__` of its own does not know
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):  # a name under which a module has it
            return reduced
        made, given, *rest = reduced
        if rest and isinstance(rest[0], dict):
            state = cast("dict[str, Any]", rest[0])
            rest[0] = {name: value for name, value in state.items() if name != "_arguments"}
        return made, given, *rest


def check_resources(agent: LitAgent[Any], resources: NamedResources) -> None:
    """Raise MissingResource if `agent` needs a resource that is not among `resources`. Call it before a run starts."""
    agent.check_resources(resources)
