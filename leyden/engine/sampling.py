"""Sample tokens from logits.

One uniform number for each row decides its token (inverse transform sampling). A row with its own random generator
therefore draws the same token in any batch that gives it the same logits. The module knows no requests and no cache.

Shapes: B rows, V vocabulary, K categories, S tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from leyden.engine.untyped import listed

_BLOCK: Final = 128
"""The number of tokens in a block. The block is chosen first, by the sums of the blocks, then a token in it."""
_SMALLEST_IN_BLOCKS: Final = 4096
"""The smallest vocabulary that is divided into blocks."""
_MOST_AT_ONCE: Final = 2**21
"""The number of logits that a CPU draws from at once. It takes three times as long for each of 8 million, because the C
library returns memory of that size to the system, and the next softmax has to fault it in again."""
_BELOW_1: Final = 1 - 2**-53
"""The largest number below 1."""


def draw(
    logits_BV: Tensor, temperatures: Sequence[float], top_ps: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample one token for each row. Return the tokens and their log-probabilities.

    A log-probability is the one with which the token was drawn: at the row's temperature, among the tokens that top_p
    keeps. For temperature 0 it is the one at temperature 1, of the whole distribution.
    uniforms: one number in [0, 1) for each row; unused where the temperature is 0.
    """
    device, (n_rows, n_vocabulary) = logits_BV.device, logits_BV.shape
    most = max(1, _MOST_AT_ONCE // n_vocabulary)
    if device.type == "cpu" and n_rows > most:
        parts = [slice(start, start + most) for start in range(0, n_rows, most)]
        drawn = [draw(logits_BV[part], temperatures[part], top_ps[part], uniforms[part]) for part in parts]
        return [token for tokens, _ in drawn for token in tokens], [each for _, logprobs in drawn for each in logprobs]
    divisors_B = greedy_B = top_ps_B = None
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        divisors_B = torch.tensor([temperature or 1.0 for temperature in temperatures], device=device)
    if 0.0 in temperatures:
        greedy_B = torch.tensor([temperature == 0.0 for temperature in temperatures], device=device)
    if any(top_p < 1.0 for top_p in top_ps):
        top_ps_B = torch.tensor(top_ps, device=device)
    uniforms_B = torch.tensor(uniforms, dtype=torch.float64)
    tokens_B, logprobs_B = draw_tensors(logits_BV, divisors_B, greedy_B, top_ps_B, uniforms_B)
    return listed(tokens_B), listed(logprobs_B)


def draw_tensors(
    logits_BV: Tensor, divisors_B: Tensor | None, greedy_B: Tensor | None, top_ps_B: Tensor | None, uniforms_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `draw` does, as tensors on the device of the logits.

    divisors_B: the temperatures, 1 in place of 0; None: all are 1.
    greedy_B: which rows take the most likely token; None: none.
    top_ps_B: None: all are 1.
    uniforms_B: in float64.
    """
    device = logits_BV.device
    logits_BV = logits_BV.float()
    if divisors_B is not None:
        logits_BV = logits_BV / divisors_B[:, None]
    probabilities_BV = chances_BV = torch.softmax(logits_BV, dim=-1)
    # Not 1: over 262,144 tokens softmax adds up to 1.0001, because it sums one after the other.
    kept_B1 = probabilities_BV.sum(dim=-1, keepdim=True)
    if top_ps_B is not None:
        chances_BV = _nucleus(probabilities_BV, top_ps_B)
        whole_B = top_ps_B >= 1.0 if greedy_B is None else (top_ps_B >= 1.0) | greedy_B
        kept_B1 = torch.where(whole_B[:, None], kept_B1, chances_BV.sum(dim=-1, keepdim=True))
    if torch.are_deterministic_algorithms_enabled():
        chances_BV = chances_BV.cpu()  # a cumulative sum on CUDA has no deterministic kernel
    tokens_B1 = _invert(chances_BV, uniforms_B[:, None].to(chances_BV.device)).to(device)
    if greedy_B is not None:
        tokens_B1 = torch.where(greedy_B[:, None], logits_BV.argmax(dim=-1, keepdim=True), tokens_B1)
    logprobs_B1 = probabilities_BV.gather(-1, tokens_B1).log() - kept_B1.log()
    return tokens_B1[:, 0], logprobs_B1[:, 0]


def _invert(chances_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Return for each row the first token at which the cumulative share of the chances exceeds the uniform number,
    shape (B, 1).

    The chances need not sum to 1. Cumulative sums are in double precision, because over a large vocabulary
    single-precision ones would shift probability between tokens. A large vocabulary is summed in blocks first, because
    cumulative sums of all its tokens take longer than a softmax.
    """
    n_vocabulary = chances_BV.shape[-1]
    if n_vocabulary < _SMALLEST_IN_BLOCKS:
        return _find(chances_BV, uniforms_B1)[0]
    if n_missing := -n_vocabulary % _BLOCK:
        chances_BV = functional.pad(chances_BV, (0, n_missing))
    blocks_BKS = chances_BV.view(len(chances_BV), -1, _BLOCK)
    block_B1, left_B1 = _find(blocks_BKS.sum(-1), uniforms_B1)
    block_BS = blocks_BKS.gather(1, block_B1[..., None].expand(-1, -1, _BLOCK))[:, 0]
    return block_B1 * _BLOCK + _find(block_BS, left_B1)[0]


def _find(chances_BK: Tensor, uniforms_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Sample an index for each row by inverting the cumulative distribution. Return the indices, (B, 1), and how far
    into the index's share each uniform number lies, in [0, 1).

    The second result is uniform again, so a second draw can use it.

    chances_BK: need not sum to 1.
    """
    cumulative_BK = chances_BK.cumsum(dim=-1, dtype=torch.float64)
    sought_B1 = uniforms_B1 * cumulative_BK[:, -1:]
    place_B1 = torch.searchsorted(cumulative_BK, sought_B1, right=True).clamp_max(chances_BK.shape[-1] - 1)
    after_B1 = cumulative_BK.gather(-1, place_B1)
    before_B1 = after_B1 - chances_BK.gather(-1, place_B1)
    return place_B1, ((sought_B1 - before_B1) / (after_B1 - before_B1)).clamp(0.0, _BELOW_1)


def _nucleus(probabilities_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Return the probabilities with 0 for all but the smallest set of most likely tokens whose mass reaches top_p
    (nucleus sampling, arXiv:1904.09751). They are not scaled to sum to 1.
    """
    ordered, order = probabilities_BV.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill((before >= top_p_B[:, None]) & (top_p_B[:, None] < 1.0), 0.0)
    return torch.zeros_like(probabilities_BV).scatter(-1, order, ordered)
