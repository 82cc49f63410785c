"""The families of `PromptSim`. Each is one function, which turns a draft (shuffled rules, a source
of chance and a difficulty) into a setting.

To add a family, write its function and put it into `FAMILIES`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.promptsim.reflection_model import Skill
from benchmarks.promptsim.task_model import Behaviour
from benchmarks.promptsim.vocabulary import COMPONENT_PROMPTS, RULES, SEED_PROMPT
from benchmarks.promptsim.world import Kind, RuleInteraction, World

_N_RULES = len(RULES)
_NEEDED = tuple(place for place in range(_N_RULES) if place % 3 != 2)
"""Places of the rules that simple families need: all but every third. With three prompts, the
places 0 to 3 belong to the first one, 4 to 7 to the second one, 8 to 11 to the third one."""
_DRIFTS_AT = 200
"""The number of the first task that needs the later rules."""


@dataclass(frozen=True)
class PromptSetting:
    """A simulated problem for prompt optimisers, whose best prompts are known: a world, the prompts
    to start from, and the two simulated models.
    """

    world: World
    initial_prompts: Mapping[str, str]
    """The initial prompt of each component, by its name."""
    behaviour: Behaviour = field(default_factory=Behaviour)
    """How the model that works on tickets departs from the ideal."""
    skill: Skill = field(default_factory=Skill)
    """How well the other model rewrites prompts."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """The starting point of every family. A *place* is an index into `names`."""

    names: Sequence[str]
    """The rules' names, shuffled."""
    components: Mapping[str, tuple[str, ...]]
    """The rules' names by the prompt that must state them."""
    chance: random.Random
    difficulty: float

    def kinds(self, **pools: Sequence[int]) -> tuple[Kind, ...]:
        """Return four kinds of tasks for each cluster.

        pools: by cluster, the places of the rules from which its kinds draw what they need.
        """
        n_needs = 2 + round(2 * self.difficulty)
        return tuple(
            Kind(cluster, frozenset(self.names[place] for place in self.chance.sample(pool, n_needs)))
            for cluster, pool in pools.items()
            for _ in range(4)
        )

    def pair(self, first: int, second: int, *, alone: float = 0.0, both: float) -> RuleInteraction:
        """Return an interaction of the rules at two places."""
        return RuleInteraction(self.names[first], self.names[second], alone, both)

    def setting(self, kinds: tuple[Kind, ...], **constants: Any) -> PromptSetting:
        """Return a setting whose initial prompts state no rule.

        constants: arguments of `World`.
        """
        one = len(self.components) == 1
        # Each of three prompts is easier to write, because all three must succeed.
        scale = {"free_words": 120} if one else {"free_words": 50, "base": -1.5, "gain": 5.0}
        options: dict[str, Any] = {**scale, **constants}
        world = World(rules=RULES, kinds=kinds, components=self.components, **options)
        hard = self.difficulty
        return PromptSetting(
            world,
            {"prompt": SEED_PROMPT} if one else dict(COMPONENT_PROMPTS),
            Behaviour(symptom_rate=0.95 - 0.5 * hard),
            Skill(right=0.95 - 0.4 * hard, drop=0.02 + 0.13 * hard, fluff=0.05 + 0.25 * hard),
        )


def _additive(draft: _Draft) -> PromptSetting:
    """Return a setting in which each rule that a task needs helps by itself. Four of the twelve
    rules help no task.
    """
    return draft.setting(draft.kinds(shop=_NEEDED))


def _clustered(draft: _Draft) -> PromptSetting:
    """Return a setting in which three clusters of tasks need three disjoint sets of rules."""
    pools = {name: range(place, _N_RULES, 3) for place, name in enumerate(("delivery", "payment", "account"))}
    return draft.setting(draft.kinds(**pools))


def _deceptive(draft: _Draft) -> PromptSetting:
    """Return a setting in which two rules harm if a prompt states one of them, and help if it
    states both.
    """
    # No task needs the rules 8 and 11; both are in the same prompt.
    pair = draft.pair(8, 11, alone=-1.5 - draft.difficulty, both=2.0)
    return draft.setting(draft.kinds(shop=_NEEDED), pairs=(pair,), gain=4.5)


def _faulty_component(draft: _Draft) -> PromptSetting:
    """Return a setting in which one of three prompts states no rule, and the others state all rules
    that tasks need of them.
    """
    setting = draft.setting(draft.kinds(shop=_NEEDED))
    faulty = draft.chance.choice(list(draft.components))
    needed = {draft.names[place] for place in _NEEDED}
    prompts = {
        name: "\n".join([text, *(rule.clauses[0] for rule in RULES if rule.name in needed.intersection(placed))])
        for (name, text), placed in zip(setting.initial_prompts.items(), draft.components.values(), strict=True)
    }
    return replace(setting, initial_prompts={**prompts, faulty: setting.initial_prompts[faulty]})


def _flaky(draft: _Draft) -> PromptSetting:
    """Return a setting in which a tenth of the rewards are wrong, and a tenth of the rollouts
    hang.
    """
    setting = _additive(draft)
    return replace(setting, behaviour=replace(setting.behaviour, flip_rate=0.1, hang_rate=0.1))


def _heavy_tailed(draft: _Draft) -> PromptSetting:
    """Return a setting in which the median call takes 10 ms, and one in a thousand a hundred times
    as long.
    """
    setting = _additive(draft)
    return replace(setting, behaviour=replace(setting.behaviour, median_seconds=0.01, sigma=1.5))


def _scalar_only(draft: _Draft) -> PromptSetting:
    """Return a setting in which a failed answer never shows a symptom."""
    setting = _additive(draft)
    return replace(setting, behaviour=replace(setting.behaviour, symptom_rate=0.0))


def _drifting(draft: _Draft) -> PromptSetting:
    """Return a setting in which tasks from number 200 on need rules that conflict with those needed
    before.
    """
    before, after = range(0, _N_RULES, 2), range(1, _N_RULES, 2)  # the even and the odd places
    conflicts = tuple(draft.pair(first, first + 1, both=-2.0) for first in before)
    later = draft.kinds(after=after)
    return draft.setting(draft.kinds(before=before), later_kinds=later, drifts_at=_DRIFTS_AT, pairs=conflicts)


FAMILIES: dict[str, Callable[[_Draft], PromptSetting]] = {
    "additive": _additive,
    "clustered": _clustered,
    "deceptive": _deceptive,
    "faulty_component": _faulty_component,
    "flaky": _flaky,
    "heavy_tailed": _heavy_tailed,
    "scalar_only": _scalar_only,
    "drifting": _drifting,
}


def setting_of(family: str, *, seed: int, difficulty: float, n_prompts: int) -> PromptSetting:
    """Return the setting of a family for one seed.

    All seeds have the same rules. Which of them a kind of task needs depends on the seed.
    difficulty: from 0 to 1. With a larger one, tasks need more rules, and wrong rules cost more.
    n_prompts: 1 or 3, how many prompts the agent has.
    """
    chance = random.Random(f"{family}/{seed}/{difficulty}")
    names = [rule.name for rule in RULES]
    chance.shuffle(names)
    each = _N_RULES // n_prompts
    labels = ["prompt"] if n_prompts == 1 else list(COMPONENT_PROMPTS)
    components = {label: tuple(names[each * place : each * (place + 1)]) for place, label in enumerate(labels)}
    return FAMILIES[family](_Draft(names, components, chance, difficulty))
