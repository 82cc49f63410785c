"""DPO by weighted likelihoods, against autograd through the textbook loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.objectives.losses import DPOLoss, TokenBatch, dpo, dpo_weights

BETA = st.floats(0.01, 2.0)
SMOOTHING = st.floats(0.0, 0.5)
ANSWER = st.lists(st.floats(-3, 0), min_size=1, max_size=4)


@given(st.lists(st.tuples(ANSWER, ANSWER, ANSWER, ANSWER), min_size=1, max_size=4), BETA, SMOOTHING)
def test_the_gradient_is_that_of_the_loss_wherever_the_answers_of_a_pair_are(
    pairs: list[tuple[list[float], ...]], beta: float, smoothing: float
) -> None:
    """An answer's tokens, and of a pair both answers, are in batches of their own."""
    made = [[torch.tensor(answer, dtype=torch.float64) for answer in pair] for pair in pairs]
    losses = []
    for chosen, rejected, reference_chosen, reference_rejected in made:
        chosen.requires_grad_(), rejected.requires_grad_()
        margin = beta * ((chosen.sum() - reference_chosen.sum()) - (rejected.sum() - reference_rejected.sum()))
        logsigmoid = torch.nn.functional.logsigmoid
        losses.append(-(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin))
    loss = torch.stack(losses).mean()
    answers = [answer for pair in made for answer in pair[:2]]
    wanted = torch.autograd.grad(loss, answers)
    sums = [[float(pair[which].detach().sum()) for pair in made] for which in range(4)]
    found = dpo_weights(*sums, beta=beta, label_smoothing=smoothing)
    assert found.loss == pytest.approx(float(loss.detach()), abs=1e-9)
    for place, weight in enumerate(found.weights_P):
        for which, sign in ((0, 1.0), (1, -1.0)):
            logp_N = answers[2 * place + which]
            columns = {"coefficients": torch.full_like(logp_N, sign * weight)}
            weights_N = torch.full_like(logp_N, 1 / len(made))
            terms = dpo(TokenBatch(logp_N, columns, weights_N, torch.zeros_like(logp_N)), DPOLoss())
            (got,) = torch.autograd.grad(-(weights_N * terms.objective_N).sum(), logp_N)
            assert got.tolist() == pytest.approx(wanted[2 * place + which].tolist(), abs=1e-9)


@given(st.lists(st.tuples(*[st.floats(-50, 0)] * 4), min_size=1, max_size=5), BETA)
def test_accuracy_and_margin_are_means_over_pairs(pairs: list[tuple[float, ...]], beta: float) -> None:
    columns = list(zip(*pairs, strict=True))
    found = dpo_weights(*columns, beta=beta)
    margins = [beta * ((a - c) - (b - d)) for a, b, c, d in pairs]
    assert found.margin == pytest.approx(sum(margins) / len(margins))
    assert found.accuracy == sum(margin > 0 for margin in margins) / len(margins)


def test_an_extreme_margin_neither_overflows_nor_loses_its_weight() -> None:
    wrong, right = (dpo_weights([margin], [0.0], [0.0], [0.0], beta=1.0) for margin in (-2000.0, 2000.0))
    assert (wrong.loss, wrong.weights_P) == (2000.0, [1.0])
    assert (right.loss, right.weights_P) == (0.0, [0.0])


def test_a_pair_has_four_numbers() -> None:
    with pytest.raises(ConfigError, match=r"the four lists have \[1, 2, 1, 1\] log-probabilities"):
        dpo_weights([0.0], [0.0, 0.0], [0.0], [0.0], beta=0.1)
    with pytest.raises(ConfigError, match="the same length, at least 1"):
        dpo_weights([], [], [], [], beta=0.1)
    with pytest.raises(ConfigError, match="beta is 0"):
        dpo_weights([0.0], [0.0], [0.0], [0.0], beta=0)
