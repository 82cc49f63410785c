"""An agent over a real model and a gateway: its turns merge, and a fork of it trains its own calls only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import leyden as ly
from leyden.adapter import TraceToTrajectory, turn_merges
from leyden.algorithm import Algorithm, CollectedRollout, fork_requests
from leyden.engine import EmbeddedBackend
from leyden.gateway import LLMProxy, UpstreamModel
from leyden.types import EnqueueRolloutRequest, semconv
from tests.engine import tiny
from tests.engine.test_turns import trained_tokenizer

N_CALLS = 4


@ly.llm_rollout
async def chatter(task: Any, llm: ly.LLM) -> float:
    """Ask four questions in one conversation, every other one as a stream."""
    messages: list[Any] = [{"role": "user", "content": f"the jar {task}"}]
    client = llm.openai()
    for number in range(N_CALLS):
        asked: dict[str, Any] = {"model": llm.model, "messages": messages, "max_tokens": 12}
        if number % 2:
            chunks = await client.chat.completions.create(**asked, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
        else:
            text = (await client.chat.completions.create(**asked)).choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "left"}]
    return float(len(messages))


class ForkOnce(Algorithm):
    """Runs a rollout, and forks it at one call."""

    uses_gateway = True

    def __init__(self, backend: EmbeddedBackend, at_call: int) -> None:
        self.backend, self.at_call = backend, at_call
        self.results: list[CollectedRollout] = []
        self.requests: list[int] = []

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        await self.backend.start()
        try:
            proxy = self.get_llm_proxy()
            assert proxy is not None
            server = self.backend.endpoint()
            proxy.update_model_list([UpstreamModel(server.model, server.endpoint, api_key=server.api_key)])
            await self.get_store().add_resources({"llm": proxy.as_resource()})
            first = [EnqueueRolloutRequest(input=task, mode="train") for task in train_dataset]
            async for result in self.collector.collect(first, keep_until=1):
                self.results.append(result)
            self.requests.append(proxy.upstreams()[0].requests)
            async for result in self.collector.collect(
                fork_requests(self.results[0].rollout, at_call=self.at_call, n=2)
            ):
                self.results.append(result)
            self.requests.append(proxy.upstreams()[0].requests)
        finally:
            await self.backend.stop()


async def test_all_turns_merge_and_a_fork_trains_its_own_calls_only(tmp_path: Path) -> None:
    tokenizer = trained_tokenizer()
    model = tiny.model(vocab_size=len(tokenizer))
    algorithm = ForkOnce(EmbeddedBackend(model, tokenizer=tokenizer), at_call=2)
    proxy = LLMProxy(deterministic_seed=11)
    trainer = ly.Trainer(algorithm=algorithm, concurrency=2, run_dir=tmp_path / "run", llm_proxy=proxy)
    await trainer.afit(chatter, [0])
    assert [result.status for result in algorithm.results] == ["succeeded"] * 3
    assert algorithm.requests[1] - algorithm.requests[0] == 2 * (N_CALLS - 2)
    original, *forks = algorithm.results
    calls = [span for span in original.spans if span.name == semconv.MODEL_CALL]
    (whole,) = TraceToTrajectory().adapt(original.spans)
    assert turn_merges(original.spans).share == 1.0
    assert trained_ids(whole) == response_ids(calls)
    again = [tokenizer.encode(tokenizer.decode(span.tokens.response_ids)) for span in calls if span.tokens]
    assert again != [span.tokens.response_ids for span in calls if span.tokens]  # as text they would not merge
    sampled = set[tuple[int, ...]]()
    for fork in forks:
        spans = [span for span in fork.spans if span.name == semconv.MODEL_CALL]
        assert [span.attributes.get(semconv.REPLAYED) for span in spans] == [True, True, None, None]
        assert response_ids(spans[:2]) == response_ids(calls[:2])
        (trajectory,) = TraceToTrajectory().adapt(fork.spans)
        assert trained_ids(trajectory) == response_ids(spans[2:])
        assert spans[3].tokens is not None
        assert trajectory.token_ids == spans[3].tokens.prompt_ids + spans[3].tokens.response_ids
        assert turn_merges(fork.spans).share == 1.0
        sampled.add(tuple(response_ids(spans[2:])))
    assert len({*sampled, tuple(response_ids(calls[2:]))}) == 3


def response_ids(spans: list[ly.Span]) -> list[int]:
    return [token for span in spans if span.tokens for token in span.tokens.response_ids]


def trained_ids(trajectory: Any) -> list[int]:
    return [token for token, mine in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mine]
