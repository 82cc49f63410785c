"""The truth about prompts: exact expected scores, and the optimum by enumeration.

A rollout succeeds if every component does, and their draws are independent. So a prompt set's
expected score is the mean over the kinds of task of the product of the components' chances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.promptsim.world import AnswerRule, Kind, World, words_of
from leyden._lib.options import check_number
from leyden.errors import ConfigError

_NOT = "never"
_MOST_RULES = 16


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best expected score that any prompts can have."""

    score: float
    """The probability that a rollout succeeds."""
    stated: frozenset[str]
    """The rules that the best prompts state."""
    prompts: Mapping[str, str]
    """Prompts with this score, by component."""


def expected_score(world: World, prompts: Mapping[str, str], kinds: Sequence[Kind]) -> float:
    """Return the exact probability that a rollout succeeds, weighted over kinds of task.

    Raise ConfigError unless there is a prompt for each component and no other.
    """
    check_prompts(world, prompts)
    chances = [
        world.chances(name, world.stated(name, text), len(words_of(text)), kinds) for name, text in prompts.items()
    ]
    return math.fsum(map(math.prod, zip(_weights(kinds), *chances, strict=True)))


def check_prompts(world: World, prompts: Mapping[str, str]) -> None:
    """Raise ConfigError unless there is a prompt for each component and no other."""
    if prompts.keys() != world.components.keys():
        wanted = ", ".join(world.components)
        raise ConfigError(f"the prompts are {sorted(prompts)}; this world's agent has the prompts {wanted}")


def optimum(world: World, kinds: Sequence[Kind]) -> Optimum:
    """Return the best score of all sets of rules, each stated in as few words as possible.

    It tries 2 ** n sets for n rules. Raise ConfigError for more than 16 rules.
    """
    check_number("the number of the world's rules", len(world.rules), at_most=_MOST_RULES)
    rules = {rule.name: rule for rule in world.rules}
    tables = [
        [
            (chosen, world.chances(name, chosen, _fewest_words([rules[each] for each in chosen]), kinds))
            for chosen in _subsets(placed)
        ]
        for name, placed in world.components.items()
    ]
    weights = _weights(kinds)
    best_score, best = -1.0, ((),) * len(tables)
    for choice in itertools.product(*tables):
        chances = (chances for _, chances in choice)
        score = math.fsum(map(math.prod, zip(weights, *chances, strict=True)))
        if score > best_score + 1e-12:  # of equal sets, the first and smallest
            best_score, best = score, tuple(chosen for chosen, _ in choice)
    stated = frozenset(itertools.chain.from_iterable(best))
    # Whole sentences, unless their length costs more than bare keywords.
    written = (
        {name: wording([rules[each] for each in chosen]) for name, chosen in zip(world.components, best, strict=True)}
        for wording in (_clauses, _keywords)
    )
    prompts = max(written, key=lambda prompts: expected_score(world, prompts, kinds))
    return Optimum(best_score, stated, prompts)


def _weights(kinds: Sequence[Kind]) -> list[float]:
    """Return the kinds' shares of all tasks."""
    total = math.fsum(kind.weight for kind in kinds)
    return [kind.weight / total for kind in kinds]


def _subsets(names: Collection[str]) -> list[tuple[str, ...]]:
    """Return all subsets, small ones first."""
    return [chosen for size in range(len(names) + 1) for chosen in itertools.combinations(names, size)]


def _clauses(rules: Sequence[AnswerRule]) -> str:
    return "\n".join(min(rule.clauses, key=lambda clause: len(words_of(clause))) for rule in rules)


def _keywords(rules: Sequence[AnswerRule]) -> str:
    """Return the shortest text that states the rules: keywords alone, all prohibitions in one
    statement.
    """
    allowed = [" ".join(group[0] for group in rule.keywords) for rule in rules if not rule.forbids]
    forbidden = [group[0] for rule in rules if rule.forbids for group in rule.keywords]
    return ". ".join([*allowed, *([" ".join([_NOT, *forbidden])] if forbidden else [])])


def _fewest_words(rules: Sequence[AnswerRule]) -> int:
    """Return the smallest number of words that state these rules: one for each group of keywords,
    and one negation for all rules that forbid.
    """
    return sum(len(rule.keywords) for rule in rules) + any(rule.forbids for rule in rules)
