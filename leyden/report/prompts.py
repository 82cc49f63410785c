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
_MAX_WORDS = 1_500
"""Words of a text beyond which it is compared by lines, because the time grows with the product of both lengths."""


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
    old, new = (re.split(r"(?<=\s)(?=\S)", text) for text in (before, after))
    if max(len(old), len(new)) > _MAX_WORDS:
        old, new = (text.splitlines(keepends=True) for text in (before, after))
    pieces: list[list[str]] = []
    for kind, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        parts = [("same", old[i:j])] if kind == "equal" else [("removed", old[i:j]), ("added", new[k:m])]
        pieces += [[name, "".join(part)] for name, part in parts if part]
    return pieces
