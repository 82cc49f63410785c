"""`transfer_edit`: make an edit of one text in another one too, sentence by sentence.

It works like cherry-picking a commit. With `before` and `after` exchanged, it undoes the edit. A
pure function of texts: it knows no prompts, no models and no optimiser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

_SENTENCE = re.compile(r".+?(?:(?<=[.!?])\s+|\n+|\Z)", re.DOTALL)
"""Matches a sentence or a line, with the space behind it."""

Change = tuple[int, int, list[str]]
"""The first sentence that is replaced, the one after the last, and what takes their place."""


def transfer_edit(before: str, after: str, target: str) -> str | None:
    """Return `target` with the change that was made from `before` to `after`.

    Sentences that were added to the target too are not added again. Return None if both texts
    changed the same sentences of `before`, because either could be meant.
    """
    base, own = _SENTENCE.findall(before), _SENTENCE.findall(target)
    kept = _changes(base, own)
    present = {sentence.strip() for _, _, added in kept for sentence in added}
    new = [
        (first, end, [sentence for sentence in added if sentence.strip() not in present])
        for first, end, added in _changes(base, _SENTENCE.findall(after))
        if (first, end, added) not in kept
    ]
    if any(_overlap(one, other) for one in kept for other in new):
        return None
    sentences, at = list[str](), 0
    for first, end, added in sorted([*kept, *new], key=lambda change: change[:2]):  # at one place, the target's first
        sentences += [*base[at:first], *added]
        at = max(at, end)
    sentences += base[at:]
    return "".join(each if each[-1].isspace() else f"{each}\n" for each in sentences).strip()


def _changes(before: Sequence[str], after: Sequence[str]) -> list[Change]:
    """Return what differs, apart from the space between sentences."""
    texts = [[sentence.strip() for sentence in sentences] for sentences in (before, after)]
    codes = SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    return [(i1, i2, [*after[j1:j2]]) for tag, i1, i2, j1, j2 in codes if tag != "equal"]


def _overlap(one: Change, other: Change) -> bool:
    """Return whether two changes are of the same sentences. Additions at one place are not."""
    (first, end, _), (other_first, other_end, _) = one, other
    if first == end or other_first == other_end:  # an addition: overlaps a change around it
        return first < other_first < end or other_first < first < other_end
    return max(first, other_first) < min(end, other_end)
