"""Random and derived identifiers, in the id shapes of the glossary (`ro-`, `at-`, `rs-`).

A write under an id that is there already is taken for a repeat, so ids must not meet by chance. A
rollout's begins with the millisecond in which it was made, so that an index of many grows at its
end, where a database is fastest; 52 random bits follow: where a thousand are made in each
millisecond, as fast as it goes, two of ten million are the same once in 900,000 stores. An
attempt's id is one among those of its rollout. `secrets` would call `os.urandom` through four
functions, which take longer than it does.
"""

from __future__ import annotations

import hashlib
import os
import time


def rollout_id() -> str:
    """Return a fresh `ro-` id with 24 hexadecimal digits.

    Ids that are made later sort after it, by the clock's milliseconds.
    """
    return f"ro-{time.time_ns() // 1_000_000:011x}{os.urandom(7).hex()[1:]}"


def attempt_id() -> str:
    """Return a fresh `at-` id with 8 hexadecimal digits."""
    return f"at-{os.urandom(4).hex()}"


def claim_id() -> str:
    """Return a fresh `cl-` id with 20 hexadecimal digits, for one claim and its repeats."""
    return f"cl-{os.urandom(10).hex()}"


def resources_id() -> str:
    """Return a fresh `rs-` id with 12 hexadecimal digits."""
    return f"rs-{os.urandom(6).hex()}"


def feedback_id() -> str:
    """Return a fresh `fb-` id with 24 hexadecimal digits."""
    return f"fb-{os.urandom(12).hex()}"


def trace_id() -> str:
    """Return a fresh OpenTelemetry trace id: 32 hexadecimal digits."""
    return os.urandom(16).hex()


def span_id() -> str:
    """Return a fresh OpenTelemetry span id: 16 hexadecimal digits."""
    return os.urandom(8).hex()


def derived_id(prefix: str, *parts: str | int) -> str:
    """Return an id with 16 digits made from `parts`.

    Equal parts give equal ids, so that a repeated write is one row.
    """
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).hexdigest()
    return f"{prefix}-{digest[:16]}"
