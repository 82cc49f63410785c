"""Which attempts may call a model, and the number of each call.

It asks the store once for each attempt and remembers the answer: a call costs no store read. It knows no HTTP beyond
the status of a refusal.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, field

from leyden.errors import LeydenError, UnknownAttempt, UnknownRollout
from leyden.gateway.limits import Spent
from leyden.gateway.refusal import Refusal
from leyden.store.base import LightningStore
from leyden.types import AttemptedRollout

__all__ = ["Admission", "AttemptKey", "Attempts", "trace_id_of"]

logger = logging.getLogger(__name__)

AttemptKey = tuple[str, str]
"""Rollout id, attempt id."""

_RECHECK_SECONDS = 30.0
"""How long an attempt that somebody else ended (a sweep, a cancellation) can still call."""
_ENDED_KEPT = 65_536
"""How many ended attempts are remembered; older ones are looked up in the store, which knows by then."""


@dataclass(frozen=True, slots=True)
class Admission:
    """One call that may go on."""

    call_index: int
    """The number of the call within its attempt, from 0."""
    trace_id: str
    """The trace of the attempt's calls that bring no trace of their own."""
    mode: str | None
    """Of the rollout."""
    spent: Spent
    """By the attempt so far."""


@dataclass(slots=True)
class _Live:
    trace_id: str
    calls: int = 0
    mode: str | None = None
    spent: Spent = field(default_factory=Spent)
    check_again_at: float = 0.0


class Attempts:
    """The attempts that call through this gateway. `admit` runs in the gateway's event loop; `end` in any thread."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._live: dict[AttemptKey, _Live] = {}
        self._ended: dict[AttemptKey, bool] = {}
        """Whether a call that came too late has been noted."""

    async def admit(self, rollout_id: str, attempt_id: str, *, call_index: int | None = None) -> Admission:
        """Number one call; call_index: the number that it has already, if it is sent again.

        Raises Refusal: 404 for ids that the store does not know, 410 for an attempt that is over, 503 when the store
        cannot say.
        """
        key = (rollout_id, attempt_id)
        if key in self._ended:
            raise _gone(rollout_id, attempt_id, "the attempt is over")
        live = self._live.get(key)
        if live is None:
            live = self._live[key] = _Live(trace_id=trace_id_of(key))
        if call_index is None:
            call_index, live.calls = live.calls, live.calls + 1
        now = time.monotonic()
        if now >= live.check_again_at:
            await self._check(key, live)
            live.check_again_at = now + _RECHECK_SECONDS
        if key in self._ended:
            raise _gone(rollout_id, attempt_id, "the attempt is over")
        return Admission(call_index=call_index, trace_id=live.trace_id, mode=live.mode, spent=live.spent)

    def note_late_call(self, rollout_id: str, attempt_id: str) -> bool:
        """Whether this is the first call of an ended attempt; only that one is worth a record, an agent may repeat it for ever."""
        first = not self._ended.get((rollout_id, attempt_id), False)
        self._ended[rollout_id, attempt_id] = True
        return first

    def end(self, rollout_id: str, attempt_id: str) -> None:
        """Refuse all later calls of this attempt. Safe to repeat."""
        key = (rollout_id, attempt_id)
        self._ended.setdefault(key, False)
        self._live.pop(key, None)
        if len(self._ended) > _ENDED_KEPT:
            self._ended.pop(next(iter(self._ended)), None)

    async def _check(self, key: AttemptKey, live: _Live) -> None:
        rollout_id, attempt_id = key
        try:
            over = await self._why_over(rollout_id, attempt_id, live)
        except (UnknownRollout, UnknownAttempt) as error:
            self._live.pop(key, None)
            noun = "rollout" if isinstance(error, UnknownRollout) else "attempt"
            raise Refusal(
                404,
                f"{noun}_not_found",
                f"the gateway cannot record a call of rollout {rollout_id!r}, attempt {attempt_id!r}: {error}. "
                "Use the base URL of the `llm` that the agent was given, and the store that holds its rollout.",
            ) from error
        except LeydenError as error:
            logger.error("cannot look up rollout %r, attempt %r: %s", rollout_id, attempt_id, error)
            raise Refusal(503, "store_unavailable", f"the gateway cannot reach its store: {error}") from error
        if over is not None:
            self.end(rollout_id, attempt_id)
            raise _gone(rollout_id, attempt_id, over)

    async def _why_over(self, rollout_id: str, attempt_id: str, live: _Live) -> str | None:
        rollout = await self._store.get_rollout_by_id(rollout_id)
        live.mode = rollout.mode
        if isinstance(rollout, AttemptedRollout) and rollout.attempt.attempt_id == attempt_id:
            attempt = rollout.attempt
        else:
            attempt = await self._store.get_attempt_by_id(rollout_id, attempt_id)
        if attempt.finished:
            return f"the attempt is over: {attempt.status}"
        return f"the rollout is over: {rollout.status}" if rollout.finished else None


def _gone(rollout_id: str, attempt_id: str, why: str) -> Refusal:
    return Refusal(
        410,
        "attempt_ended",
        f"rollout {rollout_id!r}, attempt {attempt_id!r}: {why}. Make model calls before the agent returns and before "
        "its timeout, and use the base URL of the current attempt.",
    )


def trace_id_of(key: AttemptKey) -> str:
    """The same after a restart of the gateway, so that an attempt's calls stay in one trace."""
    return hashlib.sha256("\x1f".join(key).encode()).hexdigest()[:32]
