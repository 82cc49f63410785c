"""Convert OpenTelemetry's values to those that a span keeps.

The module knows neither the SDK nor protobuf, only plain Python values. The tracer of this process and the OTLP
receiver both use it, so that the same step gives the same span on either way.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast


def seconds(nanoseconds: int | None) -> float | None:
    """Return Unix nanoseconds as Unix seconds. None if they are None or 0, OTLP's value for unknown."""
    return nanoseconds / 1_000_000_000 if nanoseconds else None


def attribute_value(value: object) -> Any:
    """Return an attribute's value as a span can keep it: a scalar, or a list of strings or of numbers.

    A map is kept as the text of its JSON, bytes as base64, and a number that JSON lacks as "NaN", "Infinity" or
    "-Infinity", as OTLP writes them. In a list that is not all numbers, an element that is no string is kept as its
    JSON. An absent value (None, which OpenTelemetry makes of an invalid one) is the empty string.
    """
    if isinstance(value, str) or _is_number(value):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        elements = list(cast(Sequence[object], value))
        if all(_is_number(element) for element in elements):
            return elements
        return [_text(element) for element in elements]
    return _text(value)


def links_text(links: Iterable[tuple[str, str, Mapping[str, Any]]]) -> str:
    """Return the links of a span (trace id, span id, attributes) as JSON, for `semconv.LINKS`."""
    return _json([{"trace_id": trace, "span_id": span, "attributes": attributes} for trace, span, attributes in links])


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return _base64(value) if isinstance(value, bytes) else _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return _base64(value)
    return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else str(value)


def _base64(value: bytes) -> str:
    return b64encode(value).decode()
