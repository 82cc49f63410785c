"""What every `PolicyBackend` does. Import the tests and give them a fixture `backend`, not started.

    from tests.contracts.engine import *

    @pytest.fixture(params=["embedded", "mine"])
    def backend(request, tmp_path): ...

The fixture's model must take any token ids below 260 and have token 2 as its end of turn. A module whose sampler
rounds otherwise than its learner overrides the fixture `logprob_tolerance`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from leyden.engine import OptimParams, OptimStepResult, PolicyBackend, SamplingParams
from leyden.errors import CheckpointError, ConfigError, EngineError
from leyden.objectives.losses import PPOLoss
from leyden.types import TrainingSequence


def sequence_of(
    token_ids: list[int], logprobs: list[float], advantages: list[float], weights: list[float]
) -> TrainingSequence:
    """A sequence with the columns of the loss `ppo`."""
    return TrainingSequence(token_ids, weights, {"logprobs": logprobs, "advantages": advantages})


def with_columns(sequence: TrainingSequence, **columns: list[float]) -> TrainingSequence:
    """The sequence with some of its columns replaced."""
    return dataclasses.replace(sequence, columns={**sequence.columns, **columns})


PROMPTS = [[1, 50, 60, 70], [1, 80], [1, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
STEP = OptimParams(learning_rate=1e-2)


@pytest.fixture
def logprob_tolerance() -> float:
    """The largest difference between a log-probability of the sampler and the learner's, in nats."""
    return 1e-5


@pytest.fixture
async def running(backend: PolicyBackend) -> AsyncIterator[PolicyBackend]:
    async with backend:
        yield backend


async def sampled(backend: PolicyBackend, *, max_tokens: int = 6, advantage: float = 1.0) -> list[TrainingSequence]:
    """What the policy says to PROMPTS, as training data."""
    samples = await backend.sample(PROMPTS, SamplingParams(max_tokens=max_tokens, seed=7))
    return [
        sequence_of(
            token_ids=prompt + s.token_ids,
            logprobs=[0.0] * len(prompt) + s.logprobs,
            advantages=[0.0] * len(prompt) + [advantage] * len(s.token_ids),
            weights=[0.0] * len(prompt) + [1 / len(s.token_ids)] * len(s.token_ids),
        )
        for prompt, s in zip(PROMPTS, samples, strict=True)
    ]


async def stepped(backend: PolicyBackend, params: OptimParams = STEP) -> OptimStepResult:
    """Take a step, and publish it."""
    result = await backend.optim_step(params)
    assert await backend.publish_weights() == result.policy_version
    return result


async def logprobs_of(backend: PolicyBackend, prompt: list[int], n: int) -> list[float]:
    """The greedy continuation's log-probabilities: a fingerprint of the weights."""
    (sample,) = await backend.sample([prompt], SamplingParams(max_tokens=n, temperature=0, seed=0))
    return sample.logprobs


def same(backend: PolicyBackend, logprobs: list[float], tolerance: float) -> object:
    """What equal weights give: the same bits, if sampler and learner share them."""
    return logprobs if backend.capabilities.shared_weights else pytest.approx(logprobs, abs=tolerance)


async def chat(backend: PolicyBackend, **fields: object) -> dict:
    body = {
        "model": backend.model_name,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "seed": 1,
        **fields,
    }
    url = backend.endpoint().endpoint + "/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        return {"status": answer.status, **await answer.json()}


async def test_starting_and_stopping_twice_is_once(backend: PolicyBackend):
    await backend.start()
    endpoint = backend.endpoint()
    await backend.start()
    assert backend.endpoint() == endpoint
    await backend.stop()
    await backend.stop()


async def test_a_stopped_backend_starts_again(backend: PolicyBackend):
    async with backend:
        pass
    async with backend:
        assert backend.policy_version == 0
        assert (await chat(backend))["status"] == 200


async def test_before_start_everything_says_so(backend: PolicyBackend):
    with pytest.raises(EngineError, match="start"):
        backend.endpoint()
    with pytest.raises(EngineError, match="start"):
        await backend.sample([[1]], SamplingParams())
    with pytest.raises(EngineError, match="start"):
        await backend.forward_backward([], PPOLoss())


async def test_a_sample_has_ids_logprobs_and_versions_of_one_length(running: PolicyBackend):
    samples = await running.sample(PROMPTS, SamplingParams(max_tokens=5, seed=1))
    assert len(samples) == len(PROMPTS)
    for sample in samples:
        assert len(sample.token_ids) == len(sample.logprobs) == len(sample.policy_versions) <= 5
        assert all(logprob <= 0 for logprob in sample.logprobs)
        assert set(sample.policy_versions) == {0}
        assert sample.finish_reason == ("stop" if sample.token_ids[-1] == 2 else "length")


async def test_a_stop_token_ends_the_response_and_is_part_of_it(running: PolicyBackend):
    free, *_ = await running.sample([PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0, seed=0))
    stop = free.token_ids[2]
    held, *_ = await running.sample(
        [PROMPTS[0]], SamplingParams(max_tokens=6, temperature=0, seed=0, stop_token_ids=(stop,))
    )
    assert held.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert held.finish_reason == "stop"


async def test_sampled_logprobs_are_those_of_the_trainer(running: PolicyBackend, logprob_tolerance: float):
    result = await running.forward_backward(await sampled(running), PPOLoss())
    assert result.metrics["max_logprob_difference"] < logprob_tolerance
    assert result.metrics["kl"] == pytest.approx(0, abs=max(1e-8, logprob_tolerance**2))
    assert result.metrics["clip_fraction"] == 0
    assert result.n_sequences == 3


async def test_a_tempered_sample_has_the_logprobs_of_a_tempered_trainer(
    running: PolicyBackend, logprob_tolerance: float
):
    samples = await running.sample(PROMPTS, SamplingParams(max_tokens=6, temperature=0.7, seed=3))
    sequences = [
        sequence_of(
            prompt + s.token_ids,
            [0.0] * len(prompt) + s.logprobs,
            [0.0] * len(prompt) + [1.0] * len(s.token_ids),
            [0.0] * len(prompt) + [1.0] * len(s.token_ids),
        )
        for prompt, s in zip(PROMPTS, samples, strict=True)
    ]
    result = await running.forward_backward(sequences, PPOLoss(), temperature=0.7)
    assert result.metrics["max_logprob_difference"] < logprob_tolerance


async def test_a_step_towards_a_response_makes_it_likelier(running: PolicyBackend):
    sequences = await sampled(running)
    await running.forward_backward(sequences, PPOLoss())
    step = await stepped(running, OptimParams(learning_rate=1e-3))
    assert step.policy_version == running.policy_version == 1
    assert step.grad_norm > 0
    after = await running.forward_backward(sequences, PPOLoss(clip_high=1e6))
    assert after.loss < -3.0  # three sequences of weight 1, each with a ratio above 1 now
    assert after.metrics["kl"] > 0


async def test_new_tokens_carry_the_new_version(running: PolicyBackend):
    await running.forward_backward(await sampled(running), PPOLoss())
    await stepped(running)
    (sample,) = await running.sample([[1, 2, 3]], SamplingParams(max_tokens=3, seed=0))
    assert set(sample.policy_versions) == {1}


async def test_gradients_add_up_over_calls(running: PolicyBackend, tmp_path: Path):
    sequences = await sampled(running)
    await running.save_state(tmp_path / "start")
    await running.forward_backward(sequences, PPOLoss())
    together = await running.optim_step(STEP)
    await running.load_state(tmp_path / "start")
    for sequence in sequences:
        await running.forward_backward([sequence], PPOLoss())
    apart = await running.optim_step(STEP)
    assert apart.grad_norm == pytest.approx(together.grad_norm, rel=1e-5)


async def test_a_step_without_a_gradient_is_refused(running: PolicyBackend):
    with pytest.raises(EngineError, match="forward_backward"):
        await running.optim_step(STEP)
    await running.forward_backward(await sampled(running), PPOLoss())
    await running.optim_step(STEP)
    with pytest.raises(EngineError, match="forward_backward"):
        await running.optim_step(STEP)
    assert await running.publish_weights() == 1


async def test_training_data_that_cannot_be_right_is_refused(running: PolicyBackend):
    good = sequence_of([1, 2, 3], [0.0, -1.0, -1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0])
    bad = {
        "nothing to train": [],
        "nothing to train on": [dataclasses.replace(good, weights=[0.0, 0.0, 0.0])],
        "same length": [with_columns(good, logprobs=[0.0])],
        "99999": [dataclasses.replace(good, token_ids=[1, 99999, 3])],
        "-1": [dataclasses.replace(good, token_ids=[1, -1, 3])],
        "first token": [dataclasses.replace(good, weights=[1.0, 1.0, 1.0])],
    }
    for message, sequences in bad.items():
        with pytest.raises(ConfigError, match=message):
            await running.forward_backward(sequences, PPOLoss())
    await running.forward_backward([good], PPOLoss())


async def test_a_loss_that_is_not_finite_clears_the_gradient(running: PolicyBackend):
    good = sequence_of([1, 2, 3], [0.0, -1.0, -1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0])
    await running.forward_backward([good], PPOLoss())
    with pytest.raises(EngineError, match="cleared"):
        await running.forward_backward([with_columns(good, advantages=[0.0, math.nan, 1.0])], PPOLoss())
    with pytest.raises(EngineError, match="forward_backward"):
        await running.optim_step(STEP)


async def test_a_saved_state_continues_to_the_bit(running: PolicyBackend, tmp_path: Path):
    data = await sampled(running)
    await running.forward_backward(data, PPOLoss())
    await stepped(running)
    await running.save_state(tmp_path / "state")

    async def continued() -> list[object]:
        results: list[object] = []
        for _ in range(2):
            results.append(await running.forward_backward(data, PPOLoss()))
            results.append(await stepped(running))
        for sample in await running.sample(PROMPTS, SamplingParams(max_tokens=4, temperature=0, seed=0)):
            # The bits of a sampler apart depend on which requests share its batch.
            results.append(sample if running.capabilities.shared_weights else sample.token_ids)
        return results

    first = await continued()
    await running.load_state(tmp_path / "state")
    assert running.policy_version == 1
    assert await continued() == first


async def test_a_state_moves_to_a_fresh_backend(backend: PolicyBackend, logprob_tolerance: float, tmp_path: Path):
    async with backend:
        await backend.forward_backward(await sampled(backend), PPOLoss())
        await stepped(backend)
        await backend.save_state(tmp_path / "state")
        before = await logprobs_of(backend, PROMPTS[0], 4)
    async with backend:
        assert await logprobs_of(backend, PROMPTS[0], 4) != pytest.approx(before, abs=10 * logprob_tolerance)
        await backend.load_state(tmp_path / "state")
        assert await logprobs_of(backend, PROMPTS[0], 4) == same(backend, before, logprob_tolerance)
        assert backend.policy_version == 1


async def test_a_missing_foreign_or_damaged_state_is_refused(
    running: PolicyBackend, logprob_tolerance: float, tmp_path: Path
):
    before = await logprobs_of(running, PROMPTS[0], 3)
    with pytest.raises(CheckpointError, match="nowhere"):
        await running.load_state(tmp_path / "nowhere")
    await running.save_state(tmp_path / "state")
    for file in ("model.safetensors", "optimizer.json", "engine.json"):
        good = (tmp_path / "state" / file).read_bytes()
        (tmp_path / "state" / file).write_bytes(good[: len(good) // 2])
        with pytest.raises(CheckpointError, match="damaged"):
            await running.load_state(tmp_path / "state")
        (tmp_path / "state" / file).write_bytes(good)
    about = json.loads((tmp_path / "state" / "engine.json").read_text())
    (tmp_path / "state" / "engine.json").write_text(json.dumps({**about, "format": 999}))
    with pytest.raises(CheckpointError, match="999"):
        await running.load_state(tmp_path / "state")
    assert await logprobs_of(running, PROMPTS[0], 3) == same(running, before, logprob_tolerance)


async def test_a_pretrained_folder_loads_with_transformers(
    running: PolicyBackend, logprob_tolerance: float, tmp_path: Path
):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    await running.forward_backward(await sampled(running), PPOLoss())
    await stepped(running)
    await running.save_pretrained(tmp_path / "hf")
    (sample,) = await running.sample([PROMPTS[0]], SamplingParams(max_tokens=1, temperature=0, seed=0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
    assert int(logprobs.argmax()) == sample.token_ids[0]
    assert float(logprobs.max()) == pytest.approx(sample.logprobs[0], abs=logprob_tolerance)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template


async def test_the_endpoint_reports_tokens_and_versions(running: PolicyBackend):
    answer = await chat(running, return_token_ids=True, logprobs=True)
    (choice,) = answer["choices"]
    n = len(choice["token_ids"])
    assert answer["prompt_token_ids"]
    assert n == len(choice["logprobs"]["content"])
    if running.capabilities.reports_versions:
        assert n == len(choice["policy_versions"])
    counts = {
        "prompt_tokens": len(answer["prompt_token_ids"]),
        "completion_tokens": n,
        "total_tokens": len(answer["prompt_token_ids"]) + n,
    }
    assert answer["usage"] == {**answer["usage"], **counts}


async def test_the_endpoint_serves_while_a_gradient_is_taken(running: PolicyBackend):
    async def trained() -> dict[str, int]:
        await running.forward_backward(data, PPOLoss())
        return {"status": 200, "version": (await stepped(running)).policy_version}

    data = await sampled(running)
    answers = await asyncio.gather(trained(), *(chat(running, seed=i) for i in range(8)))
    assert [answer["status"] for answer in answers] == [200] * 9


async def test_statistics_count_what_was_sampled(running: PolicyBackend):
    before = await running.statistics()
    await running.sample(PROMPTS, SamplingParams(max_tokens=2, seed=0))
    after = await running.statistics()
    assert after.requests - before.requests == 3
    assert after.prompt_tokens - before.prompt_tokens == sum(map(len, PROMPTS))
    assert 3 <= after.response_tokens - before.response_tokens <= 6
    assert after.decode_steps > before.decode_steps


async def test_prompts_that_cannot_be_continued_are_refused(running: PolicyBackend):
    for prompt in ([], [10**6], [1] * 100_000):
        with pytest.raises(ConfigError, match="prompt 0"):
            await running.sample([prompt], SamplingParams(seed=0))


# ---- forward, losses, capabilities -----------------------------------------------------------------------------------


async def test_a_forward_pass_has_the_logprobs_of_the_sampler_and_changes_nothing(
    running: PolicyBackend, logprob_tolerance: float
):
    samples = await running.sample(PROMPTS, SamplingParams(max_tokens=6, temperature=0.7, seed=3))
    sequences = [
        TrainingSequence(prompt + s.token_ids, [0.0] * len(prompt) + [1.0] * len(s.token_ids))
        for prompt, s in zip(PROMPTS, samples, strict=True)
    ]
    result = await running.forward(sequences, temperature=0.7)
    for prompt, sample, logprobs, entropies in zip(PROMPTS, samples, result.logprobs, result.entropies, strict=True):
        assert logprobs[: len(prompt)] == entropies[: len(prompt)] == [0.0] * len(prompt)
        assert logprobs[len(prompt) :] == pytest.approx(sample.logprobs, abs=logprob_tolerance)
        assert all(0 < entropy < 6 for entropy in entropies[len(prompt) :])
    assert result.values is None
    with pytest.raises(EngineError, match="forward_backward"):
        await running.optim_step(STEP)  # no gradient was left behind
    with pytest.raises(ConfigError, match="same length"):
        await running.forward([TrainingSequence([1, 2], [0.0])])


async def test_what_a_backend_lacks_is_refused_by_name(running: PolicyBackend):
    assert "ppo" in running.capabilities.losses
    sequences = await sampled(running)
    if not running.capabilities.values:
        with pytest.raises(ConfigError, match="no value head"):
            await running.forward(sequences, values=True)
    lacks = [
        dataclasses.replace(sequence, columns={"logprobs": sequence.columns["logprobs"]}) for sequence in sequences
    ]
    with pytest.raises(ConfigError, match="no column 'advantages', which the loss 'ppo' needs"):
        await running.forward_backward(lacks, PPOLoss())
    wrong: Any = "ppo"
    with pytest.raises(ConfigError, match="PPOLoss"):
        await running.forward_backward(sequences, wrong)


async def test_a_loss_of_its_own_reaches_every_backend_with_its_constants_and_columns(running: PolicyBackend):
    from tests.engine.weighted_likelihood import WeightedLikelihood

    sequences = [
        dataclasses.replace(sequence, columns={"score": [2.0] * len(sequence.token_ids)})
        for sequence in await sampled(running)
    ]
    result = await running.forward_backward(sequences, WeightedLikelihood(factor=3.0))
    before = await running.forward(sequences)
    wanted = -sum(
        6.0 * weight * logprob
        for sequence, logprobs in zip(sequences, before.logprobs, strict=True)
        for weight, logprob in zip(sequence.weights, logprobs, strict=True)
    )
    assert result.loss == pytest.approx(wanted, rel=1e-4)
    assert result.metrics["score"] == pytest.approx(2.0)
    await running.optim_step(STEP)
    assert (await running.forward_backward(sequences, WeightedLikelihood(factor=3.0))).loss < result.loss


async def test_weights_are_published_once_however_often_one_asks(running: PolicyBackend):
    await running.forward_backward(await sampled(running), PPOLoss())
    assert (await running.optim_step(STEP)).policy_version == 1
    assert [await running.publish_weights() for _ in range(2)] == [1, 1]
    assert running.policy_version == 1
