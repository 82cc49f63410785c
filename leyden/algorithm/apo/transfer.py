"""`transfer_edit`: repeat an edit of one text in another text, sentence by sentence, as version control does when it
picks a commit.

With `before` and `after` exchanged, it undoes the edit. A pure function of texts, which knows no prompts, no models and
no optimiser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

_SENTENCE = re.compile(r".+?(?:(?<=[.!?])\s+|\n+|\Z)", re.DOTALL)
"""Matches a sentence or a line, with the white space after it."""

Change = tuple[int, int, list[str]]
"""The index of the first sentence that is replaced, the index after that of the last, and the sentences that take their
place."""


def transfer_edit(before: str, after: str, target: str) -> str | None:
    """Return `target` with the change that was made from `before` to `after`.

    target: another text that was made from `before`. Sentences that it already has in addition to `before` are not
        added again.
    Return None if `after` and `target` changed the same sentences of `before` in different ways, because either could
    be meant.
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
    texts = [[sentence.strip() for sentence in sentences] for sentences in (before, after)]
    codes = SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    return [(i1, i2, [*after[j1:j2]]) for tag, i1, i2, j1, j2 in codes if tag != "equal"]


def _overlap(one: Change, other: Change) -> bool:
    (first, end, _), (other_first, other_end, _) = one, other
    if first == end or other_first == other_end:  # an addition overlaps a change on both sides of it
        return first < other_first < end or other_first < first < other_end
    return max(first, other_first) < min(end, other_end)
