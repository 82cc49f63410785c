"""`Preparation`: the forward passes that a step needs before its first gradient, and the advantages.

A loss or an estimator declares which columns it reads. This module knows which model computes each
column: the policy itself, a frozen reference, or a critic. To add a column, add it to `Preparation.prepare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leyden.algorithm.policy_gradient.step_data import StepData, estimate_advantages, number_calls
from leyden.engine.policy_backend import Learner
from leyden.objectives.advantages import Advantages
from leyden.objectives.losses import Loss, find_loss, reward_penalty
from leyden.training import Metrics
from leyden.types import TrainingSequence


@dataclass(frozen=True, slots=True)
class Preparation:
    """Computes the columns of a step's sequences."""

    learner: Learner
    loss: Loss
    advantages: Advantages
    temperature: float
    reference: Learner | None = None
    """The frozen policy that a KL term compares with."""
    critic: Learner | None = None
    """Estimates the value before each call."""
    kl_in_reward: float = 0.0
    """The coefficient of the KL penalty that is subtracted from rewards."""
    kl_in_reward_estimator: str = "k1"
    """The estimator of the penalty, a name in `leyden.objectives.losses.KL_ESTIMATORS`."""

    async def prepare(self, step: StepData) -> Metrics:
        """Set every column of the step's sequences that the loss and the estimator read. Return metrics."""
        sequences = [sequence for rollout in step.trained for sequence in rollout.sequences]
        columns = find_loss(self.loss).columns_of(self.loss)
        metrics: Metrics = {}
        if "learner_logprobs" in columns:
            result = await self.learner.forward(sequences, temperature=self.temperature)
            _set(sequences, "learner_logprobs", result.logprobs)
            found = [
                abs(each.columns["learner_logprobs"][place] - each.columns["logprobs"][place])
                for each in sequences
                for place in _trained_places(each)
            ]
            metrics |= {"logprob_difference": max(found), "mean_logprob_difference": math.fsum(found) / len(found)}
        if self.reference is not None:
            result = await self.reference.forward(sequences, temperature=self.temperature)
            _set(sequences, "reference_logprobs", result.logprobs)
            metrics["reference_kl"] = _mean_of(sequences, _log_ratio)
        if self.critic is not None:
            result = await self.critic.forward(sequences, temperature=self.temperature, values=True)
            _set(sequences, "values", result.values or [])
            metrics["value"] = _mean_of(sequences, lambda sequence, place: sequence.columns["values"][place])
        estimate_advantages(step, self.advantages, penalties=self.penalties(step))
        if "calls" in columns:
            for rollout in step.trained:
                number_calls(rollout)
        return metrics

    def penalties(self, step: StepData) -> list[float]:
        """Return the KL penalty of each rollout: the coefficient times the sum of the estimates over its sampled
        tokens. Return an empty list if the coefficient is 0.
        """
        if not self.kl_in_reward:
            return []
        return [
            reward_penalty(
                [s.columns["logprobs"][place] for s in rollout.sequences for place in _trained_places(s)],
                [s.columns["reference_logprobs"][place] for s in rollout.sequences for place in _trained_places(s)],
                coefficient=self.kl_in_reward,
                estimator=self.kl_in_reward_estimator,
            )
            for rollout in step.rollouts
        ]


def _set(sequences: Sequence[TrainingSequence], name: str, values: Sequence[list[float]]) -> None:
    for sequence, column in zip(sequences, values, strict=True):
        sequence.columns[name] = column


def _trained_places(sequence: TrainingSequence) -> list[int]:
    return [place for place, weight in enumerate(sequence.weights) if weight]


def _log_ratio(sequence: TrainingSequence, place: int) -> float:
    return sequence.columns["logprobs"][place] - sequence.columns["reference_logprobs"][place]


def _mean_of(sequences: Sequence[TrainingSequence], value: Callable[[TrainingSequence, int], float]) -> float:
    """Return the mean over all trained tokens of `value(sequence, index of the token)`."""
    found = [value(sequence, place) for sequence in sequences for place in _trained_places(sequence)]
    return math.fsum(found) / len(found)
