"""Calls that an algorithm itself makes are recorded in an attempt of its own."""

from __future__ import annotations

from typing import Any

import pytest

import leyden as ly
from leyden.algorithm import Algorithm
from leyden.errors import ConfigError
from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.training.runs import Run
from leyden.types import current_run_id


class Improver(Algorithm):
    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> list[str]:
        answers: list[str] = []
        for step in range(2):
            async with self.recorded_calls("reflection", metadata={"step": step}) as llm:
                for text in ("What is wrong?", "Improve it."):
                    said = [{"role": "user", "content": text}]
                    answer = await llm.openai().chat.completions.create(model=llm.model, messages=said)
                    answers.append(answer.choices[0].message.content)
                    if train_dataset == "fails":
                        raise ValueError("no idea")
        return answers


async def test_an_algorithms_own_calls_have_tokens_and_cost_and_count_for_no_run() -> None:
    async with InMemoryLightningStore() as store, FakeUpstream() as upstream:
        model = UpstreamModel("fake", upstream.endpoint, price_per_million=(1e6, 1e6))
        async with LLMProxy(model_list=[model], store=store) as proxy:
            algorithm = Improver()
            algorithm.set_store(store)
            algorithm.set_run(Run(run_id="run-1"))
            with pytest.raises(ConfigError, match="needs a gateway"):
                await algorithm.run()
            algorithm.set_llm_proxy(proxy)
            token = current_run_id.set("run-of-another")  # which the store does not know
            answers = await algorithm.run()
            current_run_id.reset(token)
            with pytest.raises(ValueError, match="no idea"):
                await algorithm.run("fails")
        assert len(answers) == 4
        own = await store.query_rollouts(group_id="run-1/algorithm")
        assert [rollout.status for rollout in own] == ["succeeded", "succeeded", "failed"]
        assert [rollout.metadata["step"] for rollout in own] == [0, 1, 0]
        for rollout in own:
            assert isinstance(rollout, ly.AttemptedRollout)
            assert (rollout.input["purpose"], rollout.run_id) == ("reflection", None)
            spans = await store.query_spans(rollout.rollout_id, name="leyden.model_call")
            taken = sum(len(span.tokens.prompt_ids) + len(span.tokens.response_ids) for span in spans if span.tokens)
            assert taken > 0
            assert rollout.attempt.prompt_tokens + rollout.attempt.response_tokens == taken
            assert rollout.attempt.cost == pytest.approx(taken)
        assert own[2].attempt.metadata["reason"] == "ValueError: no idea"
        assert own[2].attempt.failure == "algorithm"
