"""`join_edits`: add to a prompt the edits of other prompts that are worth their length, and remove its own edits that
are not.

A long prompt costs tokens with each call, and a few rewards cannot tell a useless sentence from a useful one. So each
edit has a price for the text that it adds. Pure functions of candidates and texts, which know no models and no store.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from leyden.algorithm.apo.search import Search
from leyden.algorithm.apo.transfer import transfer_edit
from leyden.algorithm.prompts.candidate import Branch, Candidate
from leyden.algorithm.prompts.texts import problem_with
from leyden.statistics import Effects
from leyden.types import PromptTemplate

_PRICE = 0.08
"""The price of an edit of mean length, in standard deviations of all rewards."""
_MAX_ADDED = 2
"""The largest number of edits that a prompt gets at once, so that few useless ones come in."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Prompts that have the edits of several candidates."""

    parent: int
    """The number of the candidate to which edits were added, or from which some were removed. It has rewards, or is the
    parent of one that has none."""
    edits: tuple[int, ...]
    """The numbers of the edits that the prompts have."""
    prompts: Mapping[str, PromptTemplate]
    """The prompts, by the names of their resources."""

    def candidate(self, search: Search, branch: Branch, version: tuple[str, int]) -> Candidate:
        """Return the prompts as a candidate. Its reason joins those of the edits that were added or removed.

        branch: the position of the candidate in the search.
        version: the id and version of the parent's resources.
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
    """Return the price of each edit, by its number: by how much it must raise the reward to be worth its length. The
    price of an edit that makes a prompt shorter is negative.

    deviation: the standard deviation of all rewards.
    """
    lengths: dict[int, int] = {}
    for edit in search.written:
        _, before, after = search.change(edit)
        lengths[edit] = len(after) - len(before)
    mean = max(1.0, statistics.fmean(map(abs, lengths.values()))) if lengths else 1.0
    return {edit: _PRICE * deviation * length / mean for edit, length in lengths.items()}


def join_edits(
    search: Search, index: int, effects: Effects, prices: Mapping[int, float], *, max_characters: int
) -> Joined:
    """Return the prompts of the candidate `index` without the edits whose effect is below their price, and with at most
    two other edits, those whose effect is the most above it.

    An edit is neither added nor removed if that does not fit the text, or makes a prompt that cannot be used.

    max_characters: the largest number of characters of a prompt.
    """
    gains = {edit: effects.edits[edit] - price for edit, price in prices.items()}
    edits, prompts = list(search.edits[index]), dict(search.candidates[index].prompts)

    def put(edit: int, *, undo: bool) -> bool:
        """Add an edit to the prompts, or remove it if `undo`; return whether that is possible."""
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
    max_edits = len(edits) + _MAX_ADDED
    for edit in sorted(gains.keys() - search.edits[index], key=lambda edit: (-gains[edit], edit)):
        if len(edits) < max_edits and gains[edit] > 0 and put(edit, undo=False):
            edits.append(edit)
    if not edits:  # the user's prompts, to the letter: an edit that is undone may leave other white space
        prompts = dict(search.candidates[0].prompts)
    has_run = search.train[index] or search.val[index]
    parent = index if has_run else search.parents[index]
    return Joined(parent or 0, tuple(sorted(edits)), prompts)
