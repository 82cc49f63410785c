"""The work of a cycle, as jobs for a separate process: train a candidate, and measure two versions.

A job runs a `Trainer`, whose run folder and store are inside the cycle's folder. So it never writes to production's
store, can be watched like any run (`leyden show`), and continues after a crash.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from leyden._lib import ids
from leyden.agent import LitAgent
from leyden.algorithm import Algorithm, Dataset
from leyden.algorithm.collector import CollectedRollout, rollout_id_at
from leyden.algorithm.decorator import FunctionalAlgorithm
from leyden.errors import BudgetExceeded, ConfigError, StoreError
from leyden.serving.continual.gate import Measurement, TaskOutcome
from leyden.serving.continual.recorded import LearningData, RecordedTasks
from leyden.trainer import Trainer
from leyden.training.runs import RunSummary
from leyden.training.runs.folder import MANIFEST
from leyden.types import (
    LLM,
    AttemptedRollout,
    EnqueueRolloutRequest,
    NamedResources,
    ResourcesUpdate,
    RolloutConfig,
)

RESOURCES: Final[TypeAdapter[NamedResources]] = TypeAdapter(NamedResources)
Choose = Callable[[RunSummary, NamedResources], NamedResources | None]
"""A function of a finished run's summary and the resources in production. It returns the candidate's resources, or None
if there is nothing to try."""
RESERVED: Final = frozenset({"algorithm", "store", "run_dir", "initial_resources", "dev"})
"""Options of `Trainer` that a job sets itself."""


@dataclass
class _TrainerJob:
    """A job that runs a `Trainer`."""

    agent: LitAgent[Any]
    options: Mapping[str, Any]
    """Options of `Trainer`."""
    folder: Path
    """The run's folder."""
    _trainer: Trainer | None = field(default=None, init=False)
    _cost: float = field(default=0.0, init=False)
    """The last known cost, which `cost` returns while the run's store does not answer."""

    async def cost(self) -> float:
        """Return the cost of the run's model calls, as it was when the run's store last answered."""
        store = None if self._trainer is None else self._trainer.store
        if store is not None:
            with contextlib.suppress(StoreError):
                spent = [await store.sum_spending(run.run_id) for run in await store.query_runs()]
                self._cost = math.fsum(each.cost or 0.0 for each in spent)
        return self._cost

    async def _fit(self, algorithm: Any, resources: NamedResources, train: Any, validation: Any = None) -> RunSummary:
        """Run an algorithm, and return the summary of the finished run.

        A run that an earlier process began is continued if its algorithm is resumable; otherwise its folder is deleted,
        and it starts again. Raise BudgetExceeded if the budget ended it early.
        """
        options: dict[str, Any] = {"progress": False, **self.options}
        trainer = Trainer(algorithm=algorithm, initial_resources=resources, run_dir=self.folder, **options)
        chosen = trainer.algorithm
        begun = (self.folder / MANIFEST).exists()
        if begun and not (chosen is not None and chosen.resumable):
            shutil.rmtree(self.folder)
            begun = False
        if isinstance(chosen, FunctionalAlgorithm):
            train, validation = _named(chosen, train, validation)
        self._trainer = trainer
        summary = await trainer.afit(self.agent, train, validation, resume=begun)
        await self.cost()  # keeps the final cost, because the run's store is closed soon
        if summary.stopped is not None:
            raise BudgetExceeded(f"the run in {self.folder} ended before its algorithm did: {summary.stopped}")
        return summary


@dataclass
class TrainJob(_TrainerJob):
    """Trains a candidate on recorded requests."""

    algorithm: Any
    production: NamedResources
    data: LearningData
    choose: Choose | None = None

    async def run(self) -> Any:
        """Train, and return the candidate's resources as JSON under "candidate"; None if there is nothing to try."""
        # Without models among the resources, the algorithm gives agents the gateway's, which
        # records the calls and their cost.
        initial = _without_models(self.production) if "llm_proxy" in self.options else self.production
        train, validation = RecordedTasks(self.data.train), RecordedTasks(self.data.validation)
        summary = await self._fit(self.algorithm, initial, train, validation if len(validation) else None)
        if self.choose is not None:
            candidate = self.choose(summary, self.production)
        else:
            candidate = await self._candidate(summary.result)
        return {"candidate": None if candidate is None else RESOURCES.dump_python(candidate, mode="json")}

    async def _candidate(self, result: Any) -> NamedResources | None:
        """Return production's resources, replaced where the algorithm has returned new ones; None if it has returned
        None. Raise ConfigError for any other result.

        A model is only taken from a mapping that the algorithm returned, because the addresses of models in the run's
        store end with the run.
        """
        if result is None:
            return None
        if isinstance(result, ResourcesUpdate):
            return {**self.production, **_without_models(result.resources)}
        if isinstance(result, Mapping):
            return RESOURCES.validate_python({**self.production, **result})
        resources_id, version = getattr(result, "resources_id", None), getattr(result, "version", None)
        if isinstance(resources_id, str) and isinstance(version, int):  # a PromptResult, for example
            assert self._trainer is not None and self._trainer.store is not None
            async with self._trainer.store as store:
                update = await store.get_resources_by_id(resources_id, version=version)
            return {**self.production, **_without_models(update.resources)}
        raise ConfigError(
            f"the algorithm returned {result!r:.200}, from which no candidate can be made; return named resources, a "
            "ResourcesUpdate or None, or give ContinualLearning(candidate=FUNCTION)"
        )


@dataclass
class MeasureJob(_TrainerJob):
    """Runs two versions on the same tasks. The result is a `Measurement` as JSON.

    replicas: how often each version runs each task.
    """

    production: NamedResources
    candidate: NamedResources
    tasks: Sequence[Any]
    replicas: int

    async def run(self) -> Any:
        algorithm = _Measure(self.production, self.candidate, self.replicas)
        algorithm.uses_gateway = "llm_proxy" in self.options
        summary = await self._fit(algorithm, self.production, list(self.tasks))
        return summary.result.model_dump(mode="json")


class _Measure(Algorithm):
    """Runs each task with both versions, which take turns at being the first, so that a slow minute of the machine, or
    the place in the queue, slows both alike.
    """

    run_kind = "eval"
    holds_runners = True  # until the address of this process's gateway is in the store, which queued rollouts need
    resumable = True

    def __init__(self, production: NamedResources, candidate: NamedResources, replicas: int) -> None:
        self.versions = {"production": production, "candidate": candidate}
        self.replicas = replicas

    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> BaseModel:
        tasks, run_id, store = train_dataset or (), self.get_run().run_id, self.get_store()
        requests: list[EnqueueRolloutRequest] = []
        for side, resources in self.versions.items():
            await store.update_resources(ids.derived_id("rs", run_id, side), await self._served(resources))
        for replica in range(self.replicas):
            for task in range(len(tasks)):
                step = 1 if (task + replica) % 2 == 0 else -1  # -1: the candidate goes first
                requests += [
                    EnqueueRolloutRequest(
                        rollout_id=rollout_id_at(run_id, side, task, replica),
                        input=tasks[task],
                        mode="val",
                        resources_id=ids.derived_id("rs", run_id, side),
                        config=RolloutConfig(max_attempts=1),
                        metadata={"side": side, "task": task},
                    )
                    for side in list(self.versions)[::step]
                ]
        found: dict[str, list[TaskOutcome]] = {side: [] for side in self.versions}
        async for result in self.collector.collect(requests):
            found[(result.request.metadata or {})["side"]].append(_outcome(result))
        return Measurement(production=found["production"], candidate=found["candidate"])

    async def _served(self, resources: NamedResources) -> NamedResources:
        """Return the resources with the gateway's address in their models, so that calls and their cost are recorded;
        the resources themselves without a gateway.
        """
        proxy = self.get_llm_proxy()
        if proxy is None:
            return resources
        return {
            name: await self.publish_endpoint(
                proxy.as_resource(model=resource.model, sampling_parameters=resource.sampling_parameters)
            )
            if isinstance(resource, LLM)
            else resource
            for name, resource in resources.items()
        }


def _outcome(result: CollectedRollout) -> TaskOutcome:
    """Return a rollout's outcome on its task. `seconds` and `cost` are None if its last attempt does not have them."""
    attempt = result.rollout.attempt if isinstance(result.rollout, AttemptedRollout) else None
    ended = None if attempt is None else attempt.end_time
    return TaskOutcome(
        task=(result.request.metadata or {})["task"],
        reward=result.reward,
        failed=result.status != "succeeded",
        seconds=None if attempt is None or ended is None else ended - attempt.start_time,
        cost=None if attempt is None else attempt.cost,
    )


def _named(algorithm: FunctionalAlgorithm, train: Any, validation: Any) -> tuple[Any, Any]:
    """Return the data sets that the algorithm's function has parameters for; None for the others.

    A function without the parameter `val_dataset` gets both sets as `train_dataset`.
    """
    named = inspect.signature(algorithm.function).parameters
    if "val_dataset" not in named and isinstance(train, RecordedTasks) and isinstance(validation, RecordedTasks):
        train, validation = RecordedTasks([*train.records, *validation.records]), None
    return train if "train_dataset" in named else None, validation


def _without_models(resources: NamedResources) -> NamedResources:
    return {name: resource for name, resource in resources.items() if not isinstance(resource, LLM)}
