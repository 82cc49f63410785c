"""`RateFinder`: try several learning rates for a few steps each, and recommend one.

Each trial begins with the same weights and the same rollouts, which are sampled once. Its later steps have the same
tasks as those of the other trials. It is `PolicyGradient` in every other respect, so that the rate fits the options.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from leyden._lib.options import check_number
from leyden.algorithm.algorithm import Dataset
from leyden.algorithm.iterative import Metrics
from leyden.algorithm.policy_gradient.collapse import Measured
from leyden.algorithm.policy_gradient.policy_gradient import PolicyGradient
from leyden.engine.policy_backend import OptimParams, PolicyBackend
from leyden.errors import ConfigError, NoTrainingData, PolicyDiverged

_AROUND = (0.1, 0.3, 1.0, 3.0, 10.0)
"""The rates that are tried if none are given, as multiples of the default for the model's size."""
_NOISE_ERRORS = 2.0
"""Rewards that differ by at most so many standard errors are taken for equal."""


@dataclass(slots=True)
class RateTrial:
    """One learning rate, and what it has done so far."""

    rate: float
    rewards: list[float] = field(default_factory=list[float])
    """The mean reward before each update, and after the last one if the trial is complete."""
    max_kl: float = 0.0
    fall: str = ""
    """How the policy has fallen, which ends the trial; empty if it has not."""
    last: Measured | None = None
    """The reward over the newest steps; None before the trial is complete."""


class RateFinder(PolicyGradient):
    """Tries learning rates on tasks; its `trials` and `recommended` are the result, also of a run that was stopped.

    rates: the learning rates; None: five around the default for the model's size, a factor of three apart.
    steps_per_rate: updates at each rate. One more step measures what the last of them has done.
    options: further options of `PolicyGradient`.
    """

    resumable = False

    def __init__(
        self,
        backend: PolicyBackend | Mapping[str, Any],
        *,
        rates: Sequence[float] | None = None,
        steps_per_rate: int = 4,
        **options: Any,
    ) -> None:
        check_number("steps_per_rate", steps_per_rate, at_least=1, whole=True)
        for rate in rates or ():
            check_number("rates", rate, above=0)
        n_trials = len(_AROUND) if rates is None else len(set(rates))
        if n_trials < 2:
            raise ConfigError(f"rates is {rates!r}; give two different rates or more to compare")
        fixed: dict[str, Any] = {"warmup_steps": 0, "hand_back": "last", "on_collapse": "warn", "max_staleness": 0}
        super().__init__(backend, n_steps=n_trials * (steps_per_rate + 1), **options, **fixed)
        self.rates = sorted(set(rates or (self.optim.learning_rate * factor for factor in _AROUND)))
        self.steps_per_rate = steps_per_rate
        self.trials: list[RateTrial] = []
        self._at = 0
        """The number of the step within its trial, from 0."""
        self._first: Any = None
        """The rollouts of the start weights, which every trial learns from first."""

    @property
    def recommended(self) -> float | None:
        """The smallest rate as good as the best up to noise; None if none has raised the reward by more than noise."""
        start = self.trials[0].rewards[0] if self.trials and self.trials[0].rewards else math.inf
        done = [(each.last, each.rate) for each in self.trials if each.last is not None and not each.fall]
        best = max((last for last, _ in done), key=lambda last: last.mean, default=None)
        if best is None or best.mean - start <= _NOISE_ERRORS * math.sqrt(best.variance):
            return None
        return min(rate for last, rate in done if best.above(last) <= _NOISE_ERRORS)

    async def setup(self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
        self.trials, self._first = [], None
        await super().setup(train_dataset, val_dataset)
        await self._save_weights(self._best)

    async def step(self, iteration: int) -> Metrics:
        number, self._at = divmod(iteration, self.steps_per_rate + 1)
        if self._at == 0:
            if number:
                await self._load_best()
            self._collapse = self._new_collapse_watch()
            self.trials.append(RateTrial(self.rates[number]))
        trial = self.trials[-1]
        rate: Metrics = {"learning_rate": trial.rate}
        if trial.fall:
            return rate
        try:
            metrics = await super().step(iteration)
        except NoTrainingData:
            if not trial.fall:
                raise
            return rate
        reward, kl = metrics["reward"], metrics.get("kl", 0.0)
        trial.rewards.append(float(reward))
        trial.max_kl = max(trial.max_kl, float(kl))
        if self._at == self.steps_per_rate:
            trial.last = self._collapse.smoothed
        return {**metrics, **rate}

    async def finish(self) -> None:
        """Write no model: the finder leaves none."""

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        """Try all rates, and return the recommended one."""
        try:
            await super().run(train_dataset, val_dataset)
        finally:
            if self.get_run().directory is not None:
                shutil.rmtree(self._best, ignore_errors=True)
        return self.recommended

    async def _collect(self, iteration: int) -> Any:
        if self._at == 0 and self._first is not None:
            return self._first
        self._next_group = self._at * self.tasks_per_step
        numbers = range(self._next_group, self._next_group + self.max_groups_per_step)
        self._generations = dict.fromkeys(numbers, len(self.trials) - 1)  # the same tasks, other rollouts
        collected = await super()._collect(self._at)
        self._first = self._first or collected
        return collected

    async def _update(self, iteration: int, data: Any) -> Metrics:
        return {} if self._at == self.steps_per_rate else await super()._update(self._at, data)

    def _scaled(self, optim: OptimParams, iteration: int) -> OptimParams:
        return replace(optim, learning_rate=self.trials[-1].rate)

    async def _watched(self, iteration: int, update: Awaitable[Metrics]) -> Metrics:
        try:
            return await super()._watched(iteration, update)
        except PolicyDiverged:
            return {}  # noted as the trial's fall

    async def _after_fall(self, fall: str) -> Metrics:
        self.trials[-1].fall = fall
        return {}
