"""The part of the store's contract that a trainer and its readers need: runs, their metrics, and the rollouts of a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from leyden.errors import ConfigError, IllegalTransition, UnknownResources, UnknownRun
from leyden.store import LightningStore
from leyden.types import (
    UNSET,
    EnqueueRolloutRequest,
    MetricPoint,
    ReplayFrom,
    Retention,
    RunRecord,
    current_run_id,
)

START = 1_700_000_000.0


def run(run_id: str = "run-1", **fields: Any) -> RunRecord:
    """A run as a trainer starts it."""
    given: dict[str, Any] = {"name": "first", "kind": "fit", "start_time": START, "config": {"seed": 1}} | fields
    return RunRecord(run_id=run_id, **given)


def point(iteration: int = 1, name: str = "reward", value: float | None = 0.5, stage: str = "train") -> MetricPoint:
    """A metric of a run."""
    return MetricPoint(stage=stage, iteration=iteration, name=name, value=value, time=START + iteration)


# ---- runs ------------------------------------------------------------------------------------------------------------


async def test_a_run_is_kept_as_it_was_started_and_has_a_heartbeat(store: LightningStore) -> None:
    config = {"algorithm": "APO", "options": {"beam": [1, None, "é"]}, "seed": 7}
    started = await store.start_run(run(config=config))
    assert started.last_heartbeat_time is not None
    assert started.last_heartbeat_time > START
    assert started == run(config=config, last_heartbeat_time=started.last_heartbeat_time)
    assert await store.get_run_by_id("run-1") == started
    assert list(await store.query_runs()) == [started]


async def test_a_run_that_is_started_again_goes_on_with_what_it_is_given(store: LightningStore) -> None:
    await store.start_run(run())
    await store.update_run("run-1", status="failed", cause="the model went away")
    again = await store.start_run(run(name="second", start_time=START + 9, status="failed", config={"seed": 2}))
    assert (again.status, again.end_time, again.cause) == ("running", None, None)
    assert (again.name, again.config, again.start_time) == ("second", {"seed": 2}, START)
    assert len(await store.query_runs()) == 1
    assert (await store.update_run("run-1", status="succeeded")).status == "succeeded"


async def test_a_run_is_not_resumed_as_another_kind(store: LightningStore) -> None:
    before = await store.start_run(run())
    with pytest.raises(ConfigError, match=r"run-1.*of kind 'fit'.*'rl'"):
        await store.start_run(run(kind="rl"))
    assert await store.get_run_by_id("run-1") == before


async def test_every_update_of_a_run_is_a_heartbeat_and_changes_what_is_given(store: LightningStore) -> None:
    beat = (await store.start_run(run())).last_heartbeat_time
    for changes in ({}, {"config": {"seed": 2}}, {"cause": "slow"}, {"status": "running"}, {"cause": None}):
        before = await store.get_run_by_id("run-1")
        after = await store.update_run("run-1", **changes)
        assert after.last_heartbeat_time is not None
        assert beat is not None
        assert after.last_heartbeat_time >= beat
        beat = after.last_heartbeat_time
        assert after == before.model_copy(update={"last_heartbeat_time": beat, **changes})
        assert await store.get_run_by_id("run-1") == after


@pytest.mark.parametrize("status", ["succeeded", "failed", "stopped"])
async def test_a_run_that_has_ended_keeps_its_status_and_its_end(store: LightningStore, status: Any) -> None:
    await store.start_run(run())
    ended = await store.update_run("run-1", status=status)
    assert ended.end_time is not None
    assert ended.end_time > START
    repeated = await store.update_run("run-1", status=status, cause="why")
    assert (repeated.end_time, repeated.cause) == (ended.end_time, "why")
    for other in {"running", "succeeded", "failed", "stopped"} - {status}:
        with pytest.raises(IllegalTransition, match=rf"run-1.*{status}.*start_run"):
            await store.update_run("run-1", status=other)  # type: ignore[arg-type]
    assert (await store.get_run_by_id("run-1")).status == status


async def test_a_cause_may_be_any_text(store: LightningStore) -> None:
    await store.start_run(run())
    assert (await store.update_run("run-1", status="failed", cause="a\x00b \ud800 é")).cause == "a\\x00b \\ud800 é"


async def test_a_run_that_nobody_started_is_unknown_to_every_method(store: LightningStore) -> None:
    for call in (
        store.get_run_by_id("nobody"),
        store.update_run("nobody", status="failed"),
        store.add_metrics("nobody", [point()]),
        store.query_metrics("nobody"),
        store.cut_metrics("nobody", after_iteration=0),
        store.query_rollouts(run_id="nobody"),
        store.enqueue_rollout("task", run_id="nobody"),
        store.start_rollout("task", run_id="nobody"),
    ):
        with pytest.raises(UnknownRun, match=r"'nobody' is not in .*start_run"):
            await call
    assert not await store.query_rollouts()
    assert not await store.query_runs(run_id_in=["nobody"])


async def test_runs_are_found_by_id_status_and_kind_and_come_in_order(store: LightningStore) -> None:
    for number, kind in enumerate(["fit", "fit", "rl", "eval"]):
        await store.start_run(run(f"r{number}", kind=kind, name=f"n{3 - number}", start_time=START - number))
    await store.update_run("r1", status="succeeded")
    await store.update_run("r3", status="stopped")

    async def found(**asked: Any) -> list[str]:
        page = await store.query_runs(**asked)
        assert page.exact
        return [each.run_id for each in page]

    assert await found() == ["r0", "r1", "r2", "r3"]
    assert await found(sort_order="asc", limit=2, offset=1) == ["r2", "r1"]
    assert await found(sort_by="name", sort_order="asc") == ["r3", "r2", "r1", "r0"]
    assert await found(sort_by="end_time") == ["r3", "r1", "r2", "r0"]  # those without an end come last
    assert await found(sort_by=None, sort_order="asc") == ["r0", "r1", "r2", "r3"]
    assert await found(run_id_in=["r2", "r0", "nobody"]) == ["r0", "r2"]
    assert await found(status_in=["running"], kind_in=["fit", "eval"]) == ["r0"]
    assert await found(status_in=[]) == []
    assert (await store.query_runs(limit=1)).total == 4
    for wrong in ({"sort_by": "config"}, {"limit": 0}, {"offset": -1}, {"sort_order": "up"}):
        with pytest.raises(ConfigError):
            await store.query_runs(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"run_id": ""}, {"run_id": "a\n"}, {"name": "x" * 201}, {"kind": ""}, {"start_time": float("inf")}],
)
async def test_a_run_that_no_store_takes_is_refused(store: LightningStore, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        await store.start_run(run().model_copy(update=wrong))
    assert not await store.query_runs()


async def test_a_config_that_is_not_json_is_refused(store: LightningStore) -> None:
    for config in ({"lr": float("nan")}, {"model": object()}):
        with pytest.raises(ConfigError):
            await store.start_run(run(config=config))
    await store.start_run(run())
    with pytest.raises(ConfigError):
        await store.update_run("run-1", config={"lr": float("inf")})
    assert (await store.get_run_by_id("run-1")).config == {"seed": 1}


async def test_a_run_that_is_started_many_times_at_once_is_one_run(store: LightningStore) -> None:
    await asyncio.gather(*(store.start_run(run()) for _ in range(8)))
    assert [each.run_id for each in await store.query_runs()] == ["run-1"]


# ---- metrics ---------------------------------------------------------------------------------------------------------


async def test_metrics_come_back_by_iteration_stage_and_name_however_they_were_added(store: LightningStore) -> None:
    await store.start_run(run())
    points = [
        point(i, name, stage=stage) for i in range(4) for stage in ("train", "val") for name in ("loss", "reward")
    ]
    await store.add_metrics("run-1", points[::-1])
    await store.add_metrics("run-1", [])
    assert list(await store.query_metrics("run-1")) == points
    page = await store.query_metrics("run-1", limit=3, offset=1)
    assert (list(page), page.total, page.exact) == (points[1:4], len(points), True)
    assert list(await store.query_metrics("run-1", iteration_from=3)) == points[-4:]
    assert list(await store.query_metrics("run-1", names=["loss"], stage="val")) == [
        point(i, "loss", stage="val") for i in range(4)
    ]
    assert list(await store.query_metrics("run-1", names=[])) == []
    with pytest.raises(ConfigError, match="limit"):
        await store.query_metrics("run-1", limit=0)


async def test_a_metric_takes_the_place_of_the_one_before_it(store: LightningStore) -> None:
    await store.start_run(run())
    await store.add_metrics("run-1", [point(1, value=0.1), point(1, value=0.2), point(2, value=0.3)])
    await store.add_metrics("run-1", [point(2, value=None), point(3, value=-1e300)])
    await store.add_metrics("run-1", [point(3, value=-1e300)])
    assert [each.value for each in await store.query_metrics("run-1")] == [0.2, None, -1e300]


async def test_metrics_belong_to_their_run(store: LightningStore) -> None:
    for run_id in ("a", "b"):
        await store.start_run(run(run_id))
    await store.add_metrics("a", [point(1, value=1.0), point(2, value=2.0)])
    await store.add_metrics("b", [point(1, value=3.0)])
    await store.cut_metrics("a", after_iteration=1)
    assert [each.value for each in await store.query_metrics("a")] == [1.0]
    assert [each.value for each in await store.query_metrics("b")] == [3.0]


async def test_metrics_are_cut_behind_an_iteration(store: LightningStore) -> None:
    await store.start_run(run())
    await store.add_metrics("run-1", [point(i, stage=stage) for i in range(5) for stage in ("train", "val")])
    for _ in range(2):
        await store.cut_metrics("run-1", after_iteration=2)
        assert [each.iteration for each in await store.query_metrics("run-1")] == [0, 0, 1, 1, 2, 2]
    await store.cut_metrics("run-1", after_iteration=-1)
    assert not await store.query_metrics("run-1")


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage": ""},
        {"name": "a\tb"},
        {"iteration": -1},
        {"time": float("nan")},
        {"value": float("nan")},
        {"value": float("inf")},
    ],
)
async def test_a_metric_that_no_store_takes_is_refused_and_nothing_is_added(
    store: LightningStore, wrong: dict[str, Any]
) -> None:
    await store.start_run(run())
    with pytest.raises(ConfigError):
        await store.add_metrics("run-1", [point(), point(2).model_copy(update=wrong)])
    assert not await store.query_metrics("run-1")


async def test_many_write_metrics_of_one_run_at_once(store: LightningStore) -> None:
    await store.start_run(run())
    batches = [[point(i, f"m{(i * k) % 7}", value=float(k)) for i in range(10)] for k in range(1, 9)]
    await asyncio.gather(*(store.add_metrics("run-1", batch) for batch in batches + batches))
    places = {(each.iteration, each.name) for batch in batches for each in batch}
    assert {(each.iteration, each.name) for each in await store.query_metrics("run-1")} == places


# ---- the rollouts of a run -------------------------------------------------------------------------------------------


async def test_a_rollout_says_which_run_and_group_it_belongs_to(store: LightningStore) -> None:
    await store.start_run(run())
    rollout = await store.enqueue_rollout("task", run_id="run-1", group_id="g")
    assert (rollout.run_id, rollout.group_id) == ("run-1", "g")
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    assert (claimed.run_id, claimed.group_id) == ("run-1", "g")
    started = await store.start_rollout("task", run_id="run-1", group_id="h")
    assert (started.run_id, started.group_id, started.attempt.sequence_id) == ("run-1", "h", 1)
    ended = await store.update_rollout(started.rollout_id, status="cancelled")
    assert (ended.run_id, ended.group_id) == ("run-1", "h")
    neither = await store.enqueue_rollout("task")
    assert (neither.run_id, neither.group_id) == (None, None)


async def test_a_rollout_belongs_to_the_run_whose_algorithm_is_at_work(store: LightningStore) -> None:
    await store.start_run(run())
    await store.start_run(run("other"))
    token = current_run_id.set("run-1")
    try:
        enqueued = await store.enqueue_rollout("task")
        started = await store.start_rollout("task", run_id=UNSET)
        request = EnqueueRolloutRequest(input="task")
        named = await store.enqueue_rollout("task", run_id="other")
        nowhere = [await store.enqueue_rollout("task", run_id=None), await store.start_rollout("task", run_id=None)]
    finally:
        current_run_id.reset(token)
    (requested,) = await store.enqueue_many_rollouts([request])
    assert [each.run_id for each in (enqueued, started, requested, named)] == ["run-1", "run-1", "run-1", "other"]
    assert [each.run_id for each in nowhere] == [None, None]
    assert (await store.enqueue_rollout("task")).run_id is None
    assert len(await store.query_rollouts(run_id="run-1")) == 3


async def test_a_rollout_of_an_unknown_run_is_refused_with_all_that_came_with_it(store: LightningStore) -> None:
    await store.start_run(run())
    requests = [EnqueueRolloutRequest(input=i, run_id=run_id) for i, run_id in enumerate(["run-1", None, "nobody"])]
    with pytest.raises(UnknownRun, match="nobody"):
        await store.enqueue_many_rollouts(requests)
    with pytest.raises(UnknownResources):
        await store.enqueue_rollout("task", resources_id="nobody", run_id="run-1")
    for group_id in ("", "a\n", "x" * 201):
        with pytest.raises(ConfigError, match="group_id"):
            await store.enqueue_rollout("task", group_id=group_id)
    assert not await store.query_rollouts()


async def test_rollouts_are_found_by_run_and_group(store: LightningStore) -> None:
    for run_id in ("a", "b"):
        await store.start_run(run(run_id))
    given = [(run_id, group_id) for run_id in ("a", "b", None) for group_id in ("g0", "g1", None)]
    requests = [
        EnqueueRolloutRequest(input=n, rollout_id=f"r{n:02}", run_id=run_id, group_id=group_id, mode=mode)
        for n, (mode, (run_id, group_id)) in enumerate((mode, each) for mode in ("train", "val") for each in given)
    ]
    await store.enqueue_many_rollouts(requests)
    for n in (0, 10):
        await store.update_rollout(f"r{n:02}", status="cancelled")

    async def found(**asked: Any) -> list[str]:
        page = await store.query_rollouts(**asked)
        asked.pop("limit", None), asked.pop("offset", None)
        assert (page.total, page.exact) == (len(await store.query_rollouts(**asked)), True)
        return [each.rollout_id for each in page]

    assert await found(run_id="a") == ["r00", "r01", "r02", "r09", "r10", "r11"]
    assert await found(run_id="a", limit=2, offset=3) == ["r09", "r10"]
    assert await found(run_id="a", sort_order="desc", limit=2) == ["r11", "r10"]
    assert await found(run_id="a", sort_by="rollout_id", sort_order="desc", limit=1) == ["r11"]
    assert await found(group_id="g1") == ["r01", "r04", "r07", "r10", "r13", "r16"]
    assert await found(run_id="b", group_id="g1") == ["r04", "r13"]
    assert await found(run_id="a", status_in=["cancelled"], limit=5) == ["r00", "r10"]
    assert await found(run_id="a", mode_in=["val"], status_in=["queuing"]) == ["r09", "r11"]
    # Of the filters that `or` joins one must match, the run and the group always.
    either: dict[str, Any] = {"mode_in": ["val"], "status_in": ["cancelled"], "filter_logic": "or"}
    assert await found(run_id="a", **either) == ["r00", "r09", "r10", "r11"]
    assert await found(run_id="a", rollout_id_in=["r01", "r03"]) == ["r01"]
    assert await found(group_id="nothing") == []


async def test_replays_and_forks_of_a_rollout_are_found_by_its_id(store: LightningStore) -> None:
    await store.start_run(run("a"))
    original = await store.start_rollout("task", rollout_id="original", run_id="a")
    await store.update_attempt("original", original.attempt.attempt_id, status="succeeded")
    source = ReplayFrom(rollout_id="original", attempt_id=original.attempt.attempt_id, n_calls=1)
    requests = [
        EnqueueRolloutRequest(
            input=n,
            rollout_id=f"fork-{n}",
            run_id="a" if n else None,
            group_id=f"g{n % 2}",
            metadata={"other": 1, **source.model_copy(update={"n_calls": n}).as_metadata()},
        )
        for n in range(4)
    ]
    await store.enqueue_many_rollouts(requests)
    await store.enqueue_rollout("task", rollout_id="no fork", metadata={"leyden.replay_from": "original"})
    await store.update_rollout("fork-3", status="cancelled")

    async def found(**asked: Any) -> list[str]:
        page = await store.query_rollouts(replay_from="original", **asked)
        assert (page.total, page.exact) == (len(page), True) or "limit" in asked
        return [each.rollout_id for each in page]

    assert await found() == ["fork-0", "fork-1", "fork-2", "fork-3"]
    assert await found(sort_order="desc", limit=2) == ["fork-3", "fork-2"]
    assert await found(run_id="a") == ["fork-1", "fork-2", "fork-3"]
    assert await found(group_id="g1") == ["fork-1", "fork-3"]
    assert await found(run_id="a", group_id="g0") == ["fork-2"]
    assert await found(status_in=["cancelled"]) == ["fork-3"]
    assert await found(sort_by="reward") == ["fork-0", "fork-1", "fork-2", "fork-3"], "none has a reward"
    assert not await store.query_rollouts(replay_from="nothing")
    assert not await store.query_rollouts(replay_from="fork-1")

    await store.update_rollout("fork-1", metadata={"other": 2})
    await store.update_rollout("no fork", metadata=source.as_metadata())
    await store.update_rollout("fork-2", priority=3)
    assert await found() == ["fork-0", "fork-2", "fork-3", "no fork"], "the metadata say it"


async def test_what_is_forgotten_of_a_run_leaves_the_run_and_its_metrics(store: LightningStore) -> None:
    await store.start_run(run())
    await store.add_metrics("run-1", [point()])
    for _ in range(3):
        rollout = await store.enqueue_rollout("task", run_id="run-1", group_id="g")
        await store.update_rollout(rollout.rollout_id, status="cancelled")
    while await store.prune(Retention(max_rollouts=1)):
        pass
    assert len(await store.query_rollouts(run_id="run-1")) == len(await store.query_rollouts(group_id="g")) == 1
    assert (await store.get_run_by_id("run-1")).status == "running"
    assert list(await store.query_metrics("run-1")) == [point()]
