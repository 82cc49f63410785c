"""Make the batch of one policy gradient step, with pure functions: its tasks, advantages, and tokens with their
weights.

The module knows no store, engine or torch. Everything is a function of the seed and the group's number, so a resumed
run does what the killed one would have done. To add a column that a loss reads, see `preparation.py`.

Shapes: T tokens of a sequence, C model calls of a rollout.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from leyden._lib.options import check_choice, check_number
from leyden.objectives.advantages import Advantages, RolloutRewards, find_estimator
from leyden.types import TrainingSequence, Trajectory

Weighting = Literal["rollout", "token"] | int
"""How the tokens of a minibatch share the loss. "rollout": each rollout weighs the same, and its tokens share its
weight (GRPO, arXiv:2402.03300, eq. 3). "token": each token weighs the same (DAPO, arXiv:2503.14476, eq. 8). A number L:
each token weighs 1/L of a rollout (Dr. GRPO, arXiv:2503.20783, section 3.1, where L is the most tokens that a rollout
may have)."""


def check_weighting(weighting: Weighting) -> None:
    """Raise ConfigError unless the value is a weighting."""
    if isinstance(weighting, str):
        check_choice("weighting", weighting, ("rollout", "token"))
    else:
        check_number("weighting", weighting, at_least=1, whole=True)


@dataclass(slots=True)
class RolloutData:
    """One rollout: its reward, and the trajectories that can be trained on."""

    rollout_id: str
    reward: float
    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])
    """Empty if the rollout only counts in its group's baseline."""
    call_indices: list[int] = field(default_factory=list[int])
    """Shape (C,): the gateway's number of each trained call (`leyden.call_index`); empty if the record has none."""
    forked_returns: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """The rewards of the forks that repeat the first c trained calls, by the number c."""


@dataclass(slots=True)
class Group:
    """The rollouts of one task, which are compared with each other."""

    rollouts: list[RolloutData]
    baseline: float | None = None
    """The reward of the rollout that decoded greedily; None if there was none."""


@dataclass(slots=True)
class StepRollout:
    """A rollout that a step uses, as sequences to train on."""

    data: RolloutData
    sequences: list[TrainingSequence]
    """One sequence for each trajectory; the weights of all their tokens sum to 1. Empty if the rollout is not trained
    on."""
    group: int = 0
    """The number of the rollout's group in the step."""
    baseline: float | None = None
    """The reward of the group's greedy rollout; None if there is none."""
    advantages: list[float] = field(default_factory=list[float])
    """Shape (C,): the advantage of each call, in the order of the calls."""

    @classmethod
    def of(cls, data: RolloutData, *, group: int = 0, baseline: float | None = None) -> StepRollout:
        """Return a rollout with its sequences, which have only the column `logprobs`."""
        n_trained = sum(trajectory.n_trained for trajectory in data.trajectories)
        sequences = [
            TrainingSequence(
                token_ids=trajectory.token_ids,
                weights=[mask / n_trained for mask in trajectory.loss_mask],
                columns={"logprobs": trajectory.logprobs},
            )
            for trajectory in data.trajectories
        ]
        return cls(data, sequences, group, baseline)


@dataclass(slots=True)
class StepData:
    """The batch of one policy gradient step."""

    rollouts: list[StepRollout] = field(default_factory=list[StepRollout])
    flat_groups: int = 0
    """The number of groups in which all rewards are equal, so that advantages give no gradient."""
    small_groups: int = 0
    """The number of groups with too few rollouts to compare, or none that can be trained on."""

    @property
    def trained(self) -> list[StepRollout]:
        """The rollouts that are trained on."""
        return [rollout for rollout in self.rollouts if rollout.sequences]


def epoch_place(n_items: int, number: int, seed: int) -> int:
    """Return the index of item `number` in a sequence of epochs, each of which is a shuffled pass over all items."""
    epoch, place = divmod(number, n_items)
    return _epoch_order(n_items, epoch, seed)[place]


@lru_cache(maxsize=2)
def _epoch_order(n_items: int, epoch: int, seed: int) -> list[int]:
    return random.Random(f"{seed}/tasks/{epoch}").sample(range(n_items), n_items)


# ---- groups --------------------------------------------------------------------------------------


def is_small(group: Group, advantages: Advantages) -> bool:
    """Return whether a group has too few rollouts to compare, or none that can be trained on."""
    trainable = any(rollout.trajectories for rollout in group.rollouts)
    compared = not advantages.uses_baseline or group.baseline is not None
    return not trainable or not compared or len(group.rollouts) < advantages.min_group


def is_flat(group: Group, advantages: Advantages) -> bool:
    """Return whether the estimator compares a group's rewards and all are equal, so that all advantages would be 0."""
    rewards = [rollout.reward for rollout in group.rollouts]
    if advantages.uses_baseline:
        return all(reward == group.baseline for reward in rewards)
    if advantages.min_group < 2:
        return False
    if advantages.uses_call_rewards:
        of_calls = [_call_rewards(rollout) for rollout in group.rollouts]
        return all(not any(rewards) for rewards in of_calls) or all(each == of_calls[0] for each in of_calls)
    return max(rewards) == min(rewards)


def has_signal(group: Group, advantages: Advantages) -> bool:
    """Return whether a group gives a gradient: it is neither small nor flat."""
    return not is_small(group, advantages) and not is_flat(group, advantages)


def build_step(groups: Sequence[Group], advantages: Advantages, *, keep_flat: bool = False) -> StepData:
    """Return the rollouts to train on, without advantages yet. Groups that are too small, or whose rewards are all
    equal (flat), have no signal: they are left out and counted.

    keep_flat: keep flat groups too, for a loss with a term that does not depend on rewards.
    """
    step = StepData()
    for number, group in enumerate(groups):
        if is_small(group, advantages):
            step.small_groups += 1
            continue
        step.flat_groups += (flat := is_flat(group, advantages))
        if keep_flat or not flat:
            step.rollouts += [
                StepRollout.of(rollout, group=number, baseline=group.baseline) for rollout in group.rollouts
            ]
    return step


def successes(groups: Sequence[Group], success_reward: float) -> list[StepRollout]:
    """Return the rollouts that can be trained on and have at least `success_reward`, for a step that imitates them."""
    return [
        StepRollout.of(rollout, group=number)
        for number, group in enumerate(groups)
        for rollout in group.rollouts
        if rollout.trajectories and rollout.reward >= success_reward
    ]


# ---- advantages ----------------------------------------------------------------------------------


def estimate_advantages(step: StepData, advantages: Advantages, *, penalties: Sequence[float] = ()) -> None:
    """Estimate the advantages of a step's rollouts, and write them into their sequences.

    This sets the column `advantages` and, if the estimator has targets for a critic, `returns`. A critic's estimates
    are read from the column `values`, at the first token of each call; then rollouts that are not trained on take no
    part, because they have no values.

    penalties: subtracted from the rewards of `step.rollouts`, in their order; empty for none.
    """
    rollouts = step.trained if advantages.uses_values else step.rollouts
    penalty_of = dict(zip(map(id, step.rollouts), penalties, strict=True)) if penalties else {}
    rewards = [_rewards(rollout, advantages, penalty_of.get(id(rollout), 0.0)) for rollout in rollouts]
    estimate = find_estimator(advantages).function(rewards, advantages)
    for place, rollout in enumerate(rollouts):
        rollout.advantages = estimate.advantages[place]
        set_column(rollout, "advantages", rollout.advantages)
        if estimate.returns is not None:
            set_column(rollout, "returns", estimate.returns[place])


def set_column(rollout: StepRollout, name: str, values_C: Sequence[float]) -> None:
    """Write one value for each call into a column: at the tokens that the policy sampled in the call, 0.0 elsewhere."""
    for sequence, trajectory, calls in _with_calls(rollout):
        column = [0.0] * len(sequence.token_ids)
        for (start, end), call in zip(trajectory.call_spans, calls, strict=True):
            column[start:end] = [values_C[call] * mask for mask in trajectory.loss_mask[start:end]]
        sequence.columns[name] = column


def number_calls(rollout: StepRollout) -> None:
    """Set the column `calls`: the number of the call that sampled each token, for losses over whole calls."""
    n_calls = sum(len(trajectory.call_spans) for trajectory in rollout.data.trajectories)
    set_column(rollout, "calls", [float(number) for number in range(n_calls)])


def _rewards(rollout: StepRollout, advantages: Advantages, penalty: float) -> RolloutRewards:
    """Return the rewards of a rollout in the form that estimators read. The penalty (KL in the reward) is subtracted
    from the rollout's reward, and from that of its last call, so that the call rewards still sum to the reward.
    """
    call_rewards = _call_rewards(rollout.data)
    call_rewards[-1] -= penalty
    return RolloutRewards(
        group=rollout.group,
        reward=rollout.data.reward - penalty,
        call_rewards=call_rewards,
        values=_values(rollout) if advantages.uses_values else None,
        baseline=rollout.baseline,
        forked_returns=rollout.data.forked_returns,
    )


def _call_rewards(rollout: RolloutData) -> list[float]:
    """Return the reward after each call, shape (C,); after the last one the final reward, if no call is rewarded."""
    calls = sorted(
        (number, reward or 0.0, reward is not None)
        for trajectory in rollout.trajectories
        for number, reward in zip(trajectory.call_numbers, trajectory.call_rewards, strict=True)
    )
    if any(matched for _, _, matched in calls):
        return [reward for _, reward, _ in calls]
    return [0.0] * (len(calls) - 1) + [rollout.reward]


def _values(rollout: StepRollout) -> list[float]:
    found: dict[int, float] = {}
    for sequence, trajectory, calls in _with_calls(rollout):
        for (start, _), call in zip(trajectory.call_spans, calls, strict=True):
            found[call] = sequence.columns["values"][start]
    return [found[call] for call in range(len(found))]


def _with_calls(rollout: StepRollout) -> Iterator[tuple[TrainingSequence, Trajectory, list[int]]]:
    """Yield each sequence with its trajectory and the indices of its calls among all calls of the rollout."""
    if not rollout.sequences:
        return
    numbers = sorted(number for trajectory in rollout.data.trajectories for number in trajectory.call_numbers)
    place_of = {number: place for place, number in enumerate(numbers)}
    for sequence, trajectory in zip(rollout.sequences, rollout.data.trajectories, strict=True):
        yield sequence, trajectory, [place_of[number] for number in trajectory.call_numbers]


# ---- minibatches ---------------------------------------------------------------------------------


def minibatches(
    rollouts: Sequence[StepRollout], *, size: int, seed: int, step: int, epoch: int, weighting: Weighting = "rollout"
) -> list[list[TrainingSequence]]:
    """Return the sequences of shuffled minibatches of about `size` rollouts each. Their weights say how the tokens
    share the loss of their minibatch.
    """
    order = list(rollouts)
    random.Random(f"{seed}/minibatches/{step}/{epoch}").shuffle(order)
    n_batches = max(1, round(len(order) / size))
    bounds = [round(index * len(order) / n_batches) for index in range(n_batches + 1)]
    return [weighted(order[start:end], weighting) for start, end in itertools.pairwise(bounds)]


def weighted(rollouts: Sequence[StepRollout], weighting: Weighting) -> list[TrainingSequence]:
    """Return the sequences of some rollouts, with the weight of each token in their common loss."""
    share = 1.0 / len(rollouts)
    n_trained = [sum(trajectory.n_trained for trajectory in rollout.data.trajectories) for rollout in rollouts]
    n_tokens = sum(n_trained)

    def scale(n_own: int) -> float:
        if weighting == "rollout":
            return share
        return n_own / n_tokens if weighting == "token" else share * n_own / weighting

    return [
        TrainingSequence(
            token_ids=sequence.token_ids,
            weights=[weight * scale(n_own) for weight in sequence.weights],
            columns=sequence.columns,
        )
        for rollout, n_own in zip(rollouts, n_trained, strict=True)
        for sequence in rollout.sequences
    ]
