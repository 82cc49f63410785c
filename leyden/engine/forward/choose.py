"""Choose the fastest forward pass whose logits are proven to equal those of the model's own.

Every candidate runs the same probe: prompts of different lengths in one batch, single tokens after them, rows of both
kinds together, a row continued after a pause. Its logits must match those of the model on each whole sequence alone. A
candidate that raises or differs is skipped, and the reason logged.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from leyden.engine.forward.cached import CachedForward, UncachedForward
from leyden.engine.forward.layout import LayoutForward
from leyden.engine.forward.model_forward import ModelForward, rounding
from leyden.errors import EngineError

logger = logging.getLogger("leyden.engine")

CANDIDATES: list[Callable[..., ModelForward]] = [LayoutForward, CachedForward, UncachedForward]
"""Implementations of the forward pass, in order of preference."""

_PROBE_ROWS = 4


class Mismatch(Exception):
    """Raised when a candidate's logits differ from the model's."""


def choose_forward(
    model: Any,
    *,
    max_rows: int,
    max_length: int,
    candidates: Sequence[Callable[..., ModelForward]] | None = None,
) -> ModelForward:
    """Return the first candidate that passes the probe. Raise EngineError, with all reasons, if none does.

    max_rows, max_length: the most rows of the cache, and tokens of a sequence.
    candidates: None: `CANDIDATES`.
    """
    reasons: list[str] = []
    for candidate in CANDIDATES if candidates is None else candidates:
        try:
            forward = candidate(model, max_rows=max(max_rows, _PROBE_ROWS), max_length=max_length)
            probe(model, forward)
        except Exception as error:  # noqa: BLE001 -- after any error the next candidate may still pass
            name = getattr(candidate, "name", getattr(candidate, "__name__", str(candidate)))
            reasons.append(f"{name}: {type(error).__name__}: {error}")
            logger.info("not used: %s", reasons[-1])
            continue
        logger.info("logits come from %s", forward.name)
        return forward
    raise EngineError(
        f"no forward pass of {type(model).__name__} gives the logits of the model's own forward; tried "
        + "; ".join(reasons)
    )


@torch.inference_mode()
def probe(model: Any, forward: ModelForward) -> None:
    """Raise Mismatch unless `forward` and `model` give the same logits. The cache is empty afterwards."""
    rng = random.Random(0)
    embeddings = model.get_input_embeddings()
    n_vocabulary = min(int(embeddings.weight.shape[0]), 32_000)
    longest = min(forward.max_length, 24)
    sequences = [[rng.randrange(n_vocabulary) for _ in range(longest)] for _ in range(_PROBE_ROWS)]
    rows = [2, 0, 3, 1]
    # How many tokens of each sequence the cache holds after each step; None: the row is not part of
    # the step.
    script: list[list[int | None]] = [
        [3, 9, 1, None],
        [4, 10, None, 7],
        [5, None, 6, 8],
        [9, 11, 7, 9],
        [10, 12, 8, 10],
    ]
    script = [[length if length is None or length <= longest else None for length in step] for step in script]
    positions = [sorted({0, longest - 1}), [longest // 2]]
    wanted = [
        _own_logits(model, sequence, {length - 1 for step in script if (length := step[b])} | set(more))
        for b, (sequence, more) in enumerate(zip(sequences, [*positions, [], []], strict=True))
    ]
    cached = [0, 0, 0, 0]
    for step in script:
        batch = [(b, length) for b, length in enumerate(step) if length is not None and length > cached[b]]
        if not batch:
            continue
        got = forward.decode(
            [rows[b] for b, _ in batch], [sequences[b][:length] for b, length in batch], [cached[b] for b, _ in batch]
        )
        for (b, length), logits_V in zip(batch, got, strict=True):
            _compare(logits_V, wanted[b][length - 1], f"decoding {length} tokens, {cached[b]} cached")
            cached[b] = length
    got = forward.logits_at(sequences[:2], positions)
    _compare(got, torch.stack([wanted[b][at] for b, each in enumerate(positions) for at in each]), "training")
    forward.release()


def _own_logits(model: Any, sequence: list[int], positions: set[int]) -> dict[int, Tensor]:
    """Return the model's own logits (V,) at some positions of one sequence, without a cache.

    A model that can is asked for these alone, because a head of 262,144 rows takes most of the time.
    """
    ids = torch.tensor([sequence], device=next(model.parameters()).device)
    if not (chosen := sorted(positions)):
        return {}
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "logits_to_keep" in inspect.signature(inner.forward).parameters:
        kept = model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor(chosen, device=ids.device)).logits[0]
    else:
        kept = model(input_ids=ids, use_cache=False).logits[0, chosen]
    return dict(zip(chosen, kept, strict=True))


def _compare(got: Tensor, wanted: Tensor, what: str) -> None:
    """Raise Mismatch if logits differ by more than rounding.

    what: their name for the message.
    """
    if got.shape != wanted.shape:
        raise Mismatch(f"{what}: logits have shape {tuple(got.shape)}, the model's have {tuple(wanted.shape)}")
    difference = float((got.float() - wanted.float()).abs().max())
    tolerance = rounding(wanted)
    if not difference <= tolerance:  # also if the difference is NaN
        raise Mismatch(f"{what}: logits differ by {difference:.2g} (at most {tolerance:.2g} is rounding)")
