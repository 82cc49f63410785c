"""Random and derived identifiers, in the id shapes of the glossary (`ro-`, `at-`, `rs-`).

A store takes a write under an existing id for a repeat, so two ids must not collide by chance. A rollout's id begins
with the millisecond in which it was made, so that a database's index grows at its end, where that is fastest. 52 random
bits follow: of ten million ids, a thousand of them in each millisecond, two collide in one of 900,000 stores. An
attempt's id need only be unique within its rollout.

The random bytes are the operating system's, fetched many at a time: `os.urandom` lets other threads run first, and each
id would wait for them.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from typing import Final

_FETCHED: Final = 4096
"""Random bytes that are read from the system at a time."""
_read = io.BytesIO().read
"""Reads the next unused bytes. It is safe in threads, because a call of `BytesIO.read` is atomic."""


def _drop_fetched() -> None:
    global _read
    _read = io.BytesIO().read


os.register_at_fork(after_in_child=_drop_fetched)  # else parent and child would make the same ids


def _random(n: int) -> str:
    global _read
    found = _read(n)
    if len(found) < n:
        fetched = os.urandom(_FETCHED)
        found, _read = fetched[:n], io.BytesIO(fetched[n:]).read
    return found.hex()


def rollout_id() -> str:
    """Return a fresh `ro-` id with 24 hexadecimal digits. Later ids sort after it, by the clock's milliseconds."""
    return f"ro-{time.time_ns() // 1_000_000:011x}{_random(7)[1:]}"  # 11 + 13 digits: 44 + 52 bits


def attempt_id() -> str:
    """Return a fresh `at-` id with 8 hexadecimal digits."""
    return f"at-{_random(4)}"


def claim_id() -> str:
    """Return a fresh `cl-` id with 20 hexadecimal digits, for one claim and its repeats."""
    return f"cl-{_random(10)}"


def resources_id() -> str:
    """Return a fresh `rs-` id with 12 hexadecimal digits."""
    return f"rs-{_random(6)}"


def feedback_id() -> str:
    """Return a fresh `fb-` id with 24 hexadecimal digits."""
    return f"fb-{_random(12)}"


def trace_id() -> str:
    """Return a fresh OpenTelemetry trace id: 32 hexadecimal digits."""
    return _random(16)


def span_id() -> str:
    """Return a fresh OpenTelemetry span id: 16 hexadecimal digits."""
    return _random(8)


def derived_id(prefix: str, *parts: str | int) -> str:
    """Return an id with 16 hexadecimal digits, made from `parts`.

    Equal parts give equal ids, so that a repeated write adds no second row.
    """
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{prefix}-{digest[:16]}"
