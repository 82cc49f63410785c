"""Random and derived identifiers, in the id shapes of the glossary (`ro-`, `at-`, `rs-`).

A write under an id that is there already is taken for a repeat, so ids must not meet by chance. A
rollout's begins with the millisecond in which it was made, so that an index of many grows at its
end, where a database is fastest; 52 random bits follow: where a thousand are made in each
millisecond, as fast as it goes, two of ten million are the same once in 900,000 stores. An
attempt's id is one among those of its rollout.
"""

from __future__ import annotations

import hashlib
import secrets
import time


def rollout_id() -> str:
    """Return a fresh `ro-` id with 24 hexadecimal digits.

    Later ids sort behind it, by the clock's milliseconds.
    """
    return f"ro-{time.time_ns() // 1_000_000:011x}{secrets.token_hex(7)[1:]}"


def attempt_id() -> str:
    """Return a fresh `at-` id with 8 hexadecimal digits."""
    return f"at-{secrets.token_hex(4)}"


def claim_id() -> str:
    """Return a fresh `cl-` id with 20 hexadecimal digits, for one claim and its repeats."""
    return f"cl-{secrets.token_hex(10)}"


def resources_id() -> str:
    """Return a fresh `rs-` id with 12 hexadecimal digits."""
    return f"rs-{secrets.token_hex(6)}"


def feedback_id() -> str:
    """Return a fresh `fb-` id with 24 hexadecimal digits."""
    return f"fb-{secrets.token_hex(12)}"


def trace_id() -> str:
    """Return a fresh OpenTelemetry trace id: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def span_id() -> str:
    """Return a fresh OpenTelemetry span id: 16 hexadecimal digits."""
    return secrets.token_hex(8)


def derived_id(prefix: str, *parts: str | int) -> str:
    """Return an id with 16 digits made from `parts`.

    Equal parts give equal ids, so that a repeated write is one row.
    """
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).hexdigest()
    return f"{prefix}-{digest[:16]}"
