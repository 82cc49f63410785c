"""Detect runs that cannot learn: warn of groups without signal, a reward that never moves, and collapsed answers.

`SignalWatch.look` checks each step. It returns the warnings that are due, and logs nothing. To detect something else,
add a symptom to `SignalWatch._find`; the first one that a step shows counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import variance
from typing import Any, NamedTuple, cast

from leyden._lib.formatting import figure
from leyden._lib.logs import Preview
from leyden._lib.numbers import mean_of

_PATIENCE = 3
"""The number of steps in a row that must show a symptom before the first warning."""
_UNMOVED_STEPS = 20
"""The number of steps after which it is first checked whether the reward has moved."""
_STANDARD_ERRORS = 2.0
"""A difference between two parts of a run of fewer standard errors is noise."""


@dataclass(frozen=True, slots=True)
class Example:
    """One rollout, as an example in a warning."""

    task: Any
    answer: Any
    """The messages of the rollout's last model call, as the adapter returns them."""
    reward: float

    def __str__(self) -> str:
        return f"Example: task {Preview(self.task)}, answer {Preview(repr(_text(self.answer)))}, reward {figure(self.reward)}"


@dataclass(slots=True)
class Answers:
    """The model's answers in the rollouts of one step."""

    n: int = 0
    cut: int = 0
    """The number of answers that ended at max_tokens."""
    longest: int = 0
    """The number of tokens of the longest answer."""
    distinct: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    """The different answers, as token ids."""
    example: Example | None = None

    def add(self, token_ids: Sequence[int], *, cut: bool) -> None:
        """Count an answer.

        cut: whether `max_tokens` ended it.
        """
        self.n += 1
        self.cut += cut
        self.longest = max(self.longest, len(token_ids))
        self.distinct.add(tuple(token_ids))


class _Symptom(NamedTuple):
    """A sign that a training step cannot teach the policy anything."""

    name: str
    """Identifies the symptom from step to step."""
    description: str
    """The symptom in a warning."""
    causes: list[str]
    """Usual causes, the most likely one first."""


@dataclass(slots=True)
class SignalWatch:
    """Checks every step, and warns of a symptom that lasts; again after twice as many steps, and so on.

    learning_rate: shown among the causes.
    max_tokens: the limit that the algorithm suggests to agents; None if it suggests none.
    """

    learning_rate: float
    max_tokens: int | None
    _symptom: str | None = None
    """The name of the symptom that the newest step has shown."""
    _first_step: int = 0
    """The step from which on every step has shown it."""
    _due: int = _PATIENCE
    """The number of such steps after which the next warning is due."""
    _rewards: list[float] = field(default_factory=list[float])
    """The mean reward of each step that has rewards."""
    _unmoved_due: int = _UNMOVED_STEPS
    """The number of steps after which to check next whether the reward has moved."""
    _has_moved: bool = False
    """Whether the reward has moved. A plateau after the policy has learned is no symptom."""
    _newest: str = ""
    """The warning that the newest step would give."""

    def look(
        self,
        step: int,
        *,
        rewards: Sequence[float],
        flat: bool,
        n_groups: int,
        answers: Answers,
        fall: str = "",
    ) -> list[str]:
        """Return the warnings that are due after a step.

        step: the number of the step, from 1.
        rewards: the rewards of the step's rollouts.
        flat: whether in each group all rewards are equal.
        n_groups: the number of such groups, for the message.
        answers: the model's answers in the step's rollouts.
        fall: how the policy has fallen (`CollapseWatch`), for the message; an empty text if it has not.
        """
        if rewards:
            self._rewards.append(mean_of(rewards))
        found = self._find(rewards, flat, n_groups, answers, fall)
        symptom = found.name if found else None
        if symptom != self._symptom:
            self._symptom, self._first_step, self._due = symptom, step, _PATIENCE
        if found is not None:
            steps = f"step {step}" if step == self._first_step else f"steps {self._first_step} to {step}"
            causes = f" Usual causes: {', '.join(found.causes)}." if found.causes else ""
            self._newest = f"{steps}: {found.description}.{causes}{_shown(answers)}"
        lasted = step - self._first_step + 1
        if symptom is not None and lasted >= self._due:
            self._due = 2 * lasted
            return [self._newest]
        if symptom is None and len(self._rewards) >= self._unmoved_due:
            self._unmoved_due *= 2
            self._has_moved = self._has_moved or _has_moved(self._rewards)
            return [] if self._has_moved else [self._unmoved(answers)]
        return []

    def end(self, step: int) -> list[str]:
        """Return the warning of a run that was too short for `look` to give it, if every step has shown the same
        symptom.

        step: the number of the last step.
        """
        all_steps = self._symptom is not None and step - self._first_step + 1 >= len(self._rewards) > 0
        return [self._newest] if all_steps and self._due == _PATIENCE else []

    def _find(
        self, rewards: Sequence[float], flat: bool, n_groups: int, answers: Answers, fall: str
    ) -> _Symptom | None:
        """Return the most specific symptom that a step shows, or None. `flat`: no advantage differs from 0."""
        several, asked_for_one = answers.n > 1, self.max_tokens == 1
        too_large = f"a learning rate that is too large (it is {figure(self.learning_rate)})"
        if several and answers.longest == 0:
            return _Symptom(
                "empty", "all answers are empty", [too_large, "a chat template that ends the answer at once"]
            )
        if several and len(answers.distinct) == 1:
            causes = [too_large, "a temperature that is too low", "tasks that all have one answer"]
            return _Symptom("identical", f"all {answers.n:,} answers are identical", causes)
        if several and answers.longest == 1 and not asked_for_one and flat:
            causes = [too_large, "a reward that prefers short answers"]
            return _Symptom("one token", "no answer has more than one token", causes)
        if several and answers.cut == answers.n and not asked_for_one:
            limit = "" if self.max_tokens is None else f"={self.max_tokens}"
            causes = [
                "a max_tokens that is too small",
                "a base model, which ends no answer by itself (few shots by completions, with stop= or stop_token_ids)",
            ]
            return _Symptom("cut", f"all {answers.n:,} answers were cut by max_tokens{limit}", causes)
        if flat and rewards:
            best = max(self._rewards)
            is_at_its_best = self._rewards[-1] >= best - 1e-9 * abs(best) > self._rewards[0]
            symptom = _flat(rewards, n_groups, answers, solved=is_at_its_best)
            return symptom._replace(description=f"{symptom.description}; {fall}", causes=[]) if fall else symptom
        return None

    def _unmoved(self, answers: Answers) -> str:
        first, second = _halves(self._rewards)
        return (
            f"the reward has not moved in {len(self._rewards):,} steps: {figure(mean_of(first), 3)} in the first half, "
            f"{figure(mean_of(second), 3)} in the second. Usual causes: a learning rate that is too small or too large "
            f"(it is {figure(self.learning_rate)}), too few rollouts for so noisy a reward, a reward that ignores the "
            f"answer, tasks that are too hard or too easy.{_shown(answers)}"
        )


def _flat(rewards: Sequence[float], n_groups: int, answers: Answers, *, solved: bool) -> _Symptom:
    """Return the symptom that every group has equal rewards. `solved`: the reward has risen to the best of the run."""
    low, high = min(rewards), max(rewards)
    values = f"{figure(low)} in every rollout" if low == high else f"from {figure(low)} to {figure(high)}"
    cut = [f"answers that were cut by max_tokens ({answers.cut:,} of {answers.n:,})"] if answers.cut else []
    if solved:
        return _Symptom(
            "solved",
            f"nothing is left to learn, because the reward has risen and in each of the {n_groups:,} groups all rewards are equal "
            f"({values})",
            ["tasks that the model has learned: stop here, or give harder ones"],
        )
    return _Symptom(
        "flat",
        f"nothing to learn, because in each of the {n_groups:,} groups all rewards are equal ({values})",
        [*cut, "tasks that are too hard or too easy for the model", "a reward that ignores the answer"],
    )


def _shown(answers: Answers) -> str:
    return "" if answers.example is None else f" {answers.example}"


def _text(answer: Any) -> str:
    if isinstance(answer, list) and answer and all(isinstance(message, dict) for message in cast("list[Any]", answer)):
        messages = cast("list[dict[str, Any]]", answer)
        texts = [message.get("content") for message in messages]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(cast("list[str]", texts))
    return answer if isinstance(answer, str) else repr(cast(object, answer))


def _halves(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    middle = len(values) // 2
    return values[:middle], values[middle:]


def _has_moved(rewards: Sequence[float]) -> bool:
    """Return whether the mean of the first quarter or half differs by more than noise from the mean of the rest."""
    for first, second in ((rewards[: len(rewards) // 4], rewards[len(rewards) // 4 :]), _halves(rewards)):
        error = math.sqrt(variance(first) / len(first) + variance(second) / len(second))
        rounding = 1e-9 * max(map(abs, rewards))  # equal rewards have means that differ by rounding
        if abs(mean_of(second) - mean_of(first)) > _STANDARD_ERRORS * error + rounding:
            return True
    return False
