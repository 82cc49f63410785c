"""The tokens of a rollout as pieces of text: what the policy sampled, token by token, and what stood between."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leyden._lib.json import Json
from leyden.adapter import TraceToTriplet, merge_triplets
from leyden.adapter.trajectory import refusal
from leyden.errors import ConfigError
from leyden.report.credit import recorded_credit
from leyden.training.runs import RecordedRun
from leyden.training.runs.overview import part_of
from leyden.training.runs.run_options import changed_of
from leyden.types import Span, Trajectory, Triplet

Texts = Callable[[Sequence[int]], list[str]]
"""Returns the text that each token of a sequence adds."""

_MAX_SAMPLED = 700
"""Sampled tokens of a rollout that are shown."""
_MAX_CONTEXT = 600
"""Characters of the text between two sampled tokens that are shown."""
_CHOOSERS = ("trainer.adapter", "trainer.triplet_exporter", "algorithm.agent_match")
"""Options that choose the calls that are trained on."""


def token_texts(run: RecordedRun, *, max_bytes: int | None) -> Texts:
    """Return the function that shows the tokens of the trained model. Raise ConfigError, with the reason, without one.

    max_bytes: a larger tokenizer is not loaded; None: of any size.
    """
    model = part_of(run.record.config, "model").get("name")
    folders = [Path(str(model or "")), *([run.directory / "model"] if run.directory is not None else [])]
    path = next((path for each in folders if (path := each / "tokenizer.json").is_file()), None)
    if path is None:
        raise ConfigError("the trained model is in no folder with a tokenizer.json")
    if max_bytes is not None and path.stat().st_size > max_bytes:
        raise ConfigError(f"the tokenizer is large; `leyden report {run.record.name}` loads it")
    try:
        from tokenizers import Tokenizer

        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error

    def texts(ids: Sequence[int]) -> list[str]:
        found: list[str] = []
        start = end = (
            0  # the ids from `start` to `end` are decoded too, because a word's form depends on what is before
        )
        for place in range(1, len(ids) + 1):
            before, now = (tokenizer.decode(list(ids[start:to]), skip_special_tokens=False) for to in (end, place))
            is_part = now.endswith("\N{REPLACEMENT CHARACTER}") and place - end < 4 and place < len(ids)
            found.append("" if is_part else now[len(before) :])  # a later token completes the character
            start, end = (start, end) if is_part else (end, place)
        return found

    return texts


def sequences(run: RecordedRun, spans: Sequence[Span], texts: Texts | None) -> list[Json]:
    """Return the token sequences of an attempt in pieces, each with the reason if it was not trained on, or if that is
    not known.

    texts: None shows tokens as ids.
    """
    triplets, temperature = TraceToTriplet().adapt(spans), recorded_credit(run).get("temperature")
    refused = [reason for each in triplets if (reason := _refusal(each, temperature)) is not None]
    chosen = next((path for path in changed_of(run.record) if path.startswith(_CHOOSERS)), None)
    reason = f"Not trained on: {refused[0]}" if refused else None
    reason = reason if chosen is None else f"Which calls were trained on is not known, because the run has {chosen}"
    found: list[Json] = []
    left = _MAX_SAMPLED
    for trajectory in merge_triplets(triplets):
        pieces = _pieces(trajectory, texts, left)
        left -= sum(piece["kind"] != "context" for piece in pieces)
        hidden = len(trajectory.token_ids) - sum(piece["tokens"] for piece in pieces)
        found.append({"pieces": pieces, "left_out": hidden, "reason": reason})
    return found


def _refusal(triplet: Triplet, temperature: float | None) -> str | None:
    sampled = triplet.metadata.get("temperature", 1.0)
    if temperature is not None and abs(sampled - temperature) > 1e-6:
        return f"a call was sampled at temperature {sampled:g}, and the policy is trained at {temperature:g}"
    return "a call has options that change its distribution" if triplet.metadata.get("sampling") else refusal(triplet)


def _pieces(trajectory: Trajectory, texts: Texts | None, max_sampled: int) -> list[Json]:
    ids, is_sampled = trajectory.token_ids, [False] * len(trajectory.token_ids)
    for start, end in trajectory.call_spans:
        is_sampled[start:end] = [True] * (end - start)
    shown = texts(ids) if texts is not None else [f"[{each}]" for each in ids]
    pieces: list[Json] = []
    for place, text in enumerate(shown):
        if not is_sampled[place]:
            if not pieces or pieces[-1]["kind"] != "context":
                pieces.append({"kind": "context", "text": "", "tokens": 0, "id": None, "probability": None})
            pieces[-1]["text"] += text
            pieces[-1]["tokens"] += 1
        elif max_sampled:
            max_sampled -= 1
            is_masked, logprob = not trajectory.loss_mask[place], trajectory.logprobs[place]
            p = None if is_masked or not math.isfinite(logprob) else math.exp(min(logprob, 0.0))
            kind = "masked" if is_masked else "sampled"
            pieces.append({"kind": kind, "text": text, "tokens": 1, "id": ids[place], "probability": p})
        else:
            break
    for piece in pieces:
        text, half = piece["text"], _MAX_CONTEXT // 2
        piece["text"] = text if len(text) <= _MAX_CONTEXT else f"{text[:half]} … {text[-half:]}"
    return pieces
