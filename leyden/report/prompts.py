"""The prompts of a run: the versions from which its best one was made, each with what it changed."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from leyden._lib.json import Json
from leyden.errors import LeydenError
from leyden.store.base import LightningStore
from leyden.training.runs import RecordedRun
from leyden.training.runs.rollouts import latest_resources
from leyden.types import PromptTemplate, ResourcesUpdate
from leyden.types.run_record import best_label

_VERSIONS, _MAX_TEXT = 8, 20_000
_MAX_WORDS = 2_000
"""Words and spaces beyond which texts are compared by lines, as the time grows with the product of their lengths."""


async def prompt_versions(run: RecordedRun, store: LightningStore) -> list[Json]:
    """Return the run's best prompts, or its newest, after the versions that they were made from; at most 8 versions."""
    update = await store.get_labelled_resources(best_label(run.record.run_id)) or await latest_resources(run, store)
    chain: list[ResourcesUpdate] = []
    while update is not None and len(chain) < _VERSIONS:
        chain.insert(0, update)
        parent, update = update.parent, None
        if parent is not None:
            try:
                update = await store.get_resources_by_id(parent[0], version=parent[1])
            except LeydenError:  # it was pruned
                break
    found: list[Json] = []
    before: dict[str, str] = {}
    for each in chain:
        texts = {name: of.template[:_MAX_TEXT] for name, of in each.resources.items() if isinstance(of, PromptTemplate)}
        for name, text in texts.items():
            if text != before.get(name):
                changes = [["same", text]] if name not in before else text_changes(before[name], text)
                found.append({"id": each.resources_id, "version": each.version, "name": name, "changes": changes})
        before |= texts
    return found


def text_changes(before: str, after: str) -> list[list[str]]:
    """Return what changed between two texts, as pieces that are `same`, `added` or `removed`."""
    old, new = (re.findall(r"\s+|\S+", text) for text in (before, after))
    if max(len(old), len(new)) > _MAX_WORDS:
        old, new = (text.splitlines(keepends=True) for text in (before, after))
    changes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    pieces: list[list[str]] = []
    removed = added = ""
    for place, (kind, i, j, k, m) in enumerate([*changes, ("equal", 0, 0, 0, 0)]):
        before, after = "".join(old[i:j]), "".join(new[k:m])
        if kind != "equal" or (before.isspace() and 0 < place < len(changes) - 1):  # a space between changed words
            removed, added = removed + before, added + after
            continue
        pieces += [["removed", removed], ["added", added], ["same", before]]
        removed = added = ""
    return [[kind, text] for kind, text in pieces if text]
