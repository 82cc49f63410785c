"""A release moves through its table, one transaction at a time, also when its process is killed."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import ConfigError, IllegalTransition, LabelMoved, ReleaseAdvanced, StoreError, VersionFrozen
from leyden.serving.continual import (
    OPEN_STATES,
    TRANSITIONS,
    advance,
    allow_learning,
    begin,
    is_stopped,
    next_state,
    open_releases,
    stop_learning,
)
from leyden.serving.continual.release import Event
from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from leyden.types import Label, PromptTemplate, Release

Version = tuple[str, int]


@pytest.fixture
async def store() -> AsyncGenerator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


async def new_version(store: LightningStore, text: str = "answer {task}") -> Version:
    update = await store.update_resources("prompts", {"prompt": PromptTemplate(template=text)})
    return update.resources_id, update.version


async def in_production(store: LightningStore) -> Version:
    version = await new_version(store)
    await store.set_label("production", *version)
    return version


async def labels_of(store: LightningStore) -> dict[str, Version]:
    return {each.label: (each.resources_id, each.version) for each in await store.get_labels()}


def test_every_way_through_the_table_ends() -> None:
    assert set(OPEN_STATES) == {"training", "gating", "shadow", "canary"}
    for state, events in TRANSITIONS.items():
        assert set(events.values()) <= set(TRANSITIONS)
        if state in OPEN_STATES:
            assert {"stop", "deadline"} <= set(events), f"{state} has no way out"
            assert next_state(state, "stop") not in OPEN_STATES
    with pytest.raises(IllegalTransition, match="is 'gating' takes no event 'better'"):
        next_state("gating", "better")
    with pytest.raises(IllegalTransition, match="it is final"):
        next_state("promoted", "worse")


async def test_a_better_canary_becomes_production_and_the_old_version_previous(store: LightningStore) -> None:
    old = await in_production(store)
    new = await new_version(store, "think, then answer {task}")
    release = await begin(store, "r1", candidate=new, production=old)
    release = await advance(store, release, "release", deadline=time.time() + 60)
    assert await labels_of(store) == {"production": old, "canary": new}
    release = await advance(store, release, "better", who="guard", why="reward is better")
    assert release.state == "promoted" and release.deadline is None
    assert await labels_of(store) == {"production": new, "previous": old}
    assert list(await open_releases(store)) == []


async def test_a_worse_canary_is_taken_out_and_cannot_be_assigned_again(store: LightningStore) -> None:
    old = await in_production(store)
    new = await new_version(store, "worse {task}")
    release = await advance(store, await begin(store, "r1", candidate=new, production=old), "release")
    release = await advance(store, release, "worse", why="reward is worse")
    assert release.state == "rolled_back" and await labels_of(store) == {"production": old}
    with pytest.raises(VersionFrozen):
        await store.set_label("canary", *new)
    again = await begin(store, "r2", candidate=new, production=old)
    with pytest.raises(VersionFrozen):
        await advance(store, again, "release")
    assert (await store.get_release("r2")).state == "gating", "the whole transition was undone"


async def test_a_refused_version_never_serves(store: LightningStore) -> None:
    old = await in_production(store)
    new = await new_version(store, "refused {task}")
    await advance(store, await begin(store, "r1", candidate=new, production=old), "refuse")
    assert await labels_of(store) == {"production": old}
    with pytest.raises(VersionFrozen):
        await store.set_label("production", *new)


async def test_of_two_processes_one_advances_and_the_other_is_refused(store: LightningStore) -> None:
    old, new = await in_production(store), await new_version(store, "new {task}")
    release = await advance(store, await begin(store, "r1", candidate=new, production=old), "release")
    results = await asyncio.gather(
        advance(store, release, "better"), advance(store, release, "worse"), return_exceptions=True
    )
    assert sorted(isinstance(each, ReleaseAdvanced) for each in results) == [False, True]
    assert "canary" not in await labels_of(store)


async def test_a_promotion_does_not_overwrite_what_an_operator_put_into_production(store: LightningStore) -> None:
    old, new = await in_production(store), await new_version(store, "new {task}")
    hotfix = await new_version(store, "fixed {task}")
    release = await advance(store, await begin(store, "r1", candidate=new, production=old), "release")
    await store.set_label("production", *hotfix, who="ann")
    with pytest.raises(LabelMoved, match="'production'"):
        await advance(store, release, "better")
    assert await labels_of(store) == {"production": hotfix, "canary": new}
    await advance(store, release, "stop")
    assert await labels_of(store) == {"production": hotfix}


async def test_the_kill_switch_ends_open_releases_and_lets_none_begin(store: LightningStore) -> None:
    old, new = await in_production(store), await new_version(store, "new {task}")
    await advance(store, await begin(store, "r1", candidate=new, production=old), "release")
    ended = await stop_learning(store, who="ann", why="complaints")
    assert [(each.release_id, each.state) for each in ended] == [("r1", "rolled_back")]
    assert await is_stopped(store) and list(await stop_learning(store)) == []
    late = await begin(store, "r2", candidate=await new_version(store, "later {task}"), production=old)
    assert late.state == "refused"
    records = await store.query_audit(label="learning-stopped")
    assert [(each.who, each.why) for each in records] == [("ann", "complaints")]
    await allow_learning(store, who="ann")
    third = await begin(store, "r3", candidate=await new_version(store, "third {task}"), production=old)
    assert third.state == "gating"


HAND_GIVEN = ("canary", "shadow", "production", "previous", "mine")
ENDINGS: list[tuple[list[Event], Event]] = [
    ([], "refuse"),
    ([], "deadline"),
    ([], "stop"),
    (["observe"], "refuse"),
    (["observe"], "deadline"),
    (["observe"], "stop"),
    (["release"], "worse"),
    (["release"], "deadline"),
    (["release"], "stop"),
]


@pytest.mark.parametrize("label", HAND_GIVEN)
@pytest.mark.parametrize(("path", "event"), ENDINGS)
async def test_a_label_that_a_person_gave_the_candidate_stays_and_keeps_no_release_open(
    store: LightningStore, label: str, path: list[Event], event: Event
) -> None:
    old, new = await in_production(store), await new_version(store, "new {task}")
    release = await begin(store, "r1", candidate=new, production=old)
    for each in path:
        release = await advance(store, release, each)
    own = label == "canary" and release.state == "canary"
    await store.set_label(label, *new, who="ann")
    ended = await advance(store, release, event)
    assert ended.state not in OPEN_STATES
    assert (await labels_of(store)).get(label) == (None if own else new)
    assert (await store.get_resources_by_id(*new[:1], version=new[1])).frozen == own


@pytest.mark.parametrize("label", HAND_GIVEN)
@pytest.mark.parametrize("path", [[], ["observe"], ["release"]])
async def test_a_label_that_a_person_takes_away_or_puts_elsewhere_keeps_no_release_open(
    store: LightningStore, label: str, path: list[Event]
) -> None:
    old, new = await in_production(store), await new_version(store, "new {task}")
    for number, move in enumerate(("away", "elsewhere")):
        candidate = await new_version(store, f"{number} {{task}}")
        release = await begin(store, f"r{number}", candidate=candidate, production=old)
        for each in path:
            release = await advance(store, release, each)
        if move == "away":
            await store.set_label(label, *candidate)
            await store.remove_label(label)
        else:
            await store.set_label(label, *new)
        (ended,) = await stop_learning(store)
        assert ended.state in ("refused", "rolled_back")
        assert (await store.get_resources_by_id(candidate[0], version=candidate[1])).frozen
        await allow_learning(store)
        if "production" not in await labels_of(store):
            await store.set_label("production", *old)


class MeddledStore(InMemoryLightningStore):
    """A store in which a person puts a label on a version just after the labels were read."""

    meddle: Callable[[], Awaitable[None]] | None = None

    async def get_labels(self) -> Sequence[Label]:
        labels = await super().get_labels()
        if (meddle := self.meddle) is not None:
            self.meddle = None
            await meddle()
        return labels


@pytest.mark.parametrize("label", HAND_GIVEN)
async def test_a_label_given_while_a_release_ends_changes_nothing_about_its_end(label: str) -> None:
    async with MeddledStore() as store:
        old, new = await in_production(store), await new_version(store, "new {task}")
        refused = await begin(store, "r1", candidate=new, production=old)
        store.meddle = lambda: store.set_label(label, *new, who="ann")
        assert (await advance(store, refused, "refuse")).state == "refused"
        assert (await labels_of(store))[label] == new


async def test_a_promotion_outlives_a_move_of_the_previous_label_meanwhile() -> None:
    async with MeddledStore() as store:
        old, new = await in_production(store), await new_version(store, "new {task}")
        release = await advance(store, await begin(store, "r1", candidate=new, production=old), "release")
        store.meddle = lambda: store.set_label("previous", *new, who="ann")
        assert (await advance(store, release, "better")).state == "promoted"
        assert await labels_of(store) == {"production": new, "previous": old}


async def test_the_kill_switch_works_without_a_version_in_production(store: LightningStore) -> None:
    with pytest.raises(ConfigError, match="'production'"):
        await stop_learning(store)
    old, new = await in_production(store), await new_version(store, "new {task}")
    first = await begin(store, "first", candidate=new, production=None)
    await begin(store, "second", candidate=await new_version(store, "newer {task}"), production=old)
    await advance(store, first, "release")
    await store.remove_label("production", who="ann")
    assert [each.state for each in await stop_learning(store)] == ["rolled_back", "refused"]
    assert await is_stopped(store) and not await open_releases(store)


class FailingStore(InMemoryLightningStore):
    """A store that fails on the row of one release."""

    async def advance_release(self, release_id: str, **given: Any) -> Release:
        if release_id == "r1":
            raise StoreError("the row is damaged")
        return await super().advance_release(release_id, **given)


async def test_the_kill_switch_ends_the_other_releases_and_names_the_one_that_it_cannot_end() -> None:
    async with FailingStore() as store:
        old = await in_production(store)
        for name in ("r1", "r2", "r3"):
            await begin(store, name, candidate=await new_version(store, f"{name} {{task}}"), production=old)
        with pytest.raises(StoreError, match=r"'r1' \(the row is damaged\).*ended now: 'r2', 'r3'"):
            await stop_learning(store)
        assert [each.release_id for each in await open_releases(store)] == ["r1"]


# ---- processes that are really killed --------------------------------------------------------------------------------


RELEASE_FOREVER = """
import asyncio, itertools, random, sys
from leyden.serving.continual import advance, begin, open_releases
from leyden.store import SqliteLightningStore
from leyden.types import PromptTemplate

async def main(path):
    numbers = random.Random()
    async with SqliteLightningStore(path) as store:
        print("ready", flush=True)
        for release in await open_releases(store):  # what the killed process before left open
            await advance(store, release, "stop")
        for count in itertools.count():
            labels = {each.label: (each.resources_id, each.version) for each in await store.get_labels()}
            text = f"{numbers.random()} {{task}}"
            made = await store.update_resources("prompts", {"prompt": PromptTemplate(template=text)})
            candidate = made.resources_id, made.version
            release = await begin(store, f"r-{made.version}", candidate=candidate, production=labels["production"])
            if numbers.random() < 0.2:
                await advance(store, release, "refuse")
                continue
            release = await advance(store, release, "release")
            await advance(store, release, "better" if numbers.random() < 0.5 else "worse")

asyncio.run(main(sys.argv[1]))
"""


def release_until_killed(path: Path, seconds: float) -> None:
    command = [sys.executable, "-c", RELEASE_FOREVER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.timeout(300)
async def test_a_killed_process_leaves_no_half_made_transition(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with SqliteLightningStore(path) as store:
        await in_production(store)
    numbers, transitions = random.Random(4), 0
    for _ in range(12):
        await asyncio.to_thread(release_until_killed, path, numbers.uniform(0.0, 0.25))
        async with SqliteLightningStore(path) as store:
            await check_labels_fit_releases(store)
            transitions = len(await store.query_releases())
    assert transitions > 12, "the processes were killed before they released anything"


async def check_labels_fit_releases(store: LightningStore) -> None:
    labels = await labels_of(store)
    releases = await store.query_releases(sort_order="asc")
    canaries = [each.canary_version for each in releases if each.state == "canary"]
    assert canaries == ([labels["canary"]] if "canary" in labels else [])
    promoted = [each for each in releases if each.state == "promoted"]
    if promoted:
        assert labels["production"] == promoted[-1].canary_version
        assert labels["previous"] == promoted[-1].from_version
    for each in releases:
        version = await store.get_resources_by_id(each.canary_version[0], version=each.canary_version[1])
        assert version.frozen == (each.state in ("rolled_back", "refused"))
