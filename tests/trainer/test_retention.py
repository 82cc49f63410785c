"""A run whose store forgets: what the algorithm still reads is there, what nobody will read again is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import leyden as ly
from leyden.algorithm.iterative import IterativeAlgorithm, Metrics
from leyden.store import InMemoryLightningStore, Sweeper
from leyden.trainer import RunSummary
from leyden.types import EnqueueRolloutRequest

FORGET_ALL = ly.Retention(max_rollouts=0)


@ly.rollout
async def double(task: int) -> float:
    return 2.0 * task


class Dawdler(IterativeAlgorithm):
    """Reads the rollouts of each step long after they have finished."""

    async def step(self, iteration: int) -> Metrics:
        store = self.get_store()
        rollouts = await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=task, pin=self.pin) for task in range(8)]
        )
        ids = [rollout.rollout_id for rollout in rollouts]
        await store.wait_for_rollouts(rollout_ids=ids)
        await asyncio.sleep(0.05)
        spans = await store.query_spans_of(ids)
        return {"reward": sum(ly.find_final_reward(spans[rollout_id]) or 0.0 for rollout_id in ids)}


async def test_an_algorithm_reads_all_of_its_step_and_the_rest_is_forgotten() -> None:
    async with InMemoryLightningStore() as store:
        algorithm = Dawdler(max_iters=4)
        trainer = ly.Trainer(algorithm=algorithm, store=store, retention=FORGET_ALL)
        async with Sweeper(store, retention=FORGET_ALL, prune_interval_seconds=0.001):
            await trainer.afit(double)
        assert algorithm._loop.metrics["reward"] == 2.0 * sum(range(8))
        assert len(await store.query_rollouts()) <= 2


@pytest.mark.parametrize(("checkpoint_every", "pinned_steps"), [(1, 1), (2, 1), (10, 3)])
async def test_what_came_after_the_newest_checkpoint_stays(
    tmp_path: Path, checkpoint_every: int, pinned_steps: int
) -> None:
    class Fails(Dawdler):
        async def validate(self, iteration: int) -> Metrics:
            if iteration == 3:  # three steps are done, and the third is in no checkpoint yet
                raise RuntimeError("the power is gone")
            return {}

    algorithm = Fails(max_iters=4, val_every_n_iters=1, checkpoint_every=checkpoint_every)
    async with InMemoryLightningStore() as store:
        with pytest.raises(RuntimeError, match="power"):
            await ly.Trainer(algorithm=algorithm, store=store, run_dir=tmp_path / "run").afit(double)
        await store.enqueue_rollout("unfinished, and the newest")
        while await store.prune(FORGET_ALL):
            pass
        assert len(await store.query_rollouts()) == 8 * pinned_steps + 1


@pytest.mark.parametrize("limit", [10, None])
async def test_a_baseline_reports_every_rollout_of_a_store_that_forgets(
    limit: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "leyden.algorithm.fast")
    async with InMemoryLightningStore() as store:
        trainer = ly.Trainer(algorithm=ly.Baseline(max_queue_length=limit), store=store)
        async with Sweeper(store, retention=FORGET_ALL, prune_interval_seconds=0.001):
            await trainer.afit(double, list(range(300)))
        assert "300 of 300 rollouts finished, mean reward 299.000" in caplog.text
        assert len(await store.query_rollouts()) <= 2


def test_a_summary_says_how_many_were_forgotten() -> None:
    summary = RunSummary(None, {"succeeded": 5, "failed": 0}, {}, forgotten=1200)
    assert str(summary) == "rollouts: 5 succeeded; and 1,200 that retention has forgotten"
