"""A simulated model that improves prompts: it reads symptoms and writes clauses, sometimes wrong
ones.

It knows no optimiser. It reads three things in a request: the symptoms that are quoted anywhere,
the current prompt, and the form in which the new prompt is wanted. To serve an optimiser whose
requests have another form, add a pattern here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.promptsim.vocabulary import DISTRACTORS, FLUFF
from benchmarks.promptsim.world import AnswerRule, World

_REFUSES_PROMPT = re.compile(r"\b(?:do not|don't) (?:write|return|give)\b[^.]*\bprompt", re.IGNORECASE)
_WANTS_PROMPT = re.compile(
    r"(?:new|revised|improved|edited|updated|proposed|better|rewritten)[ _](?:system )?(?:prompt|instruction)",
    re.IGNORECASE,
)
_WANTS_CRITIQUE = re.compile(r"\b(?:critici[sz]\w*|critique|feedback|reasons?|review)\b", re.IGNORECASE)
_TAGS = re.compile(r"<(\w+)>\s*(?:and|\.{3}|…)\s*<(/?\w+)>")
_FENCES = re.compile(r"within (?:the )?``` ?blocks?", re.IGNORECASE)
_FIELD = re.compile(r"\[\[ ## (\w*(?:prompt|instruction)\w*) ## \]\]\s*\{")
_QUOTED = re.compile(r"<(\w*(?:prompt|instruction)\w*)>\n(.*?)\n</\1>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"```\w*\n(.*?)\n```", re.DOTALL)
_STATEMENT = re.compile(r"(?<=[.!?])\s+|\n+")


@dataclass(frozen=True, slots=True)
class Skill:
    """How well the reflection model works: probabilities for one new prompt."""

    right: float = 0.9
    """The probability that the new clause meets a symptom in the request. Otherwise it is a
    distractor, which meets no rule."""
    drop: float = 0.05
    """The probability that a statement of the current prompt is lost."""
    fluff: float = 0.1
    """The probability that a sentence is added which only makes the prompt longer."""


class ReflectionModel:
    """A simulated model that criticises and rewrites the prompts of one world.

    seed: decides every draw, together with the request.
    known: sentences of the initial prompts, to find the current prompt in a request
        without delimiters.
    """

    def __init__(self, world: World, skill: Skill, seed: str, *, known: Sequence[str] = ()) -> None:
        self._world, self._skill, self._seed = world, skill, seed
        clauses = [clause for rule in world.rules for clause in rule.clauses]
        self._known = list(dict.fromkeys([*known, *clauses, *DISTRACTORS, *FLUFF]))

    def answer(self, text: str, *, replica: int = 0) -> str:
        """Return a critique or a new prompt, whichever the text asks for, in the form that it asks
        for.
        """
        if _REFUSES_PROMPT.search(text) or (_WANTS_CRITIQUE.search(text) and not _WANTS_PROMPT.search(text)):
            return _in_form(self.critique(text), text)
        chance = random.Random(f"{self._seed}\x1f{text}\x1f{replica}")
        return _in_form(self.rewrite(self.current_prompt(text), self.symptoms(text), chance), text)

    def symptoms(self, text: str) -> list[AnswerRule]:
        """Return the rules whose symptoms the text shows, the most frequent first, then in
        order of appearance.
        """
        flat = _flat(text).lower()
        places = {rule.name: flat.find(_flat(rule.symptom).lower()) for rule in self._world.rules}
        shown = [rule for rule in self._world.rules if places[rule.name] >= 0]
        return sorted(shown, key=lambda rule: (-flat.count(_flat(rule.symptom).lower()), places[rule.name]))

    def critique(self, text: str) -> str:
        """Return a critique that quotes the symptoms."""
        lines = [f"- {rule.symptom}" for rule in self.symptoms(text)]
        return "\n".join(["These complaints are the most frequent:", *lines]) if lines else "The runs show no cause."

    def current_prompt(self, text: str) -> str:
        """Return the prompt that a request quotes in tags or fences; without them, all known
        sentences in order of appearance.
        """
        if quoted := _QUOTED.search(text):
            return quoted[2].strip()
        if fenced := _FENCED.search(text):
            return fenced[1].strip()
        flat = _flat(text)
        places = {sentence: flat.find(_flat(sentence)) for sentence in self._known}
        return "\n".join(sorted((each for each in places if places[each] >= 0), key=lambda each: places[each]))

    def rewrite(self, prompt: str, symptoms: Sequence[AnswerRule], chance: random.Random) -> str:
        """Return the prompt with one more clause. With the probabilities of `Skill`, other clauses
        get lost and meaningless ones are added.

        Without an unmet symptom, the clause is a guess among all rules and distractors.
        """
        missing = [rule for rule in symptoms if not rule.stated_in(prompt)]
        if not missing:
            guesses = [rule.clauses for rule in self._world.rules if not rule.stated_in(prompt)]
            clause = chance.choice(chance.choice([*guesses, *((each,) for each in _absent(DISTRACTORS, prompt))]))
        elif chance.random() < self._skill.right:
            clause = chance.choice(missing[0].clauses)
        else:
            clause = chance.choice(_absent(DISTRACTORS, prompt))
        statements = [each for each in _STATEMENT.split(prompt) if each]
        if len(statements) > 1 and chance.random() < self._skill.drop:  # the first one always stays
            del statements[chance.randrange(1, len(statements))]
            prompt = "\n".join(statements)
        fluff = [chance.choice(FLUFF)] if chance.random() < self._skill.fluff else []
        return "\n".join([prompt, clause, *fluff]).strip()


def _in_form(answer: str, text: str) -> str:
    """Return the answer in the tags, the fence or the field that the request asks for; unchanged if
    it asks for none.

    text: the request.
    """
    if tags := _TAGS.search(text):
        return f"<{tags[1]}>{answer}<{tags[2]}>"
    if _FENCES.search(text):
        return f"```\n{answer}\n```"
    if field := _FIELD.search(text):
        return f"[[ ## {field[1]} ## ]]\n{answer}\n\n[[ ## completed ## ]]"
    return answer


def _absent(sentences: Iterable[str], prompt: str) -> list[str]:
    """Return the sentences that the prompt lacks. Return all if it lacks none, so that one can be
    chosen.
    """
    sentences = list(sentences)
    return [each for each in sentences if each not in prompt] or sentences


def _flat(text: str) -> str:
    return " ".join(text.split())
