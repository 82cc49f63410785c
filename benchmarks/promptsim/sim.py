"""`PromptSim`: a simulated problem for prompt optimisers, whose best prompts are known.

It joins a world, its task model, its reflection model and an agent. `attempt` and `reflect` are
plain functions; `reply` and `fault` serve the same behaviour through `FakeUpstream`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from benchmarks.promptsim.agents import one_prompt_agent, three_prompts_agent
from benchmarks.promptsim.families import FAMILIES, PromptSetting, setting_of
from benchmarks.promptsim.reflection_model import ReflectionModel
from benchmarks.promptsim.score import Optimum, check_prompts, expected_score, optimum
from benchmarks.promptsim.task_model import SOLVED, TaskCall, TaskModel, grade, read_call, ticket
from leyden._lib.options import check_choice, check_number
from leyden.agent import LitAgent
from leyden.errors import ConfigError
from leyden.testing.api_answers import Misbehaviour
from leyden.types import NamedResources, PromptTemplate

Prompts = str | PromptTemplate | Mapping[str, Any]
"""Texts or `PromptTemplate`s by component; for an agent with one prompt, also the prompt alone."""

_HANG_SECONDS = 24 * 3600.0
"""The delay of an answer that never comes: a server cannot wait for an infinite time."""


@dataclass(frozen=True, slots=True)
class SimulatedRollout:
    """One simulated rollout."""

    answers: tuple[str, ...]
    """The answer of each component, in order; empty if the rollout hangs."""
    solved: bool
    """Whether every component succeeded."""
    reward: float
    """The reward that an optimiser sees: 0.0 if the rollout hangs, inverted if it is flipped."""
    seconds: float
    """The simulated duration; infinite if the rollout hangs."""


class PromptSim:
    """A support desk whose prompts must state hidden rules. The best score is known exactly.

    family: "additive", "clustered", "deceptive", "faulty_component", "flaky", "heavy_tailed",
        "scalar_only", "drifting", or a `PromptSetting` of your own.
    seed: decides which rules are needed, the tasks and every draw.
    difficulty: from 0 to 1. A larger one needs more rules for a task, shows fewer symptoms, and
        makes the reflection model worse.
    prompts: 1 or 3, how many prompts the agent has; None: 3 for "faulty_component", otherwise 1.
    Raise ConfigError for any other value.
    """

    def __init__(
        self,
        family: str | PromptSetting = "additive",
        *,
        seed: int = 0,
        difficulty: float = 0.3,
        prompts: int | None = None,
    ) -> None:
        check_number("seed", seed, whole=True)
        check_number("difficulty", difficulty, at_least=0, at_most=1)
        if prompts not in (None, 1, 3) or (family == "faulty_component" and prompts == 1):
            raise ConfigError(f"prompts is {prompts!r}; possible: 1 (not with 'faulty_component'), 3")
        if isinstance(family, PromptSetting):
            setting, self.name = family, f"own/{seed}"
        else:
            check_choice("family", family, FAMILIES)
            n_prompts = prompts or (3 if family == "faulty_component" else 1)
            setting = setting_of(family, seed=seed, difficulty=difficulty, n_prompts=n_prompts)
            self.name = f"{family}/{seed}/{difficulty:g}/{n_prompts}"
        self.world, self.behaviour = setting.world, setting.behaviour
        check_prompts(self.world, setting.initial_prompts)
        self.initial_prompts = dict(setting.initial_prompts)
        """The texts that an optimiser starts from, by component."""
        self._tasks = TaskModel(self.world, self.behaviour, self.name)
        known = [line for text in self.initial_prompts.values() for line in text.splitlines()]
        self._reflection = ReflectionModel(self.world, setting.skill, self.name, known=known)
        self._optima = functools.cache(functools.partial(optimum, self.world))

    # ---- input of an optimiser -------------------------------------------------------------------

    def tasks(self, count: int, *, start: int = 0) -> list[dict[str, Any]]:
        """Return `count` tasks, numbered from `start`.

        A task has the keys `world`, `number` and `text`, and `flip_rate` if rewards are wrong at
        times.
        """
        check_number("count", count, at_least=0, whole=True)
        check_number("start", start, at_least=0, whole=True)
        flips = {"flip_rate": self.behaviour.flip_rate} if self.behaviour.flip_rate else {}
        return [
            {"world": self.name, "number": number, "text": ticket(number, self._tasks.kind(number)), **flips}
            for number in range(start, start + count)
        ]

    @property
    def initial_resources(self) -> NamedResources:
        """The initial prompts, for a trainer's `initial_resources`."""
        return {name: PromptTemplate(template=text) for name, text in self.initial_prompts.items()}

    @property
    def agent(self) -> LitAgent[Any]:
        """The agent that works with this world's prompts.

        Raise ConfigError if your own `PromptSetting` names its components otherwise than the
        agents do.
        """
        agents = {frozenset({"prompt"}): one_prompt_agent, frozenset({"plan", "search", "write"}): three_prompts_agent}
        names = frozenset(self.world.components)
        if names not in agents:
            raise ConfigError(
                f"no agent has the prompts {sorted(names)}; name them 'prompt', or 'plan', 'search', 'write'"
            )
        return agents[names]

    # ---- the truth -------------------------------------------------------------------------------

    def expected_score(self, prompts: Prompts, *, at: int = 0) -> float:
        """Return the exact probability that a rollout is solved if it does not hang.

        at: the number of a task, because a drifting world has other tasks later.
        Raise ConfigError unless there is a prompt for each component and no other.
        """
        return expected_score(self.world, self._texts(prompts), self.world.kinds_at(at))

    def expected_reward(self, prompts: Prompts, *, at: int = 0) -> float:
        """Return the mean reward that an optimiser sees: some rewards are inverted, and a rollout
        that hangs has 0.

        at: the number of a task, because a drifting world has other tasks later.
        """
        score, flips = self.expected_score(prompts, at=at), self.behaviour.flip_rate
        return (1 - self.behaviour.hang_rate) * (score * (1 - flips) + (1 - score) * flips)

    def optimum(self, *, at: int = 0) -> Optimum:
        """Return the best expected score that any prompts can have, with prompts that have it.

        at: the number of a task, because a drifting world has other tasks later.
        """
        return self._optima(self.world.kinds_at(at))

    def normalised_score(self, prompts: Prompts, *, at: int = 0) -> float:
        """Return the expected score on a scale from 0, the score of the initial prompts, to 1, the
        optimum. A worse prompt than the initial ones is below 0.

        at: the number of a task, because a drifting world has other tasks later.
        """
        first = self.expected_score(self.initial_prompts, at=at)
        return (self.expected_score(prompts, at=at) - first) / (self.optimum(at=at).score - first)

    # ---- the models, as plain functions ----------------------------------------------------------

    def attempt(self, prompts: Prompts, task: Mapping[str, Any], *, replica: int = 0) -> SimulatedRollout:
        """Simulate one rollout of the agent, without a server. Equal arguments have equal results.

        replica: which of the repeated samples of these prompts and this task to return.
        """
        texts = self._texts(prompts)
        calls = [TaskCall(name, texts[name].strip(), task["number"], replica) for name in self.world.components]
        seconds = math.fsum(self._tasks.seconds(call) for call in calls)
        if math.isinf(seconds):
            return SimulatedRollout((), solved=False, reward=0.0, seconds=seconds)
        answers = tuple(self._tasks.answer(call) for call in calls)
        solved = all(answer.startswith(SOLVED) for answer in answers)
        return SimulatedRollout(answers, solved, grade(task, answers), seconds)

    def reflect(self, text: str, *, replica: int = 0) -> str:
        """Return the reflection model's answer to a request: a critique or a new prompt, whichever
        it asks for.

        replica: which of the repeated samples of this request to return.
        """
        return self._reflection.answer(text, replica=replica)

    # ---- the models, as functions of FakeUpstream ------------------------------------------------

    def reply(self, body: dict[str, Any]) -> str:
        """Return the answer to a chat: the task model's if the last message begins or ends with a
        ticket, otherwise the reflection model's.

        The request's `seed` says which of the repeated samples of the same request to return.
        """
        messages, replica = _messages(body), int(body.get("seed") or 0)
        call = read_call(self.world, messages, replica)
        if call is not None:
            return self._tasks.answer(call)
        return self.reflect("\n\n".join(message["content"] for message in messages), replica=replica)

    def fault(self, body: dict[str, Any]) -> Misbehaviour | None:
        """Return the delay of the task model's answer, a day if it hangs. None for a request to the
        reflection model.
        """
        call = read_call(self.world, _messages(body), int(body.get("seed") or 0))
        return None if call is None else Misbehaviour(delay_seconds=min(self._tasks.seconds(call), _HANG_SECONDS))

    def _texts(self, prompts: Prompts) -> dict[str, str]:
        """Return the prompts' texts by component. Raise ConfigError unless there is one for
        each.
        """
        if isinstance(prompts, str | PromptTemplate):
            prompts = dict.fromkeys(self.world.components, prompts) if len(self.world.components) == 1 else {}
        texts = {name: each.template if isinstance(each, PromptTemplate) else each for name, each in prompts.items()}
        check_prompts(self.world, texts)
        return texts


def _messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return role and text of each message of a request to the chat API or to Anthropic's
    messages.
    """
    given: list[Any] = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return [
        {"role": str(message["role"]), "content": _text(message.get("content"))}
        for message in [*given, *cast("list[Any]", body["messages"])]
    ]


def _text(content: Any) -> str:
    if isinstance(content, str) or not content:
        return content or ""
    return "\n".join(part.get("text", "") for part in content)
