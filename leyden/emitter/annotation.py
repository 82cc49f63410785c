"""Emit attributes of the user's own, for filters and for links to other spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from leyden import semconv
from leyden.emitter.emit import emit_span
from leyden.errors import InvalidEmission
from leyden.types import Span


def emit_annotation(annotation: Mapping[str, Any], *, propagate: bool = True) -> Span:
    """Record `annotation` as attributes; nested dicts become dotted keys (`{"a": {"b": 1}}` is `a.b
    = 1`).

    Raises InvalidEmission for an empty annotation, for a key that two entries lead to and for a
    value that has no attribute form, NoActiveTrace outside a trace.
    """
    attributes: dict[str, Any] = {}
    for key, value in _flat("", annotation):
        if key in attributes:
            raise InvalidEmission(f"the annotation has {key!r} twice, once as a dotted key and once as a nested one")
        attributes[key] = value
    if not attributes:
        raise InvalidEmission(f"the annotation {annotation!r} is empty; it needs at least one key with a value")
    return emit_span("emit_annotation", semconv.ANNOTATION, attributes, propagate=propagate)


def _flat(prefix: str, mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(f"{key}.", cast(Mapping[str, Any], value))
        else:
            yield key, value
