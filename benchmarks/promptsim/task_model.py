"""The simulated model that works on tickets. It succeeds by chance, and a failed answer may say
which rule the prompt lacks.

Every draw is a hash of the seed, the prompt's words, the ticket and the replica. So outcomes are
the same in every process and in any order.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from benchmarks.promptsim.world import Kind, World, uniform, words_of

_KEPT_PROMPTS = 1000
SOLVED, FAILED = "Solved.", "Not solved."
_TICKET = r"Ticket (?P<number>\d+), \w+: please help\."
_AT_START = re.compile(rf"\s*{_TICKET}(?:\s*Step: (?P<step>\w+))?")
_AT_END = re.compile(rf"{_TICKET}(?:\s*Step: (?P<step>\w+))?\s*\Z")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How the task model, its latency and the reward depart from the ideal."""

    symptom_rate: float = 0.9
    """The probability that a failed answer shows the symptom of an unmet rule."""
    flip_rate: float = 0.0
    """The share of rollouts with the opposite reward."""
    hang_rate: float = 0.0
    """The share of rollouts that never end."""
    median_seconds: float = 0.0
    """The median latency of a call."""
    sigma: float = 0.0
    """The standard deviation of the latency's logarithm."""


@dataclass(frozen=True, slots=True)
class TaskCall:
    """One call of the task model."""

    component: str
    prompt: str
    number: int
    """The number of the ticket."""
    replica: int = 0
    """The number of the sample, if the same prompt and ticket are sampled repeatedly."""


def ticket(number: int, kind: Kind) -> str:
    """Return the text of a task."""
    return f"Ticket {number}, {kind.cluster}: please help."


def question(text: str, component: str, answers: Sequence[str] = ()) -> str:
    """Return the user message of an agent for one step of its work.

    text: the ticket.
    answers: answers of the earlier steps.
    """
    return "\n".join([text, f"Step: {component}", *answers])


def read_call(world: World, messages: Sequence[Mapping[str, str]], replica: int) -> TaskCall | None:
    """Return the call that a chat makes of the task model. None if its last user message neither
    begins nor ends with a ticket, so that it is for the reflection model.

    The prompt is the text of all system messages and what stands before the ticket.
    """
    last = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
    found = _AT_START.match(last) or _AT_END.search(last)
    if found is None:
        return None
    component = found["step"] if found["step"] in world.components else next(iter(world.components))
    system = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    return TaskCall(component, "\n".join([*system, last[: found.start()]]).strip(), int(found["number"]), replica)


def grade(task: Mapping[str, Any], answers: Sequence[str]) -> float:
    """Return the reward of a rollout: 1.0 if every answer is a solution, otherwise 0.0.

    If the task has a `flip_rate`, this share of rollouts gets the opposite reward.
    """
    solved = all(answer.startswith(SOLVED) for answer in answers)
    is_flipped = uniform("flip", task["world"], task["number"], *answers) < task.get("flip_rate", 0.0)
    return float(solved != is_flipped)


class TaskModel:
    """A simulated model that answers the tickets of one world.

    seed: decides the tickets and every draw.
    """

    def __init__(self, world: World, behaviour: Behaviour, seed: str) -> None:
        self._world, self._behaviour, self._seed = world, behaviour, seed
        self._stated = functools.lru_cache(_KEPT_PROMPTS)(world.stated)

    def kind(self, number: int) -> Kind:
        """Return the kind of the ticket with this number."""
        kinds = self._world.kinds_at(number)
        left = uniform(self._seed, "kind", number) * math.fsum(kind.weight for kind in kinds)
        for kind in kinds:
            left -= kind.weight
            if left < 0:
                return kind
        return kinds[-1]  # rounding left a rest

    def answer(self, call: TaskCall) -> str:
        """Return the answer to a call: a solution, or a failure that may show the symptom of a rule
        that the prompt lacks. It ends with a reference number that is drawn for the call.
        """
        kind, stated = self.kind(call.number), self._stated(call.component, call.prompt)
        [chance] = self._world.chances(call.component, stated, len(words_of(call.prompt)), [kind])
        reference = f"Reference {int(self._draw('reference', call) * 16**8):08X}."
        if self._draw("outcome", call) < chance:
            return f"{SOLVED} {reference}"
        unmet = self._world.unmet(call.component, stated, kind)
        if not unmet or self._draw("shows", call) >= self._behaviour.symptom_rate:
            return f"{FAILED} {reference}"
        name = unmet[int(self._draw("symptom", call) * len(unmet))]
        symptom = next(rule.symptom for rule in self._world.rules if rule.name == name)
        return f"{FAILED} {symptom} {reference}"

    def seconds(self, call: TaskCall) -> float:
        """Return how long the answer takes, lognormally distributed; infinite if it never comes."""
        behaviour = self._behaviour
        # `hang_rate` is a share of rollouts, so only the first call of a rollout can hang.
        is_first = call.component == next(iter(self._world.components))
        if is_first and self._draw("hang", call) < behaviour.hang_rate:
            return math.inf
        deviation = NormalDist().inv_cdf(max(self._draw("latency", call), 1e-12))  # 0 has no quantile
        return behaviour.median_seconds * math.exp(behaviour.sigma * deviation)

    def _draw(self, purpose: str, call: TaskCall) -> float:
        words = " ".join(words_of(call.prompt))
        return uniform(self._seed, purpose, call.component, words, call.number, call.replica)
