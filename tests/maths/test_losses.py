"""The clipped objectives, one sample at a time in Python's own arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leyden.maths.losses import PPOLoss, TokenBatch, clipped_surrogate, clipped_value_loss, ppo

LOGP = st.floats(-6, 0)


@given(
    samples=st.lists(st.tuples(LOGP, LOGP, st.floats(-3, 3)), min_size=1, max_size=6),
    low=st.floats(0.05, 0.9),
    high=st.floats(0.05, 2.0),
)
def test_the_clipped_objective_and_its_figures_are_those_of_the_formula(samples, low, high):
    logp, behaviour, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*samples, strict=True))
    batch = TokenBatch(logp, {"logprobs": behaviour, "advantages": advantages}, torch.ones_like(logp), torch.zeros(0))
    terms = ppo(batch, PPOLoss(clip_low=low, clip_high=high))
    kl = clipped = largest = 0.0
    for (new, old, advantage), got in zip(samples, terms.objective_N.tolist(), strict=True):
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 1 - low), 1 + high)
        assert got == pytest.approx(min(ratio * advantage, bounded * advantage))
        kl += ratio - 1 - (new - old)
        clipped += bounded != ratio
        largest = max(largest, abs(new - old))
    assert float(terms.sums["kl"]) == pytest.approx(kl, abs=1e-9)
    assert float(terms.sums["clip_fraction"]) == clipped
    assert float(terms.maxima["max_logprob_difference"]) == pytest.approx(largest)


def test_no_gradient_flows_where_clipping_decides():
    logp = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64, requires_grad=True)
    terms = clipped_surrogate(logp, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    terms.objective_N.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, math.exp(-1), -math.exp(1), 0.0])


@given(
    samples=st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=6),
    clip=st.floats(0.05, 2),
)
def test_the_clipped_value_loss_is_that_of_the_formula(samples, clip):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*samples, strict=True)]
    for (value, target, before), got in zip(samples, clipped_value_loss(*columns, clip=clip).tolist(), strict=True):
        bounded = min(max(value, before - clip), before + clip)
        assert got == pytest.approx(max((value - target) ** 2, (bounded - target) ** 2), abs=1e-12)
