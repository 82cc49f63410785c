"""Find the model calls of an attempt, each once, however many instrumentations recorded it.

A *sighting* is a span that records a model call. A *source* is a convention and a span's name. Two sightings belong to
one call if, in this order,

1. they have the same response id;
2. one lies below the other, as a gateway's record lies below the SDK's span that sent the
traceparent. A span with several answered calls below it is a wrapper around them, and no call of
its own;
3. they come from different sources, have the same content, and have the same index among the
sightings of their source with this content. First both request and answer are compared. Then only
the requests are, if one of the sightings has no answer.

Sightings of one source are never joined by rule 3, so two equal parallel calls stay two. Only the order within one
source counts, never the clocks of two machines. If a server gives one id to different answers, the gateway's records
show it, and that id is ignored. A call has the fields of the gateway's record, above all the tokens; other sightings
fill the fields that it lacks. The order in which spans are passed does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

from leyden._lib.json import Json
from leyden.adapter.chat_messages import comparable
from leyden.adapter.normalise import GATEWAY, ModelCallView, read_model_call
from leyden.adapter.order import in_order, moment
from leyden.types import Span, semconv


def model_calls(spans: Sequence[Span]) -> list[ModelCallView]:
    """Return the calls of one attempt in the order in which they started.

    Failed calls are included (`ModelCallView.failed`), except those that the client retried. If the gateway numbered
    every call, its numbers are the order; otherwise the clocks are.
    """
    ordered = in_order(spans)
    retried = {str(span.attributes.get(semconv.RETRY_OF)) for span in ordered}
    seen = [span for span in ordered if span.span_id not in retried]
    sightings = [_Sighting(view) for span in seen if (view := read_model_call(span)) is not None]
    _drop_reused_ids(sightings)
    joined = _JoinedCalls(sightings)
    joined.by_response_id()
    if len({sighting.source for sighting in sightings}) > 1:
        joined.by_parent({span.span_id: span.parent_id for span in ordered})
        joined.by_messages(with_answers=True)
        joined.by_messages(with_answers=False)
    calls = sorted((_merged(call) for call in joined.calls()), key=lambda call: moment(call.span))
    numbers = [number for call in calls if isinstance(number := call.span.attributes.get(semconv.CALL_INDEX), int)]
    if len(set(numbers)) == len(calls):
        calls = [call for _, call in sorted(zip(numbers, calls, strict=True), key=itemgetter(0))]
    return calls


class _Sighting:
    """One span that records a model call, with the keys that join it with others."""

    def __init__(self, view: ModelCallView) -> None:
        self.view = view
        self.span = view.span
        self.source = (view.convention != GATEWAY, view.convention, self.span.name)
        """The span's source; a key that sorts the gateway first."""
        self.response_id = view.response_id
        """The response's id. None if the span has none, or if several answers share it."""

    @cached_property
    def input_digest(self) -> str:
        return _digest(self.view.input_messages)

    @cached_property
    def output_digest(self) -> str:
        return _digest(self.view.output_messages)


def _digest(messages: Sequence[Json]) -> str:
    compared = [comparable(message) for message in messages]
    has_content = any(any(content) for _, *content in compared)  # the first entry is the role
    return json.dumps(compared, ensure_ascii=False, sort_keys=True) if has_content else ""


def _drop_reused_ids(sightings: Sequence[_Sighting]) -> None:
    """Drop ids that the gateway saw on different answers, because they identify no call."""
    seen: dict[str, list[_Sighting]] = {}
    for sighting in sightings:
        if sighting.response_id is not None:
            seen.setdefault(sighting.response_id, []).append(sighting)
    for sharing in seen.values():
        recorded = [sighting for sighting in sharing if sighting.view.convention == GATEWAY]
        if len(recorded) > 1 and len({(each.input_digest, each.output_digest) for each in recorded}) > 1:
            for sighting in sharing:
                sighting.response_id = None


@dataclass(eq=False, slots=True)
class _SightedCall:
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

    @property
    def has_answer(self) -> bool:
        return any(sighting.output_digest for sighting in self.sightings)

    def contradicts(self, other: _SightedCall) -> bool:
        mine, theirs = self.response_ids, other.response_ids
        return bool(mine and theirs and mine.isdisjoint(theirs))

    def has_content_of(self, other: _SightedCall) -> bool:
        mine = {(sighting.input_digest, sighting.output_digest) for sighting in self.sightings}
        return any((sighting.input_digest, sighting.output_digest) in mine for sighting in other.sightings)


class _JoinedCalls:
    """The sightings of an attempt, joined to calls step by step (the rules of the module)."""

    def __init__(self, sightings: Sequence[_Sighting]) -> None:
        self._sightings = sightings
        self._call_of = {sighting: _SightedCall([sighting]) for sighting in sightings}

    def calls(self) -> list[_SightedCall]:
        """Return the calls as joined so far, without wrappers."""
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
        """Join sightings of which one lies below the other (rule 2). `parents` are by span id."""
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
        """Join a call with the successful call below it that records it again: the only one, else the first with the
        same content. If there are several and none has its content, mark the call as a wrapper around them, unless it
        has a response id or tokens.

        below: the sightings whose nearest sighting above is one of `call`.
        """
        inner = list(dict.fromkeys(self._call_of[sighting] for sighting in below))
        answered = [other for other in inner if not other.failed]
        if not answered and call.failed:
            answered = inner  # a failed call was recorded again as failed
        if not answered or call in answered:
            return
        if len(answered) == 1 and not call.contradicts(answered[0]):
            self._join(call, answered[0])
        elif same := [other for other in answered if call.has_content_of(other)]:
            self._join(call, same[0])
        elif not call.response_ids and all(sighting.view.tokens is None for sighting in call.sightings):
            call.is_wrapper = True

    def by_messages(self, *, with_answers: bool) -> None:
        """Join sightings of different sources with equal requests (rule 3).

        with_answers: compare the answers, too. Otherwise one of two sightings has no answer.
        """
        if all(call.response_ids for call in self.calls()):
            return  # calls with different ids differ, even if their messages are equal
        alike: dict[tuple[str, str], list[_Sighting]] = {}
        for sighting in self._sightings:
            if sighting.input_digest and (sighting.output_digest or not with_answers):
                key = (sighting.input_digest, sighting.output_digest if with_answers else "")
                alike.setdefault(key, []).append(sighting)
        for sightings in alike.values():
            found: list[_SightedCall] = []
            for sighting in sorted(sightings, key=lambda sighting: sighting.source):
                call = self._call_of[sighting]
                if call in found or call.is_wrapper:
                    continue
                for other in found:
                    if (
                        other.failed == call.failed
                        and other.sources.isdisjoint(call.sources)
                        and not other.contradicts(call)
                        and (with_answers or not (other.has_answer and call.has_answer))
                    ):
                        self._join(other, call)
                        break
                else:
                    found.append(call)


def nearest(span_id: str | None, parents: Mapping[str, str | None], known: Container[str]) -> str | None:
    """Return the first of a span and its ancestors that is in `known`; None if none is.

    parents: the parent of each span, by span id. A circle of parents ends the search.
    """
    seen: set[str] = set()
    while span_id is not None and span_id not in seen:
        if span_id in known:
            return span_id
        seen.add(span_id)
        span_id = parents.get(span_id)
    return None


def _merged(call: _SightedCall) -> ModelCallView:
    """Return one view of all sightings of a call. Each field comes from the first source that has it."""
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
