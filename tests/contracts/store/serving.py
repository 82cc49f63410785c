"""The part of the store's contract that serving needs: feedback, the audit log, frozen versions, releases."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from leyden.errors import (
    ConfigError,
    LabelMoved,
    ReleaseAdvanced,
    UnknownRelease,
    UnknownResources,
    UnknownRollout,
    VersionFrozen,
)
from leyden.store import LightningStore
from leyden.types import AttemptedRollout, Feedback, LabelMove, LiveRollout, Retention
from tests.contracts.store.support import SOON
from tests.contracts.store.versions import labels, written


async def served(store: LightningStore, rollout_id: str, *, arm: str = "control") -> None:
    """A finished live rollout on version 1 of `rs`."""
    rollout = await store.start_rollout("task", "live", "rs", rollout_id=rollout_id, arm=arm)
    await store.update_attempt(rollout_id, rollout.attempt.attempt_id, status="succeeded")


# ---- feedback --------------------------------------------------------------------------------------------------------


async def test_feedback_has_the_version_and_the_arm_of_its_rollout(store: LightningStore) -> None:
    await written(store, "a")
    await served(store, "ro", arm="canary")
    stored = await store.add_many_feedback(
        [
            Feedback(rollout_id="ro", source="user", value=0.5, given_time=7.0),
            Feedback(rollout_id="ro", source="user", kind="label", value="thumbs_up"),
            Feedback(rollout_id="ro", source="ada", kind="correction", value={"answer": [1, None]}),
        ]
    )
    assert [(one.resources_id, one.version, one.arm) for one in stored] == [("rs", 1, "canary")] * 3
    assert [one.value for one in stored] == [0.5, "thumbs_up", {"answer": [1, None]}]
    assert stored[0].given_time == 7.0
    assert None not in [one.received_time for one in stored]
    assert list(await store.query_feedback(rollout_id="ro")) == list(stored)
    assert [one.kind for one in await store.query_feedback(source="user", kind="label")] == ["label"]
    assert (await store.query_feedback(resources_id="rs", version=1, arm="canary")).total == 3
    assert (await store.query_feedback(resources_id="rs", version=2)).total == 0
    assert list(await store.query_feedback(after=stored[1].sequence_id)) == [stored[2]]


async def test_repeated_feedback_is_counted_once(store: LightningStore) -> None:
    await written(store, "a")
    await served(store, "ro")
    one = Feedback(feedback_id="fb", rollout_id="ro", source="user", value=1.0)
    first = await asyncio.gather(*(store.add_many_feedback([one, one]) for _ in range(5)))
    assert {stored.sequence_id for batch in first for stored in batch} == {first[0][0].sequence_id}
    assert (await store.query_feedback()).total == 1
    with pytest.raises(ConfigError, match=r"'fb'.*'user'"):
        await store.add_many_feedback([one.model_copy(update={"source": "other"})])


async def test_the_last_of_a_source_counts_and_all_are_kept(store: LightningStore) -> None:
    await written(store, "a")
    await served(store, "ro")
    for source, value in (("user", 1.0), ("grader", 0.5), ("user", 0.0)):
        await store.add_many_feedback([Feedback(rollout_id="ro", source=source, value=value)])
    assert [one.value for one in await store.query_feedback()] == [1.0, 0.5, 0.0]
    assert [(one.source, one.value) for one in await store.query_feedback(counted=True)] == [
        ("grader", 0.5),
        ("user", 0.0),
    ]


async def test_feedback_counts_for_its_version_when_the_rollout_was_forgotten(store: LightningStore) -> None:
    await written(store, "a", "b")
    await served(store, "early", arm="canary")
    await store.add_many_feedback([Feedback(rollout_id="early", source="user", value=1.0)])
    for rollout_id in ("late", "last"):
        await served(store, rollout_id)
    assert await store.prune(Retention(max_rollouts=1)) == 2
    with pytest.raises(UnknownRollout):
        await store.get_rollout_by_id("early")
    await store.add_many_feedback([Feedback(rollout_id="early", source="user", value=0.0)])
    counted = await store.query_feedback(resources_id="rs", version=2, arm="canary")
    assert [one.value for one in counted] == [1.0, 0.0]


async def test_feedback_about_an_unknown_rollout_needs_a_version(store: LightningStore) -> None:
    await written(store, "a")
    await served(store, "ro")
    known = Feedback(rollout_id="ro", source="user", value=1.0)
    with pytest.raises(UnknownRollout, match="'missing'"):
        await store.add_many_feedback([known, Feedback(rollout_id="missing", source="user", value=1.0)])
    assert (await store.query_feedback()).total == 0
    given = Feedback(rollout_id="missing", source="user", value=1.0, resources_id="rs", version=1, arm="canary")
    (stored,) = await store.add_many_feedback([given])
    assert (stored.resources_id, stored.version, stored.arm) == ("rs", 1, "canary")


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, "1", None, [1.0]])
async def test_a_reward_is_a_finite_number(store: LightningStore, value: object) -> None:
    await written(store, "a")
    await served(store, "ro")
    with pytest.raises(ValueError, match=r"no (finite )?number|more than a float can hold"):
        Feedback(rollout_id="ro", source="user", value=value)
    unchecked = Feedback(rollout_id="ro", source="user", value=1.0).model_copy(update={"value": value})
    with pytest.raises(ConfigError):
        await store.add_many_feedback([unchecked])
    assert (await store.query_feedback()).total == 0


async def test_a_thumb_up_is_a_reward_of_one(store: LightningStore) -> None:
    await written(store, "a")
    await served(store, "ro")
    (stored,) = await store.add_many_feedback([Feedback(rollout_id="ro", source="user", value=True)])
    (read,) = await store.query_feedback()
    assert [(one.value, type(one.value)) for one in (stored, read)] == [(1.0, float)] * 2


# ---- the audit log and frozen versions -------------------------------------------------------------------------------


async def test_each_change_of_a_label_is_in_the_audit_log_once(store: LightningStore) -> None:
    await written(store, "a", "b")
    await store.set_label("production", "rs", 1, who="ada", why="first")
    await store.set_label("production", "rs", 1, who="bob", why="repeated")
    await store.set_label("production", "rs", 2, expected=("rs", 1), who="bob")
    with pytest.raises(LabelMoved):
        await store.set_label("production", "rs", 1, expected=("rs", 1), who="cy")
    with pytest.raises(LabelMoved):
        await store.remove_label("production", expected=("rs", 1), who="cy")
    await store.remove_label("production", who="ada")
    await store.remove_label("production", who="ada")
    log = await store.query_audit(sort_order="asc")
    assert [(one.action, one.before, one.after, one.who, one.why) for one in log] == [
        ("set_label", None, ("rs", 1), "ada", "first"),
        ("set_label", ("rs", 1), ("rs", 2), "bob", None),
        ("remove_label", ("rs", 2), None, "ada", None),
    ]
    assert [one.action for one in await store.query_audit(label="production", limit=1)] == ["remove_label"]
    assert (await store.query_audit(resources_id="other")).total == 0


async def test_a_frozen_version_gets_no_label(store: LightningStore) -> None:
    await written(store, "a", "b")
    await store.freeze_resources("rs", 2, who="ada", why="wrong answers")
    await store.freeze_resources("rs", 2, who="bob")
    assert (await store.get_resources_by_id("rs", version=2)).frozen
    assert not (await store.get_resources_by_id("rs", version=1)).frozen
    with pytest.raises(VersionFrozen, match=r"version 2 of 'rs'.*frozen"):
        await store.set_label("production", "rs", 2)
    await store.set_label("production", "rs", 1)
    with pytest.raises(ConfigError, match="'production'"):
        await store.freeze_resources("rs", 1)
    await store.freeze_resources("rs", 2, frozen=False)
    await store.set_label("production", "rs", 2)
    assert [one.action for one in await store.query_audit()] == ["set_label", "unfreeze", "set_label", "freeze"]
    with pytest.raises(UnknownResources):
        await store.freeze_resources("rs", 9)


async def test_labels_move_together_or_not_at_all(store: LightningStore) -> None:
    await written(store, "a", "b", "c")
    await store.set_label("production", "rs", 1)
    promote = [
        LabelMove(label="production", to=("rs", 2), expected=("rs", 1)),
        LabelMove(label="previous", to=("rs", 1), expected=None),
    ]
    await store.move_labels(promote, who="ada")
    await store.move_labels(promote, who="ada")  # repeated
    assert await labels(store) == {"previous": ("rs", 1), "production": ("rs", 2)}
    with pytest.raises(LabelMoved):
        await store.move_labels(
            [
                LabelMove(label="previous", to=("rs", 2), expected=("rs", 1)),
                LabelMove(label="production", to=("rs", 3), expected=("rs", 1)),
            ],
            who="bob",
        )
    assert await labels(store) == {"previous": ("rs", 1), "production": ("rs", 2)}
    rollback = [LabelMove(label="production", to=("rs", 1), expected=("rs", 2))]
    await store.move_labels(rollback, freeze=[("rs", 2)], who="bob")
    assert (await store.get_resources_by_id("rs", version=2)).frozen
    assert [one.who for one in await store.query_audit()] == ["bob", "bob", "ada", "ada", None]


# ---- releases --------------------------------------------------------------------------------------------------------


async def test_a_release_advances_with_its_labels(store: LightningStore) -> None:
    await written(store, "a", "b")
    await store.set_label("production", "rs", 1)
    canary = LabelMove(label="canary", to=("rs", 2), expected=None)
    made = await store.create_release(
        "re", ("rs", 2), state="canary", from_version=("rs", 1), details={"n": 1}, deadline=9.0, labels=[canary]
    )
    assert (made.state, made.from_version, made.canary_version) == ("canary", ("rs", 1), ("rs", 2))
    assert await store.create_release("re", ("rs", 2), state="canary") == made
    noted = await store.advance_release("re", expected_state="canary", state="canary", details={"m": 2})
    assert (noted.details, noted.deadline) == ({"n": 1, "m": 2}, 9.0)
    done = await store.advance_release(
        "re",
        expected_state="canary",
        state="rolled_back",
        deadline=None,
        labels=[LabelMove(label="canary", to=None, expected=("rs", 2))],
        freeze=[("rs", 2)],
        who="gate",
        why="reward",
    )
    assert (done.state, done.deadline) == ("rolled_back", None)
    assert await store.get_release("re") == done
    assert await labels(store) == {"production": ("rs", 1)}
    log = await store.query_audit(release_id="re", sort_order="asc")
    assert [(one.action, one.state) for one in log] == [
        ("set_label", None),
        ("release", "canary"),
        ("remove_label", None),
        ("freeze", None),
        ("release", "rolled_back"),
    ]
    assert [one.release_id for one in await store.query_releases(state_in=["rolled_back"])] == ["re"]
    assert list(await store.query_releases(state_in=["canary"])) == []


async def test_of_many_who_advance_a_release_one_succeeds(store: LightningStore) -> None:
    await written(store, "a", "b")
    await store.create_release("re", ("rs", 2), state="canary")
    states = [f"state-{n}" for n in range(6)]
    moves = [store.advance_release("re", expected_state="canary", state=state) for state in states]
    done = await asyncio.gather(*moves, return_exceptions=True)
    assert sorted(type(each).__name__ for each in done) == ["Release"] + ["ReleaseAdvanced"] * 5
    release = await store.get_release("re")
    assert await store.advance_release("re", expected_state="canary", state=release.state) == release  # repeated


async def test_a_transition_that_cannot_move_its_labels_changes_nothing(store: LightningStore) -> None:
    await written(store, "a", "b")
    before = await store.create_release("re", ("rs", 2), state="canary")
    with pytest.raises(LabelMoved):
        await store.advance_release(
            "re",
            expected_state="canary",
            state="promoted",
            details={"x": 1},
            labels=[
                LabelMove(label="previous", to=("rs", 1), expected=None),
                LabelMove(label="production", to=("rs", 2), expected=("rs", 1)),
            ],
        )
    assert await store.get_release("re") == before
    assert await labels(store) == {}
    with pytest.raises(ReleaseAdvanced, match=r"'re'.*'canary', not 'shadow'"):
        await store.advance_release("re", expected_state="shadow", state="promoted")


async def test_a_release_needs_a_version_and_an_id_of_its_own(store: LightningStore) -> None:
    await written(store, "a", "b")
    with pytest.raises(UnknownResources):
        await store.create_release("re", ("rs", 3), state="canary")
    with pytest.raises(UnknownRelease, match="'re'"):
        await store.get_release("re")
    with pytest.raises(UnknownRelease):
        await store.advance_release("re", expected_state="canary", state="promoted")
    await store.create_release("re", ("rs", 2), state="canary")
    with pytest.raises(ConfigError, match="'re'"):
        await store.create_release("re", ("rs", 1), state="canary")
    with pytest.raises(ConfigError, match=r"deadline|NaN"):
        await store.create_release("other", ("rs", 1), state="canary", deadline=math.nan)


# ---- live rollouts ---------------------------------------------------------------------------------------------------


def live(rollout_id: str = "lv", **fields: Any) -> LiveRollout:
    """A live rollout on version 1 of `rs`."""
    given: dict[str, Any] = {"attempt_id": "at", "resources_id": "rs", "version": 1, "arm": "canary", "start_time": 5.0}
    return LiveRollout(rollout_id=rollout_id, **(given | fields))


async def test_a_live_rollout_is_recorded_in_any_order_and_once(store: LightningStore) -> None:
    await written(store, "a", "b")
    begun, ended = live(input={"q": 1}), live(input={"q": 1}, status="failed", reason="no tool", seconds=0.25)
    await store.record_live_rollouts([live()])  # by a gateway, which knows no input
    await store.record_live_rollouts([begun, ended])
    await store.record_live_rollouts([begun, ended, live(status="succeeded"), live("other", status="succeeded")])
    rollout = await store.get_rollout_by_id("lv")
    assert isinstance(rollout, AttemptedRollout)
    assert (rollout.mode, rollout.arm, rollout.resources_version, rollout.input) == ("live", "canary", 1, {"q": 1})
    assert (rollout.status, rollout.attempt.status, rollout.attempt.metadata["served_seconds"]) == ("failed",) * 2 + (
        0.25,
    )
    assert (await store.query_rollouts()).total == 2
    assert await store.dequeue_rollout() is None
    with pytest.raises(ConfigError, match="'lv'"):
        await store.record_live_rollouts([live("third"), live(attempt_id="another")])
    assert (await store.query_rollouts()).total == 2


async def test_names_of_leydens_own_are_refused_in_metadata(store: LightningStore) -> None:
    own = ("leyden.replay_from", "leyden.sampling_key", "leyden.anything")
    for name in own:
        with pytest.raises(ConfigError, match=name):
            await store.record_live_rollouts(
                [live(metadata={name: {"rollout_id": "r", "attempt_id": "a", "calls": 1}})]
            )
    rollout = await store.enqueue_rollout(1)
    for name in ("leyden.anything", "leyden."):
        with pytest.raises(ConfigError, match="Leyden's own"):
            await store.enqueue_rollout(1, metadata={name: 1})
        with pytest.raises(ConfigError, match="Leyden's own"):
            await store.start_rollout(1, metadata={name: 1})
        with pytest.raises(ConfigError, match="Leyden's own"):
            await store.update_rollout(rollout.rollout_id, metadata={name: 1})
    assert len(await store.query_rollouts()) == 1
    await store.update_rollout(rollout.rollout_id, metadata={"leyden.sampling_key": "k", "leyden": 1})


async def test_a_live_rollout_that_nobody_ends_times_out(store: LightningStore) -> None:
    await written(store, "a")
    await store.record_live_rollouts([live(timeout_seconds=60.0)])
    (attempt,) = await store.sweep(time.time() + 61.0)
    assert attempt.status == "timeout"


# ---- news of labels --------------------------------------------------------------------------------------------------


async def test_a_wait_for_labels_ends_with_a_change_of_labels_or_releases_alone(store: LightningStore) -> None:
    await written(store, "a", "b")
    after = (await store.get_news(labels=True)).after

    async def told() -> None:
        nonlocal after
        news = await waiting
        assert news.labels and not (news.gap or news.finished or news.claimable or news.spans)
        after = news.after

    changes = [
        lambda: store.set_label("production", "rs", 1),
        lambda: store.move_labels([LabelMove(label="canary", to=("rs", 2), expected=None)]),
        lambda: store.remove_label("canary"),
        lambda: store.freeze_resources("rs", 2),
        lambda: store.create_release("r", ("rs", 2), state="gating"),
        lambda: store.advance_release("r", expected_state="gating", state="gating", details={"share": 0.5}),
    ]
    for change in changes:
        waiting = asyncio.create_task(store.get_news(after=after, labels=True, timeout_seconds=SOON))
        await served(store, f"ro-{changes.index(change)}")  # other news
        assert not waiting.done()
        await change()
        await told()
    assert not (await store.get_news(after=after, labels=True)).labels
    await store.set_label("production", "rs", 1)  # it is there already
    assert not (await store.get_news(after=after, labels=True)).labels
