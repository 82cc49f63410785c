"""Tokens drawn from logits.

One uniform number a row decides its token (inverse transform sampling), so a row with its own
random generator draws the same token in any batch that gives it the same logits. It knows no
requests and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


def draw(
    logits_BV: Tensor, temperatures: Sequence[float], top_ps: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample one token for each row, and return it with its log-probability.

    The log-probability is at the row's temperature (at 1 for temperature 0), before top_p.
    uniforms: numbers in [0, 1), one a row; unused where the temperature is 0.
    """
    device = logits_BV.device
    logits_BV = logits_BV.float()
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        divisor = torch.tensor([temperature or 1.0 for temperature in temperatures], device=device)
        logits_BV = logits_BV / divisor[:, None]
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    probabilities_BV = logprobs_BV.exp()
    if any(top_p < 1.0 for top_p in top_ps):
        probabilities_BV = _nucleus(probabilities_BV, torch.tensor(top_ps, device=device))
    if torch.are_deterministic_algorithms_enabled():
        probabilities_BV = probabilities_BV.cpu()  # a cumulative sum on CUDA has no deterministic kernel
    # Double precision: over a large vocabulary, single-precision sums would shift probability
    # between tokens.
    cumulative_BV = probabilities_BV.cumsum(dim=-1, dtype=torch.float64)
    uniforms_B1 = torch.tensor(uniforms, dtype=torch.float64, device=cumulative_BV.device)[:, None]
    drawn_B1 = torch.searchsorted(cumulative_BV, uniforms_B1 * cumulative_BV[:, -1:], right=True)
    tokens_B1 = drawn_B1.clamp_max(logits_BV.shape[-1] - 1).to(device)
    if 0.0 in temperatures:
        greedy = torch.tensor([temperature == 0.0 for temperature in temperatures], device=device)
        tokens_B1 = torch.where(greedy[:, None], logits_BV.argmax(dim=-1, keepdim=True), tokens_B1)
    logprobs_B = logprobs_BV.gather(-1, tokens_B1)[:, 0]
    return listed(tokens_B1[:, 0]), listed(logprobs_B)


def listed(tensor: Tensor) -> list[Any]:
    """Return the values of a tensor, nested as its shape is."""
    return cast(list[Any], tensor.tolist())  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped


def _nucleus(probabilities_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose mass reaches top_p
    (arXiv:1904.09751).
    """
    ordered, order = probabilities_BV.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill((before >= top_p_B[:, None]) & (top_p_B[:, None] < 1.0), 0.0)
    return torch.zeros_like(probabilities_BV).scatter(-1, order, ordered)
