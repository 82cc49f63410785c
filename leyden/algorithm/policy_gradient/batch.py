"""What one step trains on, as pure functions: which tasks, which advantages, which tokens with which weight, in which minibatch.

Everything is a function of the seed and the step's number, never of what happened before, so a resumed run does what the killed one
would have done.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from leyden.maths import Estimator
from leyden.types import TrainingSequence, Trajectory


@dataclass(slots=True)
class RolloutData:
    """One finished rollout: its reward and its trajectories."""

    rollout_id: str
    reward: float
    trajectories: list[Trajectory]


@dataclass(slots=True)
class Group:
    """The rollouts of one task that can be compared."""

    rollouts: list[RolloutData]


@dataclass(slots=True)
class TrainedRollout:
    """A rollout with its advantage: its sequences' weights sum to 1."""

    sequences: list[TrainingSequence]
    advantage: float


@dataclass(slots=True)
class StepData:
    """What one step trains on."""

    rollouts: list[TrainedRollout] = field(default_factory=list[TrainedRollout])
    flat_groups: int = 0
    """Groups in which all rewards are equal: no gradient, so they are not trained on."""
    small_groups: int = 0
    """Groups with fewer than two rollouts left."""


def task_indices(n_tasks: int, step: int, *, tasks_per_step: int, seed: int) -> list[int]:
    """The tasks of step `step` (from 0): epochs are shuffled passes over all tasks, and steps cut them in order."""
    first = step * tasks_per_step
    orders: dict[int, list[int]] = {}
    chosen: list[int] = []
    for position in range(first, first + tasks_per_step):
        epoch, place = divmod(position, n_tasks)
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed}/tasks/{epoch}").sample(range(n_tasks), n_tasks)
        chosen.append(orders[epoch][place])
    return chosen


def build_step(groups: Sequence[Group], estimate: Estimator) -> StepData:
    """Return the rollouts with their advantages, estimated within each group.

    Groups with one rollout, or with equal rewards, are counted and left out: they give no gradient.
    """
    step = StepData()
    for group in groups:
        if len(group.rollouts) < 2:
            step.small_groups += 1
            continue
        rewards = [rollout.reward for rollout in group.rollouts]
        if max(rewards) == min(rewards):
            step.flat_groups += 1
            continue
        for rollout, advantage in zip(group.rollouts, estimate(rewards), strict=True):
            step.rollouts.append(TrainedRollout(_sequences(rollout, advantage), advantage))
    return step


def _sequences(rollout: RolloutData, advantage: float) -> list[TrainingSequence]:
    n_trained = sum(trajectory.n_trained for trajectory in rollout.trajectories)
    return [
        TrainingSequence(
            token_ids=trajectory.token_ids,
            weights=[mask / n_trained for mask in trajectory.loss_mask],
            columns={
                "logprobs": trajectory.logprobs,
                "advantages": [advantage * mask for mask in trajectory.loss_mask],
            },
        )
        for trajectory in rollout.trajectories
    ]


def minibatches(
    rollouts: Sequence[TrainedRollout], *, size: int, seed: int, step: int, epoch: int
) -> list[list[TrainingSequence]]:
    """Shuffled minibatches of about `size` rollouts each; within each, the weights of all tokens sum to 1.

    So the loss is the mean over rollouts of each rollout's token mean: a rollout weighs the same however many turns it took.
    """
    order = list(rollouts)
    random.Random(f"{seed}/minibatches/{step}/{epoch}").shuffle(order)
    n_batches = max(1, round(len(order) / size))
    bounds = [round(index * len(order) / n_batches) for index in range(n_batches + 1)]
    return [_weighted(order[start:end]) for start, end in itertools.pairwise(bounds)]


def _weighted(rollouts: Sequence[TrainedRollout]) -> list[TrainingSequence]:
    share = 1.0 / len(rollouts)
    return [
        TrainingSequence(
            token_ids=sequence.token_ids,
            weights=[weight * share for weight in sequence.weights],
            columns=sequence.columns,
        )
        for rollout in rollouts
        for sequence in rollout.sequences
    ]
