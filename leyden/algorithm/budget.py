"""`Budget`: the rollouts, tokens, money and time that an algorithm may use.

Rollouts are counted when they are requested. Tokens and cost are known only afterwards, so the limit of each attempt is
reserved before it starts, and the unused part is released when it has ended. The module knows numbers and finished
attempts, and neither the store nor the callers that wait for a reservation.

Money is counted in billionths, as whole numbers, so that sums of prices are exact.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from leyden._lib.formatting import figure
from leyden._lib.options import check_number
from leyden.errors import BudgetExceeded, ConfigError
from leyden.types import Attempt

_BILLIONTHS = 10**9


@dataclass(slots=True)
class Budget:
    """Limits that a collector never exceeds.

    A rollout counts once, when it is first requested. If the store has the rollout already, it counts if it belongs to
    the same run, so that a resumed run spends as much as an uninterrupted one. A rollout of another run is free.

    Tokens and cost are those of the calls that the gateway records, including the algorithm's own calls. Their limits
    hold as long as no attempt takes more than `tokens_per_attempt` or `cost_per_attempt`.
    """

    rollouts: int | None = None
    """The most rollouts that may be requested. None: no limit."""
    seconds: float | None = None
    """The seconds for which rollouts may be requested and may run, from the first request on. When they are over, the
    `Evaluator` cancels unfinished rollouts and raises BudgetExceeded. None: no limit."""
    tokens: int | None = None
    """Tokens of prompts and answers that all attempts may take together. None: no limit."""
    cost: float | None = None
    """Money that all attempts may cost together, in the unit of `UpstreamModel.price_per_million`.
    None: no limit."""
    tokens_per_attempt: int | None = None
    """The most tokens that one attempt takes, which are reserved before it starts; needed with `tokens`. To enforce it,
    give `LLMProxy(attempt_limits=AttemptLimits(tokens=...))` a limit that is lower by the largest call, because the
    gateway refuses the calls of an attempt that has reached its limit."""
    cost_per_attempt: float | None = None
    """The highest cost of one attempt, which is reserved before it starts. Required with `cost`."""
    used: int = field(default=0, init=False)
    """The number of rollouts that were requested so far."""
    used_tokens: int = field(default=0, init=False)
    """Tokens of the attempts that have ended."""
    earlier_seconds: float = field(default=0.0, init=False)
    """Seconds that earlier processes of a resumed run have spent."""
    _used_cost: int = field(default=0, init=False, repr=False)
    _settled: int = field(default=0, init=False, repr=False)
    """Rollouts whose tokens and cost are known."""
    _reserved: dict[str, int] = field(default_factory=dict[str, int], init=False, repr=False)
    """Attempts that may still start or run, by the id of their rollout or call."""
    _started_at: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("rollouts", self.rollouts, at_least=0, whole=True, or_none="no limit")
        check_number("seconds", self.seconds, above=0, or_none="no limit")
        check_number("tokens", self.tokens, at_least=0, whole=True, or_none="no limit")
        check_number("cost", self.cost, at_least=0, or_none="no limit")
        check_number("tokens_per_attempt", self.tokens_per_attempt, at_least=1, whole=True, or_none="no tokens=")
        check_number("cost_per_attempt", self.cost_per_attempt, at_least=1 / _BILLIONTHS, or_none="no cost=")
        for name, total, each in (
            ("tokens", self.tokens, self.tokens_per_attempt),
            ("cost", self.cost, self.cost_per_attempt),
        ):
            if total is not None and each is None:
                raise ConfigError(
                    f"Budget({name}={total:g}) needs {name}_per_attempt=, the most that one attempt can take: "
                    "it is reserved before each attempt starts"
                )
            if total is None and each is not None:
                raise ConfigError(f"{name}_per_attempt={each:g} is not used without {name}=; give both")

    # ---- what is left ----------------------------------------------------------------------------

    @property
    def is_unlimited(self) -> bool:
        return self.rollouts is None and self.seconds is None and not self.is_reserved

    @property
    def is_reserved(self) -> bool:
        """Whether attempts need a reservation, because tokens or cost are limited."""
        return self.tokens is not None or self.cost is not None

    @property
    def left(self) -> int | None:
        """How many rollouts may still be requested; None without a limit."""
        return None if self.rollouts is None else max(0, self.rollouts - self.used)

    @property
    def seconds_left(self) -> float | None:
        """The seconds for which rollouts may still be requested; None without a limit."""
        if self.seconds is None:
            return None
        here = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        return max(0.0, self.seconds - self.earlier_seconds - here)

    @property
    def used_cost(self) -> float:
        return self._used_cost / _BILLIONTHS

    @property
    def tokens_left(self) -> int | None:
        """The tokens that are neither used nor reserved; None without a limit."""
        return next((each.left for each in self._measures() if each.name == "tokens"), None)

    @property
    def cost_left(self) -> float | None:
        """The money that is neither used nor reserved; None without a limit."""
        return next((each.left / _BILLIONTHS for each in self._measures() if each.name == "cost"), None)

    @property
    def attempts_left(self) -> int | None:
        """How many attempts may start now if each takes its limit; None without a limit on tokens or cost."""
        return min((each.left // each.limit for each in self._measures()), default=None)

    @property
    def rollouts_expected(self) -> int | None:
        """About how many more rollouts fit; None without a limit on rollouts, tokens or cost.

        The tokens and the cost that are left are divided by the mean of the finished rollouts, or by the limit of an
        attempt if none has finished. An algorithm plans with this number; the limits hold whatever it plans.
        """
        counts = [] if self.left is None else [self.left]
        for each in self._measures():
            mean = max(1.0, each.used / self._settled) if self._settled else each.limit
            counts.append(int(each.left / mean) if each.left >= each.limit else 0)
        return min(counts, default=None)

    def _measures(self) -> list[_Account]:
        reserved, found = sum(self._reserved.values()), list[_Account]()
        if self.tokens is not None and self.tokens_per_attempt is not None:
            found.append(_Account("tokens", self.tokens, self.used_tokens, reserved, self.tokens_per_attempt))
        if self.cost is not None and self.cost_per_attempt is not None:
            limit = _in_billionths(self.cost_per_attempt)
            found.append(_Account("cost", _in_billionths(self.cost), self._used_cost, reserved, limit))
        return found

    def metrics(self) -> dict[str, float]:
        """Return how much of each limit is left, and `budget_left`, the smallest share of a limit that is left. Return
        an empty dict without a limit.
        """
        limits = {
            "rollouts": (self.left, self.rollouts),
            "seconds": (self.seconds_left, self.seconds),
            "tokens": (self.tokens_left, self.tokens),
            "cost": (self.cost_left, self.cost),
        }
        given = {
            name: (left, total) for name, (left, total) in limits.items() if left is not None and total is not None
        }
        if not given:
            return {}
        share = min(left / total if total else 0.0 for left, total in given.values())
        return {"budget_left": share, **{f"budget_{name}_left": left for name, (left, _) in given.items()}}

    @property
    def spent(self) -> dict[str, float]:
        here = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        seconds = self.earlier_seconds + here
        return {"rollouts": self.used, "tokens": self.used_tokens, "cost": self.used_cost, "seconds": seconds}

    def restore(self, spent: dict[str, float]) -> None:
        """Count at least what an earlier process had spent, even if the store has deleted some of its rollouts."""
        self.used = max(self.used, int(spent["rollouts"]))
        self.used_tokens = max(self.used_tokens, int(spent.get("tokens", 0)))
        self._used_cost = max(self._used_cost, _in_billionths(spent.get("cost", 0.0)))
        self.earlier_seconds = max(self.earlier_seconds, spent["seconds"])

    # ---- rollouts --------------------------------------------------------------------------------

    def take(self, rollouts: int, *, unsent: int = 0) -> None:
        """Count rollouts as requested. The first call starts the clock of `seconds`.

        unsent: further rollouts that were counted before, and start only now.
        Raise BudgetExceeded, and count none, if there is no room for all `rollouts`, or no time is left.
        """
        if self._started_at is None:
            self._started_at = time.monotonic()
        if rollouts + unsent and self.seconds is not None and self.seconds_left == 0:
            raise BudgetExceeded(
                f"{rollouts + unsent:,} more rollouts were requested, and the time of Budget(seconds={self.seconds:g}) is over; "
                "give a larger budget"
            )
        if self.left is not None and self.rollouts is not None and rollouts > self.left:
            raise BudgetExceeded(
                f"{rollouts:,} more rollouts were requested, and {self.left:,} are left of Budget(rollouts={self.rollouts:,}); "
                "request no more than budget.left, or give a larger budget"
            )
        self.used += rollouts

    def give_back(self, rollouts: int) -> None:
        """Subtract `rollouts` from the requested ones, because they were never enqueued."""
        self.used -= rollouts

    # ---- tokens and cost -------------------------------------------------------------------------

    @property
    def reserved(self) -> frozenset[str]:
        """The ids of the rollouts and calls that have a reservation."""
        return frozenset(self._reserved)

    def reserve(self, key: str, attempts: int = 1) -> bool:
        """Reserve the limits of a rollout's attempts. Return whether there was room.

        key: the id of the rollout. If it has a reservation, that one is kept.
        attempts: how many attempts may start.
        """
        left = self.attempts_left
        if key in self._reserved or left is None:
            return True
        if attempts > left:
            return False
        self._reserved[key] = attempts
        return True

    def release(self, key: str) -> None:
        """Release a whole reservation, because no attempt has started. Safe to repeat."""
        self._reserved.pop(key, None)

    def settle(self, key: str, attempts: Iterable[Attempt]) -> str | None:
        """Release a reservation, and count what its attempts have used. Do nothing without a reservation.

        Return why an attempt has broken its limits, or None.
        """
        return None if self._reserved.pop(key, None) is None else self.spend(attempts)

    def spend(self, attempts: Iterable[Attempt]) -> str | None:
        """Count the tokens and the cost of the attempts of a finished rollout.

        An attempt that was cut off counts with its limit if it has recorded less, because a call that it was making may
        be billed. So does one whose calls have no price, if cost is limited. Return why an attempt has broken its
        limits, or None.
        """
        problem: str | None = None
        for attempt in attempts:
            tokens, cost = attempt.prompt_tokens + attempt.response_tokens, attempt.cost
            is_cut = attempt.status not in ("succeeded", "failed") or attempt.interrupted
            problem = self._problem_with(attempt, tokens) or problem
            if cost is None:
                cost = 0.0 if tokens == 0 else self.cost_per_attempt or 0.0
            self.used_tokens += max(tokens, self.tokens_per_attempt or 0) if is_cut else tokens
            self._used_cost += _in_billionths(max(cost, self.cost_per_attempt or 0.0) if is_cut else cost)
        self._settled += 1
        return problem

    def call_of_own_client(self, key: str, tokens: int) -> Attempt:
        """Return an attempt that stands for one finished model call that the algorithm made with its own client, past
        the gateway. Its price is unknown, so it costs `cost_per_attempt`. Pass the attempt to `settle`.

        key: the key of the reservation.
        tokens: the tokens of prompt and response together.
        """
        fixed: dict[str, Any] = {"rollout_id": key, "attempt_id": key, "sequence_id": 1, "start_time": 0.0}
        ended = {"status": "succeeded", "response_tokens": tokens, "cost": self.cost_per_attempt}
        return Attempt.model_validate({**fixed, **ended})

    def _problem_with(self, attempt: Attempt, tokens: int) -> str | None:
        """Return why an attempt has broken its own limits; None if it has not."""
        name = f"attempt {attempt.attempt_id} of {attempt.rollout_id}"
        if self.tokens_per_attempt is not None and tokens > self.tokens_per_attempt:
            return f"{name} took {tokens:,} tokens, more than tokens_per_attempt={self.tokens_per_attempt:,}"
        if self.cost_per_attempt is None:
            return None
        if attempt.cost is None and tokens:
            return f"{name} called a model without a price, and counts with cost_per_attempt; give price_per_million"
        if attempt.cost is not None and _in_billionths(attempt.cost) > _in_billionths(self.cost_per_attempt):
            return f"{name} cost {figure(attempt.cost)}, more than cost_per_attempt={self.cost_per_attempt:g}"
        return None

    def exceeded(self, attempts: int) -> BudgetExceeded:
        """Return the error for attempts that do not fit in the budget, nor will when the running ones have ended."""
        lacking = [
            f"{figure(left)} of Budget({name}={total:g}), with {each:g} reserved for each attempt"
            for name, left, total, each in (
                ("tokens", self.tokens_left, self.tokens, self.tokens_per_attempt),
                ("cost", self.cost_left, self.cost, self.cost_per_attempt),
            )
            if left is not None and total is not None and each is not None
        ]
        return BudgetExceeded(
            f"{attempts:,} more attempts were requested, but what is left is {' and '.join(lacking)}; give a larger budget"
        )


@dataclass(frozen=True, slots=True)
class _Account:
    """The account of one limit, tokens or cost, in whole numbers."""

    name: str
    total: int
    used: int
    reserved: int
    """Number of attempts whose limit is reserved."""
    limit: int
    """The most that one attempt may use, which is reserved before it starts."""

    @property
    def left(self) -> int:
        return max(0, self.total - self.used - self.reserved * self.limit)


def busy_seconds(attempts: Iterable[Attempt]) -> float:
    """Return for how many seconds at least one of these attempts was under way.

    An attempt of a process that was killed ends with its last heartbeat, so that the time until the run was resumed
    does not count.
    """
    total, until = 0.0, float("-inf")
    for start, end in sorted((attempt.start_time, _last_sign(attempt)) for attempt in attempts):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _last_sign(attempt: Attempt) -> float:
    """Return the end of an attempt; if it was interrupted or has none, its last heartbeat."""
    if attempt.end_time is not None and not attempt.interrupted:
        return attempt.end_time
    return max(attempt.start_time, attempt.last_heartbeat_time or 0.0)


def _in_billionths(money: float) -> int:
    return round(money * _BILLIONTHS)
