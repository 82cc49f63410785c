"""The world of `PromptSim`: latent rules, the tasks that need them, and the chance that a prompt
succeeds.

Pure data and functions. Only two things in a prompt matter: the set of rules that it states and its
number of words. The module knows no model, no agent and no vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from leyden.errors import ConfigError

_STATEMENT_END = re.compile(r"[.!?;\n]+")
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_NEGATIONS = frozenset({"not", "never", "no", "don't", "don’t", "without", "avoid", "neither"})


def uniform(*parts: object) -> float:
    """Return a number in [0, 1) that depends on the parts alone, in every process."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


def statements_of(text: str) -> list[frozenset[str]]:
    """Split a text at line ends, `;`, `.`, `!` and `?`; return the set of words of each part."""
    return [frozenset(words_of(statement)) for statement in _STATEMENT_END.split(text)]


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """An instruction that answers need, whatever its wording."""

    name: str
    clauses: tuple[str, ...]
    """Wordings, the canonical one first."""
    keywords: tuple[tuple[str, ...], ...]
    """Groups of synonyms, single words in lower case. A statement has a word of every group."""
    symptom: str
    """The sentence in a failed answer that shows that the prompt lacks the rule."""
    forbids: bool = False
    """Whether the statement must be negated; the statement of any other rule must not be."""

    def stated_in(self, text: str) -> bool:
        """Return whether one statement of the text means this rule."""
        return any(self.is_meant_by(words) for words in statements_of(text))

    def is_meant_by(self, words: frozenset[str]) -> bool:
        """Return whether a statement with these words means this rule."""
        has_all = all(not words.isdisjoint(group) for group in self.keywords)
        return has_all and self.forbids != words.isdisjoint(_NEGATIONS)


@dataclass(frozen=True, slots=True)
class RuleInteraction:
    """Two rules of one component whose effects on the log-odds do not add up."""

    first: str
    second: str
    alone: float = 0.0
    """Added if a prompt states exactly one of them."""
    both: float = 0.0
    """Added if a prompt states both; negative for a conflict."""

    def effect(self, stated: Collection[str]) -> float:
        """Return what this pair of rules adds to the log-odds of a prompt that states the rules
        `stated`.
        """
        n_stated = (self.first in stated) + (self.second in stated)
        return (0.0, self.alone, self.both)[n_stated]


@dataclass(frozen=True, slots=True)
class Kind:
    """Tasks that need the same rules."""

    cluster: str
    """The subject that the ticket names, such as "delivery"; several kinds may share it."""
    needs: frozenset[str]
    weight: float = 1.0
    """The share of tasks, up to a common factor."""


@dataclass(frozen=True)
class World:
    """A simulated problem for prompt optimisers: the rules that its prompts should state, its kinds
    of tasks, and the constants of its models.

    Raise ConfigError if the parts contradict each other.
    """

    rules: tuple[AnswerRule, ...]
    kinds: tuple[Kind, ...]
    components: Mapping[str, tuple[str, ...]]
    """The agent's prompts in the order of use, and the rules that each must state."""
    pairs: tuple[RuleInteraction, ...] = ()
    later_kinds: tuple[Kind, ...] = ()
    """Replace `kinds` from the task `drifts_at` on."""
    drifts_at: int | None = None
    """The number of a task; None: the tasks never change."""
    base: float = -3.0
    """Log-odds of success of a prompt that states no rule."""
    gain: float = 6.5
    """Added to the log-odds if all needed rules are stated, in proportion if some are."""
    free_words: int = 120
    """The number of words up to which the length of a prompt costs nothing."""
    word_cost: float = 0.03
    """Subtracted from the log-odds for each further word."""

    def __post_init__(self) -> None:
        names = {rule.name for rule in self.rules}
        placed = [name for rules in self.components.values() for name in rules]
        needed = {name for kind in (*self.kinds, *self.later_kinds) for name in kind.needs}
        paired = {name for pair in self.pairs for name in (pair.first, pair.second)}
        if unknown := sorted((needed | paired | {*placed}) - names):
            raise ConfigError(f"the world has no rule {unknown[0]!r}; it has {', '.join(sorted(names))}")
        if sorted(placed) != sorted(names):
            raise ConfigError("components must list each rule of the world exactly once")
        for pair in self.pairs:
            if not any({pair.first, pair.second} <= {*rules} for rules in self.components.values()):
                raise ConfigError(f"the rules {pair.first!r} and {pair.second!r} of a pair must be in one component")
        if not self.kinds or (self.drifts_at is None) != (not self.later_kinds):
            raise ConfigError("a world needs kinds, and later_kinds exactly if it has drifts_at")
        self._check_wordings()

    def _check_wordings(self) -> None:
        """Raise ConfigError unless each clause states its own rule alone and no word
        serves two groups.
        """
        words = [word for rule in self.rules for group in rule.keywords for word in group]
        if twice := next((word for word in words if words.count(word) > 1), None):
            raise ConfigError(f"the keyword {twice!r} is used twice; a keyword must belong to one group of one rule")
        if bad := next((word for word in words if words_of(word) != [word] or word in _NEGATIONS), None):
            raise ConfigError(f"the keyword {bad!r} must be one word in lower case that is no negation")
        for rule in self.rules:
            for text, wanted in [(rule.symptom, set[str]()), *((clause, {rule.name}) for clause in rule.clauses)]:
                statements = statements_of(text)
                found = {each.name for each in self.rules if any(map(each.is_meant_by, statements))}
                if found != wanted:
                    raise ConfigError(
                        f"{text!r} of the rule {rule.name!r} states {sorted(found)}, not {sorted(wanted)}"
                    )

    def kinds_at(self, number: int) -> tuple[Kind, ...]:
        """Return the kinds from which the task of this number is drawn."""
        return self.later_kinds if self.drifts_at is not None and number >= self.drifts_at else self.kinds

    def stated(self, component: str, prompt: str) -> frozenset[str]:
        """Return the names of the component's rules that its prompt states."""
        statements = statements_of(prompt)
        rules = (rule for rule in self.rules if rule.name in self._placed[component])
        return frozenset(rule.name for rule in rules if any(map(rule.is_meant_by, statements)))

    def unmet(self, component: str, stated: Collection[str], kind: Kind) -> list[str]:
        """Return the names of the rules that would have helped a failed answer, in the order of
        `rules`.

        component: the prompt that the rules belong to.
        stated: the rules that this prompt states already.
        kind: the kind of the task.
        """
        helpful = {name for pair in self.pairs if pair.both > 0 for name in (pair.first, pair.second)}
        wanted = (kind.needs | helpful) & self._placed[component]
        return [rule.name for rule in self.rules if rule.name in wanted and rule.name not in stated]

    def chances(self, component: str, stated: Collection[str], n_words: int, kinds: Sequence[Kind]) -> list[float]:
        """Return the probability that one prompt succeeds, for each kind of task: the logistic
        function of its log-odds.

        n_words: the length of the prompt.
        If a kind needs none of the component's rules, the prompt counts as stating all of them.
        """
        placed = self._placed[component]
        effects = sum(pair.effect(stated) for pair in self.pairs if pair.first in placed)
        shared = self.base + effects - self.word_cost * max(0, n_words - self.free_words)
        chances: list[float] = []
        for kind in kinds:
            needed = kind.needs & placed
            share = len(needed.intersection(stated)) / len(needed) if needed else 1.0
            chances.append(1 / (1 + math.exp(-(shared + self.gain * share))))
        return chances

    @functools.cached_property
    def _placed(self) -> dict[str, frozenset[str]]:
        return {component: frozenset(rules) for component, rules in self.components.items()}
