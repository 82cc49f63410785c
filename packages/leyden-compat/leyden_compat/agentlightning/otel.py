# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Agent Lightning's helpers for attributes of spans: nested and flat forms, tags, links, and values that OpenTelemetry
takes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import NoOpTracerProvider
from pydantic import TypeAdapter

from leyden.tracing import exception_attributes
from leyden.types import Span
from leyden_compat.agentlightning.semconv import LightningSpanAttributes, LinkPydanticModel, agl_attributes

logger = logging.getLogger("leyden.compat.agentlightning.otel")

S = TypeVar("S", bound=ReadableSpan | Span)

_PRIMITIVE = (str, bool, int, float)


def full_qualified_name(obj: type) -> str:
    """Return a class's module and name; the name alone for a builtin."""
    return obj.__qualname__ if obj.__module__ == "builtins" else f"{obj.__module__}.{obj.__qualname__}"


def get_tracer_provider(inspect: bool = True) -> TracerProvider:
    """Return OpenTelemetry's global tracer provider.

    inspect: of no effect.
    Raise RuntimeError if no tracer has set one up.
    """
    provider = otel_trace.get_tracer_provider()
    if isinstance(provider, otel_trace.ProxyTracerProvider):
        raise RuntimeError("no tracer is initialised, so a span would be lost; open a trace first")
    return cast(TracerProvider, provider)


def get_span_processors(tracer_provider: TracerProvider, expected_type: type[Any]) -> list[Any]:
    """Return the provider's span processors of a type."""
    processors: Any = getattr(getattr(tracer_provider, "_active_span_processor", None), "_span_processors", ())
    return [processor for processor in processors if isinstance(processor, expected_type)]


def get_tracer(use_active_span_processor: bool = True) -> otel_trace.Tracer:
    """Return a tracer of OpenTelemetry, whose spans are recorded inside a trace.

    use_active_span_processor: False returns a tracer whose spans are not recorded.
    """
    if use_active_span_processor:
        return get_tracer_provider().get_tracer("agentlightning")
    return NoOpTracerProvider().get_tracer("agentlightning")


def make_tag_attributes(tags: list[str]) -> dict[str, Any]:
    """Return attributes that hold a span's tags."""
    return flatten_attributes({LightningSpanAttributes.TAG.value: tags}, expand_leaf_lists=True)


def extract_tags_from_attributes(attributes: Mapping[str, Any]) -> list[str]:
    """Return the tags in attributes."""
    return TypeAdapter(list[str]).validate_python(_below(attributes, LightningSpanAttributes.TAG) or [])


def make_link_attributes(links: Mapping[str, str]) -> dict[str, Any]:
    """Return attributes that link a span to the spans that have the attributes `links`."""
    for key, value in links.items():
        if not isinstance(value, str):
            raise ValueError(f"the link {key!r} is a {type(value).__name__}; it must be a string")
    listed = [{"key_match": key, "value_match": value} for key, value in links.items()]
    return flatten_attributes({LightningSpanAttributes.LINK.value: listed}, expand_leaf_lists=True)


def extract_links_from_attributes(attributes: Mapping[str, Any]) -> list[LinkPydanticModel]:
    """Return the links in attributes."""
    found = _below(attributes, LightningSpanAttributes.LINK) or []
    return TypeAdapter(list[LinkPydanticModel]).validate_python(found)


def query_linked_spans(spans: Sequence[S], links: Sequence[LinkPydanticModel]) -> list[S]:
    """Return the spans that match every link."""
    return [span for span in spans if all(_matches(span, link) for link in links)]


def _matches(span: ReadableSpan | Span, link: LinkPydanticModel) -> bool:
    """Return whether a span is the one that a link names by trace id, span id or an attribute."""
    if link.key_match in ("trace_id", "span_id"):
        if isinstance(span, Span):
            return getattr(span, link.key_match) == link.value_match
        context = span.context
        if context is None:
            return False
        ids = {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
        return ids[link.key_match] == link.value_match
    value = (span.attributes or {}).get(link.key_match)
    return value is not None and str(value) == link.value_match


def filter_attributes(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the attributes whose name is the prefix or begins with `prefix.`."""
    return {key: value for key, value in attributes.items() if key == prefix or key.startswith(f"{prefix}.")}


def filter_and_unflatten_attributes(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any] | list[Any]:
    """Return the attributes below a prefix as a nested value, without the prefix.

    Raise ValueError if an attribute has the prefix itself as its name.
    """
    found = filter_attributes(attributes, prefix)
    if prefix in found:
        raise ValueError(f"the attribute {prefix!r} has a value of its own, so there is nothing below it to nest")
    return unflatten_attributes({key[len(prefix) + 1 :]: value for key, value in found.items()})


def _below(attributes: Mapping[str, Any], prefix: LightningSpanAttributes) -> Any:
    return filter_and_unflatten_attributes(agl_attributes(attributes), prefix.value)


def flatten_attributes(
    nested_data: Mapping[str, Any] | Sequence[Any], *, expand_leaf_lists: bool = False
) -> dict[str, Any]:
    """Return a nested value as one dict with dotted names: `{"a": {"b": 1}}` is `{"a.b": 1}`.

    expand_leaf_lists: give each element of a list of plain values its own name.
    Raise ValueError for a name that is no string.
    """
    return dict(_flat("", nested_data, expand_leaf_lists))


def _flat(prefix: str, value: Any, expand: bool) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value with their dotted names. Raise ValueError for a key that is not a string.

    expand: also split lists of plain values, which OpenTelemetry could store as they are.
    """
    if isinstance(value, Mapping):
        entries: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list) and not (prefix and not expand and _is_leaf(value)):
        entries = [(str(index), element) for index, element in enumerate(value)]
    else:
        yield prefix, value
        return
    for name, element in entries:
        if not isinstance(name, str):
            raise ValueError(f"{name!r} below {prefix!r} is a {type(name).__name__}; names of attributes are strings")
        yield from _flat(f"{prefix}.{name}" if prefix else name, element, expand)


def _is_leaf(values: list[Any]) -> bool:
    """Return whether a list can be one attribute: plain values of one type."""
    return bool(values) and len({type(value) for value in values}) == 1 and isinstance(values[0], _PRIMITIVE)


def unflatten_attributes(flat_data: Mapping[str, Any]) -> dict[str, Any] | list[Any]:
    """Return the nested value of dotted names. A dict whose names are 0 to n-1 becomes a list."""
    root: dict[str, Any] = {}
    for name, value in flat_data.items():
        *parents, last = name.split(".")
        branch = root
        for parent in parents:
            if not isinstance(branch.get(parent), dict):
                branch[parent] = {}
            branch = branch[parent]
        branch[last] = value
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    children = {name: _with_lists(value) for name, value in node.items()}
    numbers = [str(index) for index in range(len(children))]
    return [children[number] for number in numbers] if children and children.keys() == set(numbers) else children


def sanitize_attribute_value(object: Any, force: bool = True) -> Any:
    """Return a value that a span can hold: a plain value, a list of one kind, or the JSON text of anything else.

    force: write a part that JSON lacks as its `str`; False raises ValueError for it. NaN and infinity are written as
        Python's `json` writes them.
    """
    if isinstance(object, _PRIMITIVE):
        return object
    if isinstance(object, list):
        try:
            return sanitize_list_attribute_sanity(object)
        except ValueError as error:
            logger.warning("a list attribute is kept as JSON: %s", error)
    try:
        return json.dumps(object, default=str if force else None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a {type(object).__name__} is not JSON: {error}") from error


def sanitize_attributes(attributes: Mapping[str, Any], force: bool = True) -> dict[str, Any]:
    """Return attributes with values that a span can hold.

    Raise ValueError, naming the attribute, for a value that cannot be converted.
    """
    clean: dict[str, Any] = {}
    for key, value in attributes.items():
        try:
            clean[key] = sanitize_attribute_value(value, force=force)
        except ValueError as error:
            raise ValueError(f"attribute {key!r}: {error}") from error
    return clean


def sanitize_list_attribute_sanity(maybe_list: list[Any]) -> Any:
    """Return a list with elements of one kind, converting whole numbers to floats where needed. Raise ValueError if the
    elements are of several kinds.
    """
    for kind in (str, bool):
        if all(isinstance(element, kind) for element in maybe_list):
            return list(maybe_list)
    for kind in (int, float):
        if all(isinstance(element, kind | int) for element in maybe_list):
            return [kind(element) for element in maybe_list]
    kinds = sorted({type(element).__name__ for element in maybe_list})
    raise ValueError(f"the list has elements of {', '.join(kinds)}; they must be of one kind")


def check_attributes_sanity(attributes: Mapping[Any, Any]) -> None:
    """Raise ValueError unless every name is a string and every value can be kept as it is."""
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"the attribute name {key!r} is a {type(key).__name__}; it must be a string")
        if isinstance(value, list):
            sanitize_list_attribute_sanity(value)
        elif not isinstance(value, _PRIMITIVE):
            raise ValueError(
                f"attribute {key!r} is a {type(value).__name__}; it must be a string, a number, a bool or a list of one of these"
            )


def format_exception_attributes(exception: BaseException) -> dict[str, Any]:
    """Return the attributes that describe an exception."""
    return {
        **exception_attributes(exception),
        "exception.type": type(exception).__name__,
        "exception.message": str(exception),
        "exception.escaped": True,
    }
