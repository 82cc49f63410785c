"""Forks of recorded rollouts, and the advantages of single calls, against a game whose values are known."""

from __future__ import annotations

import hashlib
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.adapter import TraceToTrajectory, replayed_calls
from leyden.algorithm import Algorithm, CollectedRollout, call_advantages, fork_requests, fork_returns
from leyden.errors import ConfigError
from leyden.gateway import LLMProxy
from leyden.testing import FakeUpstream
from leyden.types import AttemptedRollout, EnqueueRolloutRequest, read_replay_from, semconv

N_CALLS = 3
P_HEADS = 0.6
FORKS = 24


def coin(request: dict[str, Any]) -> str:
    """Say heads with probability 0.6, by the request's seed."""
    digest = hashlib.sha256(f"coin/{request['seed']}".encode()).digest()
    return "heads" if int.from_bytes(digest[:4], "big") / 2**32 < P_HEADS else "tails"


@ly.llm_rollout
async def gambler(task: Any, llm: ly.LLM) -> float:
    """Ask three times; the reward is 1 for two heads or more."""
    messages: list[Any] = [{"role": "user", "content": "Throw a coin."}]
    thrown: list[str] = []
    for _ in range(N_CALLS):
        answer = await llm.openai().chat.completions.create(model=llm.model, messages=messages)
        thrown.append(answer.choices[0].message.content or "")
        messages += [{"role": "assistant", "content": thrown[-1]}, {"role": "user", "content": "Again."}]
    return float(thrown.count("heads") >= 2)


def true_value(heads: int, left: int) -> float:
    if left == 0:
        return float(heads >= 2)
    return P_HEADS * true_value(heads + 1, left - 1) + (1 - P_HEADS) * true_value(heads, left - 1)


class Forking(Algorithm):
    """Plays a few games, and forks each at every call."""

    uses_gateway = True

    def __init__(self, upstream: FakeUpstream) -> None:
        self.upstream = upstream
        self.originals: list[CollectedRollout] = []
        self.forks: list[CollectedRollout] = []
        self.live_calls = 0

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        proxy = self.get_llm_proxy()
        assert proxy is not None
        proxy.update_model_list([self.upstream.llm()])
        await self.get_store().add_resources({"llm": proxy.as_resource()})
        first = [EnqueueRolloutRequest(input=task, mode="train") for task in train_dataset]
        async for result in self.collector.collect(first, keep_until=1):
            self.originals.append(result)
        before = len(self.upstream.requests)
        requests = [
            request
            for result in self.originals
            for k in range(N_CALLS)
            for request in fork_requests(result.rollout, at_call=k, n=FORKS)
        ]
        async for result in self.collector.collect(requests):
            self.forks.append(result)
        self.live_calls = len(self.upstream.requests) - before


@pytest.mark.slow
@pytest.mark.merge
async def test_forked_estimates_agree_with_the_true_advantages(tmp_path: Path) -> None:
    n_games = 2
    async with FakeUpstream(reply=coin) as upstream:
        algorithm = Forking(upstream)
        trainer = ly.Trainer(
            algorithm=algorithm, concurrency=8, run_dir=tmp_path / "run", llm_proxy=LLMProxy(deterministic_seed=5)
        )
        await trainer.afit(gambler, list(range(n_games)))
    assert all(result.status == "succeeded" for result in [*algorithm.originals, *algorithm.forks])
    assert algorithm.live_calls == n_games * FORKS * (3 + 2 + 1)
    returns = fork_returns(algorithm.forks)
    agree = 0
    for original in algorithm.originals:
        assert isinstance(original.rollout, AttemptedRollout)
        of_game = returns[original.rollout_id, original.rollout.attempt.attempt_id]
        assert not of_game.diverged
        assert {k: len(values) for k, values in of_game.by_call.items()} == dict.fromkeys(range(N_CALLS), FORKS)
        assert original.reward is not None
        estimates = call_advantages(of_game.by_call, n_calls=N_CALLS, own_return=original.reward)
        thrown = [str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]) for span in model_calls(original)]
        heads = [sum("heads" in text for text in thrown[:k]) for k in range(N_CALLS + 1)]
        for k, estimate in enumerate(estimates):
            truth = true_value(heads[k + 1], N_CALLS - k - 1) - true_value(heads[k], N_CALLS - k)
            assert estimate.call == k
            assert estimate.low is not None
            assert estimate.high is not None
            agree += estimate.low - 1e-9 <= truth <= estimate.high + 1e-9
    assert agree >= n_games * N_CALLS - 1  # each interval holds the truth in 95 of 100 cases


def model_calls(result: CollectedRollout) -> list[ly.Span]:
    return [span for span in result.spans if span.name == semconv.MODEL_CALL]


async def test_the_forks_of_a_group_keep_their_calls_and_sample_the_rest_anew(tmp_path: Path) -> None:
    async with FakeUpstream() as upstream:
        algorithm = Forking(upstream)
        trainer = ly.Trainer(
            algorithm=algorithm, concurrency=8, run_dir=tmp_path / "run", llm_proxy=LLMProxy(deterministic_seed=5)
        )
        await trainer.afit(gambler, [0])
    (original,) = algorithm.originals
    (forked,) = [model_calls(original)]
    for fork in algorithm.forks:
        source = read_replay_from(fork.rollout.metadata)
        assert source is not None
        calls = model_calls(fork)
        kept = source.n_calls
        assert [call.state for call in replayed_calls(fork.spans)] == ["replayed"] * kept + ["live"] * (3 - kept)
        assert [span.tokens for span in calls[:kept]] == [span.tokens for span in forked[:kept]]
        assert all(call.tokens != other.tokens for call, other in zip(calls[kept:], forked[kept:], strict=True))
        trained = sum(trajectory.n_trained for trajectory in TraceToTrajectory().adapt(fork.spans))
        assert trained == sum(len(span.tokens.response_ids) for span in calls[kept:] if span.tokens)
    live = [
        str(model_calls(fork)[2].attributes[f"{semconv.GEN_AI_REQUEST_PREFIX}.seed"])
        for fork in algorithm.forks
        if "2/" in str(fork.rollout.metadata[semconv.SAMPLING_KEY]).split("/fork/")[1]
    ]
    assert len(set(live)) == FORKS


# ---- requests ------------------------------------------------------------------------------------------------------------


async def finished_rollout(store: ly.LightningStore) -> AttemptedRollout:
    rollout = await store.start_rollout("a task", metadata={"task": 3, semconv.SAMPLING_KEY: "train/1/2"}, mode="train")
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    found = await store.get_rollout_by_id(rollout.rollout_id)
    assert isinstance(found, AttemptedRollout)
    return found


async def test_a_group_of_forks_has_ids_of_its_own_and_the_originals_everything_else() -> None:
    async with ly.open_store("memory://") as store:
        rollout = await finished_rollout(store)
        requests = fork_requests(rollout, at_call=2, n=4)
        assert fork_requests(rollout, at_call=2, n=6)[:4] == requests
        others = fork_requests(rollout, at_call=1, n=4)
        new = fork_requests(rollout, at_call=2, n=4, resources_id="rs-new")
        for requested in (requests, others, new):
            assert len({request.group_id for request in requested}) == 1
        assert len({request.rollout_id for request in [*requests, *others, *new]}) == 12
        assert len({request.group_id for request in [*requests, *others, *new]}) == 3
        keys = [(request.metadata or {})[semconv.SAMPLING_KEY] for request in [*requests, *others]]
        assert len({*keys, "train/1/2"}) == 9
        for request in requests:
            assert (request.input, request.mode, (request.metadata or {})["task"]) == ("a task", "train", 3)
            source = read_replay_from(request.metadata or {})
            assert source is not None
            assert (source.rollout_id, source.n_calls) == (rollout.rollout_id, 2)
        enqueued = await store.enqueue_many_rollouts(requests)
        assert read_replay_from(enqueued[0].metadata) == read_replay_from(requests[0].metadata or {})


async def test_a_rollout_that_has_not_ended_cannot_be_forked() -> None:
    async with ly.open_store("memory://") as store:
        with pytest.raises(ConfigError, match="fork it when its attempt has ended"):
            fork_requests(await store.enqueue_rollout("a task"), at_call=1, n=1)
        rollout = await finished_rollout(store)
        with pytest.raises(ConfigError, match="at_call"):
            fork_requests(rollout, at_call=-1, n=1)
        with pytest.raises(ConfigError, match="n"):
            fork_requests(rollout, at_call=1, n=0)


# ---- estimates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 8, 32])
@pytest.mark.parametrize("kind", ["coins", "normal"])
def test_intervals_hold_the_truth_in_about_95_of_100_cases(kind: str, n: int) -> None:
    draw, held, cases = random.Random(f"{kind}/{n}"), 0, 800
    for _ in range(cases):
        if kind == "coins":
            p, q = draw.random(), draw.random()
            before, after = ([float(draw.random() < each) for _ in range(n)] for each in (p, q))
            truth = q - p
        else:
            before = [draw.gauss(1.0, 1.0) for _ in range(n)]
            after = [draw.gauss(3.0, 2.0) for _ in range(n)]
            truth = 2.0
        (estimate,) = call_advantages({5: before, 6: after})
        assert estimate.call == 5
        assert estimate.advantage == pytest.approx(statistics.fmean(after) - statistics.fmean(before))
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= truth <= estimate.high
    assert 0.93 <= held / cases <= 0.99


def test_the_own_return_is_exact_for_forks_that_keep_every_call() -> None:
    (last,) = call_advantages({1: [0.0, 1.0, 0.0, 0.0]}, n_calls=2, own_return=1.0)
    assert (last.call, last.advantage, last.method) == (1, 0.75, "Newcombe")
    assert last.high is not None
    assert last.high <= 1.0
    (graded,) = call_advantages({1: [0.1, 0.2, 0.3]}, n_calls=2, own_return=0.5)
    assert graded.advantage == pytest.approx(0.3)
    assert graded.high is not None
    assert graded.high - graded.advantage == pytest.approx(4.303 * 0.1 / 3**0.5, rel=0.01)  # Student's t, 2 degrees


def test_calls_without_forks_on_both_sides_are_left_out() -> None:
    assert [each.call for each in call_advantages({0: [1.0], 2: [0.0], 3: [1.0]})] == [2]
    assert call_advantages({}) == []
    (few,) = call_advantages({0: [0.5, 0.7], 1: [0.9]})
    assert (few.low, few.high, few.method) == (None, None, "none")
    with pytest.raises(ConfigError, match="together"):
        call_advantages({0: [1.0]}, n_calls=1)


async def test_forks_that_left_the_record_are_counted_and_not_averaged(tmp_path: Path) -> None:
    async with FakeUpstream(reply=coin) as upstream:
        algorithm = Forking(upstream)
        thrown = iter(range(10_000))

        @ly.llm_rollout
        async def forgetful(task: Any, llm: ly.LLM) -> float:
            """Its own code is not deterministic."""
            for text in ("Throw.", f"Throw number {next(thrown)}.", "Throw."):
                said: Any = [{"role": "user", "content": text}]
                await llm.openai().chat.completions.create(model=llm.model, messages=said)
            return 1.0

        trainer = ly.Trainer(
            algorithm=algorithm, concurrency=8, run_dir=tmp_path / "run", llm_proxy=LLMProxy(deterministic_seed=5)
        )
        await trainer.afit(forgetful, [0])
    (returns,) = fork_returns(algorithm.forks).values()
    assert {k: len(values) for k, values in returns.by_call.items()} == {0: FORKS, 1: FORKS}
    assert len(returns.diverged) == FORKS
    assert returns.diverged[0].startswith('call 1: messages[0].content is "Throw number')


async def test_a_fork_that_did_not_get_to_its_call_is_no_return_of_it(tmp_path: Path) -> None:
    """An agent that stops early on a fork, and one whose record is gone, tell nothing about the call."""
    stops_early: list[bool] = []

    @ly.llm_rollout
    async def agent(task: Any, llm: ly.LLM) -> float:
        messages: list[Any] = [{"role": "user", "content": "Throw a coin."}]
        for _ in range(1 if stops_early else N_CALLS):
            answer = await llm.openai().chat.completions.create(model=llm.model, messages=messages)
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "Again."},
            ]
        return 1.0

    class StoppingEarly(Forking):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            proxy = self.get_llm_proxy()
            assert proxy is not None
            proxy.update_model_list([self.upstream.llm()])
            await self.get_store().add_resources({"llm": proxy.as_resource()})
            async for result in self.collector.collect([EnqueueRolloutRequest(input=0)], keep_until=1):
                self.originals.append(result)
            stops_early.append(True)
            requests = [each for k in (1, 2) for each in fork_requests(self.originals[0].rollout, at_call=k, n=2)]
            async for result in self.collector.collect(requests):
                self.forks.append(result)

    async with FakeUpstream(reply=coin) as upstream:
        algorithm = StoppingEarly(upstream)
        await ly.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", llm_proxy=LLMProxy(deterministic_seed=5)).afit(
            agent, [0]
        )
    (returns,) = fork_returns(algorithm.forks).values()
    assert returns.by_call == {1: [1.0, 1.0]}, "a fork at call 1 kept all that it was to keep"
    assert len(returns.diverged) == 2
    assert all("ended after 1 recorded calls, before call 2" in line for line in returns.diverged)
