"""A judge's reward counts, and what it is given is what was recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import leyden as ly
from leyden.errors import InvalidArgument
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.types import RolloutConfig, Span, find_final_reward, semconv

pytest.importorskip("openai")


@ly.llm_rollout
async def agent(task: str, llm: ly.LLM) -> float | None:
    """Ask, and reward itself only for the task "own"."""
    if task == "raises":
        raise ValueError("no such luck")
    await llm.openai().chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
    return 0.25 if task == "own" else None


def answers(spans: Sequence[Span]) -> list[str]:
    return [str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]) for span in spans if span.name == semconv.MODEL_CALL]


async def judged(judge: ly.Judge, tasks: list[str]) -> dict[str, tuple[str, float | None]]:
    """Return the status and the final reward of each task, with the judge looking on."""
    async with FakeUpstream() as upstream, InMemoryLightningStore() as store:
        proxy = ly.LLMProxy(model_list=[upstream.llm()], store=store)
        async with proxy:
            config = RolloutConfig(require_reward=True)
            resources = await store.add_resources({"main_llm": proxy.as_resource(model=upstream.llm().model)})
            for task in tasks:
                await store.enqueue_rollout(task, resources_id=resources.resources_id, config=config)
            runner = ly.LitAgentRunner(max_rollouts=len(tasks))
            async with runner.run_context(agent=agent, store=store, hooks=[judge], recorders=[proxy]) as bound:
                await bound.iter()
        return {
            str(rollout.input): (rollout.status, find_final_reward(await store.query_spans(rollout.rollout_id)))
            for rollout in await store.query_rollouts()
        }


async def test_a_judge_reads_the_recorded_calls_and_its_reward_counts() -> None:
    seen: dict[str, list[str]] = {}

    async def score(task: str, spans: Sequence[Span]) -> float:
        await asyncio.sleep(0)
        seen[task] = answers(spans)
        return 0.75

    found = await judged(ly.Judge(score), ["none", "own", "raises"])
    assert found["none"] == ("succeeded", 0.75)
    assert found["own"] == ("succeeded", 0.75), "the last reward counts"
    assert found["raises"][0] == "failed"
    assert [len(texts) for task, texts in seen.items() if task != "raises"] == [1, 1]


async def test_a_judge_may_leave_the_agents_reward_and_name_several() -> None:
    def score(task: str, spans: Sequence[Span]) -> Any:
        return None if task == "own" else {"helpful": 0.5, "polite": 1.0}

    assert await judged(ly.Judge(score), ["none", "own"]) == {"none": ("succeeded", 0.5), "own": ("succeeded", 0.25)}


async def test_an_attempt_whose_judge_fails_has_no_reward() -> None:
    def score(task: str, spans: Sequence[Span]) -> float:
        raise ConnectionError("the reward model is away")

    assert await judged(ly.Judge(score), ["none", "own"]) == {"none": ("failed", None), "own": ("succeeded", 0.25)}


def test_a_score_that_is_no_function_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"score is 0\.5; give a function"):
        ly.Judge(0.5)  # type: ignore[arg-type]
