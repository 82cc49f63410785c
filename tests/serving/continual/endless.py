"""A controller that learns in one cycle after the other until it is killed, and what users think of its candidates.

Users like half of the candidates, a quarter of them is refused by the grader, and users dislike the rest.
"""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import leyden as ly
from leyden.serving.continual import (
    OPEN_STATES,
    REWARD,
    TRANSITIONS,
    CanarySettings,
    ContinualLearning,
    GuardSettings,
    Limits,
    RecordedTasks,
    Trigger,
)
from leyden.store import LightningStore, LightningStoreClient
from leyden.types import NamedResources, PromptTemplate

__all__ = ["check_releases", "learn", "likes"]


def _kind(template: str) -> int:
    return crc32(template.encode()) % 4


def likes(template: str) -> bool:
    """Return whether users like a candidate."""
    return _kind(template) < 2


@ly.rollout
async def graded(task: object, prompt_template: PromptTemplate) -> float:
    """The agent with its grader."""
    return 0.0 if "candidate" in prompt_template.template and _kind(prompt_template.template) == 3 else 1.0


@ly.algo
def next_candidate(*, train_dataset: RecordedTasks) -> NamedResources:
    return {"prompt": PromptTemplate(template=f"candidate {train_dataset.records[0].rollout_id}")}


async def learn(url: str, folder: str, deadline_seconds: str = "20") -> None:
    """Learn until killed. deadline_seconds: how long a canary may be without a verdict."""
    async with LightningStoreClient(url, retry_seconds=0.2) as store:
        await ContinualLearning(
            next_candidate,
            graded,
            store=store,
            folder=Path(folder),
            trigger=Trigger(count=20),
            canary=CanarySettings(
                share=0.5,
                guard=GuardSettings(metrics=(REWARD,)),
                waiting_seconds=60,
                deadline_seconds=float(deadline_seconds),
                settle_seconds=0.3,
                lag_seconds=0.3,
            ),
            limits=Limits(nice=0, seconds=60),
            every_seconds=0.05,
            pause_seconds=0,
        ).run()


async def check_releases(store: LightningStore, first: tuple[str, int]) -> dict[str, str]:
    """Check that no transition is half made, and return the state of each row by its id.

    first: the version that was in production before.
    """
    audit = await store.query_audit(sort_order="asc")
    rows = {row.release_id: row for row in await store.query_releases()}
    path: dict[str, list[str]] = {}
    production, canary = first, None
    for each in audit:
        if each.action != "release":
            continue
        assert each.release_id is not None and each.state is not None
        states, row = path.setdefault(each.release_id, []), rows[each.release_id]
        if states:
            assert each.state in TRANSITIONS[states[-1]].values(), (each.release_id, states, each.state)  # pyright: ignore[reportArgumentType]
        else:
            assert each.state in ("training", "gating")
        states.append(each.state)
        if each.state == "canary":
            canary = row.canary_version
        elif each.state in ("promoted", "rolled_back"):
            assert canary == row.canary_version, "one canary at a time"
            production, canary = (canary if each.state == "promoted" else production), None
    assert {row_id: states[-1] for row_id, states in path.items()} == {key: row.state for key, row in rows.items()}
    assert sum(row.state in OPEN_STATES for row in rows.values()) <= 1
    labels = {each.label: (each.resources_id, each.version) for each in await store.get_labels()}
    assert (labels["production"], labels.get("canary")) == (production, canary)
    frozen = {
        (each.resources_id, each.version)
        for each in await store.query_resources(resources_id=first[0], all_versions=True)
        if each.frozen
    }
    assert frozen == {row.canary_version for row in rows.values() if row.state in ("refused", "rolled_back")}
    return {key: row.state for key, row in rows.items()}
