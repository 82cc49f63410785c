"""`Prices`: what the tokens of models cost, read from one file by trainers, evaluations and gateways.

Pure values. A call has a cost only if its usage says what every token of it was; else the cost is unknown, and never 0.
To price another kind of token, add a field to `Price` and read it in `Price.cost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from leyden._lib.config_file import read_config_file
from leyden._lib.json import is_object
from leyden._lib.options import check_names, check_number
from leyden.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a million tokens of each kind, in any unit."""

    prompt: float
    answer: float
    cached: float | None = None
    """The price of prompt tokens that the server has read from its cache; None: `prompt`."""
    cache_write: float | None = None
    """The price of prompt tokens that the server has written to its cache; None: `prompt`."""

    @classmethod
    def of(cls, given: object, name: str) -> Price:
        """Return a price that was given as one, as a mapping of its fields, or as two or three numbers (of prompts, of
        answers, of cached prompts). Raise ConfigError, naming `name`, for anything else.
        """
        known = [each.name for each in fields(cls)]
        if isinstance(given, list | tuple):
            numbers = cast("Sequence[Any]", given)
            given = dict(zip(known, numbers, strict=False)) if len(numbers) in (2, 3) else numbers
        if not isinstance(given, cls):
            if not (isinstance(given, Mapping) and "prompt" in given and "answer" in given):
                raise ConfigError(
                    f"{name} is {given!r:.100}; give the prices of a million tokens, such as "
                    "{prompt: 0.4, cached: 0.1, answer: 1.6}"
                )
            check_names(name, [str(each) for each in cast("Mapping[Any, Any]", given)], known)
            given = cls(**cast("Mapping[str, Any]", given))
        for each in known:
            none = None if each in ("prompt", "answer") else "the price of prompt"
            check_number(f"{name}: {each}", getattr(given, each), at_least=0, or_none=none)
        return given

    def cost(self, usage: Any) -> float | None:
        """Return the cost of a call; None if its usage, in chat form, is missing or does not add up."""
        if not is_object(usage):
            return None
        details: Any = usage.get("prompt_tokens_details") or {}
        n_prompt, n_answer = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if n_answer is None and usage.get("total_tokens") == n_prompt:  # embeddings have no answer
            n_answer = 0
        n_cached, n_written = (
            (details.get(name) or 0) if is_object(details) else None for name in ("cached_tokens", "cache_write_tokens")
        )
        counts = (n_prompt, n_answer, n_cached, n_written)
        if not all(type(count) is int and count >= 0 for count in counts):
            return None
        prompt, answer, cached, written = cast("tuple[int, int, int, int]", counts)
        if prompt + answer == 0 or cached + written > prompt:
            return None
        read_price = self.prompt if self.cached is None else self.cached
        write_price = self.prompt if self.cache_write is None else self.cache_write
        plain = (prompt - cached - written) * self.prompt
        return (plain + cached * read_price + written * write_price + answer * self.answer) / 1e6


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices by the model's name, or by a pattern of names such as `gpt-4.1-*`."""

    models: Mapping[str, Price] = field(default_factory=dict[str, Price])
    currency: str = ""
    """The unit of all prices, for people."""

    @classmethod
    def of(cls, given: object) -> Prices:
        """Return prices that were given as such, as a file, or as the content of one: `{"currency": "USD", "models":
        {"gpt-4.1-mini": {"prompt": 0.4, "cached": 0.1, "answer": 1.6}}}`.

        Raise ConfigError, with the name of the model, for prices that cannot be read.
        """
        if isinstance(given, cls):
            return given
        name = "prices"
        if isinstance(given, str | Path) and str(given):
            name, given = str(given), read_config_file(Path(given)).content
        content = cast("dict[str, Any]", given) if isinstance(given, Mapping) else {}
        models, currency = content.get("models"), content.get("currency", "")
        if not is_object(models) or not isinstance(currency, str) or len(content) > 1 + ("currency" in content):
            raise ConfigError(
                f"{name} must have the section models, with a price for each name, and perhaps a currency, and nothing else"
            )
        return cls({str(each): Price.of(price, f"{name}: {each}") for each, price in models.items()}, currency)

    def of_model(self, *names: str) -> Price | None:
        """Return the price of a model with these names; None if it has none. A whole name is preferred to a pattern,
        and the first fitting pattern to later ones.
        """
        for name in names:
            if name in self.models:
                return self.models[name]
        return next((p for pattern, p in self.models.items() for name in names if fnmatchcase(name, pattern)), None)
