"""A canary on recorded requests: promotion, rollback, deadline, users who return, the kill switch."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from leyden.errors import ConfigError
from leyden.serving.continual import (
    FAILURE,
    REWARD,
    CanarySettings,
    GuardSettings,
    begin,
    judge,
    start_canary,
    step,
    stop_learning,
)
from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from leyden.types import Feedback, LiveClaim, PromptTemplate, Release
from tests.machine_clock import MachineClock

SETTINGS = CanarySettings(
    share=0.5,
    guard=GuardSettings(metrics=(REWARD,)),
    waiting_seconds=60,
    deadline_seconds=1000,
    settle_seconds=0,
    lag_seconds=0,
)
Version = tuple[str, int]


@pytest.fixture
async def store() -> AsyncGenerator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


async def canary_of(store: LightningStore, settings: CanarySettings = SETTINGS) -> Release:
    versions: list[Version] = []
    for name in ("old", "new"):
        update = await store.update_resources(name, {"prompt": PromptTemplate(template=name + " {task}")})
        versions.append((update.resources_id, update.version))
    await store.set_label("production", *versions[0])
    release = await begin(store, "r1", candidate=versions[1], production=versions[0])
    return await start_canary(store, release, settings)


async def serve(
    store: LightningStore,
    means: dict[str, float],
    requests: int,
    *,
    user: Callable[[int], str] = str,
    silent: bool = False,
) -> None:
    """Record live requests, with thumbs from their users."""
    numbers = random.Random(1)
    labels = {each.label: (each.resources_id, each.version) for each in await store.get_labels()}
    arms: dict[str, str] = {}
    thumbs: list[Feedback] = []
    for count in range(requests):
        name = user(count)
        arm = arms.setdefault(name, numbers.choice(["control", "canary"]))
        version = labels["production" if arm == "control" else "canary"]
        rollout = await store.start_rollout(
            {"task": count},
            mode="live",
            resources_id=version[0],
            arm=arm,
            metadata={"user": name},
        )
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
        label = "thumbs_up" if numbers.random() < means[arm] else "thumbs_down"
        thumbs.append(Feedback(rollout_id=rollout.rollout_id, source="user", kind="label", value=label))
    if not silent:
        await store.add_many_feedback(thumbs)


async def labels_of(store: LightningStore) -> dict[str, Version]:
    return {each.label: (each.resources_id, each.version) for each in await store.get_labels()}


async def test_a_better_canary_is_promoted(store: LightningStore) -> None:
    release = await canary_of(store)
    await serve(store, {"control": 0.3, "canary": 0.95}, 150)
    release, verdict = await step(store, "r1", SETTINGS)
    assert release.state == "promoted" and verdict is not None and verdict.decision == "promote"
    assert await labels_of(store) == {"production": release.canary_version, "previous": release.from_version}
    assert release.details["canary_requests"] + release.details["control_requests"] <= 150


async def test_a_worse_canary_is_rolled_back_and_the_next_request_has_the_old_version(store: LightningStore) -> None:
    release = await canary_of(store)
    await serve(store, {"control": 0.95, "canary": 0.3}, 100)
    release, _ = await step(store, "r1", SETTINGS)
    assert release.state == "rolled_back"
    assert await labels_of(store) == {"production": release.from_version}
    audit = (await store.query_audit(label="canary"))[0]
    assert (audit.who, audit.why) == ("continual", "reward is worse in the canary, at an error of 0.2")
    assert (await step(store, "r1", SETTINGS))[0].state == "rolled_back", "a second look changes nothing"


async def test_a_canary_without_traffic_is_rolled_back_at_its_deadline(store: LightningStore) -> None:
    release = await canary_of(store)
    now = time.time()
    assert (await step(store, "r1", SETTINGS, now=now + 900))[0].state == "canary"
    release, _ = await step(store, "r1", SETTINGS, now=now + 1001)
    assert release.state == "rolled_back"
    assert (await store.query_audit(release_id="r1"))[0].why == "no verdict after 0 requests: no decision yet on reward"


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_step_of_the_clock_neither_ends_a_canary_nor_prolongs_it(
    store: LightningStore, machine_clock: MachineClock, hours: int
) -> None:
    await canary_of(store)
    machine_clock.step(3600 * hours)
    assert (await step(store, "r1", SETTINGS))[0].state == "canary"
    machine_clock.let_pass(980)
    assert (await step(store, "r1", SETTINGS))[0].state == "canary"
    machine_clock.let_pass(40)
    assert (await step(store, "r1", SETTINGS))[0].state == "rolled_back"


@pytest.mark.parametrize("hours", [1, -1])
async def test_requests_after_a_step_of_the_clock_count_for_the_verdict(
    store: LightningStore, machine_clock: MachineClock, hours: int
) -> None:
    await canary_of(store)
    machine_clock.step(3600 * hours)
    await serve(store, {"control": 0.3, "canary": 0.95}, 150)
    assert (await step(store, "r1", SETTINGS))[0].state == "promoted"


async def test_a_controller_whose_clock_jumps_back_decides_later_and_alike(store: LightningStore) -> None:
    await canary_of(store)
    await serve(store, {"control": 0.3, "canary": 0.95}, 150)
    for seconds in (2 * 3600.0, 30.0):
        assert (await step(store, "r1", SETTINGS, now=time.time() - seconds))[0].state == "canary"
    assert (await step(store, "r1", SETTINGS))[0].state == "promoted"


async def test_a_controller_whose_clock_jumps_ahead_promotes_nothing_that_is_not_proven(store: LightningStore) -> None:
    release = await canary_of(store)
    await serve(store, {"control": 0.5, "canary": 0.5}, 40)
    assert (await step(store, "r1", SETTINGS, now=time.time() + 30 * 24 * 3600.0))[0].state == "rolled_back"
    assert await labels_of(store) == {"production": release.from_version}


async def test_requests_from_the_deadline_on_do_not_count(store: LightningStore) -> None:
    """Sessions give them all to the control, which would look like a wrong share to a controller that was away."""
    release = await canary_of(store, replace(SETTINGS, deadline_seconds=2.0))
    await serve(store, {"control": 0.5, "canary": 0.5}, 40, silent=True)
    assert release.deadline is not None
    await asyncio.sleep(max(0.0, release.deadline - time.time()))
    for count in range(60):
        user = {"user": f"late {count}"}
        await store.start_rollout({"task": count}, mode="live", resources_id="old", arm="control", metadata=user)
    verdict = await judge(store, release, SETTINGS, now=time.time() + 61)
    assert verdict.canary_requests + verdict.control_requests == 40
    assert not verdict.share_alarm


async def test_requests_without_feedback_are_awaited_and_then_left_out(store: LightningStore) -> None:
    release = await canary_of(store)
    await serve(store, {"control": 0.9, "canary": 0.1}, 20, silent=True)
    assert (await judge(store, release, SETTINGS)).canary_requests == 0, "awaited"
    later = await judge(store, release, SETTINGS, now=time.time() + 61)
    assert later.canary_requests + later.control_requests == 20
    assert later.metrics[0].canary_missing == 1.0 and later.metrics[0].canary_mean is None


async def test_what_arrives_after_the_waiting_time_never_counts(store: LightningStore) -> None:
    settings = replace(SETTINGS, waiting_seconds=0.2)
    release = await canary_of(store, settings)
    await serve(store, {"control": 1.0, "canary": 1.0}, 20)
    await serve(store, {"control": 1.0, "canary": 1.0}, 20, user=lambda count: f"silent-{count}", silent=True)
    await asyncio.sleep(0.25)
    before = await judge(store, release, settings)
    rollouts = await store.query_rollouts(mode_in=["live"])
    late = [Feedback(rollout_id=one.rollout_id, source="user", kind="label", value="thumbs_down") for one in rollouts]
    await store.add_many_feedback(late)
    assert await judge(store, release, settings) == before
    assert before.canary_requests + before.control_requests == 40
    assert before.metrics[0].canary_mean == 1.0


async def test_a_rollout_that_ends_after_the_waiting_time_has_no_values(store: LightningStore) -> None:
    settings = replace(SETTINGS, guard=GuardSettings(metrics=(REWARD, FAILURE)), waiting_seconds=0.05)
    release = await canary_of(store, settings)
    version = release.canary_version
    rollout = await store.start_rollout("q", mode="live", resources_id=version[0], arm="canary")
    await asyncio.sleep(0.1)
    before = await judge(store, release, settings)
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
    assert await judge(store, release, settings) == before
    assert before.canary_requests == 1 and before.metrics[1].canary_missing == 1.0


@pytest.mark.parametrize("late", ["served before the canary", "served without the labels"])
async def test_requests_whose_session_did_not_know_of_the_canary_do_not_count(store: LightningStore, late: str) -> None:
    release = await canary_of(store)
    assert release.from_version is not None
    old = late == "served without the labels"
    served_at = time.time() - (0 if old else 3600)
    claim = LiveClaim("late", "at", *release.from_version, "control", served_at)
    known = LiveClaim("known", "at", *release.from_version, "control", time.time())
    rollout = claim.rollout()
    rollout.metadata = {"labels_are_old": True} if old else {}
    await store.record_live_rollouts([rollout, known.rollout()])
    verdict = await judge(store, release, SETTINGS, now=time.time() + 61)
    assert verdict.control_requests == 1


async def test_a_user_who_returns_counts_once(store: LightningStore) -> None:
    """One angry user of the canary must not roll it back alone."""
    release = await canary_of(store)
    await serve(store, {"control": 0.9, "canary": 0.0}, 60, user=lambda count: f"user-{count % 2}")
    verdict = await judge(store, release, SETTINGS)
    assert verdict.canary_requests + verdict.control_requests == 2 and verdict.decision == "continue"


async def test_requests_before_the_sessions_know_of_the_canary_do_not_count(store: LightningStore) -> None:
    settings = replace(SETTINGS, settle_seconds=500)
    release = await canary_of(store, settings)
    await serve(store, {"control": 0.9, "canary": 0.1}, 20)
    assert (await judge(store, release, settings)).control_requests == 0


async def test_the_kill_switch_ends_a_canary(store: LightningStore) -> None:
    release = await canary_of(store)
    await stop_learning(store, who="ann")
    assert (await step(store, "r1", SETTINGS))[0].state == "rolled_back"
    assert (await labels_of(store)).get("production") == release.from_version


async def test_settings_and_releases_that_cannot_be_judged_are_refused(store: LightningStore) -> None:
    release = await canary_of(store)
    with pytest.raises(ConfigError, match="share is 1"):
        CanarySettings(share=1.0)
    with pytest.raises(ConfigError, match="no canary"):
        await judge(store, release.model_copy(update={"details": {}}), SETTINGS)


STEP_FOREVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from test_watch import SETTINGS
from leyden.serving.continual import step
from leyden.store import SqliteLightningStore

async def main(path):
    async with SqliteLightningStore(path) as store:
        print("ready", flush=True)
        while (await step(store, "r1", SETTINGS))[0].state == "canary":
            await asyncio.sleep(0)
        print("done", flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.timeout(240)
async def test_a_killed_controller_continues_and_reaches_the_same_verdict(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with SqliteLightningStore(path) as store:
        await canary_of(store)
        await serve(store, {"control": 0.9, "canary": 0.3}, 120)
        expected = await judge(store, await store.get_release("r1"), SETTINGS)
    assert expected.decision == "roll_back"
    for seconds in (0.0, 0.01, 0.03, None):
        await asyncio.to_thread(step_until_killed, path, seconds)
    async with SqliteLightningStore(path) as store:
        release = await store.get_release("r1")
        assert release.state == "rolled_back"
        assert release.details["canary_requests"] == expected.canary_requests
        assert await labels_of(store) == {"production": release.from_version}


def step_until_killed(path: Path, seconds: float | None) -> None:
    """Run the controller; None: until it is done."""
    command = [sys.executable, "-c", STEP_FOREVER, str(path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if seconds is None:
            assert process.stdout.readline() == "done\n"
        else:
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)
