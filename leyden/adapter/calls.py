"""The model calls of an attempt, each once, however many instrumentations recorded it.

A sighting is a span that records a model call. Two sightings belong to one call if, in this order,

1. they have the same response id;
2. one lies below the other, as a gateway's record lies below the SDK's span that sent the
traceparent. A span with several answered calls below it is a wrapper around them, and no call of
its own;
3. they come from different sources (a source is a convention and a span's name), have the same
content, and are the k-th of their source with it. Request and answer are compared first, then, if
one of them has no answer, the request.

Sightings of one source are never joined by rule 3, so two equal parallel calls stay two. Only the
order within one source counts, never the clocks of two machines. If an upstream gives different
answers one id, the gateway's records show it, and that id is ignored. The gateway's record decides
what the call is, above all its tokens; the others fill gaps. The order of `spans` changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from leyden import semconv
from leyden.adapter.attributes import Json
from leyden.adapter.chat import plain
from leyden.adapter.normalise import GATEWAY, ModelCallView, read_model_call
from leyden.adapter.order import in_order, moment
from leyden.types import Span


def model_calls(spans: Sequence[Span]) -> list[ModelCallView]:
    """Return the calls of one attempt in the order in which they started.

    Failed calls are included (`ModelCallView.failed`), except those that the client retried. The
    order is the gateway's count if it saw every call and counted each once; otherwise it is by the
    clocks.
    """
    ordered = in_order(spans)
    tried_again = {str(span.attributes.get(semconv.RETRY_OF)) for span in ordered}
    seen = [span for span in ordered if span.span_id not in tried_again]
    sightings = [_Sighting(view) for span in seen if (view := read_model_call(span)) is not None]
    _forget_reused_ids(sightings)
    joined = _JoinedCalls(sightings)
    joined.by_response_id()
    if len({sighting.source for sighting in sightings}) > 1:
        joined.by_parent({span.span_id: span.parent_id for span in ordered})
        joined.by_messages(answered=True)
        joined.by_messages(answered=False)
    return _sorted([_merged(call) for call in joined.calls()])


def _sorted(calls: list[ModelCallView]) -> list[ModelCallView]:
    counted = [(call.span.attributes.get(semconv.CALL_INDEX), call) for call in calls]
    numbers = {number for number, _ in counted if isinstance(number, int)}
    if len(numbers) == len(calls):
        return [call for _, call in sorted(counted, key=lambda pair: (pair[0], moment(pair[1].span)))]
    return sorted(calls, key=lambda call: moment(call.span))


class _Sighting:
    """One span that records a model call, with its means of recognition."""

    def __init__(self, view: ModelCallView) -> None:
        self.view = view
        self.span = view.span
        self.source = (view.convention != GATEWAY, view.convention, self.span.name)
        """The rank of the span's source. The gateway is first."""
        self.response_id = view.response_id
        """The response's id. None if no span has it, or if several answers share it."""

    @cached_property
    def asked(self) -> str:
        """Return the request's messages in a form that all conventions share; empty if there are
        none.
        """
        return _digest(self.view.input_messages)

    @cached_property
    def answered(self) -> str:
        """Return a digest of the output messages, equal for two instrumentations of one call; empty
        if there is no output.
        """
        return _digest(self.view.output_messages)


def _digest(messages: Sequence[Json]) -> str:
    said = [plain(message) for message in messages]
    return json.dumps(said, ensure_ascii=False, sort_keys=True) if any(any(what[1:]) for what in said) else ""


def _forget_reused_ids(sightings: Sequence[_Sighting]) -> None:
    """Drop ids that the gateway saw on different answers, because they identify no call."""
    seen: dict[str, list[_Sighting]] = {}
    for sighting in sightings:
        if sighting.response_id is not None:
            seen.setdefault(sighting.response_id, []).append(sighting)
    for sharing in seen.values():
        recorded = [sighting for sighting in sharing if sighting.view.convention == GATEWAY]
        if len(recorded) > 1 and len({(sighting.asked, sighting.answered) for sighting in recorded}) > 1:
            for sighting in sharing:
                sighting.response_id = None


@dataclass(eq=False, slots=True)
class _SightedCall:
    """One model call, and the spans that record it (its sightings)."""

    sightings: list[_Sighting]
    is_wrapper: bool = False

    @property
    def response_ids(self) -> set[str]:
        return {sighting.response_id for sighting in self.sightings if sighting.response_id is not None}

    @property
    def sources(self) -> set[tuple[bool, str, str]]:
        return {sighting.source for sighting in self.sightings}

    @property
    def failed(self) -> bool:
        return all(sighting.view.failed for sighting in self.sightings)

    def contradicts(self, other: _SightedCall) -> bool:
        """Return whether both have a response id, and the ids differ."""
        mine, theirs = self.response_ids, other.response_ids
        return bool(mine and theirs and mine.isdisjoint(theirs))

    def says_what(self, other: _SightedCall) -> bool:
        """Return whether a sighting of each has the same content."""
        mine = {(sighting.asked, sighting.answered) for sighting in self.sightings}
        return any((sighting.asked, sighting.answered) in mine for sighting in other.sightings)


class _JoinedCalls:
    """The sightings, joined to calls step by step."""

    def __init__(self, sightings: Sequence[_Sighting]) -> None:
        self._sightings = sightings
        self._call_of = {sighting: _SightedCall([sighting]) for sighting in sightings}

    def calls(self) -> list[_SightedCall]:
        """Return the present calls, without the wrappers."""
        return [call for call in dict.fromkeys(self._call_of.values()) if not call.is_wrapper]

    def _join(self, one: _SightedCall, other: _SightedCall) -> None:
        if one is not other:
            one.sightings += other.sightings
            self._call_of.update(dict.fromkeys(other.sightings, one))

    def by_response_id(self) -> None:
        first: dict[str, _SightedCall] = {}
        for sighting in self._sightings:
            if sighting.response_id is not None:
                self._join(first.setdefault(sighting.response_id, self._call_of[sighting]), self._call_of[sighting])

    def by_parent(self, parents: Mapping[str, str | None]) -> None:
        at = {sighting.span.span_id: sighting for sighting in self._sightings}
        below: dict[_Sighting, list[_Sighting]] = {}
        for sighting in self._sightings:
            span_id = sighting.span.span_id
            above = nearest(parents.get(span_id), parents, at)
            if above is not None and above != span_id:
                below.setdefault(at[above], []).append(sighting)
        for sighting in self._sightings:
            self._join_below(self._call_of[sighting], below.get(sighting, []))

    def _join_below(self, call: _SightedCall, below: Sequence[_Sighting]) -> None:
        """Join a call with the one that was recorded again below it, if exactly one fits: it
        succeeded and says the same. A call that wraps several others without tokens of its own is
        marked as a wrapper.

        below: sightings of calls in the subtree of `call`'s span.
        """
        inner = list(dict.fromkeys(self._call_of[sighting] for sighting in below))
        answered = [other for other in inner if not other.failed]
        if not answered and call.failed:
            answered = inner  # it failed there
        if not answered or call in answered:
            return
        if len(answered) == 1 and not call.contradicts(answered[0]):
            self._join(call, answered[0])
        elif same := [other for other in answered if call.says_what(other)]:
            self._join(call, same[0])
        elif not call.response_ids and all(sighting.view.tokens is None for sighting in call.sightings):
            call.is_wrapper = True

    def by_messages(self, *, answered: bool) -> None:
        """Join sightings with equal requests, and with equal answers too if `answered`."""
        if all(call.response_ids for call in self.calls()):
            return  # calls with different ids differ, even if their messages are equal
        alike: dict[tuple[str, str], list[_Sighting]] = {}
        for sighting in self._sightings:
            if sighting.asked and (sighting.answered or not answered):
                key = (sighting.asked, sighting.answered if answered else "")
                alike.setdefault(key, []).append(sighting)
        for sightings in alike.values():
            found: list[_SightedCall] = []
            for sighting in sorted(sightings, key=lambda sighting: sighting.source):
                self._join_to_first(found, self._call_of[sighting], answered=answered)

    def _join_to_first(self, found: list[_SightedCall], call: _SightedCall, *, answered: bool) -> None:
        """Join the call to the first of those found that its source has not seen, or add it to
        them.
        """
        if call in found or call.is_wrapper:
            return
        for other in found:
            if (
                other.failed == call.failed
                and other.sources.isdisjoint(call.sources)
                and not other.contradicts(call)
                and (answered or not (_has_answer(other) and _has_answer(call)))
            ):
                return self._join(other, call)
        found.append(call)


def _has_answer(call: _SightedCall) -> bool:
    return any(sighting.answered for sighting in call.sightings)


def nearest(span_id: str | None, parents: Mapping[str, str | None], known: Container[str]) -> str | None:
    """Return the span itself or its nearest ancestor in `known`; None if there is none."""
    seen: set[str] = set()
    while span_id is not None and span_id not in seen:
        if span_id in known:
            return span_id
        seen.add(span_id)
        span_id = parents.get(span_id)
    return None


def _merged(call: _SightedCall) -> ModelCallView:
    """Return one view of all sightings: each field from the first source that has it, the gateway's
    first.
    """
    first, *others = [
        sighting.view
        for sighting in sorted(call.sightings, key=lambda sighting: (sighting.source, moment(sighting.span)))
    ]
    if not others:
        return first
    views = [first, *others]
    known: dict[str, Any] = {
        name: next((value for view in views if (value := getattr(view, name))), getattr(first, name)) for name in _GAPS
    }
    known["refused"] = first.refused if known["tokens"] is None else None
    return replace(first, spans=tuple(view.span for view in views), **known)


_GAPS = ("response_id", "model", "input_messages", "output_messages", "tools", "settings", "usage", "tokens")
"""Fields that one sighting may have and another may lack."""
