"""Spans that any OpenTelemetry exporter sends: read from bytes, placed by their attributes, answered as the protocol asks."""

from __future__ import annotations

import gzip
import json
import time
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from leyden.store import InMemoryLightningStore, LightningStore
from leyden.store.otlp import JSON, PROTOBUF, OtlpReply, read_spans, receive
from leyden.store.server import LightningStoreServer
from leyden.tracing.otel_tracer import from_readable_span
from leyden.types import AttemptedRollout, Span, semconv

# ---- an exporter: what opentelemetry-exporter-otlp-proto-common does --------------------------------------------------------


def any_value(value: Any) -> AnyValue:
    match value:
        case None:
            return AnyValue()
        case bool():
            return AnyValue(bool_value=value)
        case str():
            return AnyValue(string_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case bytes():
            return AnyValue(bytes_value=value)
        case Mapping():
            return AnyValue(kvlist_value={"values": key_values(value)})
        case Sequence():
            return AnyValue(array_value={"values": [any_value(element) for element in value]})
        case _:
            raise TypeError(type(value))


def key_values(attributes: Mapping[str, Any] | None) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in (attributes or {}).items()]


def exported(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    for span in spans:
        group = request.resource_spans.add()
        group.resource.attributes.extend(key_values(span.resource.attributes))
        proto = group.scope_spans.add().spans.add(
            trace_id=span.context.trace_id.to_bytes(16, "big"),
            span_id=span.context.span_id.to_bytes(8, "big"),
            parent_span_id=b"" if span.parent is None else span.parent.span_id.to_bytes(8, "big"),
            name=span.name,
            kind=f"SPAN_KIND_{span.kind.name}",
            start_time_unix_nano=span.start_time,
            end_time_unix_nano=span.end_time,
            attributes=key_values(span.attributes),
            status={"code": span.status.status_code.value, "message": span.status.description or ""},
        )
        for event in span.events:
            attributes = key_values(event.attributes)
            proto.events.add(name=event.name, time_unix_nano=event.timestamp, attributes=attributes)
        for link in span.links:
            proto.links.add(
                trace_id=link.context.trace_id.to_bytes(16, "big"),
                span_id=link.context.span_id.to_bytes(8, "big"),
                attributes=key_values(link.attributes),
            )
    return request


def as_json(request: ExportTraceServiceRequest) -> bytes:
    """OTLP's JSON: protobuf's, with ids in hexadecimal digits and enums as numbers."""

    def hexadecimal(entries: dict[str, Any]) -> dict[str, Any]:
        ids = {key: b64decode(entries[key]).hex() for key in ("traceId", "spanId", "parentSpanId") if key in entries}
        return entries | ids

    text = json_format.MessageToJson(request, use_integers_for_enums=True)
    return json.dumps(json.loads(text, object_hook=hexadecimal)).encode()


def encoded(request: ExportTraceServiceRequest, encoding: str) -> bytes:
    return request.SerializeToString() if encoding == PROTOBUF else as_json(request)


ENCODINGS = pytest.mark.parametrize("encoding", [PROTOBUF, JSON])


def request_of(*spans: Mapping[str, Any], resource: Mapping[str, Any] | None = None) -> ExportTraceServiceRequest:
    """A request of spans by hand; `attributes` and `resource` are plain mappings."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.extend(key_values(resource))
    scope = group.scope_spans.add()
    for index, fields in enumerate(spans):
        given = {"trace_id": b"\x01" * 16, "span_id": (index + 1).to_bytes(8, "big"), "name": "step", **fields}
        scope.spans.add(**given | {"attributes": key_values(fields.get("attributes"))})
    return request


def placing(rollout: AttemptedRollout, **more: Any) -> dict[str, Any]:
    return {semconv.ROLLOUT_ID: rollout.rollout_id, semconv.ATTEMPT_ID: rollout.attempt.attempt_id, **more}


def rejected(answer: OtlpReply) -> tuple[int, str]:
    """How many spans an answer says were not placed, and what it says of them."""
    assert answer.status == 200
    response = ExportTraceServiceResponse()
    if answer.content_type == PROTOBUF:
        response.ParseFromString(answer.body)
    else:
        json_format.Parse(answer.body, response)
    return response.partial_success.rejected_spans, response.partial_success.error_message


async def sent(
    store: LightningStore, *spans: Mapping[str, Any], resource: Mapping[str, Any] | None = None
) -> tuple[int, str]:
    return rejected(await receive(store, request_of(*spans, resource=resource).SerializeToString(), PROTOBUF))


@pytest.fixture
async def memory():
    async with InMemoryLightningStore() as opened:
        yield opened


# ---- a span is the same by either road --------------------------------------------------------------------------------------


class Recorder:
    """A real SDK provider whose ended spans can be had."""

    def __init__(self, resource: Mapping[str, Any]) -> None:
        self._ended = InMemorySpanExporter()
        provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self.tracer = provider.get_tracer("test")

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._ended.get_finished_spans()


def roads(
    recorder: Recorder, encoding: str, rollout_id: str = "ro", attempt_id: str = "at"
) -> tuple[list[Span], list[Span]]:
    received = read_spans(encoded(exported(recorder.spans), encoding), encoding)
    assert received.refused == []
    return received.spans, [from_readable_span(span, rollout_id, attempt_id) for span in recorder.spans]


@ENCODINGS
def test_a_span_that_is_exported_equals_the_one_that_our_tracer_delivers(encoding: str):
    recorder = Recorder({semconv.ROLLOUT_ID: "ro", semconv.ATTEMPT_ID: "at", "host.cpus": 4})
    linked = SpanContext(2**127 + 5, 7, is_remote=True, trace_flags=TraceFlags(1))
    with recorder.tracer.start_as_current_span("outer", kind=SpanKind.SERVER) as outer:
        outer.set_status(Status(StatusCode.OK))
        links = [Link(linked, {"why": "handed over", "n": (1, 2)})]
        with recorder.tracer.start_as_current_span("inner", kind=SpanKind.CLIENT, links=links) as inner:
            inner.add_event("token", {"n": 1, "logprob": -0.5})
            inner.set_attributes({"s": "é", "i": -(2**63), "f": 0.1, "b": True, "list": ("a", "b"), "none": ()})
            inner.record_exception(ValueError("wrong"))
            inner.set_status(StatusCode.ERROR, "wrong")
    recorder.tracer.start_span("plain").end()
    received, delivered = roads(recorder, encoding)
    assert received == delivered
    inner, outer, plain = received
    assert [span.kind for span in received] == ["CLIENT", "SERVER", "INTERNAL"]
    assert inner.parent_id == outer.span_id
    assert inner.status.status_code == "ERROR"
    assert [event.name for event in inner.events] == ["token", "exception"]
    assert json.loads(str(inner.attributes[semconv.LINKS])) == [
        {"trace_id": "8" + "0" * 30 + "5", "span_id": "0" * 15 + "7", "attributes": {"why": "handed over", "n": [1, 2]}}
    ]
    assert plain.parent_id is None
    assert plain.resource["host.cpus"] == 4


TEXT = st.text(max_size=5)
SCALARS = st.one_of(
    TEXT,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.binary(max_size=5),
    st.none(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.text(min_size=1, max_size=3), VALUES, max_size=4))
def test_every_value_that_opentelemetry_has_is_the_same_by_either_road(attributes: dict[str, Any]):
    recorder = Recorder({semconv.ROLLOUT_ID: "ro", semconv.ATTEMPT_ID: "at"})
    recorder.tracer.start_span("step", attributes=attributes).end()
    for encoding in (PROTOBUF, JSON):
        received, delivered = roads(recorder, encoding)
        assert received == delivered


@ENCODINGS
def test_values_that_a_span_has_no_type_for_are_kept_as_text(encoding: str):
    attributes = {
        semconv.ROLLOUT_ID: "ro",
        semconv.ATTEMPT_ID: "at",
        "bytes": b"\x00\xff",
        "map": {"a": [1, None], "b": b"\x01"},
        "mixed": ["a", 1, True, None, [2]],
        "numbers": [1, 2.5],
        "not numbers": [1, float("inf")],
        "not a number": float("nan"),
        "empty": [],
        "absent": None,
    }
    (span,) = read_spans(encoded(request_of({"attributes": attributes}), encoding), encoding).spans
    assert {key: span.attributes[key] for key in list(attributes)[2:]} == {
        "bytes": "AP8=",
        "map": '{"a": [1, null], "b": "AQ=="}',
        "mixed": ["a", "1", "true", "", "[2]"],
        "numbers": [1, 2.5],
        "not numbers": ["1", "Infinity"],
        "not a number": "NaN",
        "empty": [],
        "absent": "",
    }


def test_json_may_name_enums_give_numbers_for_times_and_hold_fields_that_nobody_knows():
    place = [{"key": key, "value": {"stringValue": key}} for key in (semconv.ROLLOUT_ID, semconv.ATTEMPT_ID)]
    span = {
        "traceId": "0A" * 16,
        "spanId": "0b" * 8,
        "name": "step",
        "kind": "SPAN_KIND_CLIENT",
        "status": {"code": "STATUS_CODE_ERROR", "message": "no"},
        "startTimeUnixNano": 1_700_000_000_000_000_000,
        "endTimeUnixNano": "1700000001000000000",
        "attributes": [*place, {"key": "n", "value": {"intValue": "9007199254740993"}}],
        "invented": {"traceId": 5},
    }
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}], "resource": None}], "more": 1}).encode()
    (read,) = read_spans(body, JSON).spans
    assert (read.trace_id, read.span_id, read.kind) == ("0a" * 16, "0b" * 8, "CLIENT")
    assert (read.status.status_code, read.status.description) == ("ERROR", "no")
    assert (read.start_time, read.end_time) == (1.7e9, 1.700000001e9)
    assert read.attributes["n"] == 9007199254740993


@pytest.mark.parametrize("encoding", [PROTOBUF, JSON])
@pytest.mark.parametrize("n_bytes", [8, 0, 16])
def test_a_parent_of_zero_bytes_is_no_parent(encoding: str, n_bytes: int):
    place = {semconv.ROLLOUT_ID: "ro", semconv.ATTEMPT_ID: "at"}
    if encoding == PROTOBUF:
        body = request_of({"parent_span_id": bytes(n_bytes)}, resource=place).SerializeToString()
    else:
        span = {"traceId": "0a" * 16, "spanId": "0b" * 8, "parentSpanId": "00" * n_bytes, "attributes": PLACE}
        body = (SPAN % json.dumps(span)).encode()
    (read,) = read_spans(body, encoding).spans
    assert read.parent_id is None


PLACE = [{"key": key, "value": {"stringValue": key}} for key in (semconv.ROLLOUT_ID, semconv.ATTEMPT_ID)]


@pytest.mark.parametrize(
    ("kind", "read_as"),
    [
        *(("SpanKind.INTERNAL", "INTERNAL"), ("SpanKind.CLIENT", "CLIENT"), ("SPAN_KIND_SERVER", "SERVER")),
        *(("CONSUMER", "CONSUMER"), ("producer", "PRODUCER"), (3, "CLIENT"), ("3", "CLIENT"), (0, "INTERNAL")),
        *((99, "INTERNAL"), ("NEW_KIND", "INTERNAL"), (None, "INTERNAL")),
    ],
)
def test_a_kind_is_read_however_json_spells_it(kind: Any, read_as: str):
    span = {"traceId": "0a" * 16, "spanId": "0b" * 8, "kind": kind, "attributes": PLACE}
    (read,) = read_spans((SPAN % json.dumps(span)).encode(), JSON).spans
    assert read.kind == read_as


@pytest.mark.parametrize(
    ("code", "read_as"),
    [("StatusCode.ERROR", "ERROR"), ("Ok", "OK"), ("UNSET", "UNSET"), (2, "ERROR"), ("2", "ERROR"), ("odd", "UNSET")],
)
def test_a_status_is_read_however_json_spells_it(code: Any, read_as: str):
    span = {"traceId": "0a" * 16, "spanId": "0b" * 8, "status": {"code": code}, "attributes": PLACE}
    (read,) = read_spans((SPAN % json.dumps(span)).encode(), JSON).spans
    assert read.status.status_code == read_as


@pytest.mark.parametrize(
    ("groups", "scopes"), [("resource_spans", "scope_spans"), ("resourceSpans", "instrumentationLibrarySpans")]
)
def test_fields_in_snake_case_and_the_first_name_of_scopes_lose_no_span(groups: str, scopes: str):
    span = {"trace_id": "0a" * 16, "span_id": "0b" * 8, "parent_span_id": "0c" * 8, "attributes": PLACE}
    (read,) = read_spans(json.dumps({groups: [{scopes: [{"spans": [span]}]}]}).encode(), JSON).spans
    assert (read.trace_id, read.span_id, read.parent_id) == ("0a" * 16, "0b" * 8, "0c" * 8)


def test_an_unknown_kind_or_status_is_the_default_and_a_time_of_zero_is_no_time():
    place = {semconv.ROLLOUT_ID: "ro", semconv.ATTEMPT_ID: "at"}
    body = request_of({"kind": 99, "status": {"code": 99, "message": "?"}}, resource=place).SerializeToString()
    (span,) = read_spans(body, PROTOBUF).spans
    assert (span.kind, span.status.status_code, span.status.description) == ("INTERNAL", "UNSET", None)
    assert (span.start_time, span.end_time) == (None, None)


# ---- where a span belongs ---------------------------------------------------------------------------------------------------


async def test_the_resource_places_spans_and_a_span_places_itself_against_it(store: LightningStore):
    first, second = await store.start_rollout("a"), await store.start_rollout("b")
    answer = await sent(store, {}, {"attributes": placing(second)}, {}, resource=placing(first))
    assert answer == (0, "")
    assert [span.span_id[-1] for span in await store.query_spans(first.rollout_id)] == ["1", "3"]
    assert [span.span_id[-1] for span in await store.query_spans(second.rollout_id)] == ["2"]
    assert (await store.get_rollout_by_id(first.rollout_id)).status == "running"


@pytest.mark.parametrize("sequence_id", [7, "7"])
async def test_the_names_of_agent_lightning_are_understood(memory: LightningStore, sequence_id: int | str):
    rollout = await memory.start_rollout(None)
    place = {
        "agentlightning.rollout_id": rollout.rollout_id,
        "agentlightning.attempt_id": rollout.attempt.attempt_id,
        "agentlightning.span_sequence_id": sequence_id,
    }
    assert await sent(memory, {}, resource=place) == (0, "")
    (span,) = await memory.query_spans(rollout.rollout_id)
    assert span.sequence_id == 7


async def test_spans_without_a_sequence_id_are_numbered_in_the_order_in_which_they_ended(memory: LightningStore):
    rollout = await memory.start_rollout(None)
    ends = [30, 10, 0, 20]
    await sent(memory, *({"end_time_unix_nano": end * 10**9} for end in ends), resource=placing(rollout))
    spans = await memory.query_spans(rollout.rollout_id)
    assert [(span.sequence_id, span.end_time) for span in spans] == [(1, 10.0), (2, 20.0), (3, 30.0), (4, None)]


async def test_a_span_that_cannot_be_placed_is_counted_and_its_siblings_are_kept(store: LightningStore):
    rollout = await store.start_rollout(None)
    mine = placing(rollout)
    count, message = await sent(
        store,
        {"attributes": mine},
        {"attributes": {semconv.ROLLOUT_ID: "nowhere", semconv.ATTEMPT_ID: "at"}, "name": "lost"},
        {"attributes": mine},
        {"attributes": {**mine, semconv.ATTEMPT_ID: "at-of-another"}},
        {"attributes": {}},
        {"attributes": mine, "span_id": b"\x05"},
    )
    assert count == 4
    assert message.startswith("4 of 6 spans were not placed: ")
    assert (
        "span 0000000000000005 'step': rollout_id unknown, it names none; set the attribute leyden.rollout_id"
        in message
    )
    assert "its span id '05' is not 16 hexadecimal digits" in message
    assert "'nowhere'" in message or "'at-of-another'" in message
    assert message.endswith("; and 1 more")
    assert [span.span_id[-1] for span in await store.query_spans(rollout.rollout_id)] == ["1", "3"]


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({semconv.ATTEMPT_ID: "at"}, "rollout_id unknown"),
        ({semconv.ROLLOUT_ID: "ro"}, "attempt_id unknown"),
        ({semconv.ROLLOUT_ID: "", semconv.ATTEMPT_ID: "at"}, "'' is none"),
        ({semconv.ROLLOUT_ID: 5, semconv.ATTEMPT_ID: "at"}, "5 is none"),
        ({semconv.ROLLOUT_ID: "ro", semconv.ATTEMPT_ID: ["at"]}, "['at'] is none"),
        ({semconv.ROLLOUT_ID: "ro", semconv.ATTEMPT_ID: "at", semconv.SEQUENCE_ID: "next"}, "is not a whole number"),
        ({semconv.ROLLOUT_ID: "ro", semconv.ATTEMPT_ID: "at", semconv.SEQUENCE_ID: -1}, "-1 is not a whole number"),
        ({semconv.ROLLOUT_ID: "ro", semconv.ATTEMPT_ID: "at", semconv.SEQUENCE_ID: True}, "is not a whole number"),
    ],
)
def test_a_span_that_does_not_say_where_it_belongs_is_refused_with_the_reason(attributes: dict[str, Any], reason: str):
    received = read_spans(request_of({"attributes": attributes}).SerializeToString(), PROTOBUF)
    assert received.spans == []
    assert reason in received.refused[0]


@pytest.mark.parametrize(
    "ids",
    [
        {"trace_id": b""},
        {"trace_id": bytes(16)},
        {"trace_id": b"\x01" * 17},
        {"span_id": b""},
        {"span_id": bytes(8)},
        {"parent_span_id": b"\x01"},
    ],
)
def test_a_span_with_a_bad_id_is_refused(ids: dict[str, bytes]):
    place = {semconv.ROLLOUT_ID: "ro", semconv.ATTEMPT_ID: "at"}
    received = read_spans(request_of(ids, {}, resource=place).SerializeToString(), PROTOBUF)
    assert len(received.spans) == len(received.refused) == 1
    assert "hexadecimal digits" in received.refused[0]


async def test_a_span_that_the_store_refuses_costs_its_siblings_nothing(memory: LightningStore):
    rollout = await memory.start_rollout(None)
    count, message = await sent(
        memory,
        {},
        {"attributes": {semconv.SEQUENCE_ID: 2**63 - 1}},
        {"attributes": {semconv.ROLLOUT_ID: "no\0where"}},
        {},
        resource=placing(rollout),
    )
    assert count == 2
    assert "sequence_id 9223372036854775807 of span '0000000000000002' is above" in message
    assert "no\\x00where" in message
    assert [span.span_id[-1] for span in await memory.query_spans(rollout.rollout_id)] == ["1", "4"]


async def test_what_is_sent_twice_is_there_once_and_a_finished_attempt_takes_spans(memory: LightningStore):
    rollout = await memory.start_rollout(None)
    await memory.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, "succeeded")
    for _ in range(2):
        assert await sent(memory, {}, {}, resource=placing(rollout)) == (0, "")
    assert len(await memory.query_spans(rollout.rollout_id)) == 2
    assert (await memory.get_rollout_by_id(rollout.rollout_id)).status == "succeeded"


async def test_ten_thousand_spans_of_many_attempts_arrive_in_one_request(memory: LightningStore):
    rollouts = [await memory.start_rollout(n) for n in range(20)]
    spans = [{"attributes": placing(rollouts[n % 20]), "end_time_unix_nano": n + 1} for n in range(10_000)]
    spans[5_000]["attributes"] = {semconv.ROLLOUT_ID: "nowhere", semconv.ATTEMPT_ID: "at"}
    count, message = await sent(memory, *spans)
    assert count == 1
    assert "'nowhere'" in message
    assert (await memory.statistics())["total_spans"] == 9_999
    ids = [int(span.span_id, 16) for span in await memory.query_spans(rollouts[3].rollout_id)]
    assert ids == list(range(4, 10_001, 20))


# ---- answers ----------------------------------------------------------------------------------------------------------------


@ENCODINGS
async def test_an_answer_is_in_the_encoding_of_the_request_and_empty_when_all_is_well(
    memory: LightningStore, encoding: str
):
    rollout = await memory.start_rollout(None)
    answer = await receive(memory, encoded(request_of({}, resource=placing(rollout)), encoding), encoding)
    assert (answer.status, answer.content_type, answer.body) == (200, encoding, b"" if encoding == PROTOBUF else b"{}")
    answer = await receive(memory, encoded(request_of({}), encoding), f"{encoding.upper()}; charset=utf-8")
    assert answer.content_type == encoding
    assert rejected(answer)[0] == 1
    assert rejected(await receive(memory, b"" if encoding == PROTOBUF else b"{}", encoding)) == (0, "")


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/x-protobuf-not", "multipart/form-data; boundary=x"]
)
async def test_another_content_type_is_told_which_ones_there_are(memory: LightningStore, content_type: str):
    answer = await receive(memory, b"", content_type)
    assert (answer.status, answer.content_type) == (415, JSON)
    assert json.loads(answer.body) == {
        "code": 3,
        "message": f"the content type is {content_type!r}; possible: application/x-protobuf, application/json",
    }


async def test_a_protobuf_body_that_cannot_be_read_is_answered_with_a_status_message(memory: LightningStore):
    answer = await receive(memory, b"\xff\xff not protobuf", PROTOBUF)
    assert (answer.status, answer.content_type) == (400, PROTOBUF)
    status = ExportTracePartialSuccess.FromString(answer.body)  # the same fields as google.rpc.Status
    assert answer.body[:2] == b"\x08\x03"
    assert "no ExportTraceServiceRequest as application/x-protobuf" in status.error_message


SPAN = '{"resourceSpans":[{"scopeSpans":[{"spans":[%s]}]}]}'


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "it is [], not an object"),
        ('"x"', "not an object"),
        ("null", "it is None, not an object"),
        ('{"resourceSpans": 5}', "resourceSpans is 5, not a list of objects"),
        ('{"resourceSpans": [5]}', "resourceSpans is [5], not a list of objects"),
        ('{"resourceSpans": [{"resource": 5}]}', "resource is 5, not an object"),
        ('{"resourceSpans": [{"resource": {"attributes": 5}}]}', "attributes"),
        ('{"resourceSpans": [{"scopeSpans": {}}]}', "scopeSpans"),
        (SPAN % '{"name": 5}', "name"),
        (SPAN % '{"name": "\\ud800"}', "Unpaired surrogate"),
        (SPAN % '{"traceId": "xyz"}', "traceId 'xyz' is not hexadecimal"),
        (SPAN % '{"traceId": 5}', "traceId"),
        (SPAN % '{"startTimeUnixNano": -1}', "startTimeUnixNano"),
        (SPAN % '{"startTimeUnixNano": "soon"}', "startTimeUnixNano"),
        (SPAN % '{"endTimeUnixNano": 18446744073709551616}', "endTimeUnixNano"),
        (SPAN % '{"name": "a", "name": "b"}', "a key twice"),
        (SPAN % '{"attributes": [{"key": "a", "value": {"doubleValue": NaN}}]}', "NaN"),
        (SPAN % '{"attributes": [{"key": "a", "value": {"intValue": "1e99"}}]}', "intValue"),
        (SPAN % f'{{"attributes": [{{"key": "a", "value": {{"intValue": {"9" * 5000}}}}}]}}', "4300 digits"),
        ("[" * 100_000, "recursion"),
        ('{"a":' * 100_000, "recursion"),
        (
            SPAN % ('{"attributes":[{"key":"a","value":' + '{"arrayValue":{"values":[' * 200 + "]}}" * 200 + "}]}"),
            "too deep",
        ),
    ],
)
async def test_a_json_body_that_cannot_be_read_is_answered_with_the_reason(
    memory: LightningStore, body: str, reason: str
):
    answer = await receive(memory, body.encode(), JSON)
    assert (answer.status, answer.content_type) == (400, JSON)
    status = json.loads(answer.body)
    assert status["code"] == 3
    assert status["message"].startswith("the body is no ExportTraceServiceRequest as application/json: ")
    assert reason in status["message"]
    assert len(status["message"]) < 1200


PLACED = request_of({}, {}, resource={semconv.ROLLOUT_ID: "ro", semconv.ATTEMPT_ID: "at"}).SerializeToString()


@pytest.mark.parametrize("wrong", ["a text", 1, True, ["a", "b"], "a" * 200_000], ids=lambda wrong: repr(wrong)[:12])
@pytest.mark.parametrize(
    "place",
    [
        '"attributes": [{"key": "a", "value": %s}]',
        '"attributes": [{"key": "a", "value": {"arrayValue": %s}}]',
        '"attributes": [{"key": "a", "value": {"array_value": {"values": [%s]}}}]',
        '"attributes": [{"key": "a", "value": {"kvlistValue": {"values": [%s]}}}]',
        '"attributes": [%s]',
        '"status": %s',
        '"events": [%s]',
        '"links": [{"attributes": [%s]}]',
    ],
)
def test_a_value_in_place_of_an_object_is_refused_and_named_in_json(place: str, wrong: Any):
    span = f'{{"name": "x", {place.replace("%s", json.dumps(wrong))}}}'
    body = f'{{"resourceSpans": [{{"scopeSpans": [{{"spans": [{span}]}}]}}]}}'
    with pytest.raises(ValueError, match=r"(value|Value|values|status|attributes|events) is .*, not an object"):
        read_spans(body.encode(), JSON)


@pytest.mark.parametrize("length", range(1, len(PLACED)))
def test_a_protobuf_body_that_is_cut_off_is_refused_wherever_it_is_cut(length: int):
    with pytest.raises(ValueError, match="no ExportTraceServiceRequest"):
        read_spans(PLACED[:length], PROTOBUF)


def test_fields_that_nobody_knows_are_passed_over():
    unknown = (
        b"\x98\x06\x05" + b"\xa1\x06" + bytes(8) + b"\xaa\x06\x02hi" + b"\xb5\x06" + bytes(4)
    )  # 99: 5, a double, a text, a float
    assert len(read_spans(unknown + PLACED + unknown, PROTOBUF).spans) == 2


@pytest.mark.parametrize("body", [b"\x0b\x0c", b"\x0a" + b"\xff" * 11, b"\x0a\xff\xff\xff\xff\x0f", b"\x0d\x00"])
def test_bytes_that_are_no_message_are_refused(body: bytes):
    """A group, a number that does not end, a length beyond the end, a number that is cut off."""
    with pytest.raises(ValueError, match="no ExportTraceServiceRequest"):
        read_spans(body, PROTOBUF)


async def test_more_spans_than_a_request_may_have_are_refused(memory: LightningStore):
    count = 100_001
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for _ in range(count):
        scope.spans.add()
    answer = await receive(memory, request.SerializeToString(), PROTOBUF)
    assert answer.status == 413
    assert b"more than 100,000 spans" in answer.body


def field(number: int, content: bytes) -> bytes:
    """One field of a protobuf message, of the kind that has a length."""
    length, digits = len(content), bytearray()
    while length > 127:
        digits.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *digits, length]) + content


@pytest.mark.parametrize(
    "body",
    [
        field(1, b"") * 200_001,  # groups
        field(1, field(2, b"") * 200_001),  # scopes
        b"\x18\x00" * 200_001,  # fields that no message of OTLP has
        field(1, field(2, field(2, field(9, b"") * 200_001))),  # attributes of a span
    ],
)
def test_parts_of_a_request_that_hold_no_spans_count_too(body: bytes):
    started = time.process_time()
    with pytest.raises(ValueError, match="more than 200,000 parts; send fewer spans at a time"):
        read_spans(body, PROTOBUF)
    assert time.process_time() - started < 5.0


def test_a_resource_of_any_size_is_not_parsed():
    with pytest.raises(ValueError, match="a resource has 1,200,000 bytes"):
        read_spans(field(1, field(1, field(1, b"") * 600_000)), PROTOBUF)


@pytest.mark.parametrize("kind", ["array_value", "kvlist_value"])
async def test_a_span_whose_attribute_holds_a_million_values_is_refused_before_it_is_parsed(
    memory: LightningStore, kind: str
):
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    value = span.attributes.add(key="a").value
    for _ in range(3):  # a list in a list in a list
        value = getattr(value, kind).values.add()
        value = value if kind == "array_value" else value.value
    getattr(value, kind).values.extend([AnyValue() if kind == "array_value" else KeyValue()] * 500_000)
    answer = await receive(memory, request.SerializeToString(), PROTOBUF)
    assert answer.status == 413
    assert b"more than 200,000 parts" in answer.body


async def test_more_attributes_than_a_request_may_have_are_refused(memory: LightningStore):
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    span = scope.spans.add()
    span.attributes.extend([KeyValue()] * 20_000)
    scope.spans.extend([span] * 101)
    answer = await receive(memory, request.SerializeToString(), PROTOBUF)
    assert answer.status == 413
    assert b"more than 2,000,000 attributes" in answer.body


def test_json_groups_without_spans_count_too():
    with pytest.raises(ValueError, match="more than 200,000 parts"):
        read_spans(f'{{"resourceSpans":[{",".join(["{}"] * 200_001)}]}}'.encode(), JSON)


@pytest.mark.parametrize("body", [b"\xff\xfe\xff", b'{"resourceSpans": "\xff"}', b"\x00"])
async def test_a_json_body_that_is_no_text_is_refused(memory: LightningStore, body: bytes):
    assert (await receive(memory, body, JSON)).status == 400


FIELDS = (
    *("resourceSpans", "scopeSpans", "spans", "resource", "attributes", "key", "value", "traceId", "spanId"),
    *("parentSpanId", "name", "kind", "status", "code", "events", "links", "stringValue", "intValue", "doubleValue"),
    *("arrayValue", "values", "kvlistValue", "bytesValue", "boolValue", "startTimeUnixNano"),
)
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)),
    max_leaves=20,
)


def read_or_refused(body: bytes, encoding: str) -> None:
    try:
        read_spans(body, encoding)
    except ValueError as error:
        if "the body is no ExportTraceServiceRequest" not in str(error):
            raise


@given(st.one_of(JSON_VALUES, JSON_VALUES.map(lambda span: {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})))
def test_any_json_is_read_or_refused(document: Any):
    read_or_refused(json.dumps(document).encode(), JSON)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(body: bytes):
    read_or_refused(body, PROTOBUF)


# ---- over HTTP --------------------------------------------------------------------------------------------------------------


@ENCODINGS
@pytest.mark.parametrize("packed", [False, True])
async def test_an_exporter_sends_to_the_server_with_its_token(memory: LightningStore, encoding: str, packed: bool):
    rollout = await memory.start_rollout(None)
    body = encoded(request_of({}, {"attributes": {semconv.ROLLOUT_ID: "nowhere"}}, resource=placing(rollout)), encoding)
    headers = {"content-type": encoding, "authorization": "Bearer secret"} | (
        {"content-encoding": "gzip"} if packed else {}
    )
    async with LightningStoreServer(memory, token="secret") as server, aiohttp.ClientSession() as session:
        url, sent = f"{server.endpoint}/v1/traces", gzip.compress(body) if packed else body
        async with session.post(url, data=sent) as answer:
            assert answer.status == 401
        async with session.post(url, data=sent, headers=headers) as answer:
            received = OtlpReply(answer.status, answer.headers["content-type"], await answer.read())
        async with session.post(url, data=sent[:-4], headers=headers) as answer:
            assert answer.status == 400
    assert received.content_type == encoding
    count, message = rejected(received)
    assert count == 1
    assert "'nowhere'" in message
    assert [span.span_id[-1] for span in await memory.query_spans(rollout.rollout_id)] == ["1"]
