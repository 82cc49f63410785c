"""The offline check of a candidate, and the split of recorded requests: pure functions and a store in memory."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.errors import ConfigError
from leyden.serving.continual import (
    DataSettings,
    GateSettings,
    Limits,
    Measurement,
    RecordedTasks,
    TaskOutcome,
    check,
    drop_at,
)
from leyden.serving.continual.jobs import MeasureJob
from leyden.serving.continual.recorded import read_data
from leyden.store import InMemoryLightningStore, LightningStore
from leyden.types import Feedback, NamedResources, PromptTemplate
from tests.serving.continual import world


def outcomes(
    *rewards: float | None, seconds: float = 1.0, stumble: float = 0.0, cost: float | None = None, failed: int = 0
) -> Any:
    """Return one outcome for each reward; the first `failed` ones have failed, the first takes `stumble` longer."""
    return [
        TaskOutcome(
            task=place, reward=reward, failed=place < failed, seconds=seconds + stumble * (place == 0), cost=cost
        )
        for place, reward in enumerate(rewards)
    ]


HALF = [1.0, 0.0] * 5


@pytest.mark.parametrize(
    ("candidate", "settings", "passed", "reason"),
    [
        (outcomes(*[1.0] * 10), {}, True, "differs by 0.5"),
        (outcomes(*[1.0] * 10), {"sure": True}, True, "sure"),
        (outcomes(*HALF), {}, True, "differs by 0 "),
        (outcomes(*[1.0, 1.0, *HALF[2:]]), {"sure": True}, False, "which may be chance"),
        (outcomes(*HALF), {"min_gain": 0.1}, False, "at least 0.1 is required"),
        (outcomes(*[0.0, *HALF[1:]]), {}, False, "differs by -0.1"),
        (outcomes(*[1.0] * 10, failed=1), {}, False, "10% of its tasks fail, instead of 0%"),
        (outcomes(*[1.0] * 10, failed=1), {"max_more_failures": 0.1}, True, "differs by 0.4"),
        (outcomes(*[1.0] * 10, seconds=2.0), {}, False, "its mean duration is 2 times as large, and 1.5 is the limit"),
        (outcomes(*[1.0] * 10, seconds=2.0), {"max_slowdown": None}, True, "differs by 0.5"),
        (outcomes(*[1.0] * 10, stumble=100.0), {}, True, "differs by 0.5"),
        (outcomes(*[1.0] * 10, cost=0.04), {}, False, "its mean cost is 4 times as large"),
        (outcomes(*[None] * 10), {}, False, "no task has a reward for both versions"),
        (outcomes(*[None] * 10), {"min_gain": None}, True, "its rewards were not compared"),
        (outcomes(*[1.0] * 3), {}, False, "3 tasks are too few"),
    ],
)
def test_a_candidate_passes_within_all_limits(
    candidate: list[TaskOutcome], settings: dict[str, Any], passed: bool, reason: str
) -> None:
    measured = Measurement(production=outcomes(*HALF, cost=0.01), candidate=candidate)
    report = check(GateSettings(**settings), measured)
    assert report.passed is passed and reason in report.reason, report


def test_a_failed_task_counts_as_a_reward_of_0() -> None:
    measured = Measurement(production=outcomes(*[0.5] * 10), candidate=outcomes(*[1.0] * 10, failed=5))
    report = check(GateSettings(max_more_failures=1.0), measured)
    assert report.numbers["gain"] == 0.0 and report.numbers["failures"] == 0.5


def test_wrong_settings_are_refused() -> None:
    for make in (
        lambda: GateSettings(min_tasks=0),
        lambda: GateSettings(max_slowdown=0),
        lambda: Limits(nice=-1),
        lambda: Limits(cost=0),
        lambda: DataSettings(replayed=1.0),
    ):
        with pytest.raises(ConfigError):
            make()


def test_the_beginning_of_a_drop_is_found() -> None:
    def found_too_late(seed: int) -> int:
        numbers = random.Random(seed)
        return drop_at([float(numbers.random() < (0.9 if place < 300 else 0.3)) for place in range(360)]) - 300

    errors = sorted(abs(found_too_late(seed)) for seed in range(100))
    assert errors[50] <= 3 and errors[95] <= 15
    assert drop_at([0.0, 0.0, 1.0, 1.0]) == 0, "a rise is no drop"
    assert drop_at([]) == drop_at([1.0]) == 0


# ---- recorded requests -----------------------------------------------------------------------------------------------


@pytest.fixture
async def store() -> AsyncGenerator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        await world.release_first(opened, "plain")
        yield opened


async def read(store: LightningStore, settings: DataSettings, since: float = 0.0, cycle: str = "c") -> Any:
    return await read_data(store, settings, since=since, before=time.time(), cycle_id=cycle)


async def test_no_input_is_in_two_parts_and_held_out_ones_stay_held_out_in_every_cycle(store: LightningStore) -> None:
    await world.serve(store, 100, wants="plain")
    await world.serve(store, 100, wants="plain")  # the same inputs again
    data = await read(store, DataSettings())
    parts = [{each.input["number"] for each in part} for part in (data.train, data.validation, data.held_out)]
    assert set.union(*parts) == set(range(100)) and sum(map(len, parts)) == 100
    assert len(data.held_out) == len(parts[2]), "each task is held out once"
    assert len(data.train) == 2 * len(parts[0])
    assert all(len(part) > 5 for part in parts[1:])
    await world.serve(store, 100, wants="plain")
    later = await read(store, DataSettings(), cycle="another")
    assert {each.input["number"] for each in later.held_out} == parts[2]


async def test_requests_without_a_reward_are_left_out_and_the_last_feedback_counts(store: LightningStore) -> None:
    await world.serve(store, 40, wants="kind")
    found = await store.query_rollouts(mode_in=["live"])
    await store.add_many_feedback(
        [Feedback(rollout_id=each.rollout_id, source="user", kind="label", value="thumbs_up") for each in found[:20]]
    )
    data = await read(store, DataSettings(held_out=0, validation=0))
    rewards = {each.input["number"]: each.reward for each in data.train}
    assert rewards == {number: float(number < 20) for number in range(40)}
    assert [each.value for each in data.train[0].feedback] == ["thumbs_down", "kind"], "the newest comes first"
    tasks = RecordedTasks(data.train)
    assert len(tasks) == 40 and tasks[0] == data.train[0].input == next(iter(tasks))
    assert list(tasks[:2]) == [tasks[0], tasks[1]] and tasks[:2].records == tasks.records[:2]


async def test_older_requests_are_replayed_as_a_part_of_all(store: LightningStore) -> None:
    await world.serve(store, 100, wants="plain")
    since = time.time()
    await world.serve(store, 40, wants="kind", seed=1)
    settings = DataSettings(replayed=0.2, held_out=0, validation=0)
    data = await read(store, settings, since)
    assert sum(each.replayed for each in data.train) == 10 and len(data.train) == 50
    assert [each.input["seed"] for each in data.train[:40]] == [1] * 40, "new ones come first"
    again = await read(store, settings, since)
    assert again == data, "a cycle that is continued reads the same"
    other = await read(store, settings, since, cycle="other")
    assert {each.rollout_id for each in other.train} != {each.rollout_id for each in data.train}
    few = await read(store, replace(settings, new_tasks=8), since)
    assert len(few.train) == 10


async def test_both_versions_take_turns_so_that_the_place_in_the_queue_slows_neither(tmp_path: Path) -> None:
    order: list[str] = []

    @ly.rollout
    async def agent(task: int, prompt_template: PromptTemplate) -> float:
        order.append(world.tone_of(prompt_template))
        return 1.0

    versions: list[NamedResources] = [{"prompt": world.prompt(tone)} for tone in ("plain", "kind")]
    job = MeasureJob(agent, {}, tmp_path / "gate", *versions, tasks=list(range(16)), replicas=1)
    measured = Measurement.model_validate(await job.run())
    assert len(measured.production) == len(measured.candidate) == 16
    assert order == ["plain", "kind", "kind", "plain"] * 8
