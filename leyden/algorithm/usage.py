"""Whether an agent uses the prompts that it is given: whether their text is in its model calls.

`PromptUsage` counts over the rollouts of a run, and has a warning for a prompt whose text no call
has. It knows prompts and recorded calls, no rewards and no optimiser.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from leyden.adapter.calls import model_calls
from leyden.adapter.chat import message_text
from leyden.adapter.normalise import ModelCallView
from leyden.types import NamedResources, PromptTemplate, Span

_LEAST_CHARACTERS = 12
"""A shorter piece of a template is found in many messages by chance."""
_OTHER_ENGINES = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
"""Marks that Jinja and POML replace."""
_LEAST_ROLLOUTS = 8
"""After this many rollouts with model calls, a prompt that none of them has sent is ignored."""
_MOST_ROLLOUTS = 32
"""Rollouts that are read for each text of a prompt."""
_LEAST_ROLLOUTS_OF_NEW_TEXT = 4
"""After this many rollouts, the agent is known to ignore a new text, if it sends another one of
that prompt in most rollouts."""


def fixed_pieces(prompt: PromptTemplate) -> list[str]:
    """Return the text between the placeholders of a template, with single spaces; pieces that are
    too short are left out.
    """
    pieces = [""]
    if prompt.engine == "f-string":
        try:
            for literal, name, _, _ in string.Formatter().parse(prompt.template):
                pieces[-1] += literal
                pieces += [""] if name is not None else []
        except ValueError:  # such a template cannot be formatted, so no agent uses it
            return []
    else:
        pieces = _OTHER_ENGINES.split(prompt.template)
    return [piece for piece in map(_single_spaced, pieces) if len(piece) >= _LEAST_CHARACTERS]


def calls_with(prompt: PromptTemplate, calls: Sequence[ModelCallView]) -> list[ModelCallView]:
    """Return the calls whose messages have the prompt's text. A placeholder stands for any text.

    A prompt without a piece of text that is long enough is in no call.
    """
    pieces = fixed_pieces(prompt)
    return [call for call in calls if pieces and all(piece in text for text in [_input(call)] for piece in pieces)]


def _input(call: ModelCallView) -> str:
    return _single_spaced("\n".join(message_text(message.get("content")) for message in call.input_messages))


def _single_spaced(text: str) -> str:
    return " ".join(text.split())


@dataclass(slots=True)
class _Count:
    """Rollouts with model calls that were given one text of a prompt."""

    rollouts: int = 0
    used: int = 0
    """Rollouts of which at least one model call contains the text."""


class PromptUsage:
    """Counts in how many rollouts the agent has sent the prompts that it was given."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, _Count]] = {}
        """Counts by the prompt's name, then by its text."""
        self._warned: set[str] = set()

    def observe(
        self, resources: NamedResources, spans: Sequence[Span], names: Collection[str] | None = None
    ) -> list[str]:
        """Count one rollout, and return a warning for each prompt that the agent is now
        known to ignore, once.

        A rollout without recorded model calls does not count, and neither does a prompt of a few
        letters.

        resources: what the agent was given. names: of the prompts that are watched; None: all.
        """
        open_counts = list(self._open_counts(resources, names))
        calls = model_calls(spans) if open_counts else []
        if calls:
            for prompt, count in open_counts:
                count.rollouts += 1
                count.used += bool(calls_with(prompt, calls))
        return self._warnings()

    def _open_counts(
        self, resources: NamedResources, names: Collection[str] | None
    ) -> Iterator[tuple[PromptTemplate, _Count]]:
        """Yield the prompts for which more rollouts must be read to know whether agents use them.

        The number of rollouts is limited, because reading their calls takes time.
        """
        for name, prompt in resources.items():
            if isinstance(prompt, PromptTemplate) and (names is None or name in names) and fixed_pieces(prompt):
                count = self._counts.setdefault(name, {}).setdefault(prompt.template, _Count())
                if count.rollouts < _MOST_ROLLOUTS:
                    yield prompt, count

    def _warnings(self) -> list[str]:
        """Return a warning for each prompt that the agent is newly known to ignore."""
        found: list[str] = []
        for name, counts in self._counts.items():
            if name not in self._warned and (rollouts := _rollouts_without(counts)):
                self._warned.add(name)
                found.append(
                    f"the agent ignores the prompt {name!r}: the model calls of {rollouts:,} rollouts do not have its text. "
                    f"Format it in the agent, resources[{name!r}].format(...), and send the result to the model; "
                    "leyden prompts extract RUN finds a prompt that the agent has hard-coded"
                )
        return found


def _rollouts_without(counts: Mapping[str, _Count]) -> int:
    """Return how many rollouts ran without the prompt that they were given; 0 unless it is known
    that the agent ignores the prompt.

    The agent ignores it if no rollout used any of its texts, or if most rollouts with one text used
    that one and none of many used another: then the first text is hard-coded. A prompt that only
    some tasks need is in few rollouts, and is not ignored.
    counts: by the prompt's text.
    """
    total, used = sum(count.rollouts for count in counts.values()), sum(count.used for count in counts.values())
    if used == 0:
        return total if total >= _LEAST_ROLLOUTS else 0
    is_usual = any(2 * count.used > count.rollouts for count in counts.values())
    unused = [count.rollouts for count in counts.values() if count.used == 0]
    most = max(unused, default=0)
    return most if is_usual and most >= _LEAST_ROLLOUTS_OF_NEW_TEXT else 0
