"""Pickle values for another process: by name where pickle can, and by value where it cannot.

Functions and classes of a script or a notebook, lambdas and closures travel by value (cloudpickle).
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # cloudpickle is untyped
    from pickle import Pickler as _Pickler
else:
    from cloudpickle import Pickler as _Pickler


class CloudPickler(_Pickler):
    """The pickler of cloudpickle, with the types of pickle's."""


def pack(value: Any) -> bytes:
    """Pickle a value, with cloudpickle if pickle alone fails. `pickle.loads` reads the result."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 -- a user's __reduce__ raises anything; the second attempt reports it
        return pack_by_value(value)


def pack_by_value(value: Any) -> bytes:
    """Pickle a value with cloudpickle, which takes in what the other process cannot import."""
    buffer = io.BytesIO()
    CloudPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
