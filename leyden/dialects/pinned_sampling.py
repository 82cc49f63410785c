"""Sampling that is pinned for an attempt: a program asks for its own, and the gateway uses this in its place.

The pins stand in the attempt's address, `/rollout/{id}/attempt/{id}/sampling,temperature=1.0,max_tokens=256.0/v1`, so
that they reach every client, in every language, and no gateway has to look them up. The attempt's key ends in
`;sampling,...`, for a program that leaves the path out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from leyden._lib.json import Json
from leyden.dialects.sampling import SAMPLING_PARAMETERS, is_neutral

_PREFIX: Final = "sampling,"
KEY_MARK: Final = f";{_PREFIX}".encode()
"""Stands between an attempt's key and its pins."""
_NAMES: Final = ("temperature", "top_p", "max_tokens")
"""The parameters that every dialect has."""
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The limit of a response, in the dialects."""
_SERVERS_LIMITS: Final = ("n_predict", "max_new_tokens")
"""Names that some servers know besides, and prefer."""


def pinned_part(sampling: Mapping[str, Any]) -> str:
    """Return the part of an address that pins a model's sampling parameters, and "" if there is none to pin.

    Parameters that not every dialect has are left out: they stay suggestions.
    """
    pins = [f"{name}={float(sampling[name])!r}" for name in _NAMES if sampling.get(name) is not None]
    return f"{_PREFIX}{','.join(pins)}/" if pins else ""


def read_pinned(part: str) -> dict[str, float] | None:
    """Return the pins of a part of an address; None for any other part. Raise ValueError for unreadable pins."""
    if not part.startswith(_PREFIX):
        return None
    pins: dict[str, float] = {}
    for pin in part.removeprefix(_PREFIX).split(","):
        name, _, text = pin.partition("=")
        value = float(text)
        if name not in _NAMES or name in pins or not 0 <= value < math.inf:
            raise ValueError(f"{pin!r} is no pin of {', '.join(_NAMES)}")
        pins[name] = value
    return pins


def pin(request: Json, pins: Mapping[str, float], path: str) -> Json:
    """Return a request of any dialect with its sampling as pinned.

    A limit lowers what the program asks for, and never raises it. If the temperature is pinned, tokens are drawn from
    the model's own distribution at that temperature: of other parameters only those stay that change nothing.

    path: the dialect's route.
    """
    pinned = dict(request)
    if "temperature" in pins:
        pinned = {
            name: value
            for name, value in request.items()
            if name not in SAMPLING_PARAMETERS or is_neutral(name, value, request)
        }
    pinned |= {name: pins[name] for name in ("temperature", "top_p") if name in pins}
    if (limit := pins.get("max_tokens")) is not None:
        asked = {name: request[name] for name in (*_LIMITS, *_SERVERS_LIMITS) if request.get(name) is not None}
        if asked.keys().isdisjoint(_LIMITS):
            asked["max_output_tokens" if path == "responses" else "max_tokens"] = limit
        pinned |= {
            # to some servers a negative number is no limit
            name: min(int(limit), value) if isinstance(value, int | float) and value >= 0 else int(limit)
            for name, value in asked.items()
        }
    return pinned
