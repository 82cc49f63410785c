"""Agent Lightning's spans, triplets and other types.

`Span` and `Triplet` are subclasses of Leyden's, with Agent Lightning's further fields and constructors, so that every
part of Leyden takes them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar, cast

from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from leyden import types
from leyden._lib import ids
from leyden.tracing import from_readable_span
from leyden.types import Attributes, SpanEvent, SpanStatus, semconv
from leyden_compat.agentlightning.semconv import AGL_VIRTUAL, agl_attributes, agl_span_name

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

TraceState = dict[str, str]
StatusCode = Literal["UNSET", "OK", "ERROR"]


class SpanContext(BaseModel):
    """The ids of a span."""

    model_config = ConfigDict(extra="allow")

    trace_id: str
    span_id: str
    is_remote: bool = False
    trace_state: TraceState = Field(default_factory=dict[str, str])

    @classmethod
    def from_opentelemetry(cls, src: Any) -> SpanContext:
        """Return the SpanContext for a context of OpenTelemetry, with its ids in hexadecimal."""
        state = dict((src.trace_state or {}).items())
        return cls(
            trace_id=f"{src.trace_id:032x}", span_id=f"{src.span_id:016x}", is_remote=src.is_remote, trace_state=state
        )


class PaginatedResult(types.PaginatedResult[T]):
    """One page of a query, which is also compared, added and written like a list."""

    __slots__ = ()
    __hash__ = None  # pyright: ignore[reportAssignmentType] -- as a list has none

    def __eq__(self, other: object) -> bool:
        if isinstance(other, types.PaginatedResult):
            mine, theirs = (
                (list(page), page.limit, page.offset, page.total)
                for page in (self, cast("PaginatedResult[Any]", other))
            )
            return mine == theirs
        return list(self) == other if isinstance(other, list) else NotImplemented

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return the fields as a dict, and the items as dicts."""
        items = [item.model_dump(**options) if isinstance(item, BaseModel) else item for item in self]
        return {"items": items, "limit": self.limit, "offset": self.offset, "total": self.total}

    def model_dump_json(self, **options: Any) -> str:
        """Return the fields as JSON."""
        return json.dumps(self.model_dump(mode="json", **options))

    @classmethod
    def of(cls, page: types.PaginatedResult[T]) -> PaginatedResult[T]:
        """Return Leyden's page as one of this class."""
        return cls(page.items, page.limit, page.offset, page.total, page.exact)


class TraceStatus(SpanStatus):
    """The status with which a step ended."""

    def __init__(self, status_code: StatusCode = "UNSET", description: str | None = None, **others: Any) -> None:
        super().__init__(status_code=status_code, description=description, **others)

    @classmethod
    def from_opentelemetry(cls, src: Any) -> TraceStatus:
        """Return the TraceStatus for a status of OpenTelemetry."""
        return cls(src.status_code.name, src.description)


class Event(SpanEvent):
    """Something that happened at one moment of a span."""

    @classmethod
    def from_opentelemetry(cls, src: Any) -> Event:
        """Return the Event for an event of OpenTelemetry."""
        return cls(name=src.name, attributes=dict(src.attributes or {}), timestamp=convert_timestamp(src.timestamp))


class Link(BaseModel):
    """A link from one span to another."""

    context: SpanContext
    attributes: Attributes | None = None

    @classmethod
    def from_opentelemetry(cls, src: Any) -> Link:
        """Return the Link for a link of OpenTelemetry."""
        return cls(context=SpanContext.from_opentelemetry(src.context), attributes=dict(src.attributes or {}) or None)


class OtelResource(dict[str, Any]):
    """Attributes of the process that recorded a span: a dict that also has the fields `attributes` and `schema_url` of
    Agent Lightning's model.
    """

    def __init__(self, attributes: Mapping[str, Any] | None = None, schema_url: str = "") -> None:
        super().__init__(attributes or {})
        self.schema_url = schema_url

    @property
    def attributes(self) -> dict[str, Any]:
        """The resource's attributes: this dict itself."""
        return self

    @classmethod
    def from_opentelemetry(cls, src: Any) -> OtelResource:
        """Return the OtelResource for a resource of OpenTelemetry."""
        return cls(dict(src.attributes or {}), src.schema_url or "")

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the fields as a dict."""
        return {"attributes": dict(self), "schema_url": self.schema_url}


def old_status(status: Any) -> Any:
    """Return Leyden's status of a step as a TraceStatus; anything else as it is."""
    if isinstance(status, SpanStatus) and not isinstance(status, TraceStatus):
        return TraceStatus(status.status_code, status.description)
    return status


def old_event(event: Any) -> Any:
    """Return Leyden's event of a step as an Event; anything else as it is."""
    if isinstance(event, SpanEvent) and not isinstance(event, Event):
        return Event.model_construct(**{name: getattr(event, name) for name in SpanEvent.model_fields})
    return event


class SpanCoreFields(BaseModel):
    """A recorded step that belongs to no attempt yet."""

    name: str
    status: TraceStatus
    attributes: Attributes
    start_time: float | None
    end_time: float | None

    @field_validator("status", mode="before")
    @classmethod
    def _as_old_status(cls, value: Any) -> Any:
        return old_status(value)


class Span(types.Span):
    """A recorded step, with `links`, `context`, `parent` and `resource.attributes`.

    Names and attributes that Leyden wrote are shown under Agent Lightning's names.
    """

    status: TraceStatus  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    events: list[Event] = Field(default_factory=list[Event])  # pyright: ignore[reportIncompatibleVariableOverride]

    @field_validator("status", mode="before")
    @classmethod
    def _as_old_status(cls, value: Any) -> Any:
        return old_status(value)

    @field_validator("events", mode="before")
    @classmethod
    def _as_old_events(cls, value: Any) -> Any:
        return [old_event(event) for event in value] if isinstance(value, list | tuple) else value

    @model_validator(mode="before")
    @classmethod
    def _take_old_fields(cls, values: Any) -> Any:
        """Accept the fields of Agent Lightning 0.3: links become an attribute, the resource an object; context and
        parent, which only repeat ids, are dropped.
        """
        if not isinstance(values, Mapping):
            return values
        fields = dict(cast(Mapping[str, Any], values))
        fields.pop("context", None)
        fields.pop("parent", None)
        links = [Link.model_validate(link, from_attributes=True) for link in fields.pop("links", None) or ()]
        if links:
            written = [
                {"trace_id": li.context.trace_id, "span_id": li.context.span_id, "attributes": li.attributes or {}}
                for li in links
            ]
            fields["attributes"] = {**fields.get("attributes", {}), semconv.LINKS: json.dumps(written)}
        resource = fields.get("resource")
        if isinstance(resource, Mapping) and set(resource) == {"attributes", "schema_url"}:
            fields["resource"] = OtelResource(resource["attributes"], resource["schema_url"])
        for name in ("status", "events"):
            if isinstance(fields.get(name), list):
                fields[name] = [item.model_dump() if isinstance(item, BaseModel) else item for item in fields[name]]
        return fields

    @field_validator("resource", mode="wrap")
    @classmethod
    def _as_resource(cls, value: Any, check: Callable[[Any], Any]) -> OtelResource:
        return OtelResource(check(dict(value)), getattr(value, "schema_url", ""))

    @field_serializer("resource")
    def _plain_resource(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return dict(value)

    @property
    def links(self) -> list[Link]:
        """Links to other spans."""
        written = self.attributes.get(semconv.LINKS)
        entries: list[Any] = json.loads(written) if isinstance(written, str) else []
        return [
            Link(
                context=SpanContext(trace_id=entry["trace_id"], span_id=entry["span_id"]),
                attributes=entry.get("attributes") or None,
            )
            for entry in entries
        ]

    @property
    def context(self) -> SpanContext:
        """The span's own ids."""
        return SpanContext(trace_id=self.trace_id, span_id=self.span_id)

    @property
    def parent(self) -> SpanContext | None:
        """The parent's ids, or None."""
        return None if self.parent_id is None else SpanContext(trace_id=self.trace_id, span_id=self.parent_id)

    @classmethod
    def of(cls, span: types.Span) -> Span:
        """Return Leyden's span as one of this class, under Agent Lightning's names."""
        if isinstance(span, cls):
            return span
        fields = {name: getattr(span, name) for name in types.Span.model_fields}
        fields["name"] = agl_span_name(span.name)
        fields["attributes"] = agl_attributes(span.attributes)
        fields["status"] = old_status(span.status)
        fields["events"] = [old_event(event) for event in span.events]
        location = {
            "agentlightning.rollout_id": span.rollout_id,
            "agentlightning.attempt_id": span.attempt_id,
            "agentlightning.span_sequence_id": span.sequence_id,
        }
        fields["resource"] = OtelResource(location | span.resource)
        return cls.model_construct(**fields)

    @classmethod
    def from_opentelemetry(cls, src: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
        """Return an ended OpenTelemetry span as a span of an attempt."""
        span = cls.of(from_readable_span(src, rollout_id, attempt_id))
        return span.model_copy(update={"sequence_id": sequence_id})

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Attributes,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        name: str | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        resource: OtelResource | None = None,
        status: SpanStatus | None = None,
    ) -> Span:
        """Return a span with these attributes, and new ids where none are given."""
        return cls(
            rollout_id=rollout_id or "",
            attempt_id=attempt_id or "",
            sequence_id=sequence_id or 0,
            trace_id=trace_id or ids.trace_id(),
            span_id=span_id or ids.span_id(),
            parent_id=parent_id,
            name=name or AGL_VIRTUAL,
            status=TraceStatus("OK") if status is None else old_status(status),
            attributes=attributes,
            start_time=start_time,
            end_time=end_time,
            resource=resource or {},
        )

    @classmethod
    def from_core_fields(
        cls,
        core: SpanCoreFields,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
    ) -> Span:
        """Return a recorded step as a span of an attempt."""
        return cls.from_attributes(
            attributes=core.attributes,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            name=core.name,
            start_time=core.start_time or time.time(),
            end_time=core.end_time,
            status=core.status,
        )


SpanLike = ReadableSpan | types.Span


class SpanRecordingContext(Protocol):
    """Records attributes and errors of a step under way."""

    def record_exception(self, exception: BaseException) -> None: ...
    def record_attributes(self, attributes: Attributes) -> None: ...
    def record_status(self, status_code: StatusCode, description: str | None = None) -> None: ...
    def get_recorded_span(self) -> SpanCoreFields: ...


class _Fields:
    """A mixin that gives a model the read methods of a dict."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default if there is none of this name."""
        return getattr(self, name) if name in self.keys() else default

    def keys(self) -> list[str]:
        return list(type(cast(BaseModel, self)).model_fields)

    def items(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.keys()]

    def values(self) -> list[Any]:
        return [value for _, value in self.items()]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())


class TripletPrompt(_Fields, types.TripletPrompt):
    """The prompt of a triplet, which is also read like a dict."""


class TripletResponse(_Fields, types.TripletResponse):
    """The response of a triplet, which is also read like a dict."""


class Triplet(types.Triplet):
    """One model call. `prompt` and `response` are read like dicts, and may be anything at all."""

    prompt: Any
    response: Any

    @field_validator("prompt", mode="after")
    @classmethod
    def _readable_prompt(cls, value: Any) -> Any:
        return _readable(value, types.TripletPrompt, TripletPrompt)

    @field_validator("response", mode="after")
    @classmethod
    def _readable_response(cls, value: Any) -> Any:
        return _readable(value, types.TripletResponse, TripletResponse)

    @classmethod
    def of(cls, triplet: types.Triplet) -> Triplet:
        """Return Leyden's triplet as one of this class."""
        return cls(
            prompt=triplet.prompt, response=triplet.response, reward=triplet.reward, metadata=dict(triplet.metadata)
        )


def _readable(value: Any, native: type[BaseModel], old: type[BaseModel]) -> Any:
    if isinstance(value, old) or not isinstance(value, native):
        return value
    return old.model_construct(**{name: getattr(value, name) for name in native.model_fields})


def convert_timestamp(timestamp: float | None) -> float | None:
    """Return a Unix time in seconds, from seconds or nanoseconds. None for None and 0."""
    if not timestamp:
        return None
    return timestamp / 1_000_000_000 if timestamp > 1e12 else timestamp  # 1e12 seconds are 30,000 years


def extract_extra_fields(src: Any, excluded_fields: Sequence[str]) -> dict[str, Any]:
    """Return the attributes of an object that are not excluded, as JSON values."""
    # OpenTelemetry's classes keep a field `name` as `_name`, behind a property of the class.
    left_out = {*excluded_fields, *(f"_{name}" for name in excluded_fields), *vars(type(src))}
    values = {name.lstrip("_"): value for name, value in vars(src).items()}
    return json.loads(json.dumps({name: v for name, v in values.items() if name not in left_out}, default=str))


class Dataset(Protocol[T_co]):
    """Tasks by index."""

    def __getitem__(self, index: int, /) -> T_co: ...
    def __len__(self) -> int: ...


class FilterField(TypedDict, total=False):
    """A condition on one field of a query: equal to `exact`, one of `within`, or a text with `contains`."""

    exact: Any
    within: Sequence[Any]
    contains: str


FilterOptions = Mapping[str, FilterField | Literal["and", "or"] | Mapping[str, FilterField]]


class SortOptions(TypedDict):
    """The field to sort by, and the order."""

    name: str
    order: Literal["asc", "desc"]


RolloutRawResult = None | float | list[ReadableSpan] | list[types.Span] | list[SpanCoreFields]
