"""Policy losses and the critic's, one sample at a time in Python's own arithmetic, with their gradients."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leyden.errors import ConfigError
from leyden.objectives.losses import (
    LOSSES,
    CISPOLoss,
    CrossEntropyLoss,
    GSPOLoss,
    Loss,
    LossTerms,
    PolicyLoss,
    PPOLoss,
    ReinforceLoss,
    TokenBatch,
    ValueLoss,
    clipped_surrogate,
    clipped_value_loss,
    find_loss,
    make_loss,
)

LOGP = st.floats(-3, 0)
NUMBER = st.floats(-3, 3)
Columns = dict[str, list[float]]


@st.composite
def tokens(draw: st.DrawFn) -> Columns:
    """Columns of a batch of a few tokens, with `logp`, which is trained."""
    n = draw(st.integers(1, 6))
    kinds = dict.fromkeys(("logp", "logprobs", "learner_logprobs", "reference_logprobs"), LOGP)
    kinds |= dict.fromkeys(("advantages", "entropies", "value", "returns", "values"), NUMBER)
    columns = {name: draw(st.lists(kind, min_size=n, max_size=n)) for name, kind in kinds.items()}
    sequence_and_call = sorted(draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=n, max_size=n)))
    columns["sequence"], columns["calls"] = (
        list(map(float, column)) for column in zip(*sequence_and_call, strict=True)
    )
    return columns


def terms_of(loss: Loss, columns: Columns) -> tuple[LossTerms, Mapping[str, Tensor]]:
    """The terms, and the tensors that a gradient can be taken of."""
    made = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    trained = {name: made[name].requires_grad_() for name in ("logp", "entropies", "value")}
    batch = TokenBatch(
        trained["logp"],
        {name: made[name] for name in find_loss(loss).columns_of(loss)},
        torch.ones_like(made["advantages"]),
        made["sequence"].long(),
        entropies_N=trained["entropies"] if loss.uses_entropies else None,
        values_N=trained["value"] if loss.uses_values else None,
    )
    return find_loss(loss).function(batch, loss), trained


def gradient(terms: LossTerms, of: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(terms.objective_N.sum(), of, allow_unused=True, retain_graph=True)
    return [0.0] * len(of) if found is None else found.tolist()


def clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, 1 - low), 1 + high)


# ---- each objective --------------------------------------------------------------------------------------------------


@given(columns=tokens(), low=st.floats(0.05, 0.9), high=st.floats(0.05, 2.0))
def test_ppo_and_its_metrics_are_those_of_the_formula(columns: Columns, low: float, high: float) -> None:
    terms, _ = terms_of(PPOLoss(clip_low=low, clip_high=high), columns)
    kl = clipped = largest = 0.0
    samples = zip(columns["logp"], columns["logprobs"], columns["advantages"], strict=True)
    for (new, old, advantage), got in zip(samples, terms.objective_N.tolist(), strict=True):
        ratio = math.exp(new - old)
        bounded = clip(ratio, low, high)
        assert got == pytest.approx(min(ratio * advantage, bounded * advantage))
        kl += ratio - 1 - (new - old)
        clipped += bounded != ratio
        largest = max(largest, abs(new - old))
    assert float(terms.sums["kl"]) == pytest.approx(kl, abs=1e-9)
    assert float(terms.sums["clip_fraction"]) == clipped
    ratios = [math.exp(new - old) for new, old in zip(columns["logp"], columns["logprobs"], strict=True)]
    assert float(terms.sums["ratio"]) == pytest.approx(sum(ratios))
    assert float(terms.maxima["max_ratio"]) == pytest.approx(max(ratios))
    assert float(terms.maxima["max_logprob_difference"]) == pytest.approx(largest)


def test_no_gradient_flows_where_clipping_decides() -> None:
    logp = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64, requires_grad=True)
    terms = clipped_surrogate(logp, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    terms.objective_N.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, math.exp(-1), -math.exp(1), 0.0])


@given(columns=tokens(), bound=st.floats(1.5, 5.0))
def test_dual_clipping_bounds_what_a_token_of_negative_advantage_can_lose(columns: Columns, bound: float) -> None:
    terms, trained = terms_of(PPOLoss(dual_clip=bound), columns)
    n_bounded = 0
    slopes = gradient(terms, trained["logp"])
    samples = zip(columns["logp"], columns["logprobs"], columns["advantages"], strict=True)
    for (new, old, advantage), got, slope in zip(samples, terms.objective_N.tolist(), slopes, strict=True):
        ratio = math.exp(new - old)
        plain = min(ratio * advantage, clip(ratio, 0.2, 0.28) * advantage)
        wanted = max(plain, bound * advantage) if advantage < 0 else plain
        assert got == pytest.approx(wanted)
        if wanted != plain:
            n_bounded += 1
            assert slope == 0
    assert float(terms.sums["dual_clip_fraction"]) == n_bounded


def test_dual_clipping_holds_a_ratio_of_twenty() -> None:
    columns = {name: [0.0] for name in ("logprobs", "sequence", "entropies", "value")}
    terms, trained = terms_of(PPOLoss(dual_clip=3.0), {**columns, "logp": [3.0], "advantages": [-2.0]})
    assert terms.objective_N.tolist() == [-6.0]
    assert gradient(terms, trained["logp"]) == [0.0]


@given(columns=tokens(), low=st.floats(0.05, 0.9), high=st.floats(0.05, 2.0))
def test_gspo_has_one_ratio_for_each_call_of_each_sequence(columns: Columns, low: float, high: float) -> None:
    """Value and gradient of the sequence objective (eq. 5), for calls whose tokens have one advantage."""
    keys = list(zip(columns["sequence"], columns["calls"], strict=True))
    first = {key: keys.index(key) for key in keys}
    columns = {**columns, "advantages": [columns["advantages"][first[key]] for key in keys]}
    terms, trained = terms_of(GSPOLoss(clip_low=low, clip_high=high), columns)
    values, slopes = terms.objective_N.tolist(), gradient(terms, trained["logp"])
    for key in first:
        places = [place for place, other in enumerate(keys) if other == key]
        advantage = columns["advantages"][places[0]]
        ratio = math.exp(sum(columns["logp"][t] - columns["logprobs"][t] for t in places) / len(places))
        unclipped = ratio * advantage <= clip(ratio, low, high) * advantage
        for t in places:
            assert values[t] == pytest.approx(min(ratio * advantage, clip(ratio, low, high) * advantage))
            # The |y| tokens of the call have the objective's value each, and ds/dlogp_t is s / |y|.
            assert slopes[t] == pytest.approx(ratio * advantage if unclipped else 0.0)


@given(columns=tokens(), high=st.floats(0.05, 2.0), low=st.one_of(st.none(), st.floats(0.05, 0.9)))
def test_cispo_weighs_every_token_by_its_clipped_ratio(columns: Columns, high: float, low: float | None) -> None:
    terms, trained = terms_of(CISPOLoss(clip_low=low, clip_high=high), columns)
    slopes = gradient(terms, trained["logp"])
    samples = zip(columns["logp"], columns["logprobs"], columns["advantages"], strict=True)
    for (new, old, advantage), got, slope in zip(samples, terms.objective_N.tolist(), slopes, strict=True):
        weight = clip(math.exp(new - old), math.inf if low is None else low, high)
        assert got == pytest.approx(weight * advantage * new)
        assert slope == pytest.approx(weight * advantage)


@given(columns=tokens())
def test_reinforce_and_cross_entropy_are_weighted_log_probabilities(columns: Columns) -> None:
    terms, trained = terms_of(ReinforceLoss(), columns)
    pairs = zip(columns["logp"], columns["advantages"], strict=True)
    assert terms.objective_N.tolist() == pytest.approx([logp * advantage for logp, advantage in pairs])
    assert gradient(terms, trained["logp"]) == pytest.approx(columns["advantages"])
    terms, trained = terms_of(CrossEntropyLoss(), columns)
    assert terms.objective_N.tolist() == columns["logp"]
    assert gradient(terms, trained["logp"]) == [1.0] * len(columns["logp"])
    assert float(terms.sums["cross_entropy"]) == pytest.approx(-sum(columns["logp"]))


@pytest.mark.parametrize("kind", [PPOLoss, GSPOLoss, CISPOLoss, ReinforceLoss])
@given(columns=tokens())
@settings(max_examples=30)
def test_right_after_sampling_every_loss_has_the_policy_gradient(kind: type[PolicyLoss], columns: Columns) -> None:
    terms, trained = terms_of(kind(), {**columns, "logprobs": columns["logp"]})
    assert gradient(terms, trained["logp"]) == pytest.approx(columns["advantages"])
    assert float(terms.sums["kl"]) == 0


# ---- the terms that they share ---------------------------------------------------------------------------------------

KL: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
}
"""Estimates and their derivatives, by d = logp - reference logp."""


@pytest.mark.parametrize("kind", [PPOLoss, GSPOLoss, CISPOLoss, ReinforceLoss])
@given(columns=tokens(), estimator=st.sampled_from(sorted(KL)), cap=st.floats(0.5, 4.0))
@settings(max_examples=30)
def test_every_policy_loss_has_the_same_further_terms(
    kind: type[PolicyLoss], columns: Columns, estimator: str, cap: float
) -> None:
    full = kind(kl_coefficient=0.3, kl_estimator=estimator, entropy_coefficient=0.2, importance_cap=cap)
    assert set(full.further_columns) == {"reference_logprobs", "learner_logprobs"}
    assert full.uses_entropies
    terms, trained = terms_of(full, columns)
    plain, alone = terms_of(kind(), {**columns, "logprobs": columns["learner_logprobs"]})
    value, slope = KL[estimator]
    expected: list[float] = []
    slopes: list[float] = []
    for t, (objective, plain_slope) in enumerate(
        zip(plain.objective_N.tolist(), gradient(plain, alone["logp"]), strict=True)
    ):
        weight = min(math.exp(columns["learner_logprobs"][t] - columns["logprobs"][t]), cap)
        difference = columns["logp"][t] - columns["reference_logprobs"][t]
        expected.append(weight * objective - 0.3 * value(difference) + 0.2 * columns["entropies"][t])
        slopes.append(weight * plain_slope - 0.3 * slope(difference))
    assert terms.objective_N.tolist() == pytest.approx(expected)
    assert gradient(terms, trained["logp"]) == pytest.approx(slopes, abs=1e-9)
    assert gradient(terms, trained["entropies"]) == pytest.approx([0.2] * len(expected))


@given(columns=tokens(), limit=st.one_of(st.none(), st.floats(0.05, 2.0)))
def test_a_critic_is_trained_alone_or_with_the_policy(columns: Columns, limit: float | None) -> None:
    alone, trained = terms_of(ValueLoss(value_coefficient=0.7, value_clip=limit), columns)
    policy, _ = terms_of(PPOLoss(), columns)
    both, trained_too = terms_of(PPOLoss(value_coefficient=0.7, value_clip=limit), columns)
    errors: list[float] = []
    for new, target, old in zip(columns["value"], columns["returns"], columns["values"], strict=True):
        bounded = new if limit is None else min(max(new, old - limit), old + limit)
        errors.append(max((new - target) ** 2, (bounded - target) ** 2))
    assert alone.objective_N.tolist() == pytest.approx([-0.7 * error for error in errors])
    together = [a - 0.7 * error for a, error in zip(policy.objective_N.tolist(), errors, strict=True)]
    assert both.objective_N.tolist() == pytest.approx(together)
    assert float(both.sums["value_error"]) == float(alone.sums["value_error"]) == pytest.approx(sum(errors))
    assert gradient(both, trained_too["value"]) == gradient(alone, trained["value"])


@given(
    samples=st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=6),
    limit=st.floats(0.05, 2),
)
def test_the_clipped_value_loss_is_that_of_the_formula(samples: list[tuple[float, ...]], limit: float) -> None:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*samples, strict=True)]
    for (value, target, before), got in zip(samples, clipped_value_loss(*columns, clip=limit).tolist(), strict=True):
        bounded = min(max(value, before - limit), before + limit)
        assert got == pytest.approx(max((value - target) ** 2, (bounded - target) ** 2), abs=1e-12)


# ---- what a loss needs and refuses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_travels_as_its_name_and_its_constants(name: str) -> None:
    loss = make_loss(name)
    assert make_loss(find_loss(loss).name, json.loads(json.dumps(asdict(loss)))) == loss


def test_a_loss_needs_the_columns_of_the_terms_that_it_has() -> None:
    assert PPOLoss().further_columns == ()
    assert PPOLoss(value_coefficient=0.5).further_columns == ("returns", "values")
    assert (PPOLoss().uses_values, PPOLoss(value_coefficient=0.5).uses_values) == (False, True)
    assert (PPOLoss().uses_entropies, PPOLoss(entropy_coefficient=-0.1).uses_entropies) == (False, True)


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("ppo", {"clip_low": -0.1}, "clip_low is -0.1; it must be a number, at least 0"),
        ("ppo", {"dual_clip": 1}, "dual_clip is 1; it must be a number, above 1, or None for no bound"),
        ("ppo", {"value_clip": 0}, "value_clip is 0"),
        ("ppo", {"kl_estimator": "k4"}, "kl_estimator is 'k4'"),
        ("gspo", {"kl_coefficient": -1}, "kl_coefficient is -1"),
        ("cispo", {"clip_high": math.nan}, "clip_high is nan"),
        ("reinforce", {"importance_cap": 0}, "importance_cap is 0; .* or None for no importance sampling"),
        ("reinforce", {"entropy_coefficient": "1"}, "entropy_coefficient is '1'"),
        ("value", {"value_coefficient": 0}, "value_coefficient is 0"),
        ("dpo", {"beta": 0}, "beta is 0"),
        ("dpo", {"label_smoothing": 0.6}, "label_smoothing is 0.6"),
    ],
)
def test_constants_out_of_their_range_are_refused(name: str, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_loss(name, given)
