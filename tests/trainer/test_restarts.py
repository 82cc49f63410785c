"""An algorithm that fails goes on from its last checkpoint, and ends as one that never failed."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden._lib import ids
from leyden._lib.aio import Latch
from leyden.algorithm import Run
from leyden.errors import ConfigError
from leyden.store import SqliteLightningStore
from leyden.trainer import restarts
from leyden.types import EnqueueRolloutRequest

N_STEPS, ROLLOUTS = 5, 8


@ly.rollout
async def weigh(task: dict[str, float]) -> float:
    """What the policy of its step makes of a task."""
    return task["weight"] * task["number"]


class Descent(ly.IterativeAlgorithm):
    """A policy of one weight, which each step changes by what its rollouts were worth; draws from the process's random state.

    failures: the steps that it raises in, each once, with that step's rollouts in the queue and one of them finished.
    """

    def __init__(self, failures: list[int], **options: Any) -> None:
        super().__init__(max_iters=N_STEPS, **options)
        self.failures = list(failures)
        self.lives = 0
        self.weight = 0.0

    async def setup(self, train_dataset: Any, val_dataset: Any) -> None:
        self.lives += 1
        self.weight = 1.0

    async def step(self, iteration: int) -> ly.Metrics:
        store, run_id = self.get_store(), self.get_run().run_id
        requests = [
            EnqueueRolloutRequest(
                rollout_id=ids.derived_id("ro", run_id, iteration, place),
                input={"weight": self.weight, "number": random.random()},
                pin=self.pin,
            )
            for place in range(ROLLOUTS)
        ]
        rollout_ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
        if iteration in self.failures:
            self.failures.remove(iteration)
            await store.wait_for_any_rollout(rollout_ids=rollout_ids)
            self.weight = -1000.0
            raise ZeroDivisionError(f"failure {self.lives} in step {iteration}")
        await store.wait_for_rollouts(rollout_ids=rollout_ids)
        spans = await store.query_spans_of(rollout_ids)
        worth = sum(ly.find_final_reward(spans[rollout_id]) or 0.0 for rollout_id in rollout_ids)
        self.weight += worth / ROLLOUTS
        return {"worth": worth}

    async def save(self, path: Path) -> None:
        (path / "weight.json").write_text(json.dumps(self.weight))

    async def load(self, path: Path) -> None:
        self.weight = json.loads((path / "weight.json").read_text())


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_FIRST_PAUSE_SECONDS", 0.01)


async def train(directory: Path, strategy: str, algorithm: Descent, restarts: int = 0) -> dict[str, Any]:
    """What is left of a run: the weight, and each rollout's input with how often it succeeded."""
    directory.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 -- nothing else runs yet
    (directory / "run.json").write_text(
        json.dumps({"format": 1, "run_id": "feedfacecafe", "started": 0.0, "options": {}})
    )
    random.seed(7)
    trainer = ly.Trainer(
        algorithm=algorithm, strategy=strategy, n_runners=2, run_dir=directory, max_algorithm_restarts=restarts
    )
    await trainer.afit(weigh, resume=True)
    async with SqliteLightningStore(directory / "store.sqlite") as store:
        rollouts = await store.query_rollouts()
        attempts = {each.rollout_id: await store.query_attempts(each.rollout_id) for each in rollouts}
    done = Counter({key: sum(one.status == "succeeded" for one in each) for key, each in attempts.items()})
    return {"weight": algorithm.weight, "inputs": {each.rollout_id: each.input for each in rollouts}, "done": done}


@pytest.mark.parametrize("strategy", ["shm", "ipc", pytest.param("cs", marks=pytest.mark.slow)])
@pytest.mark.parametrize("failures", [[3, 3], [0, 4]])
async def test_an_algorithm_that_fails_twice_ends_as_one_that_never_failed(
    tmp_path: Path, strategy: str, failures: list[int]
) -> None:
    undisturbed = await train(tmp_path / "undisturbed", "shm", Descent([]))
    failing = Descent(failures)
    assert await train(tmp_path / "failing", strategy, failing, restarts=2) == undisturbed
    assert failing.lives == 3
    assert set(undisturbed["done"].values()) == {1}
    assert len(undisturbed["done"]) == N_STEPS * ROLLOUTS


async def test_the_error_of_the_last_failure_is_raised_and_the_earlier_ones_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError, match="failure 3 in step 2") as raised:
        await train(tmp_path / "run", "shm", Descent([1, 1, 2]), restarts=2)
    [note] = raised.value.__notes__
    assert note.startswith("the run has failed; what it had finished is in ")
    assert "Remedy the cause, then continue with Trainer(" in note and note.endswith("resume=True)")
    assert "restart 1 of 2" in caplog.text
    assert "failure 1 in step 1" in caplog.text
    assert "failure 2 in step 1" in caplog.text
    assert "failure 3" not in caplog.text


async def test_without_restarts_the_first_failure_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="failure 1"):
        await train(tmp_path / "run", "shm", Descent([3]))


async def test_agents_do_not_fail_for_want_of_what_a_failed_algorithm_tears_down(tmp_path: Path) -> None:
    under_way = Latch()

    @ly.rollout
    async def needs_the_policy(task: int) -> float:
        under_way.set()
        if task == 0 and failures:
            await torn_down.wait_async()
            raise ConnectionError("the policy is gone")
        return 1.0

    torn_down, failures = Latch(), [1]

    class Serving(Descent):
        async def step(self, iteration: int) -> ly.Metrics:
            store, run_id = self.get_store(), self.get_run().run_id
            request = EnqueueRolloutRequest(rollout_id=ids.derived_id("ro", run_id, iteration), input=iteration)
            (rollout,) = await store.enqueue_many_rollouts([request])
            if failures:
                await under_way.wait_async()
                raise ZeroDivisionError("while an agent is under way")
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])
            return {}

        async def teardown(self) -> None:
            torn_down.set()
            await asyncio.sleep(0.1)  # a policy takes a while to end
            failures.clear()

    algorithm = Serving([])
    trainer = ly.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", max_algorithm_restarts=1)
    summary = await trainer.afit(needs_the_policy)
    assert {status: count for status, count in summary.rollouts.items() if count} == {"succeeded": N_STEPS}


async def test_baseline_is_started_again_and_resumed_without_a_task_done_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "leyden")  # at which Baseline shows what the adapter makes of a rollout
    failures = [1]

    class Unreadable(ly.TraceAdapter[Any]):
        def adapt(self, source: Any) -> Any:
            if failures:
                failures.clear()
                raise RuntimeError("an adapter that fails once")

    tasks = [{"weight": 1.0, "number": float(number)} for number in range(6)]
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "adapter": Unreadable, "max_algorithm_restarts": 1}
    summary = await ly.Trainer(algorithm=ly.Baseline(n_epochs=2), **options).afit(weigh, tasks)
    assert not failures, "it failed, and was started again"
    assert {status: count for status, count in summary.rollouts.items() if count} == {"succeeded": 12}
    again = await ly.Trainer(algorithm=ly.Baseline(n_epochs=2), **options).afit(weigh, [*tasks, tasks[0]], resume=True)
    assert again.rollouts["succeeded"] == 14, "one task was new, in each of two epochs"


async def test_a_function_that_takes_the_run_is_started_again_and_meets_its_rollouts(tmp_path: Path) -> None:
    lives: list[bool] = []

    @ly.algo
    async def search(*, store: ly.LightningStore, run: Run, train_dataset: Any) -> None:
        lives.append(run.resume)
        requests = [
            EnqueueRolloutRequest(rollout_id=ids.derived_id("ro", run.run_id, place), input=task)
            for place, task in enumerate(train_dataset)
        ]
        rollouts = await store.enqueue_many_rollouts(requests)
        if not run.resume:
            raise ConnectionError("the optimiser's model is away")
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in rollouts])

    trainer = ly.Trainer(algorithm=search, run_dir=tmp_path / "run", max_algorithm_restarts=1)
    summary = await trainer.afit(weigh, [{"weight": 1.0, "number": 1.0}] * 3)
    assert lives == [False, True]
    assert {status: count for status, count in summary.rollouts.items() if count} == {"succeeded": 3}


async def test_what_another_start_would_not_mend_is_raised_at_once(tmp_path: Path) -> None:
    class Misconfigured(Descent):
        async def step(self, iteration: int) -> ly.Metrics:
            raise ConfigError("an option is wrong")

    algorithm = Misconfigured([])
    with pytest.raises(ConfigError, match="an option is wrong"):
        await train(tmp_path / "run", "shm", algorithm, restarts=5)
    assert algorithm.lives == 1


def test_restarts_that_could_not_continue_anything_are_refused() -> None:
    @ly.algo
    async def free(*, store: Any) -> None: ...

    class Unable(ly.Algorithm):
        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None: ...

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"algorithm": free}, "the function 'free' would begin anew and enqueue everything twice: let it take `run`"),
        ({"algorithm": Unable()}, "Unable does not say that it can continue"),
        ({"algorithm": "baseline", "store": "memory"}, "give run_dir="),
        ({}, "there is no algorithm"),
        ({"algorithm": Descent([]), "store": "memory"}, "give run_dir="),
        ({"algorithm": Descent([]), "max_algorithm_restarts": -1}, "max_algorithm_restarts is -1"),
    ]
    for given, message in wrong:
        options: dict[str, Any] = {"max_algorithm_restarts": 1, **given}
        with pytest.raises(ConfigError, match=message):
            ly.Trainer(**options).fit(weigh, [{"weight": 1.0, "number": 1.0}])
