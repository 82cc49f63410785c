"""Errors for requests that an engine cannot serve, at its endpoint and in `sample`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from leyden._lib.host.http import Refusal
from leyden.errors import ConfigError


def bad_request(message: str, *, status: int = 400, param: str | None = None, code: str = "") -> Refusal:
    """Return a Refusal, to be raised.

    param, code: fields of OpenAI's error object: the request's field that is wrong, and a word for programs; code ""
        leaves it null.
    """
    return Refusal(status, code, message, param=param)


def shown(value: Any) -> str:
    """Return a value as JSON for an error message, cut to 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unknown_token(ids: Sequence[int], n_vocabulary: int) -> str | None:
    """Return the end of an error message for token ids outside the vocabulary; None if all are known."""
    if not ids or 0 <= min(ids) <= max(ids) < n_vocabulary:
        return None
    bad = next(token for token in ids if not 0 <= token < n_vocabulary)
    return f"has the token id {bad}; the vocabulary has {n_vocabulary} tokens, so encode with this model's tokenizer"


def check_prompts(prompts: Sequence[Sequence[int]], n_vocabulary: int, max_length: int) -> None:
    """Raise ConfigError, which names the prompt, for a prompt that is empty, too long, or has an unknown token id."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {index} has no tokens; give it at least one")
        if fault := unknown_token(prompt, n_vocabulary):
            raise ConfigError(f"prompt {index} {fault}")
        if len(prompt) >= max_length:
            raise ConfigError(
                f"prompt {index} has {len(prompt)} tokens; there is no room for an answer in max_length={max_length}, so "
                "shorten the prompt, or give the engine a larger max_length"
            )
