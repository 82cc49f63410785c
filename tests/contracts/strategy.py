"""What every execution strategy does. Import the tests and give them a fixture `make_strategy`: `make_strategy(n_runners) -> strategy`.

from tests.contracts.strategy import *

@pytest.fixture(params=["mine"])
def make_strategy(request): ...
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.execution import ExecutionStrategy
from tests.execution import agents

MakeStrategy = Callable[[int], ExecutionStrategy]


async def outcomes(
    strategy: ExecutionStrategy, agent: ly.LitAgent[Any], tasks: list[Any], **options: Any
) -> Counter[float | str | None]:
    """Final rewards of the succeeded rollouts, and the status of the others, each with its number."""
    async with ly.InMemoryLightningStore() as store:
        options = {"algorithm": "baseline", **options}
        async with asyncio.timeout(50):
            await ly.Trainer(strategy=strategy, store=store, **options).afit(agent, tasks)
        rollouts = await store.query_rollouts()
        spans = await store.query_spans_of([rollout.rollout_id for rollout in rollouts])
    return Counter(
        ly.find_final_reward(spans[rollout.rollout_id]) if rollout.status == "succeeded" else rollout.status
        for rollout in rollouts
    )


async def test_a_hundred_tasks_each_get_their_reward(make_strategy: MakeStrategy) -> None:
    assert await outcomes(make_strategy(2), agents.double, list(range(100))) == Counter(2.0 * n for n in range(100))


async def test_an_agent_that_raises_fails_its_own_rollouts_only(make_strategy: MakeStrategy) -> None:
    assert await outcomes(make_strategy(1), agents.picky, [0, 1, 2, 3]) == {0.0: 1, 2.0: 1, "failed": 2}


@pytest.mark.parametrize("kind", ["sync function", "class", "closure", "lambda"])
async def test_agents_of_every_kind_run(make_strategy: MakeStrategy, kind: str) -> None:
    factor = 5.0

    @ly.rollout
    async def closure(task: int) -> float:
        return factor * task

    kinds: dict[str, tuple[ly.LitAgent[Any], float]] = {
        "sync function": (agents.triple, 3.0),
        "class": (agents.Method(), 4.0),
        "closure": (closure, 5.0),
        "lambda": (ly.rollout(lambda task: factor * task + task), 6.0),
    }
    agent, expected = kinds[kind]
    assert await outcomes(make_strategy(1), agent, [1]) == {expected: 1}


async def test_hooks_are_called_where_the_agent_runs(make_strategy: MakeStrategy, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    await outcomes(make_strategy(1), agents.double, [1, 2, 3], hooks=agents.Noting(notes))
    assert len(notes.read_text().split()) == 3


async def test_what_the_algorithm_raises_is_raised(make_strategy: MakeStrategy) -> None:
    @ly.algo
    async def broken(*, train_dataset: list[int]) -> None:
        raise ZeroDivisionError("in the algorithm")

    with pytest.raises(ZeroDivisionError, match="in the algorithm"):
        await outcomes(make_strategy(1), agents.double, [1], algorithm=broken)


async def test_a_model_call_is_in_the_record_when_its_attempt_is_over(make_strategy: MakeStrategy) -> None:
    from leyden.testing import FakeUpstream

    @ly.llm_rollout
    async def ask(task: int, llm: ly.LLM) -> float:
        import aiohttp

        question = {"model": llm.model, "messages": [{"role": "user", "content": str(task)}]}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{llm.endpoint}/chat/completions", json=question) as answer,
        ):
            return float(answer.status)

    async with FakeUpstream() as upstream, ly.InMemoryLightningStore() as store, asyncio.timeout(50):
        async with ly.LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
            trainer = ly.Trainer(
                algorithm="baseline",
                strategy=make_strategy(1),
                store=store,
                llm_proxy=proxy,
                initial_resources={"llm": proxy.as_resource()},
            )
            await trainer.afit(ask, [1, 2, 3])
            for rollout in await store.query_rollouts():
                assert isinstance(rollout, ly.AttemptedRollout)
                with pytest.raises(AssertionError, match="410"):
                    await _call(proxy, rollout)
        assert len(upstream.calls) == 3


async def _call(proxy: ly.LLMProxy, rollout: ly.AttemptedRollout) -> None:
    import aiohttp

    llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
    async with aiohttp.ClientSession() as session:
        question = {"model": llm.model, "messages": [{"role": "user", "content": "late"}]}
        async with session.post(f"{llm.endpoint}/chat/completions", json=question) as answer:
            raise AssertionError(answer.status)


async def test_cancelling_a_run_ends_it_in_seconds(make_strategy: MakeStrategy) -> None:
    started = threading.Event()

    @ly.algo
    async def endless(*, store: ly.LightningStore, train_dataset: list[int]) -> None:
        await store.wait_for_rollouts(rollout_ids=[(await store.enqueue_rollout(1)).rollout_id])
        started.set()
        await asyncio.sleep(600)

    run = asyncio.create_task(outcomes(make_strategy(1), agents.double, [1], algorithm=endless))
    await asyncio.to_thread(started.wait, 40)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(15):
            await run
