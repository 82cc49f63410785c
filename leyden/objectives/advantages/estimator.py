"""Input and result of advantage estimators, and the registry of estimators by name."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

from leyden._lib.numbers import finite_number
from leyden.errors import ConfigError
from leyden.objectives.registry import Registry


@dataclass(frozen=True, slots=True)
class RolloutRewards:
    """The rewards of one rollout of C model calls, as estimators read them."""

    group: int
    """The number of the rollout's group. A group has the rollouts of one task."""
    reward: float
    """Final reward, from which a KL penalty in the reward has been subtracted."""
    call_rewards: Sequence[float]
    """Shape (C,): the reward that followed each call. The call rewards sum to `reward`, or all but the last are 0."""
    values: Sequence[float] | None = None
    """Shape (C,): a critic's estimate before each call; None without a critic."""
    baseline: float | None = None
    """Reward of the group's baseline rollout, which was decoded greedily; None without one."""
    forked_returns: Mapping[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])
    """Rewards of forks, by call c from 0 to C - 1: a fork repeats the calls before c and samples the rest again. Empty
    without forks."""


@dataclass(frozen=True, slots=True)
class AdvantageEstimate:
    """The advantages of a step's R rollouts, in their order. Rollout r has C_r calls."""

    advantages: list[list[float]]
    """Shape (R, C_r): one number for each call."""
    returns: list[list[float]] | None = None
    """Shape (R, C_r): the value that a critic should have estimated before each call; None from estimators without a
    critic."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Base of the constants of a registered estimator. The type of the constants chooses the estimator."""

    uses_values: ClassVar[bool] = False
    """Whether the estimator reads `RolloutRewards.values`."""
    uses_baseline: ClassVar[bool] = False
    """Whether the estimator reads `RolloutRewards.baseline`."""
    uses_call_rewards: ClassVar[bool] = False
    """Whether the estimator reads the numbers in `RolloutRewards.call_rewards`, and not only how many there are."""

    @property
    def min_group(self) -> int:
        """The smallest number of rollouts in a group: 2 if the rollouts of a group are compared, else 1."""
        return 1

    @property
    def forks_per_call(self) -> int:
        """The number of forks at each call that `fork_places` chooses; 0 if rollouts are not forked."""
        return 0

    def fork_places(self, n_calls: int) -> list[int]:
        """Return the indices of the calls at which a rollout of `n_calls` trained calls is forked; by default none."""
        return []


@dataclass(frozen=True, slots=True)
class GroupAdvantages(Advantages):
    """Base of the constants of an estimator that compares the rollouts of a group."""

    @property
    def min_group(self) -> int:
        """2, because a single rollout has nothing to be compared with."""
        return 2


A = TypeVar("A", bound=Advantages)
EstimatorFunction = Callable[[Sequence[RolloutRewards], A], AdvantageEstimate]
"""An estimator: returns the advantages of all rollouts of one step, with all of its groups. The second argument holds
the estimator's constants."""


@dataclass(frozen=True, slots=True)
class RegisteredEstimator:
    """An entry of the registry of estimators: name, function, and the class of its constants."""

    name: str
    function: EstimatorFunction[Any]
    """The registered function with the checks of `register_estimator`: raises ConfigError for rollouts that it cannot
    compare."""
    constants: type[Advantages]


ESTIMATORS: Registry[RegisteredEstimator] = Registry("advantages")
"""Estimators by the name that a user gives, for example `PolicyGradient(advantages="grpo")`."""


def register_estimator(name: str, constants: type[A]) -> Callable[[EstimatorFunction[A]], EstimatorFunction[A]]:
    """Return a decorator that registers an estimator under a name, with the type of its constants.

    The decorator adds checks to the function: ConfigError for a rollout whose numbers are not finite, or that lacks
    something that the constants need, and for a group smaller than `min_group`. Raise ConfigError for a name or a type
    that is registered already.
    """

    def register(function: EstimatorFunction[A]) -> EstimatorFunction[A]:
        @functools.wraps(function)
        def checked(rollouts: Sequence[RolloutRewards], constants: A) -> AdvantageEstimate:
            _check(name, rollouts, constants)
            estimate: object = function(rollouts, constants)
            if not isinstance(estimate, AdvantageEstimate):
                kind = type(estimate).__name__
                raise ConfigError(
                    f"the estimator {name!r} returned a {kind}; return an AdvantageEstimate, as repeated(...) does"
                )
            returns = estimate.returns
            return AdvantageEstimate(
                _per_call(f"the estimator {name!r} returned advantages", estimate.advantages, rollouts),
                None if returns is None else _per_call(f"the estimator {name!r} returned returns", returns, rollouts),
            )

        ESTIMATORS.add(RegisteredEstimator(name, checked, constants))
        return checked

    return register


def find_estimator(constants: Advantages) -> RegisteredEstimator:
    """Return the estimator that these constants belong to. Raise ConfigError for any other value."""
    return ESTIMATORS.find(constants)


def make_advantages(name: str, constants: Mapping[str, Any] | None = None) -> Advantages:
    """Return the constants of the estimator with this name; those left out have their defaults. Raise ConfigError for
    an unknown name or constant, and for a constant out of its range.
    """
    return cast(Advantages, ESTIMATORS.make(name, constants))


def members(rollouts: Sequence[RolloutRewards]) -> dict[int, list[int]]:
    """Return the indices of each group's rollouts in the list, by the group's number."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, rollout in enumerate(rollouts):
        places[rollout.group].append(place)
    return dict(places)


def repeated(advantages_R: Sequence[float], rollouts: Sequence[RolloutRewards]) -> AdvantageEstimate:
    """Return an estimate in which each call of a rollout has the rollout's advantage.

    Raise ConfigError unless there is one number for each rollout.
    """
    if len(advantages_R) != len(rollouts):
        raise ConfigError(f"repeated() was given {len(advantages_R)} advantages for {len(rollouts)} rollouts")
    return AdvantageEstimate(
        [[advantage] * len(each.call_rewards) for advantage, each in zip(advantages_R, rollouts, strict=True)]
    )


def _per_call(what: str, rows: Sequence[Sequence[Any]], rollouts: Sequence[RolloutRewards]) -> list[list[float]]:
    """Return one finite number for each call of each rollout. Raise ConfigError, which names the place, for others."""
    if len(rows) != len(rollouts):
        raise ConfigError(f"{what} of {len(rows)} rollouts; there are {len(rollouts)}")
    found: list[list[float]] = []
    for place, (row, rollout) in enumerate(zip(rows, rollouts, strict=True)):
        if len(row) != (n := len(rollout.call_rewards)):
            raise ConfigError(f"{what} of {len(row)} calls for rollout {place}; it has {n}")
        try:
            found.append([finite_number(number) for number in row])
        except ValueError as error:
            raise ConfigError(f"{what} for rollout {place} of which one {error}; each call has one number") from error
    return found


def _check(name: str, rollouts: Sequence[RolloutRewards], constants: Advantages) -> None:
    """Raise ConfigError, naming rollout and group, for rewards that the estimator cannot use or too small a group."""
    for place, rollout in enumerate(rollouts):
        _check_rollout(f"rollout {place} of group {rollout.group}", name, rollout, constants)
    for group, places in members(rollouts).items():
        if len(places) < constants.min_group:
            raise ConfigError(
                f"group {group} has {len(places)} rollout; advantages={name!r} needs a group of at least "
                f"{constants.min_group} rollouts to compare, so raise rollouts_per_task"
            )


def _check_rollout(which: str, name: str, rollout: RolloutRewards, constants: Advantages) -> None:
    """Raise ConfigError unless the rollout has finite numbers, and all that the constants need."""
    if not rollout.call_rewards:
        raise ConfigError(f"{which} has no call_rewards; leave a rollout without a model call out")
    if constants.uses_values and (rollout.values is None or len(rollout.values) != len(rollout.call_rewards)):
        given = "no" if rollout.values is None else len(rollout.values)
        raise ConfigError(
            f"{which} has {given} values for {len(rollout.call_rewards)} calls; advantages={name!r} needs a "
            "critic's estimate before each call"
        )
    if constants.uses_baseline and rollout.baseline is None:
        raise ConfigError(
            f"{which} has no baseline; advantages={name!r} needs the reward of a rollout that was decoded greedily"
        )
    numbers = {
        "reward": [rollout.reward],
        "call_rewards": rollout.call_rewards,
        "values": rollout.values or (),
        "baseline": () if rollout.baseline is None else [rollout.baseline],
        "forked_returns": [value for returns in rollout.forked_returns.values() for value in returns],
    }
    for name_of, values in numbers.items():
        for value in values:
            if not math.isfinite(value):
                raise ConfigError(f"{which} has the {name_of} {value!r}; give finite numbers, or leave the rollout out")
    if not all(0 <= place < len(rollout.call_rewards) for place in rollout.forked_returns):
        raise ConfigError(
            f"{which} has forked_returns at {sorted(rollout.forked_returns)}; forks begin at one of its "
            f"{len(rollout.call_rewards)} calls"
        )
