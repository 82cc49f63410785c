"""`join_edits`: give a prompt the edits of other prompts that are worth their length, and take away
those that are not.

A long prompt costs tokens with each call, and a few rewards cannot tell a useless sentence from a
useful one. So each edit has a price for the text that it adds. Pure functions: they know candidates
and texts, no models and no store.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from leyden.algorithm.apo.effects import Effects
from leyden.algorithm.apo.search import Search
from leyden.algorithm.apo.transfer import transfer_edit
from leyden.algorithm.prompts.candidate import Branch, Candidate
from leyden.algorithm.prompts.texts import problem_with
from leyden.types import PromptTemplate

_PRICE = 0.04
"""The price of an edit of mean length, in standard deviations of all rewards."""
_MOST_ADDED = 2
"""The most edits that are added to a prompt at once, so that useless ones come in slowly."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Prompts with joined edits."""

    parent: int
    """A candidate that ran, from which some edits were taken away, or to which some were added."""
    edits: tuple[int, ...]
    prompts: Mapping[str, PromptTemplate]

    def candidate(self, search: Search, branch: Branch, version: tuple[str, int]) -> Candidate:
        """Return the prompts as a candidate. Its reason is that of the edits.

        version: the parent's resources id and version.
        """
        before = search.edits[self.parent]
        added = [edit for edit in self.edits if edit not in before]
        undone = [edit for edit in before if edit not in self.edits]
        reasons = [search.candidates[edit].reason for edit in added]
        reasons += [f"Undone: {search.candidates[edit].reason}" for edit in undone]
        names = {search.candidates[edit].edited or "" for edit in (*added, *undone)}
        return Candidate(
            self.prompts,
            branch.round + 1,
            branch.branch,
            version,
            ", ".join(sorted(names)),
            "\n".join(reasons),
        )


def edit_prices(search: Search, deviation: float) -> dict[int, float]:
    """Return the price of each edit: by how much it must raise the reward to be worth its length.

    It is negative for an edit that makes a prompt shorter.

    deviation: the standard deviation of all rewards.
    """
    lengths: dict[int, int] = {}
    for edit in search.written:
        _, before, after = search.change(edit)
        lengths[edit] = len(after) - len(before)
    mean = max(1.0, statistics.fmean(map(abs, lengths.values()))) if lengths else 1.0
    return {edit: _PRICE * deviation * length / mean for edit, length in lengths.items()}


def join_edits(
    search: Search, place: int, effects: Effects, prices: Mapping[int, float], *, max_characters: int
) -> Joined:
    """Return a candidate's prompts without the edits whose effect is below their price, and with
    the best other edits whose effect is above it.

    An edit that does not fit, or that makes a prompt which cannot be used, is left as it is.
    """
    gains = {edit: effects.edits[edit] - price for edit, price in prices.items()}
    edits, prompts = list(search.edits[place]), dict(search.candidates[place].prompts)

    def put(edit: int, *, undo: bool) -> bool:
        """Make an edit in the prompts, or undo it; return whether that is possible."""
        name, before, after = search.change(edit)
        prompt = prompts[name]
        text = transfer_edit(*((after, before) if undo else (before, after)), prompt.template)
        if text is None or problem_with(text, prompt, max_characters=max_characters) is not None:
            return False
        prompts[name] = prompt.model_copy(update={"template": text})
        return True

    for edit in sorted(edits, key=gains.__getitem__):
        if gains[edit] < 0 and put(edit, undo=True):
            edits.remove(edit)
    n_most = len(edits) + _MOST_ADDED
    for edit in sorted(gains.keys() - search.edits[place], key=lambda edit: (-gains[edit], edit)):
        if len(edits) < n_most and gains[edit] > 0 and put(edit, undo=False):
            edits.append(edit)
    has_run = search.train[place] or search.val[place]
    parent = place if has_run else search.parents[place]
    return Joined(parent or 0, tuple(sorted(edits)), prompts)
