"""The loss and its figures against formulas written out by hand; gradients do not depend on how data is cut up."""

from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.engine import EmbeddedBackend, OptimParams
from leyden.engine.batches import TrainedPart, held_tokens, micro_batches
from leyden.engine.control import control_handlers, read_answer, write_arguments
from leyden.engine.forward.cached import CachedForward
from leyden.engine.forward.layout import LayoutForward
from leyden.engine.learner import TorchLearner
from leyden.engine.policy_backend import ForwardResult
from leyden.errors import ConfigError
from leyden.objectives.losses import Loss, LossTerms, PPOLoss, TokenBatch, make_loss, register_loss
from leyden.types import TrainingSequence
from tests.contracts.engine import sequence_of
from tests.engine import tiny
from tests.engine.weighted_likelihood import WeightedLikelihood

torch.set_num_threads(1)


def learner(model: Any = None, *, way: Any = LayoutForward, max_tokens: int = 512) -> TorchLearner:
    model = tiny.model() if model is None else model
    return TorchLearner(model, way(model, max_rows=4, max_length=128), max_tokens_per_microbatch=max_tokens)


def a_batch(seed: int, n: int = 6) -> list[TrainingSequence]:
    """Sequences of several turns, with log-probabilities near what a random model says."""
    rng = random.Random(seed)
    batch: list[TrainingSequence] = []
    for _ in range(n):
        length = rng.randrange(3, 40)
        weights = [0.0, *(rng.choice([0.0, 0.0, 0.1, 1.0]) for _ in range(length - 1))]
        batch.append(
            sequence_of(
                token_ids=[rng.randrange(260) for _ in range(length)],
                logprobs=[rng.uniform(-6.5, -4.5) for _ in range(length)],
                advantages=[rng.gauss(0, 1) for _ in range(length)],
                weights=weights,
            )
        )
    batch[0].weights[-1] = 1.0
    return batch


def gradient(of: TorchLearner) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in of.parameters.items() if p.grad is not None}


def by_hand(model: Any, batch: list[TrainingSequence], loss: PPOLoss, temperature: float) -> dict[str, float]:
    """The formulas of `PPOLoss` and `ForwardBackwardResult`, one token at a time in double precision."""
    total = kl = entropy = clipped = largest = 0.0
    ratios: list[float] = []
    n = 0
    for sequence in batch:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sequence.token_ids])).logits[0].double() / temperature
        table = logits.log_softmax(-1)
        behaviour, advantages = sequence.columns["logprobs"], sequence.columns["advantages"]
        for t, weight in enumerate(sequence.weights):
            if weight == 0:
                continue
            logp = float(table[t - 1, sequence.token_ids[t]])
            ratio = math.exp(logp - behaviour[t])
            ratios.append(ratio)
            bounded = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
            advantage = advantages[t]
            total -= weight * min(ratio * advantage, bounded * advantage)
            kl += ratio - 1 - math.log(ratio)
            clipped += bounded != ratio
            entropy -= float((table[t - 1].exp() * table[t - 1]).sum())
            largest = max(largest, abs(logp - behaviour[t]))
            n += 1
    return {
        "loss": total,
        "kl": kl / n,
        "ratio": sum(ratios) / n,
        "max_ratio": max(ratios),
        "clip_fraction": clipped / n,
        "entropy": entropy / n,
        "max_logprob_difference": largest,
        "n_trained": n,
    }


@given(
    seed=st.integers(0, 10**6),
    low=st.floats(0.05, 0.5),
    high=st.floats(0.05, 0.9),
    temperature=st.sampled_from([0.7, 1.0, 1.3]),
)
@settings(max_examples=20)
def test_the_loss_and_its_figures_are_those_of_the_formulas(seed: int, low: float, high: float, temperature: float):
    model, batch = tiny.model(), a_batch(seed)
    loss = PPOLoss(clip_low=low, clip_high=high)
    result = learner(model).forward_backward(batch, loss, temperature)
    found = {"loss": result.loss, "n_trained": result.n_trained, **result.metrics}
    wanted = by_hand(model, batch, loss, temperature)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert result.n_sequences == len(batch)


def test_the_gradient_is_that_of_the_formula():
    model, batch, loss = tiny.model(), a_batch(3), PPOLoss(clip_low=0.3, clip_high=0.6)
    twin = copy.deepcopy(model)
    total = torch.zeros(())
    for s in batch:
        logp = twin(input_ids=torch.tensor([s.token_ids])).logits[0].log_softmax(-1)
        behaviour, advantages = s.columns["logprobs"], s.columns["advantages"]
        for t in range(1, len(s.token_ids)):
            ratio = torch.exp(logp[t - 1, s.token_ids[t]] - behaviour[t])
            bounded = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
            total = total - s.weights[t] * torch.minimum(ratio * advantages[t], bounded * advantages[t])
    total.backward()
    ours = learner(model)
    ours.forward_backward(batch, loss, 1.0)
    wanted = {name: p.grad for name, p in twin.named_parameters()}
    for name, got in gradient(ours).items():
        torch.testing.assert_close(got, wanted[name], atol=1e-4, rtol=1e-3)


async def test_a_loss_travels_as_its_name_and_its_constants():
    model, batch = tiny.model(), [replace(s, columns={"score": s.columns["advantages"]}) for s in a_batch(4)]
    wanted = 0.0
    for s in batch:
        with torch.no_grad():
            table = model(input_ids=torch.tensor([s.token_ids])).logits[0].double().log_softmax(-1)
        for t in range(1, len(s.token_ids)):
            wanted -= 2 * s.weights[t] * s.columns["score"][t] * float(table[t - 1, s.token_ids[t]])
    assert learner(model).forward_backward(batch, WeightedLikelihood(2.0), 1.0).loss == pytest.approx(wanted, rel=1e-4)

    backend = EmbeddedBackend(model, tokenizer=tiny.tokenizer(), device="cpu", max_length=128)
    async with backend:
        handler = control_handlers(backend)["/control/forward_backward"]
        arguments = {"sequences": batch, "loss": WeightedLikelihood(2.0), "temperature": 1.0}
        payload = json.loads(write_arguments(arguments))
        assert (payload["loss"]["name"], payload["loss"]["constants"]) == ("weighted_likelihood", {"factor": 2.0})
        reply = await handler(json.dumps(payload).encode(), {})
        assert read_answer(reply.body)["loss"] == pytest.approx(wanted, rel=1e-4)
        for change, message in (
            (
                {"loss": payload["loss"] | {"name": "weighted_likelihoods"}},
                "does not register the loss 'weighted_likelihoods'",
            ),
            ({"loss": payload["loss"] | {"constants": {"factr": 1.0}}}, "did you mean 'factor'"),
            (
                {"sequences": [payload["sequences"][0] | {"weights": ["much"]}]},
                r"sequences.0.weights.0 is 'much' \(a str",
            ),
            (
                {"sequences": [payload["sequences"][0], payload["sequences"][1] | {"columns": {}}]},
                "sequence 1 has no",
            ),
        ):
            reply = await handler(json.dumps(payload | change).encode(), {})
            with pytest.raises(ConfigError, match=message):
                read_answer(reply.body)


async def test_arguments_and_results_arrive_as_they_were_sent():
    model = tiny.model()
    async with EmbeddedBackend(model, tokenizer=tiny.tokenizer(), device="cpu", max_length=128) as backend:
        handlers = control_handlers(backend)
        one, two = a_batch(1, n=2)
        odd = replace(one, weights=torch.tensor(one.weights), columns={})  # pyright: ignore[reportArgumentType] -- numbers of a library's own
        for sequences in ([one, two], [odd, two]):
            reply = await handlers["/control/forward"](write_arguments({"sequences": sequences}), {})
            assert read_answer(reply.body, ForwardResult) == await backend.forward([one, two])


def test_a_name_or_a_type_is_registered_once():
    @dataclass(frozen=True, slots=True)
    class Other(Loss):
        """No constants."""

    def nothing(batch: TokenBatch, constants: Loss) -> LossTerms:
        return LossTerms(batch.logprobs_N)

    with pytest.raises(ConfigError, match="'ppo'"):
        register_loss("ppo", Other, columns=())(nothing)
    with pytest.raises(ConfigError, match="PPOLoss"):
        register_loss("other", PPOLoss, columns=())(nothing)
    with pytest.raises(ConfigError, match="loss is 'pop'; did you mean 'ppo'"):
        make_loss("pop")
    assert make_loss("ppo", {"clip_low": 0.1}) == PPOLoss(clip_low=0.1)


@pytest.mark.parametrize("way", [LayoutForward, CachedForward])
@given(seed=st.integers(0, 10**6), max_tokens=st.integers(1, 300))
@settings(max_examples=10)
def test_micro_batches_change_no_gradient(way: Any, seed: int, max_tokens: int):
    batch = a_batch(seed)
    whole, cut = learner(way=way, max_tokens=10**6), learner(way=way, max_tokens=max_tokens)
    first = whole.forward_backward(batch, PPOLoss(), 1.0)
    second = cut.forward_backward(batch, PPOLoss(), 1.0)
    assert first.loss == pytest.approx(second.loss, rel=1e-4, abs=1e-4)
    assert first.n_tokens == second.n_tokens
    wanted = gradient(whole)
    for name, got in gradient(cut).items():
        torch.testing.assert_close(got, wanted[name], atol=1e-4, rtol=1e-3)


def test_a_merged_conversation_has_the_gradient_of_its_separate_calls():
    first, second = [5, 6, 7, 8], [9, 10, 11]
    merged = sequence_of(first + second, [-5.0] * 7, [0.5] * 7, [0, 0, 1.0, 1.0, 0, 1.0, 1.0])
    calls = [
        sequence_of(first, [-5.0] * 4, [0.5] * 4, [0, 0, 1.0, 1.0]),
        sequence_of(first + second, [-5.0] * 7, [0.5] * 7, [0, 0, 0, 0, 0, 1.0, 1.0]),
    ]
    one, two = learner(), learner()
    together = one.forward_backward([merged], PPOLoss(), 1.0)
    apart = two.forward_backward(calls, PPOLoss(), 1.0)
    assert together.loss == pytest.approx(apart.loss, rel=1e-5)
    assert together.n_tokens < apart.n_tokens
    merged_gradient, wanted = (torch.cat([each.flatten() for each in gradient(side).values()]) for side in (one, two))
    assert float((merged_gradient - wanted).norm()) < 1e-6 * float(wanted.norm())


def test_sequences_without_weight_and_tokens_after_the_last_weight_are_not_run():
    batch = a_batch(1)
    padded = [
        replace(
            s,
            token_ids=[*s.token_ids, 7, 7],
            weights=[*s.weights, 0.0, 0.0],
            columns={name: [*values, 9.0, 9.0] for name, values in s.columns.items()},
        )
        for s in batch
    ]
    idle = replace(batch[0], weights=[0.0] * len(batch[0].weights))
    one, two = learner(), learner()
    plain, more = one.forward_backward(batch, PPOLoss(), 1.0), two.forward_backward([*padded, idle], PPOLoss(), 1.0)
    assert more.n_tokens == plain.n_tokens
    assert more.n_sequences == plain.n_sequences + 1
    assert all(torch.equal(got, gradient(one)[name]) for name, got in gradient(two).items())


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_micro_batches_keep_their_token_budget_and_every_sequence(shares_prefixes: bool):
    batch = [s for s in a_batch(5, n=40) if any(s.weights)]
    seen = 0

    for part in micro_batches([TrainedPart.of(s, (), 0) for s in batch], 64, shares_prefixes=shares_prefixes):
        assert len(part) == 1 or held_tokens(part, shares_prefixes=shares_prefixes) <= 64
        seen += len(part)
    assert seen == len(batch)


def test_the_gradient_is_clipped_to_its_norm():
    ours = learner()
    ours.forward_backward(a_batch(2), PPOLoss(), 1.0)
    before = math.sqrt(sum(float(g.pow(2).sum()) for g in gradient(ours).values()))
    assert ours.clip(OptimParams(max_grad_norm=0.01)) == pytest.approx(before, rel=1e-4)
    after = math.sqrt(sum(float(g.pow(2).sum()) for g in gradient(ours).values()))
    assert after == pytest.approx(0.01, rel=1e-3)


def test_a_step_is_that_of_torch_adamw():
    model, batch = tiny.model(), a_batch(4)
    ours = learner(model)
    ours.forward_backward(batch, PPOLoss(), 1.0)
    params = OptimParams(learning_rate=3e-3, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=1e9)
    twin = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for name, grad in gradient(ours).items():
        twin[name].grad = grad
    torch.optim.AdamW(twin.values(), lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1).step()
    ours.clip(params)
    ours.apply(params)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), twin[name].detach(), atol=1e-6, rtol=1e-5)


def test_half_precision_weights_are_stepped_in_single_precision():
    model = tiny.model().to(torch.bfloat16)
    ours = learner(model)
    ours.forward_backward(a_batch(4), PPOLoss(), 1.0)
    small = OptimParams(learning_rate=1e-5)
    ours.clip(small)
    masters = {name: m.detach().clone() for name, m in ours.masters.items()}
    ours.apply(small)
    assert all(not torch.equal(m, masters[name]) for name, m in ours.masters.items())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, ours.masters[name].to(torch.bfloat16))


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="requires_grad"):
        learner(tiny.model().requires_grad_(False))
