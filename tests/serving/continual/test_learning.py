"""A whole cycle: drift, training in another process, gate, shadow, canary, promotion; and every way out of it."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import ConfigError, LabelMoved
from leyden.serving.continual import (
    REWARD,
    CanarySettings,
    ContinualLearning,
    CycleStatus,
    DataSettings,
    Drift,
    GateSettings,
    GuardSettings,
    Limits,
    ShadowSettings,
    Trigger,
    allow_learning,
    stop_learning,
)
from leyden.store import InMemoryLightningStore, LightningStore
from leyden.types import Feedback, Rollout
from tests.serving.continual import world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # each training and each check is a process

CANARY = CanarySettings(
    share=0.5,
    guard=GuardSettings(metrics=(REWARD,)),
    waiting_seconds=60,
    deadline_seconds=1000,
    settle_seconds=0,
    lag_seconds=0,
)
TRIGGER = Trigger(drift=Drift(tolerance=0.1, reference_count=30, run_length=100))
NOW = Trigger(count=1)


@pytest.fixture
async def store() -> AsyncGenerator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


def learning(
    store: LightningStore, folder: Path, algorithm: Any = world.most_wanted, **options: Any
) -> ContinualLearning:
    defaults: dict[str, Any] = {
        "trigger": TRIGGER,
        "canary": CANARY,
        "every_seconds": 0.05,
        "pause_seconds": 0,
        "limits": Limits(nice=0, seconds=120),
    }
    return ContinualLearning(algorithm, world.support, store=store, folder=folder, **{**defaults, **options})


async def labels_of(store: LightningStore) -> dict[str, world.Version]:
    return {each.label: (each.resources_id, each.version) for each in await store.get_labels()}


async def tone_in_production(store: LightningStore) -> str:
    version = (await labels_of(store))["production"]
    prompt: Any = (await store.get_resources_by_id(version[0], version=version[1])).resources["prompt"]
    return world.tone_of(prompt)


async def states_of(store: LightningStore) -> dict[str, str]:
    return {row.release_id: row.state for row in await store.query_releases(sort_order="asc")}


async def until(cycle: ContinualLearning, *states: str) -> CycleStatus:
    """Step until the status is one of these."""
    deadline = time.monotonic() + 120
    while (status := await cycle.step()).state not in states:
        assert time.monotonic() < deadline, status
    return status


async def until_it_is(store: LightningStore, state: str) -> None:
    """Wait until the first cycle's release is in a state."""
    after: str | None = None
    while (await states_of(store)).get("learning-000001-release") != state:
        after = (await store.get_news(after=after, labels=True, timeout_seconds=10)).after


async def eventually(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.05)


async def test_a_drift_is_found_learned_from_checked_and_released(store: LightningStore, tmp_path: Path) -> None:
    first = await world.release_first(store, "plain")
    cycle = learning(store, tmp_path)
    await world.serve(store, 100, wants="plain")
    assert (await cycle.step()).state == "idle", "nothing has changed"
    await world.serve(store, 60, wants="kind", seed=1)
    status = await cycle.step()
    assert status.state == "training" and "dropped by more than 0.1" in status.said
    assert (await cycle.step()).state == "gating"
    status = await cycle.step()
    assert status.state == "canary"
    gate = (await store.get_release("learning-000001-release")).details["gate"]
    assert gate["gain"] > 0.4, "measured on requests since the drop, with some older ones"
    assert await tone_in_production(store) == "plain", "users of the control still have the old version"
    await world.serve(store, 200, wants="kind", seed=2)
    assert (await cycle.step()).state == "promoted"
    assert await tone_in_production(store) == "kind"
    assert (await labels_of(store))["previous"] == first
    assert await states_of(store) == {"learning-000001": "trained", "learning-000001-release": "promoted"}
    assert (await cycle.step()).state == "idle", "the new version has its own level"
    candidate = (await store.query_resources(resources_id="helpdesk"))[0]
    assert (candidate.author, candidate.parent) == ("learning-000001", first)


async def test_a_bad_candidate_is_refused_at_the_gate_and_no_user_gets_it(
    store: LightningStore, tmp_path: Path
) -> None:
    first = await world.release_first(store, "plain")
    await world.serve(store, 60, wants="plain")
    cycle = learning(store, tmp_path, world.rude, trigger=NOW)
    status = await until(cycle, "refused")
    assert "-1" in status.said and "at least 0 is required" in status.said
    assert await labels_of(store) == {"production": first}
    assert (await store.get_resources_by_id("helpdesk", version=2)).frozen
    await world.serve(store, 60, wants="plain", seed=1)
    status = await until(cycle, "abandoned")
    assert "equal to version 2, which is frozen" in status.said, "it is not tried again"


async def test_a_candidate_that_users_dislike_is_rolled_back(store: LightningStore, tmp_path: Path) -> None:
    first = await world.release_first(store, "plain")
    await world.serve(store, 60, wants="kind")
    cycle = learning(store, tmp_path, trigger=NOW)
    await until(cycle, "canary")
    await world.serve(store, 200, wants="kind", likes=lambda tone, _: tone == "plain", seed=1)  # the grader is wrong
    assert (await until(cycle, "rolled_back")).said == "reward is worse in the canary, at an error of 0.2"
    assert await labels_of(store) == {"production": first}


async def test_a_candidate_answers_live_tasks_in_the_shadow_before_a_user_gets_it(
    store: LightningStore, tmp_path: Path
) -> None:
    first = await world.release_first(store, "plain")
    await world.serve(store, 60, wants="kind")
    shadow = ShadowSettings(requests=8, gate=GateSettings(min_gain=0.5))
    cycle = learning(store, tmp_path, trigger=NOW, shadow=shadow)
    await until(cycle, "shadow")
    assert await labels_of(store) == {"production": first}
    assert (await cycle.step()).said == "0 of 8 live requests"
    await world.serve(store, 10, wants="kind", seed=1)
    status = await cycle.step()
    assert status.state == "canary"
    release = await store.get_release("learning-000001-release")
    assert release.details["gate"]["gain"] == 1.0
    assert "differs by 1" in release.details.get("why", "") + status.said


async def test_a_shadow_that_fails_refuses_the_candidate(store: LightningStore, tmp_path: Path) -> None:
    await world.release_first(store, "plain")
    await world.serve(store, 60, wants="kind")
    shadow = ShadowSettings(requests=8, gate=GateSettings(min_gain=0.5))
    cycle = learning(store, tmp_path, trigger=NOW, shadow=shadow)
    await until(cycle, "shadow")
    await world.serve(store, 10, wants="plain", seed=1)  # users want something else meanwhile
    assert (await cycle.step()).state == "refused"


@pytest.mark.parametrize(
    ("algorithm", "limits", "words"),
    [
        (world.failing, {}, "ValueError: no idea"),
        (world.dying, {}, r"was killed by SIGKILL.*I was about to"),
        (world.burning, {"cpu_seconds": 4}, r"CPU time, as many as Limits\(cpu_seconds=\) allows"),
        (world.hoarding, {"memory_bytes": 2**30}, "MemoryError"),
        (world.sleeping, {"seconds": 3}, "was not done in time"),
        (world.nothing, {}, "found nothing to try"),
    ],
)
async def test_training_that_fails_dies_or_takes_too_much_ends_the_cycle_with_its_last_words(
    store: LightningStore, tmp_path: Path, algorithm: Any, limits: dict[str, Any], words: str
) -> None:
    first = await world.release_first(store, "plain")
    await world.serve(store, 60, wants="kind")
    cycle = learning(store, tmp_path, algorithm, trigger=NOW, limits=Limits(**{"nice": 0, "seconds": 120, **limits}))
    await until(cycle, "abandoned")
    row = await store.get_release("learning-000001")
    assert row.details["why"] == (await store.query_audit(release_id=row.release_id))[0].why
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(row.details["why"])
    assert await labels_of(store) == {"production": first}
    assert len(await store.query_resources(resources_id="helpdesk", all_versions=True)) == 1


async def test_the_kill_switch_ends_training_at_once(store: LightningStore, tmp_path: Path) -> None:
    first = await world.release_first(store, "plain")
    await world.serve(store, 60, wants="kind")
    cycle = learning(store, tmp_path, world.sleeping, trigger=NOW)
    async with cycle:
        running = asyncio.ensure_future(cycle.run())
        await eventually((tmp_path / "learning-000001" / "train" / "run.json").exists)
        ended = await stop_learning(store, who="ann", why="complaints")
        assert [row.state for row in ended] == ["abandoned"]
        await eventually(lambda: not multiprocessing.active_children())
        assert (await cycle.step()).state == "stopped"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert await labels_of(store) == {"production": first, "learning-stopped": first}
    await allow_learning(store)
    assert (await learning(store, tmp_path, world.nothing, trigger=NOW).step()).state == "idle", "nothing is new"


async def test_what_a_person_has_moved_ends_the_release_and_stays(store: LightningStore, tmp_path: Path) -> None:
    await world.release_first(store, "plain")
    await world.serve(store, 60, wants="kind")
    cycle = learning(store, tmp_path, trigger=NOW)
    await until(cycle, "canary")
    hotfix = await store.update_resources("hotfix", {"prompt": world.prompt("short")})
    await store.set_label("production", hotfix.resources_id, hotfix.version, who="ann")
    release = await store.get_release("learning-000001-release")
    with pytest.raises(LabelMoved):
        await store.set_label("production", *release.canary_version, expected=release.from_version)
    await store.set_label("canary", hotfix.resources_id, hotfix.version, who="ann")
    await stop_learning(store, who="ann")
    assert (await store.get_release(release.release_id)).state == "rolled_back", "a moved label keeps nothing open"
    there = await labels_of(store)
    assert there["production"] == there["canary"] == ("hotfix", 1)


@pytest.mark.parametrize("label", ["canary", "shadow", "mine"])
async def test_a_label_given_by_hand_to_a_candidate_that_is_refused_does_not_end_learning(
    store: LightningStore, tmp_path: Path, label: str
) -> None:
    await world.release_first(store, "plain")
    await world.serve(store, 60, wants="plain")
    cycle = learning(store, tmp_path, world.rude, trigger=NOW)
    await until(cycle, "gating")
    candidate = (await store.get_release("learning-000001-release")).canary_version
    await store.set_label(label, *candidate, who="ann")
    await until(cycle, "refused")
    assert (await labels_of(store))[label] == candidate
    assert (await cycle.step()).state == "idle", "learning goes on"


async def test_a_canary_that_cannot_be_judged_is_rolled_back_at_its_deadline_and_learning_goes_on(
    store: LightningStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def judged(rollout: Rollout, feedback: Sequence[Feedback]) -> dict[str, float]:
        raise ZeroDivisionError("no feedback yet")

    await world.release_first(store, "plain")
    await world.serve(store, 60, wants="kind")
    broken = replace(CANARY, values=judged, deadline_seconds=4.0)
    cycle = learning(store, tmp_path, trigger=NOW, canary=broken, pause_seconds=3600)
    running = asyncio.create_task(cycle.run())
    try:
        await until_it_is(store, "canary")
        await world.serve(store, 10, wants="kind")
        await until_it_is(store, "rolled_back")
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert "canary" not in await labels_of(store)
    (record,) = [
        each for each in await store.query_audit(release_id="learning-000001-release") if each.state == "rolled_back"
    ]
    assert record.why == "it was not done in time (canary): no feedback yet"
    assert [each.message for each in caplog.records].count(
        "learning: a step has failed and is tried again: no feedback yet"
    ) == 1


async def test_a_program_that_cannot_start_a_training_ends_with_the_reason(
    store: LightningStore, tmp_path: Path
) -> None:
    await world.release_first(store, "plain")
    await world.serve(store, 60, wants="kind")
    cycle = learning(store, tmp_path, trigger=NOW, trainer={"callbacks": [threading.Lock()]})
    with pytest.raises(ConfigError, match="train cannot go to a process of its own"):
        await cycle.run()


async def test_too_few_requests_are_not_learned_from(store: LightningStore, tmp_path: Path) -> None:
    await world.release_first(store, "plain")
    await world.serve(store, 3, wants="kind")
    status = await learning(store, tmp_path, trigger=NOW).step()
    assert status.state == "idle" and "not enough yet" in status.said
    assert await states_of(store) == {}


async def test_two_processes_do_not_share_a_folder_and_bad_options_are_refused(
    store: LightningStore, tmp_path: Path
) -> None:
    async with learning(store, tmp_path):
        with pytest.raises(ConfigError, match="another process learns"):
            async with learning(store, tmp_path):
                pass
    with pytest.raises(ConfigError, match="store, which ContinualLearning sets itself"):
        learning(store, tmp_path, trainer={"store": store})
    with pytest.raises(ConfigError, match="name is 'a/b'"):
        learning(store, tmp_path, name="a/b")
    with pytest.raises(ConfigError, match="held_out is 2"):
        DataSettings(held_out=2)
