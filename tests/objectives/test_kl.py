"""Estimates of the KL divergence, against its definition on a small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.objectives.losses import KL_ESTIMATORS, k1, k2, k3, reward_penalty

LOGITS = st.lists(st.floats(-2, 2), min_size=4, max_size=4)
LOGPROBS = st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=0, max_size=6)


@given(LOGITS, LOGITS)
def test_k1_and_k3_are_the_divergence_in_expectation_and_k2_has_its_gradient(
    policy: list[float], reference: list[float]
) -> None:
    logits_V = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    logp_V, reference_V = logits_V.log_softmax(0), torch.tensor(reference, dtype=torch.float64).log_softmax(0)
    divergence = (logp_V.exp() * (logp_V - reference_V)).sum()
    (wanted,) = torch.autograd.grad(divergence, logits_V, retain_graph=True)
    drawn_V = logp_V.exp().detach()  # tokens are drawn from the policy, through which no gradient flows
    for estimate in (k1, k3):
        expected = (drawn_V * estimate(logp_V - reference_V)).sum()
        assert float(expected.detach()) == pytest.approx(float(divergence.detach()), abs=1e-9)
    (found,) = torch.autograd.grad((drawn_V * k2(logp_V - reference_V)).sum(), logits_V, retain_graph=True)
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-9)
    (zero,) = torch.autograd.grad((drawn_V * k1(logp_V - reference_V)).sum(), logits_V)
    assert zero.tolist() == pytest.approx([0.0] * 4, abs=1e-9)


@given(st.floats(-8, 8))
def test_numbers_and_tensors_have_the_same_estimates(difference: float) -> None:
    formulas = {"k1": difference, "k2": difference**2 / 2, "k3": math.exp(-difference) - 1 + difference}
    assert formulas.keys() == KL_ESTIMATORS.keys()
    for name, expected in formulas.items():
        assert KL_ESTIMATORS[name](difference) == pytest.approx(expected, abs=1e-9)
        tensor = KL_ESTIMATORS[name](torch.tensor(difference, dtype=torch.float64))
        assert float(tensor) == pytest.approx(expected, abs=1e-9)


def test_k3_is_precise_where_the_policies_are_near() -> None:
    assert k3(1e-6) == pytest.approx(5e-13, rel=1e-3)
    assert float(k3(torch.tensor(1e-3))) == pytest.approx(5e-7, rel=1e-2)


@given(LOGPROBS, st.sampled_from(sorted(KL_ESTIMATORS)))
def test_the_penalty_of_a_rollout_is_the_sum_over_its_tokens(pairs: list[tuple[float, float]], estimator: str) -> None:
    logprobs, reference = [a for a, _ in pairs], [b for _, b in pairs]
    expected = 0.5 * math.fsum(KL_ESTIMATORS[estimator](a - b) for a, b in pairs)
    assert reward_penalty(logprobs, reference, coefficient=0.5, estimator=estimator) == pytest.approx(expected)


def test_a_penalty_needs_a_reference_for_each_token() -> None:
    with pytest.raises(ConfigError, match="2 logprobs and 1 reference_logprobs; they must have the same length"):
        reward_penalty([0.0, 0.0], [0.0], coefficient=1.0)
    with pytest.raises(ConfigError, match="kl_estimator is 'k9'"):
        reward_penalty([], [], coefficient=1.0, estimator="k9")
