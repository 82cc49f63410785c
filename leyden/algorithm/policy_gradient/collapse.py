"""`CollapseWatch`: which weights of a run were the best, and whether the policy has collapsed since, as pure decisions.

The watch sees the rewards of each step and each validation. The reward of a training step measures the weights before
its update, that of a validation those after it. Training rewards are compared with training rewards alone, validations
with validations. The watch is plain data, so that a resumed run decides as the killed one would have. It knows no
engine and no files; `policy_algorithm.py` keeps the weights and goes back to them.

A difference is noise up to some standard errors. The error of a step is that of the mean of its groups, which differ by
their tasks, or that of its rollouts if it is larger. Two validations of the same tasks are compared task by task.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import variance
from typing import Final

from pydantic import TypeAdapter

from leyden._lib.formatting import figure
from leyden._lib.numbers import mean_of

logger = logging.getLogger(__name__)

MAX_RESTORES: Final = 2
"""How often a run goes back to its best weights; a later fall is only warned of."""
_SMOOTHED: Final = 3
"""The number of steps over which the training reward is averaged to find the best one."""
_REMEMBERED: Final = 5
"""The largest number of steps over which a fall is looked for."""
_FALL_ERRORS: Final = 6.0
"""A fall in one step is noise up to this many standard errors, in several steps or with another sign up to fewer."""
_FALL_ERRORS_OF_SEVERAL: Final = 5.0
_FALL_ERRORS_WITH_A_SIGN: Final = 4.0
_WORSE_ERRORS: Final = 3.0
"""The last weights of a run are as good as its best ones up to this many standard errors. The best is the largest of
many means, and therefore too large by about one."""
_LARGE_KL: Final = 0.1
"""A sign of a collapse: the divergence in one update, in nats a token."""
_EXPLODED_KL: Final = 5.0
"""A collapse by itself."""
_ENOUGH_ANSWERS: Final = 8
"""So many equal answers in a step are a sign of a collapse."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A mean reward with its noise."""

    mean: float
    variance: float
    """The square of the mean's standard error."""

    def above(self, other: Measured) -> float:
        """Return by how many standard errors this mean is above another."""
        difference = self.mean - other.mean
        return difference / math.sqrt(max(self.variance + other.variance, 1e-18))

    def __str__(self) -> str:
        return figure(self.mean, 3)


@dataclass(frozen=True, slots=True)
class Kept:
    """The best weights, and how they were measured."""

    step: int
    """How many steps the weights were trained for."""
    reward: Measured
    """The training reward up to these weights, averaged over some steps."""
    validation: dict[int, float] | None = None
    """The reward of each validation task; None if the weights are the best by their training reward."""


@dataclass(slots=True)
class CollapseWatch:
    """The rewards that matter of a run so far.

    by_validation: whether validations decide which weights are the best, once there is one after training has begun.
    """

    by_validation: bool = False
    kept: Kept | None = None
    restores: int = 0
    due: str = ""
    """A fall that a validation has shown; the next step begins with the best weights."""
    first: Measured | None = None
    best: Measured | None = None
    """The best training reward, averaged over some steps."""
    recent: list[Measured] = field(default_factory=list[Measured])
    extremes: tuple[float, float] | None = None
    """The lowest and the highest reward so far."""
    had_choices: bool = False
    """Whether a step has had different answers."""
    equal_steps: int = 0
    """The number of steps in a row in which all answers were equal."""
    kl: float = 0.0
    """The divergence in the newest update."""
    has_gone_back: bool = False
    """Whether the newest measurement is of weights that the run went back to."""
    warned: bool = False
    broken: str = ""
    """Why the newest weights are worse than the best, whatever their reward; empty if they are not."""
    first_validation: float | None = None
    validation: dict[int, float] | None = None
    """The newest validation after training has begun."""

    def look(self, step: int, groups: Iterable[Sequence[float]], *, n_answers: int, n_distinct: int) -> str:
        """Return how the policy has fallen, by the rollouts of a training step; an empty text if it has not.

        step: the number of the step, from 1.
        groups: the rewards of each group.
        n_answers, n_distinct: the answers of the step, and how many different ones.
        """
        rewards = [list(group) for group in groups if group]
        if not rewards:
            return ""
        now = self._measured(rewards)
        several = n_answers >= _ENOUGH_ANSWERS
        self.equal_steps = self.equal_steps + 1 if several and n_distinct == 1 and self.had_choices else 0
        self.had_choices = self.had_choices or n_distinct > 1
        self.recent = [*self.recent[1 - _REMEMBERED :], now]
        was_back, self.has_gone_back = self.has_gone_back, False
        if self.first is None or self.best is None:
            self.first = self.best = now
        fall = self._fall(now)
        if fall and was_back:  # the best weights are no better, so the weights are not the cause
            logger.warning(
                "step %d: %s, although the policy has its best weights. Look for a change of the reward, the agent or the tasks",
                step,
                fall,
            )
            self.first = self.best = now
            self.kept = None if self.kept is None else Kept(self.kept.step, now)
            return ""
        if fall:
            self.recent = [now]
            return f"step {step}: {fall}"
        self.broken = ""
        if self.smoothed.mean > self.best.mean:
            self.best = self.smoothed
        return ""

    @property
    def smoothed(self) -> Measured:
        """The training reward, averaged over the newest steps."""
        return _mean(self.recent[-_SMOOTHED:]) if self.recent else self.best or Measured(0.0, 0.0)

    def is_best(self) -> bool:
        """Return whether the weights that the newest step was sampled with are better than the kept ones by more than
        one standard error, as far as training rewards decide.
        """
        kept, smoothed = self.kept, self.smoothed
        if kept is None or kept.validation is not None:
            return kept is None
        return self.recent[-1].mean >= smoothed.mean and smoothed.above(kept.reward) > 1.0

    def validated(self, step: int, rewards: Mapping[int, float]) -> tuple[bool, str]:
        """Return whether the policy is the best so far by a validation, and how it has fallen, if it has.

        step: how many steps the policy was trained for.
        rewards: the reward of each task, by its index in the validation set.
        """
        if not rewards:
            return False, ""
        mean = mean_of(rewards.values())
        if self.first_validation is None:
            self.first_validation = mean
        if step == 0:
            return False, ""
        self.validation = dict(rewards)
        if not self.by_validation:
            return False, ""
        before = None if self.kept is None else self.kept.validation
        if before is None or mean > mean_of(before.values()):
            return True, ""
        lost, errors = _paired(before, rewards)
        if lost > 0.5 * (mean_of(before.values()) - self.first_validation) and errors > _FALL_ERRORS:
            reward = f"{figure(mean + lost, 3)} to {figure(mean, 3)}"
            return False, f"the validation after step {step}: the reward has fallen from {reward}"
        return False, ""

    def updated(self, step: int, kl: float | None) -> str:
        """Return how an update has broken the policy, by its divergence `kl` in nats a token (None: no update); an
        empty text if it has not.
        """
        self.kl = kl or 0.0
        if self.kl > _EXPLODED_KL:
            self.broken = f"step {step}: the update has moved the policy by a kl of {figure(self.kl)} a token"
        return self.broken

    def keep(self, step: int, validation: Mapping[int, float] | None = None) -> None:
        """Note that the weights after `step` steps are kept as the best, with their rewards by validation task."""
        self.kept = Kept(step, self.smoothed, None if validation is None else dict(validation))

    def went_back(self) -> None:
        """Note that the policy has the kept weights again."""
        assert self.kept is not None
        self.restores += 1
        self.recent, self.best, self.validation = [], self.kept.reward, self.kept.validation
        self.due, self.broken, self.kl, self.equal_steps, self.has_gone_back = "", "", 0.0, 0, True

    def last_is_worse(self) -> str | None:
        """Return in which way the last weights are worse than the kept ones by more than noise; None if they are not.

        Only measured weights are known: without a validation after it, nothing tells of the last update.
        """
        kept = self.kept
        if kept is None or self.broken:
            return self.broken if kept else None
        if kept.validation is not None and self.validation is not None:
            lost, errors = _paired(kept.validation, self.validation)
            if lost > 0 and errors > _WORSE_ERRORS:
                best = mean_of(kept.validation.values())
                return f"validation reward {figure(best, 3)} after step {kept.step}, {figure(best - lost, 3)} at last"
        if self.recent and kept.reward.above(self.smoothed) > _WORSE_ERRORS:
            return f"reward {kept.reward} after step {kept.step}, {self.smoothed} at last"
        return None

    def _measured(self, groups: Sequence[Sequence[float]]) -> Measured:
        rewards = [reward for group in groups for reward in group]
        low, high = min(rewards), max(rewards)
        if self.extremes is not None:
            low, high = min(low, self.extremes[0]), max(high, self.extremes[1])
        self.extremes = low, high
        smallest = (high - low) / len(rewards)  # the error of equal rewards, which are a sample, too
        means = [mean_of(group) for group in groups]
        errors = [variance(each) / len(each) for each in (rewards, means) if len(each) > 1]
        return Measured(mean_of(rewards), max(smallest**2, *errors, 0.0))

    def _fall(self, now: Measured) -> str:
        """Return how the policy has fallen by its training reward; an empty text if it has not."""
        best, first = self.best, self.first
        assert best is not None and first is not None
        sign = self.kl > _LARGE_KL or self.equal_steps > 0
        half = 0.5 * (best.mean - first.mean)

        def is_below(reward: Measured, errors: float) -> bool:
            return best.mean - reward.mean > half and best.above(reward) > errors

        if is_below(now, _FALL_ERRORS_WITH_A_SIGN if sign else _FALL_ERRORS) or (
            best.mean - now.mean > half
            and any(is_below(_mean(self.recent[-n:]), _FALL_ERRORS_OF_SEVERAL) for n in range(2, len(self.recent) + 1))
        ):
            found = f"the reward has fallen from {best} to {now}"
            if self.equal_steps:
                return f"{found}, and all answers are the same"
            return f"{found} (the update before had a kl of {figure(self.kl)})" if self.kl > _LARGE_KL else found
        if self.equal_steps >= 2 and not (now.mean > first.mean and best.above(now) < _WORSE_ERRORS):
            return f"all answers are the same, at a reward of {now}"
        return ""


def _mean(rewards: Sequence[Measured]) -> Measured:
    return Measured(mean_of(each.mean for each in rewards), sum(each.variance for each in rewards) / len(rewards) ** 2)


def _paired(best: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, float]:
    """Return by how much `other` is worse in the mean of the tasks that both have, and by how many standard errors."""
    losses = [best[place] - other[place] for place in sorted(best.keys() & other.keys())]
    if not losses:
        return 0.0, 0.0
    spread = max((*best.values(), *other.values())) - min((*best.values(), *other.values()))
    error = math.sqrt(variance(losses) / len(losses)) if len(losses) > 1 else 0.0
    lost = mean_of(losses)
    return lost, lost / max(error, spread / len(losses), 1e-9)


STATE: Final = TypeAdapter(CollapseWatch)
"""Writes a watch as JSON, and reads it."""
