"""API keys that name an attempt: `sk-leyden-<rollout>.<attempt>.<hmac>`.

A holder of the gateway's token can make a key for any attempt. A holder of a key can call in its attempt and in no
other. This module knows neither resources nor HTTP.
"""

from __future__ import annotations

import hmac
from typing import Final
from urllib.parse import quote, unquote

PREFIX: Final = "sk-leyden-"
NO_TOKEN: Final = "EMPTY"
"""Stands for the token of a gateway that has none. Its keys then name an attempt without proving that their holder may
call in it."""


def attempt_key(token: str | None, rollout_id: str, attempt_id: str) -> str:
    """Return the API key of one attempt, in ASCII."""
    return f"{PREFIX}{_quoted(rollout_id)}.{_quoted(attempt_id)}.{_signature(token, rollout_id, attempt_id)}"


def read_attempt_key(token: str | None, key: str) -> tuple[str, str] | None:
    """Return the rollout id and the attempt id of a key. None if this token did not make it."""
    named = named_by(key)
    proven = named is not None and hmac.compare_digest(
        key.rpartition(".")[2].encode(), _signature(token, *named).encode()
    )
    return named if proven else None


def named_by(key: str) -> tuple[str, str] | None:
    """Return the rollout id and the attempt id that a key names, without verifying the key. None for other text."""
    parts = key.removeprefix(PREFIX).split(".")
    return (unquote(parts[0]), unquote(parts[1])) if key.startswith(PREFIX) and len(parts) == 3 else None


def _quoted(part: str) -> str:
    return quote(part, safe="").replace(".", "%2E")  # dots separate the parts of a key


def _signature(token: str | None, rollout_id: str, attempt_id: str) -> str:
    message = f"leyden attempt\x1f{_quoted(rollout_id)}.{_quoted(attempt_id)}".encode()
    return hmac.digest((token or NO_TOKEN).encode(), message, "sha256").hex()[:40]
