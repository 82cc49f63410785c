"""Pickle values for another process: by name where pickle can, and by value where it cannot.

Functions and classes of a script or a notebook, lambdas and closures travel by value (cloudpickle).
"""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs] -- it has none

_cloudpickle: Any = cloudpickle  # untyped


def pack(value: Any) -> bytes:
    """Pickle a value, by value if pickle cannot send it by name.

    `pickle.loads` reads the result.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 -- a user's __reduce__ raises anything; the second attempt reports it
        return pack_by_value(value)


def pack_by_value(value: Any) -> bytes:
    """Pickle a value with cloudpickle, which takes in what the other process cannot import."""
    data: bytes = _cloudpickle.dumps(value)
    return data
