"""Live rollouts: work that is served now and recorded afterwards, under ids that a session makes.

A session signs the ids together with the version and the arm. A gateway that has the same key admits calls of the
rollout before the store knows it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from leyden.types.rollout import TaskInput

LIVE_KEY_PREFIX: Final = "sk-leyden-live-"
"""The beginning of an API key that is a signed claim."""
LIVE_TIMEOUT_SECONDS: Final = 24 * 3600.0
"""The default time limit of a live rollout, after which the store ends it as `timeout`.

It is longer than a store may be away, because an end that waits for the store must not come too late.
"""

LiveStatus: TypeAlias = Literal["succeeded", "failed", "cancelled"]


class LiveRollout(BaseModel):
    """A report on a live rollout: of its beginning, its end or both."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    rollout_id: str
    attempt_id: str
    resources_id: str
    version: int = Field(ge=1)
    arm: str | None = None
    start_time: float
    """Unix seconds, by the clock of the reporting process."""
    timeout_seconds: float = Field(default=LIVE_TIMEOUT_SECONDS, gt=0, allow_inf_nan=False)
    input: TaskInput = None
    """The input; None if the reporting process does not know it, as a gateway does not."""
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    status: LiveStatus | None = None
    """The final status; None while the rollout is under way."""
    reason: str | None = None
    """The reason if the rollout failed."""
    seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The duration, by a clock that does not jump."""


class LiveClaim(NamedTuple):
    """The content of a signed key: the rollout that may call, and the resources of that rollout."""

    rollout_id: str
    attempt_id: str
    resources_id: str
    version: int
    arm: str | None
    start_time: float
    """Unix seconds."""

    def rollout(self) -> LiveRollout:
        """Return the beginning of the rollout, as far as the claim knows it."""
        return LiveRollout(**self._asdict())


def sign_claim(key: str, claim: LiveClaim) -> str:
    """Return a claim as text for a URL or an API key (letters, digits, `-`, `_`, one dot), signed with the secret `key`
    that the session and the gateway share.
    """
    payload = base64.urlsafe_b64encode(json.dumps(claim, separators=(",", ":")).encode()).rstrip(b"=")
    return f"{payload.decode()}.{_signature(key, payload)}"


def read_claim(key: str, text: str) -> LiveClaim | None:
    """Return the claim that `sign_claim` made `text` of, or None if it was not signed with this key."""
    payload, _, signature = text.partition(".")
    if not payload.isascii() or not hmac.compare_digest(signature.encode(), _signature(key, payload.encode()).encode()):
        return None
    return parse_claim(payload)


def parse_claim(text: str) -> LiveClaim | None:
    """Return the claim in a signed or unsigned text without verifying it. None for other text."""
    payload = text.partition(".")[0]
    try:
        # base64 needs the padding that `sign_claim` took away
        return LiveClaim(*json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))))
    except (binascii.Error, ValueError, TypeError):
        return None


def _signature(key: str, payload: bytes) -> str:
    return hmac.digest(key.encode(), b"leyden live\x1f" + payload, "sha256").hex()[:40]
