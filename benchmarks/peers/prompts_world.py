"""What every optimiser of `benchmarks/prompts.py` runs on: worlds whose best prompt is known, simulated time, and what a run did.

It imports nothing but the standard library and `leyden.testing`, so that the sides of the peers use it in environments of their own.
"""

from __future__ import annotations

import contextvars
import heapq
import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.promptsim import Behaviour, Kind, PromptSetting, PromptSim, RuleInteraction, Skill, World
from benchmarks.promptsim.vocabulary import DISTRACTORS, FLUFF, RULES, SEED_PROMPT

N_TRAIN, N_VAL = 60, 40
BUDGET, LIMIT = 800, 4000
"""Rollouts of a run, and how far one is continued that has not come to `SHARE` of the optimum by then."""
SLOTS, ROLLOUT_SECONDS, REFLECTION_SECONDS, TIMEOUT_SECONDS = 16, 1.0, 5.0, 60.0
SHARE = 0.95


# ---- worlds --------------------------------------------------------------------------------------------------------------


def _rare(seed: int) -> PromptSetting:
    """One task in ten needs three rules that no other task needs."""
    names = [rule.name for rule in RULES]
    random.Random(f"rare/{seed}").shuffle(names)
    kinds = (Kind("many", frozenset(names[:3]), 9.0), Kind("few", frozenset(names[3:6]), 1.0))
    return PromptSetting(World(rules=RULES, kinds=kinds, components={"prompt": tuple(names)}), {"prompt": SEED_PROMPT})


def _terse(seed: int) -> PromptSetting:
    """Each word beyond forty costs, so that useless clauses hurt."""
    names = [rule.name for rule in RULES]
    random.Random(f"terse/{seed}").shuffle(names)
    kinds = tuple(Kind("shop", frozenset(names[place : place + 3])) for place in range(0, 6, 3))
    world = World(rules=RULES, kinds=kinds, components={"prompt": tuple(names)}, free_words=40, word_cost=0.06)
    return PromptSetting(world, {"prompt": SEED_PROMPT})


def _inherited(seed: int) -> PromptSetting:
    """The first prompt is an old one: it states three of the six rules that tasks need, and two of four that harm.

    No symptom tells which statement harms. A rewritten prompt has lost a statement with a probability of one half.
    """
    chance = random.Random(f"inherited/{seed}")
    names = [rule.name for rule in RULES]
    chance.shuffle(names)
    needed, harmful = names[:6], names[6:10]
    kinds = tuple(
        Kind("shop", frozenset(needed[place] for place in places))
        for places in ((0, 1, 3, 4), (1, 2, 4, 5), (2, 0, 5, 3))
    )
    harm = tuple(RuleInteraction(*harmful[place : place + 2], alone=-1.3, both=-2.6) for place in (0, 2))
    stated = {*needed[:3], *harmful[::2]}
    old = [chance.choice(rule.clauses) for rule in RULES if rule.name in stated]
    old += [chance.choice(DISTRACTORS), chance.choice(FLUFF)]
    chance.shuffle(old)
    world = World(rules=RULES, kinds=kinds, components={"prompt": tuple(names)}, pairs=harm)
    return PromptSetting(world, {"prompt": "\n".join([SEED_PROMPT, *old])}, skill=Skill(drop=0.5))


def _uneven(seed: int) -> PromptSetting:
    """Half of the tasks need two rules, and a fifth needs five; a judge errs at times.

    So two rules matter much and six little. The reflection model is wordy and forgets.
    """
    names = [rule.name for rule in RULES]
    random.Random(f"uneven/{seed}").shuffle(names)
    a, b, c, d, *rest = names
    needs = ((5.0, {a, b}), (3.0, {a, c, d}), (2.0, {b, *rest[:4]}))
    kinds = tuple(Kind("shop", frozenset(each), weight) for weight, each in needs)
    world = World(rules=RULES, kinds=kinds, components={"prompt": tuple(names)})
    behaviour = Behaviour(symptom_rate=0.8, flip_rate=0.05)
    return PromptSetting(world, {"prompt": SEED_PROMPT}, behaviour, Skill(right=0.8, drop=0.2, fluff=0.3))


HELD_OUT: dict[str, Callable[[int], PromptSetting]] = {
    "rare": _rare,
    "terse": _terse,
    "inherited": _inherited,
    "uneven": _uneven,
}
"""Families that were not used while the optimisers were written; settings of APO were later tried on `rare` and `terse`, with other
seeds."""
UNSEEN = frozenset({"inherited", "uneven"})
"""The families of `HELD_OUT` on which no optimiser of Leyden ran before its code was final."""


def world(family: str, seed: int) -> PromptSim:
    """Return the world of a run."""
    return PromptSim(HELD_OUT[family](seed) if family in HELD_OUT else family, seed=seed)


# ---- one run -------------------------------------------------------------------------------------------------------------


class Clock:
    """Simulated time: rollouts take slots in the order in which they are requested."""

    def __init__(self) -> None:
        self._free = [0.0] * SLOTS
        self._now: contextvars.ContextVar[float] = contextvars.ContextVar("now")
        self.end = 0.0
        """When the last of all ends."""

    @property
    def now(self) -> float:
        """The time of the task that asks; after a barrier, the end of all before it."""
        return self._now.get(self._barrier)

    _barrier = 0.0

    def barrier(self) -> None:
        """Whatever starts next waits for all before it."""
        self._barrier = self.end
        self._now.set(self.end)

    def run(self, seconds: Iterable[float]) -> None:
        """Run rollouts at once, and go on when the last has ended."""
        start, last = self.now, self.now
        for duration in seconds:
            ends = max(start, heapq.heappop(self._free)) + duration
            heapq.heappush(self._free, ends)
            last = max(last, ends)
        self._set(last)

    def reflect(self) -> None:
        """Wait for one answer of the reflection model."""
        self._set(self.now + REFLECTION_SECONDS)

    def _set(self, now: float) -> None:
        self._now.set(now)
        self.end = max(self.end, now)


@dataclass(frozen=True)
class Spent:
    """A run's counts and its best prompts at the moment when its budget was spent."""

    rollouts: int
    reflections: int
    seconds: float
    prompts: dict[str, str]
    believed: float
    """The reward that the optimiser believes its prompts to have."""


@dataclass
class Trace:
    """The rollouts, reflections and prompts of one run, by simulated time."""

    sim: PromptSim
    clock: Clock = field(default_factory=Clock)
    rollouts: int = 0
    reflections: int = 0
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Rollouts, seconds and normalised truth each time that the best prompts changed."""
    reflections_to_share: int | None = None
    """Reflection calls until the best prompts first came to `SHARE` of the optimum; None before."""
    expected: float | None = None
    """The reward that the optimiser expects of its final prompts on new tasks; None if it says none."""
    ends_at_share: bool = False
    """Whether the run has `LIMIT` rollouts, and ends when it has come to `SHARE` of the optimum."""
    spent: Spent | None = None
    """The state when the budget was spent, of a run that went on."""

    def seconds(self, prompts: dict[str, str], task: Any) -> float:
        """Return the simulated duration of a rollout."""
        seconds, median = self.sim.attempt(prompts, task).seconds, self.sim.behaviour.median_seconds
        return TIMEOUT_SECONDS if math.isinf(seconds) else ROLLOUT_SECONDS * (seconds / median if median else 1.0)

    def best(self, prompts: dict[str, str]) -> None:
        """Note new best prompts."""
        truth = self.sim.normalised_score(prompts)
        self.curve.append((self.rollouts, round(self.clock.end, 2), truth))
        if truth >= SHARE and self.reflections_to_share is None:
            self.reflections_to_share = self.reflections


@dataclass(frozen=True)
class Run:
    """The outcome of one run, a line of `results/prompts_runs.jsonl`."""

    side: str
    family: str
    seed: int
    budget: int
    rollouts: int
    reflections: int
    seconds: float
    """Simulated."""
    truth: float
    """Of the final prompts: 0 for the first ones, 1 for the best possible ones."""
    gap: float
    """What the optimiser believes of its prompts, minus the truth."""
    curve: list[tuple[int, float, float]]
    wall_s: float
    expected_gap: float | None = None
    """The reward that the optimiser expects on new tasks, if it says one, minus the truth."""
    followed: tuple[int, float] | None = None
    """Rollouts and seconds at which the run was given up, if it went on after its budget."""
    reflections_to_share: int | None = None
    """Reflection calls until the truth was first at `SHARE` of the optimum; None if never, or for runs that did not count them."""

    def reached(self, share: float = SHARE, *, within: int = BUDGET) -> tuple[float, float] | None:
        """Return rollouts and seconds until the truth was first at this share of the optimum; None if never."""
        points = ((rollouts, seconds) for rollouts, seconds, truth in self.curve if truth >= share)
        return next((point for point in points if point[0] <= within), None)


def measure(side: str, optimise: Callable[[Trace, int], tuple[dict[str, str], float]], family: str, seed: int) -> Run:
    """Run one optimiser on one world. It returns its prompts, and the reward that it believes them to have."""
    trace, began = Trace(world(family, seed)), time.perf_counter()
    prompts, believed = optimise(trace, seed)
    end = Spent(trace.rollouts, trace.reflections, trace.clock.end, prompts, believed)
    spent, sim = trace.spent or end, trace.sim
    return Run(
        side=side,
        family=family,
        seed=seed,
        budget=BUDGET,
        rollouts=spent.rollouts,
        reflections=spent.reflections,
        seconds=spent.seconds,
        truth=sim.normalised_score(spent.prompts),
        gap=spent.believed - sim.expected_reward(spent.prompts),
        curve=trace.curve,
        expected_gap=None if trace.expected is None else trace.expected - sim.expected_reward(spent.prompts),
        wall_s=round(time.perf_counter() - began, 2),
        followed=(end.rollouts, end.seconds) if trace.spent else None,
        reflections_to_share=trace.reflections_to_share,
    )


def follow(run: Run, optimise: Callable[[Trace, int], tuple[dict[str, str], float]]) -> Run:
    """Repeat a run with `LIMIT` rollouts, until it comes to `SHARE` of the optimum. Return it with what followed its budget.

    The repetition is the same up to the rounds that the smaller budget has cut short. If only the repetition finds a prompt within the
    budget, it counts with one rollout more than the budget, because the run has not found it.
    """
    trace = Trace(world(run.family, run.seed), ends_at_share=True)
    optimise(trace, run.seed)
    new = [point for point in trace.curve if point not in run.curve]
    later = [(max(at, run.budget + 1), seconds, truth) for at, seconds, truth in new]
    return replace(
        run,
        curve=[*run.curve, *later],
        followed=(trace.rollouts, trace.clock.end),
        reflections_to_share=trace.reflections_to_share,
    )
