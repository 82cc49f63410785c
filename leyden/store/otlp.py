"""Receive spans from any OpenTelemetry exporter by OTLP/HTTP, in protobuf and in JSON.

`read_spans` converts the bytes of a request to spans, without I/O; `receive` stores them and makes the protocol's
reply. The module knows no server: the application that mounts it unpacks the body and limits its size. The attributes
of `_PLACE`, on the span or on its resource (`OTEL_RESOURCE_ATTRIBUTES=leyden.rollout_id=...,leyden.attempt_id=...`),
say which attempt a span belongs to. A span without them is refused, counted and named in the reply, and the other spans
are stored. The instrumentation scope, the trace state, flags and counts of dropped data are not stored.

To accept another name for an attempt's ids, add it to `_PLACE`.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, Literal, Protocol, TypeVar, cast

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2
from pydantic import ValidationError

from leyden._lib.host.http import LARGE_BYTES, HttpReply, RequestHeaders, parsed
from leyden._lib.otel import attribute_value, links_text, seconds
from leyden._lib.text import fault_reason, storable
from leyden.errors import ConfigError, UnknownAttempt, UnknownRollout
from leyden.types import Attributes, Span, SpanEvent, SpanKind, SpanStatus, semconv
from leyden.types.span import enum_name

TRACES = "/v1/traces"
"""The path that exporters send to, under the endpoint that they are given."""
PROTOBUF = "application/x-protobuf"
JSON = "application/json"

_PLACE = {
    "rollout_id": (semconv.ROLLOUT_ID, "agentlightning.rollout_id"),
    "attempt_id": (semconv.ATTEMPT_ID, "agentlightning.attempt_id"),
    "sequence_id": (semconv.SEQUENCE_ID, "agentlightning.span_sequence_id"),
}
"""The attributes that place a span, in order of preference. The span's own come before its resource's."""

_BATCH = 1000
"""Spans of one transaction: enough that its commit costs nothing, few enough to delay no other call for long."""
_MAX_SPANS = 100_000
"""The most spans of one request, which bounds its memory and time."""
_MAX_PARTS = 200_000
"""The most parts of one request: groups, spans, and other contents of a group.

An empty part takes two bytes to send.
"""
_MAX_ATTRIBUTES = 2_000_000
"""The most attributes of all spans of one request, which take 3 s to read."""
_MAX_DEPTH = 50
"""The most lists of an attribute within each other that are counted. protobuf parses 100."""
_RESOURCE_BYTES = 2**20
"""The most bytes of one resource."""
_SPAN_BYTES = 16 * 2**20
"""The most bytes of one span in protobuf, many times those of the longest conversation."""
_NAMED = 3
"""The number of refused spans that a reply names."""

# OTLP's numbers for kinds and statuses; any other is INTERNAL and UNSET
_KINDS: dict[int, SpanKind] = {2: "SERVER", 3: "CLIENT", 4: "PRODUCER", 5: "CONSUMER"}
_STATUS: dict[int, Literal["OK", "ERROR"]] = {1: "OK", 2: "ERROR"}
_KIND_NUMBERS = {name: number for number, name in _KINDS.items()}
_STATUS_NUMBERS = {name: number for number, name in _STATUS.items()}


@dataclass(frozen=True, slots=True)
class OtlpReply:
    """The reply to an exporter."""

    status: int
    """The HTTP status: 200; 400 for a body that cannot be read; 415 for an encoding that is neither `PROTOBUF` nor
    `JSON`."""
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class ReceivedSpans:
    """The contents of a request."""

    spans: list[Span]
    """Spans that name their attempt, by attempt, in the order in which they ended."""
    refused: list[str]
    """The name of each refused span, and the reason."""


class SpanSink(Protocol):
    """The destination of received spans: a store, or an object that forwards them to one."""

    async def add_many_spans(self, spans: Sequence[Span]) -> object:
        """Take all spans or none. Raise UnknownRollout, UnknownAttempt or ConfigError for spans that never fit."""
        ...


class _Refused(ValueError):
    """A span cannot be stored; the message gives the reason."""


async def receive(store: SpanSink, body: bytes, content_type: str) -> OtlpReply:
    """Store the spans of an OTLP request, and reply in the encoding of the request.

    Spans that are refused are counted in `partial_success`. Spans that are stored already are not, because an exporter
    may send a request again. A finished attempt takes spans too. A body that cannot be read gives a reply with status
    400, another content type one with 415.

    Raise StoreError or StoreClosed if the store cannot write. Some of the spans may be stored then, and the request is
    safe to retry.
    """
    encoding = content_type.partition(";")[0].strip().lower()
    if encoding not in (PROTOBUF, JSON):
        return _failure(415, JSON, f"the content type is {content_type[:100]!r}; possible: {PROTOBUF}, {JSON}")
    try:
        received = await parsed(body, lambda body: read_spans(body, encoding))
    except TooManyParts as error:
        return _failure(413, encoding, str(error))
    except ValueError as error:
        return _failure(400, encoding, str(error))
    refused = received.refused[:]
    for start in range(0, len(received.spans), _BATCH):
        refused += await _add_together(store, received.spans[start : start + _BATCH])
    response = ExportTraceServiceResponse()
    if refused:
        more = f"; and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
        total = len(received.spans) + len(received.refused)
        response.partial_success.rejected_spans = len(refused)
        response.partial_success.error_message = (
            f"{len(refused)} of {total} spans were not placed: {'; '.join(refused[:_NAMED])}{more}"
        )
    is_json = encoding == JSON
    text = json_format.MessageToJson(response, indent=None).encode() if is_json else response.SerializeToString()
    return OtlpReply(200, encoding, text)


async def handle_traces(store: SpanSink, body: bytes, headers: RequestHeaders) -> HttpReply:
    """Handle a POST to `TRACES`, as `receive` does."""
    reply = await receive(store, body, headers.get(b"content-type", b"").decode("latin-1"))
    return HttpReply(reply.status, reply.body, (b"content-type", reply.content_type.encode()))


async def _add_together(store: SpanSink, spans: Sequence[Span]) -> list[str]:
    """Add spans in one transaction. Return a message for each refused span; an empty list if all were added.

    If the store refuses the transaction, the spans of each attempt are added by themselves, and if it refuses those
    too, each span by itself.
    """
    parts = [list(group) for _, group in groupby(spans, key=_OWNER)]
    try:
        await store.add_many_spans(spans)
        return []
    except (UnknownRollout, UnknownAttempt) as error:
        if len(parts) == 1:
            return [f"{_called(span.span_id, span.name)}: {error}" for span in spans]
    except ConfigError as error:
        if len(spans) == 1:
            return [f"{_called(spans[0].span_id, spans[0].name)}: {error}"]
        if len(parts) == 1:
            parts = [[span] for span in spans]
    return [refusal for part in parts for refusal in await _add_together(store, part)]


_OWNER = attrgetter("rollout_id", "attempt_id")


# ---- replies -------------------------------------------------------------------------------------


def _failure(status: int, encoding: str, message: str) -> OtlpReply:
    """Return a `google.rpc.Status` with the code INVALID_ARGUMENT."""
    if encoding == JSON:
        return OtlpReply(status, JSON, json.dumps({"code": 3, "message": message}).encode())
    # No installed package has `google.rpc.Status`. This message has the same fields (1: a number,
    # 2: a text), and so the same bytes. 3 is INVALID_ARGUMENT.
    same = ExportTracePartialSuccess(rejected_spans=3, error_message=message)
    return OtlpReply(status, PROTOBUF, same.SerializeToString())


# ---- from bytes to spans -------------------------------------------------------------------------


def read_spans(body: bytes, encoding: str) -> ReceivedSpans:
    """Parse an `ExportTraceServiceRequest` in `PROTOBUF` or `JSON`.

    Raise ValueError, which says where, for a body that is malformed or has more than 100,000 spans or 200,000 parts. A
    span without an attempt is not an error: it is listed as refused.
    """
    spans: list[tuple[tuple[str, str, int], Span]] = []
    refused: list[str] = []
    for resource, proto in _each_span(body, encoding):
        if len(spans) + len(refused) == _MAX_SPANS:
            raise TooManyParts(f"the request has more than {_MAX_SPANS:,} spans; send fewer at a time")
        try:
            span = _span(proto, resource)
            end = proto.end_time_unix_nano or 2**64  # a span that has not ended comes last
            spans.append(((span.rollout_id, span.attempt_id, end), span))
        except _Refused as error:
            refused.append(f"{_called(proto.span_id.hex(), proto.name)}: {error}")
    spans.sort(key=itemgetter(0))
    return ReceivedSpans([span for _, span in spans], refused)


def _each_span(body: bytes, encoding: str) -> Iterator[tuple[Attributes, trace_pb2.Span]]:
    """Yield the spans, each with the attributes of its resource. Raise ValueError if the body cannot be read."""
    try:
        left, attributes_left = _Left(_MAX_PARTS), _Left(_MAX_ATTRIBUTES, "attributes")
        for resource, spans in _json_groups(body, left) if encoding == JSON else _protobuf_groups(body, left):
            attributes = _attributes(resource.attributes)
            for span in spans:
                attributes_left.take(len(span.attributes))
                yield attributes, span
    except TooManyParts:
        raise
    except (ValueError, RecursionError, DecodeError, json_format.Error) as error:
        reason = storable(str(error), limit=1000)
        raise ValueError(f"the body is no ExportTraceServiceRequest as {encoding}: {reason}") from None


_Group = tuple[Resource, Iterator[trace_pb2.Span]]
"""A resource and its spans. They are parsed one by one, because a parsed message takes up to 90 times its bytes."""


class TooManyParts(ValueError):
    """A request takes more work than the limits allow; the message names the limit."""


class _Left:
    """Counts down the parts that a request may still have."""

    def __init__(self, number: int, what: str = "parts") -> None:
        self._number = self._most = number
        self._what = what

    def take(self, number: int = 1) -> None:
        """Count one part of the request: a field of a protobuf message, or a group of spans in JSON. Raise ValueError
        when there are too many.
        """
        self._number -= number
        if self._number < 0:
            raise TooManyParts(f"it has more than {self._most:,} {self._what}; send fewer spans at a time")


def _protobuf_groups(body: bytes, left: _Left) -> Iterator[_Group]:
    for group in _parts(memoryview(body), ExportTraceServiceRequest.RESOURCE_SPANS_FIELD_NUMBER, left):
        resource = b"".join(_parts(group, trace_pb2.ResourceSpans.RESOURCE_FIELD_NUMBER, left))
        if len(resource) > _RESOURCE_BYTES:
            raise ValueError(f"a resource has {len(resource):,} bytes, and {_RESOURCE_BYTES:,} is the most")
        yield Resource.FromString(resource), _protobuf_spans(group, left)


def _protobuf_spans(group: memoryview, left: _Left) -> Iterator[trace_pb2.Span]:
    """Yield the spans of one resource. Raise ValueError for a span that is too large."""
    for scope in _parts(group, trace_pb2.ResourceSpans.SCOPE_SPANS_FIELD_NUMBER, left):
        for span in _parts(scope, trace_pb2.ScopeSpans.SPANS_FIELD_NUMBER, left):
            if len(span) > _SPAN_BYTES:
                raise ValueError(f"a span has {len(span):,} bytes, and {_SPAN_BYTES:,} is the most that one may have")
            if len(span) > LARGE_BYTES:
                for attribute in _parts(span, trace_pb2.Span.ATTRIBUTES_FIELD_NUMBER, left):
                    _count_entry(attribute, left)
            yield trace_pb2.Span.FromString(bytes(span))


def _count_entry(entry: memoryview, left: _Left, depth: int = 0) -> None:
    """Count the parts of an attribute, which may be nested lists, before they are parsed."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"an attribute nests lists more than {_MAX_DEPTH} deep")
    for value in _parts(entry, KeyValue.VALUE_FIELD_NUMBER, left):
        _count_value(value, left, depth)


def _count_value(value: memoryview, left: _Left, depth: int) -> None:
    for array in _parts(value, AnyValue.ARRAY_VALUE_FIELD_NUMBER, left):
        for element in _parts(array, ArrayValue.VALUES_FIELD_NUMBER, left):
            if depth < _MAX_DEPTH:
                _count_value(element, left, depth + 1)
    for entries in _parts(value, AnyValue.KVLIST_VALUE_FIELD_NUMBER, left):
        for nested in _parts(entries, KeyValueList.VALUES_FIELD_NUMBER, left):
            _count_entry(nested, left, depth + 1)


def _parts(message: memoryview, number: int, left: _Left) -> Iterator[memoryview]:
    """Yield the bytes of each occurrence of field `number` in a protobuf message, not parsed. Raise ValueError for
    bytes that are no message.

    Every field of the message counts as a part, because each one costs memory when it is parsed.
    """
    at = 0
    while at < len(message):
        left.take()
        tag, at = _varint(message, at)
        match tag & 7:  # the wire type; the bits above are the field's number
            case 0:  # a varint
                at = _varint(message, at)[1]
            case 1:  # 64 bits
                at += 8
            case 2:  # a length, then so many bytes
                length, start = _varint(message, at)
                at = start + length
                if tag >> 3 == number and at <= len(message):
                    yield message[start:at]
            case 5:  # 32 bits
                at += 4
            case kind:
                raise ValueError(f"a field of kind {kind} at byte {at}")
    if at > len(message):
        raise ValueError(f"it ends {at - len(message)} bytes too early")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at position `at`, and the position after it. Raise ValueError if it does not end."""
    value = 0
    for shift, byte in enumerate(message[at : at + 10]):  # 10 bytes hold 64 bits
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    raise ValueError(f"a number at byte {at} does not end")


def _json_groups(body: bytes, left: _Left) -> Iterator[_Group]:
    """Yield each resource of a request in JSON with its spans. Raise ValueError unless the request is an object."""
    document: Any = json.loads(body, object_pairs_hook=_object)
    if not isinstance(document, dict):
        raise ValueError(f"it is {storable(repr(document), limit=100)}, not an object")
    for group in _objects(cast(dict[str, Any], document), "resourceSpans", "resource_spans"):
        left.take()
        spans: list[dict[str, Any]] = []
        for scope in _objects(group, "scopeSpans", "scope_spans", "instrumentationLibrarySpans"):
            left.take()
            spans += _objects(scope, "spans")
        resource = _from_json(group.get("resource") or {}, Resource())
        yield resource, (_from_json(_with_numbers(span), trace_pb2.Span()) for span in spans)


def _with_numbers(span: dict[str, Any]) -> dict[str, Any]:
    """Return a span with numbers in place of the names of its kind and status, however they are spelled. An unknown
    name is the default, as an unknown number is.
    """
    found = dict(span)
    if isinstance(name := enum_name(found.get("kind")), str):
        found["kind"] = int(name) if name.isdecimal() and len(name) < 4 else _KIND_NUMBERS.get(name, 0)
    if isinstance(status := found.get("status"), dict):
        code = enum_name(cast(dict[str, Any], status).get("code"))
        if isinstance(code, str):
            number = int(code) if code.isdecimal() and len(code) < 4 else _STATUS_NUMBERS.get(code, 0)
            found["status"] = {**status, "code": number}
    return found


def _objects(parent: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Return the objects in the lists under one field's names, or []. Raise ValueError for another value."""
    objects: list[dict[str, Any]] = []
    for name in names:
        found: Any = parent.get(name)
        if found is None:
            continue
        if not isinstance(found, list) or not all(isinstance(part, dict) for part in cast(list[Any], found)):
            raise ValueError(f"{name} is {storable(repr(cast(object, found)), limit=100)}, not a list of objects")
        objects += cast(list[dict[str, Any]], found)
    return objects


_M = TypeVar("_M", bound=Message)


def _from_json(entries: Any, message: _M) -> _M:
    _check_objects("resource", entries, message.DESCRIPTOR)
    return json_format.ParseDict(cast(dict[str, Any], entries), message, ignore_unknown_fields=True)


def _check_objects(name: str, entries: Any, kind: Any) -> None:
    """Raise ValueError for a value that is no object where a message of the descriptor `kind` has one.

    protobuf's reader takes each character of a text for the name of an unknown field: it reads "value": "x" as no
    value, and 60 MB of text in 25 s.
    """
    if not isinstance(entries, dict):
        raise ValueError(f"{name} is {storable(repr(entries), limit=100)}, not an object")
    for key, value in cast(dict[str, Any], entries).items():
        field = kind.fields_by_camelcase_name.get(key) or kind.fields_by_name.get(key)
        if value is None or field is None or field.message_type is None:
            continue
        repeated = isinstance(value, list) and not field.has_presence
        for part in cast(list[Any], value if repeated else [value]):
            _check_objects(key, part, field.message_type)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object with its ids in base64, as protobuf's JSON has them; OTLP's are hexadecimal."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError(f"an object has a key twice: {storable(str([key for key, _ in pairs]), limit=200)}")
    for key in ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"):
        if isinstance(digits := entries.get(key), str):
            try:
                entries[key] = b64encode(bytes.fromhex(digits)).decode()
            except ValueError:
                raise ValueError(f"{key} {storable(repr(digits), limit=100)} is not hexadecimal") from None
    return entries


def _span(proto: trace_pb2.Span, resource: Attributes) -> Span:
    """Convert one span. Raise _Refused, with the reason, if it names no attempt or is malformed."""
    attributes = _attributes(proto.attributes)
    rollout_id, attempt_id = (_placing_id(noun, attributes, resource) for noun in ("rollout_id", "attempt_id"))
    if proto.links:
        attributes[semconv.LINKS] = links_text(
            (link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes)) for link in proto.links
        )
    code = _STATUS.get(proto.status.code)
    try:
        return Span(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=_sequence_id(attributes, resource),
            trace_id=_hex("trace", proto.trace_id, 16),
            span_id=_hex("span", proto.span_id, 8),
            # Some exporters write zeros for a span without a parent.
            parent_id=_hex("parent's", proto.parent_span_id, 8) if any(proto.parent_span_id) else None,
            name=proto.name,
            kind=_KINDS.get(proto.kind, "INTERNAL"),
            status=SpanStatus(status_code=code, description=proto.status.message or None) if code else SpanStatus(),
            attributes=attributes,
            events=[
                SpanEvent(
                    name=each.name, timestamp=seconds(each.time_unix_nano), attributes=_attributes(each.attributes)
                )
                for each in proto.events
            ],
            start_time=seconds(proto.start_time_unix_nano),
            end_time=seconds(proto.end_time_unix_nano),
            resource=resource,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _Refused(f"{'.'.join(map(str, first['loc']))}: {fault_reason(first)}") from None


def _called(span_id: str, name: str) -> str:
    return f"span {span_id or '(without id)'} {storable(repr(name), limit=100)}"


def _hex(whose: str, value: bytes, length: int) -> str:
    """Return an id as hexadecimal digits. Raise _Refused for another length and for all zeros."""
    if len(value) != length or not any(value):
        raise _Refused(
            f"its {whose} id {value[:32].hex()!r} is not {2 * length} hexadecimal digits, or all of them are 0"
        )
    return value.hex()


def _placing(noun: str, attributes: Attributes, resource: Attributes) -> Any:
    """Return the value of the first attribute that gives a span's `noun` ("rollout_id", ...); None if there is none."""
    names = _PLACE[noun]
    return next((source[name] for source in (attributes, resource) for name in names if name in source), None)


def _placing_id(noun: str, attributes: Attributes, resource: Attributes) -> str:
    """Return the rollout's or attempt's id in a span's attributes. Raise _Refused without one."""
    value = _placing(noun, attributes, resource)
    if not value or not isinstance(value, str):
        found = "it names none" if value is None else f"{storable(repr(value), limit=100)} is none"
        names = " or ".join(_PLACE[noun])
        raise _Refused(f"{noun} unknown, {found}; set the attribute {names} on the span or on its resource")
    return value


def _sequence_id(attributes: Attributes, resource: Attributes) -> int:
    """Return the span's sequence id; 0 if it has none, so that the store draws one.

    It may be text, because resource attributes from an environment variable are.
    """
    value = _placing("sequence_id", attributes, resource)
    if value is None:
        return 0
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise _Refused(f"{semconv.SEQUENCE_ID} {storable(repr(value), limit=100)} is not a whole number")


def _attributes(attributes: Iterable[KeyValue]) -> Attributes:
    return {attribute.key: attribute_value(_plain(attribute.value)) for attribute in attributes}


def _plain(value: AnyValue) -> Any:
    """Return an attribute's value as a Python value; None if it is not set."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    return _READ[kind](getattr(value, kind)) if kind in _READ else getattr(value, kind)


_READ: dict[str, Callable[[Any], Any]] = {
    "array_value": lambda array: [_plain(element) for element in array.values],
    "kvlist_value": lambda entries: {entry.key: _plain(entry.value) for entry in entries.values},
    "string_value_strindex": lambda _: None,  # for the profiles signal; traces must read it as absent
}
