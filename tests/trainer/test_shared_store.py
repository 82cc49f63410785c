"""A trainer on a store that others work on too: it does its own work, and leaves alone what is theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.errors import ConfigError
from leyden.store import LightningStoreServer, SqliteLightningStore
from leyden.types import Retention

Served = tuple[SqliteLightningStore, LightningStoreServer]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with SqliteLightningStore(tmp_path / "store.db") as store, LightningStoreServer(store) as server:
        yield store, server


@ly.rollout
async def double(task: int) -> float:
    return 2.0 * task


async def test_a_trainer_takes_a_store_by_its_url(served: Served) -> None:
    store, server = served
    summary = await ly.Trainer(algorithm="baseline", store=server.endpoint).afit(double, [1, 2, 3])
    assert summary.rollouts["succeeded"] == 3
    spans = await store.query_spans_of([rollout.rollout_id for rollout in await store.query_rollouts()])
    assert sorted(ly.find_final_reward(record) or 0.0 for record in spans.values()) == [2.0, 4.0, 6.0]


async def test_runners_without_an_algorithm_say_whose_rollouts_they_wait_for(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    store, server = served
    await store.enqueue_rollout(1)
    async with asyncio.timeout(30):
        await ly.Trainer(store=server.endpoint, max_rollouts=1).afit(double)
    said = f"waiting for rollouts that others enqueue in {server.endpoint}; Ctrl-C ends"
    assert capsys.readouterr().err.count(said) == 1


async def test_two_runs_of_an_agent_on_one_store_have_workers_of_their_own(served: Served) -> None:
    store, server = served
    await asyncio.gather(
        *(ly.Trainer(algorithm="baseline", n_runners=2, store=server.endpoint).afit(double, [n]) for n in range(2))
    )
    names = {worker.worker_id for worker in await store.query_workers()}
    assert len(names) == 4


async def test_a_run_that_is_stopped_releases_its_own_claims_and_no_others(served: Served, tmp_path: Path) -> None:
    store, server = served
    foreign = await store.start_rollout("foreign", worker_id="somebody-else")
    started = asyncio.Event()

    @ly.rollout
    async def hang(task: int) -> float:
        started.set()
        await asyncio.sleep(60)
        return 0.0

    run: dict[str, Any] = {"algorithm": "baseline", "store": server.endpoint, "run_dir": tmp_path / "run"}
    work = asyncio.create_task(ly.Trainer(**run).afit(hang, [1]))
    async with asyncio.timeout(20):
        await started.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert (await store.get_rollout_by_id(foreign.rollout_id)).status == "preparing"
    assert [rollout.input for rollout in await store.query_rollouts(status_in=["requeuing", "queuing"])] == [1]


async def test_one_run_does_not_decide_what_a_shared_store_keeps(served: Served) -> None:
    _, server = served
    trainer = ly.Trainer(algorithm="baseline", store=server.endpoint, retention=Retention(max_rollouts=1))
    with pytest.raises(ConfigError, match="leyden store --keep-rollouts"):
        await trainer.afit(double, [1])


@pytest.mark.parametrize("by_url", [False, True], ids=["instance", "url"])
async def test_the_summary_of_a_run_counts_its_own_rollouts_alone(served: Served, by_url: bool) -> None:
    store, server = served

    @ly.rollout
    async def picky(task: int) -> float:
        if task < 0:
            raise ValueError("negative")
        return 1.0

    summaries = [
        await ly.Trainer(algorithm="baseline", store=server.endpoint if by_url else store).afit(picky, tasks)
        for tasks in ([1, -2, 3], [4])
    ]
    counts = [(each.rollouts["succeeded"], each.rollouts["failed"], sum(each.failures.values())) for each in summaries]
    assert counts == [(2, 1, 1), (1, 0, 0)]
