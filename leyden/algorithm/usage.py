"""Find out whether an agent uses the prompts that it is given, by looking for their text in its model calls.

`PromptUsage` counts over the rollouts of a run, and returns a warning for a prompt that the agent ignores. The module
knows prompts and recorded calls, no rewards and no optimiser.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from leyden.adapter.calls import model_calls
from leyden.adapter.chat_messages import message_text
from leyden.adapter.normalise import ModelCallView
from leyden.types import NamedResources, PromptTemplate, Span

_MIN_CHARACTERS = 12
"""A shorter piece of a template is found in many messages by chance."""
_OTHER_ENGINES = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
"""Marks that Jinja and POML replace."""
_MIN_ROLLOUTS = 8
"""If this many rollouts have model calls, and none contains the prompt, the agent ignores it."""
_MAX_ROLLOUTS = 32
"""How many rollouts are read for each text of a prompt."""
_MIN_ROLLOUTS_OF_NEW_TEXT = 4
"""If this many rollouts lack a new text of a prompt, and most rollouts with another text contain that text, the agent
ignores the prompt."""


def fixed_pieces(prompt: PromptTemplate) -> list[str]:
    """Return the pieces of text between the placeholders of a template, with single spaces. Pieces that are too short
    to be recognised are left out.
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
    return [piece for piece in map(_single_spaced, pieces) if len(piece) >= _MIN_CHARACTERS]


def calls_with(prompt: PromptTemplate, calls: Sequence[ModelCallView]) -> list[ModelCallView]:
    """Return the calls whose messages contain the prompt's text. A placeholder stands for any text.

    Return none for a prompt whose pieces of text are all too short to be recognised.
    """
    pieces = fixed_pieces(prompt)
    return [call for call in calls if pieces and all(piece in text for text in [_input(call)] for piece in pieces)]


def _input(call: ModelCallView) -> str:
    return _single_spaced("\n".join(message_text(message.get("content")) for message in call.input_messages))


def _single_spaced(text: str) -> str:
    return " ".join(text.split())


@dataclass(slots=True)
class _Count:
    """Counts of the rollouts with model calls that were given one text of a prompt."""

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
        """Count one rollout. Return a warning for each prompt that the agent is now known to ignore; each prompt has
        one warning at most.

        A rollout without recorded model calls does not count, and neither does a prompt of a few letters.
        resources: the resources that the agent was given.
        names: the names of the watched prompts; None: all.
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
                if count.rollouts < _MAX_ROLLOUTS:
                    yield prompt, count

    def _warnings(self) -> list[str]:
        """Return a warning for each prompt that the agent is newly known to ignore."""
        found: list[str] = []
        for name, counts in self._counts.items():
            if name not in self._warned and (rollouts := _rollouts_that_ignore(counts)):
                self._warned.add(name)
                found.append(
                    f"the agent ignores the prompt {name!r}: the model calls of {rollouts:,} rollouts do not have its text. "
                    f"Format it in the agent, resources[{name!r}].format(...), and send the result to the model; "
                    "leyden prompts extract RUN finds a prompt that the agent has hard-coded"
                )
        return found


def _rollouts_that_ignore(counts: Mapping[str, _Count]) -> int:
    """Return how many rollouts did not contain the prompt that they were given. Return 0 unless the agent is known to
    ignore the prompt.

    It ignores the prompt if no rollout contains any text of it. It also does if most rollouts with one text contain
    that text, and none with another text contains the other: then the agent has the first text in its code. A prompt
    that only some tasks need is in few rollouts, and does not count as ignored.
    counts: by the prompt's text.
    """
    total, used = sum(count.rollouts for count in counts.values()), sum(count.used for count in counts.values())
    if used == 0:
        return total if total >= _MIN_ROLLOUTS else 0
    is_usual = any(2 * count.used > count.rollouts for count in counts.values())
    unused = [count.rollouts for count in counts.values() if count.used == 0]
    most = max(unused, default=0)
    return most if is_usual and most >= _MIN_ROLLOUTS_OF_NEW_TEXT else 0
