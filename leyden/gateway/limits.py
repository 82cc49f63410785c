"""Limit the calls, tokens and cost of one attempt.

Pure values: the module knows no store, and no HTTP beyond the status of a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from leyden._lib.host.http import Refusal
from leyden._lib.options import check_number


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """The most that one attempt may spend; None: any amount.

    Calls that run at the same time may exceed a limit together.
    """

    calls: int | None = None
    """The number of calls. A call that its client sends again counts once."""
    tokens: int | None = None
    """Tokens of prompts and responses, as the servers count them."""
    cost: float | None = None
    """Cost, in the unit of `UpstreamModel.price_per_million`, which every model then needs. After a call whose cost is
    unknown, such as a stream without a usage, the attempt gets no further one."""

    def __post_init__(self) -> None:
        for name in ("calls", "tokens", "cost"):
            limit = getattr(self, name)
            check_number(f"attempt_limits: {name}", limit, above=0, whole=name != "cost", or_none="no limit")

    def check(self, call_index: int, spent: Spent) -> None:
        """Raise Refusal (429) if the attempt has reached a limit. The reply tells the client not to retry.

        call_index: the number of the call in its attempt, from 0.
        """
        if self.calls is not None and call_index >= self.calls:
            raise _refusal("calls", self.calls, call_index)
        if self.tokens is not None and spent.tokens >= self.tokens:
            raise _refusal("tokens", self.tokens, spent.tokens)
        if self.cost is not None and spent.unpriced_calls:
            raise Refusal(
                429,
                "attempt_limit",
                f"the cost of a call is unknown, so cost={self.cost:g} cannot be kept: {spent.why_unknown}",
            )
        if self.cost is not None and spent.cost >= self.cost:
            raise _refusal("cost", self.cost, spent.cost)


@dataclass(slots=True)
class Spent:
    """The tokens and the cost that the answered calls of one attempt have spent."""

    tokens: int = 0
    cost: float = 0.0
    unpriced_calls: int = 0
    why_unknown: str | None = None
    """Why the cost of the last such call is unknown."""

    def add(self, usage: Any, cost: float | None, why_unknown: str | None) -> None:
        """usage: the usage of a response in chat form; anything else counts no tokens."""
        self.tokens += sum(_tokens(usage))
        self.cost += cost or 0.0
        if why_unknown is not None:
            self.unpriced_calls, self.why_unknown = self.unpriced_calls + 1, why_unknown


def _tokens(usage: Any) -> tuple[int, int]:
    if not isinstance(usage, dict):
        return 0, 0
    counts = (cast(dict[str, Any], usage).get(name) for name in ("prompt_tokens", "completion_tokens"))
    n_prompt, n_response = (count if isinstance(count, int) else 0 for count in counts)
    return n_prompt, n_response


def _refusal(name: str, limit: float, spent: float) -> Refusal:
    return Refusal(
        429,
        "attempt_limit",
        f"the attempt has spent its {name}: {spent:g} of {limit:g} (LLMProxy's attempt_limits); end it, or raise the limit",
    )
