# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Agent Lightning's emitters: they take its arguments, write its attribute names and raise its errors."""

from __future__ import annotations

import base64
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypedDict, TypeVar, cast

from leyden.types import get_reward_value as native_reward_value
from leyden_compat.agentlightning.otel import (
    check_attributes_sanity,
    filter_and_unflatten_attributes,
    flatten_attributes,
    format_exception_attributes,
    full_qualified_name,
    sanitize_attributes,
)
from leyden_compat.agentlightning.semconv import (
    AGL_ANNOTATION,
    AGL_EXCEPTION,
    AGL_MESSAGE,
    AGL_OBJECT,
    AGL_OPERATION,
    LightningSpanAttributes,
    RewardPydanticModel,
    agl_attributes,
)
from leyden_compat.agentlightning.tracer import DetachedTracer, RecordingContext, Tracer, get_active_tracer
from leyden_compat.agentlightning.types import SpanCoreFields, SpanLike, TraceStatus

F = TypeVar("F", bound=Callable[..., Any])

_OK = TraceStatus("OK")
_OBJECT_TYPE = LightningSpanAttributes.OBJECT_TYPE.value
_OBJECT_LITERAL = LightningSpanAttributes.OBJECT_LITERAL.value
_OBJECT_JSON = LightningSpanAttributes.OBJECT_JSON.value
_LITERALS: dict[str, Callable[[Any], Any]] = {  # how `get_object_value` reads the text of each type
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: str(text).lower() == "true",
    "bytes": lambda text: base64.b64decode(str(text)),
}


class RewardDimension(TypedDict):
    """One dimension of a reward."""

    name: str
    value: float


class RewardSpanData(TypedDict):
    """A reward, as version 0.1 writes it."""

    type: Literal["reward"]
    value: float | None


def emit_reward(
    reward: float | Mapping[str, Any],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> Any:
    """Record how well the agent did, and return the span.

    reward: a number, or numbers by name.
    primary_key: the name of the primary reward, if there are names.
    propagate: False makes the span without recording it, and needs no trace.
    Raise TypeError for a value that is no number, ValueError for a wrong dict or primary_key, and RuntimeError outside
    a trace.
    """
    if isinstance(reward, Mapping):
        for name, value in reward.items():
            if not isinstance(value, int | float):
                raise ValueError(f"the reward {name!r} is a {type(value).__name__}; it must be a number")
        if primary_key is None or primary_key not in reward:
            raise ValueError(f"primary_key is {primary_key!r}; it must be one of {list(reward)}")
        names = [primary_key, *(name for name in reward if name != primary_key)]
        dimensions = [{"name": name, "value": float(reward[name])} for name in names]
    elif isinstance(reward, int | float):
        dimensions = [{"name": "primary", "value": float(reward)}]
    else:
        raise TypeError(f"the reward is a {type(reward).__name__}; it must be a number")
    annotation = {LightningSpanAttributes.REWARD.value: dimensions, **(attributes or {})}
    return emit_annotation(annotation, propagate=propagate)


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> Any:
    """Record attributes in a span, and return it. Nested dicts and lists become dotted names.

    propagate: False makes the span without recording it, and needs no trace.
    """
    flat = flatten_attributes(annotation)
    check_attributes_sanity(flat)
    return _tracer(propagate, "annotation").create_span(AGL_ANNOTATION, sanitize_attributes(flat), status=_OK)


def emit_message(message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> Any:
    """Record a text in a span, and return it. Raise TypeError for a value that is no string.

    propagate: False makes the span without recording it, and needs no trace.
    """
    if not isinstance(message, str):
        raise TypeError(f"the message is a {type(message).__name__}; it must be a string")
    own = {LightningSpanAttributes.MESSAGE_BODY.value: message, **_flat(attributes)}
    return _tracer(propagate, "message").create_span(AGL_MESSAGE, own)


def emit_object(object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True) -> Any:
    """Record a JSON value or bytes in a span, and return it. Raise RuntimeError for another value.

    propagate: False makes the span without recording it, and needs no trace.
    """
    own = {**encode_object(object), **_flat(attributes)}
    return _tracer(propagate, "object").create_span(AGL_OBJECT, own, status=_OK)


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> Any:
    """Record an exception that the agent has handled, and return the span, whose own status is OK. Raise TypeError for
    a value that is no exception.

    propagate: False makes the span without recording it, and needs no trace.
    """
    if not isinstance(exception, BaseException):
        raise TypeError(f"{exception!r:.200} is a {type(exception).__name__}, not an exception")
    own = {**format_exception_attributes(exception), **_flat(attributes)}
    return _tracer(propagate, "exception").create_span(AGL_EXCEPTION, own, status=_OK)


def _flat(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    return sanitize_attributes(flatten_attributes(attributes)) if attributes else {}


def _tracer(propagate: bool, what: str) -> Tracer:
    """Return the active tracer; with `propagate` false, one that records nothing. Raise RuntimeError outside a trace.

    what: what would be lost, for the message.
    """
    if not propagate:
        return DetachedTracer()
    tracer = get_active_tracer()
    if tracer is None:
        raise RuntimeError(f"no active tracer: the {what} would be lost; emit it inside a trace")
    return tracer


def encode_object(object: Any) -> dict[str, Any]:
    """Return the attributes that hold a value.

    Raise RuntimeError if it cannot be encoded as JSON.
    """
    if isinstance(object, bytes):
        return {_OBJECT_TYPE: "bytes", _OBJECT_LITERAL: base64.b64encode(object).decode()}
    if isinstance(object, str | int | float | bool):
        return {_OBJECT_TYPE: type(object).__name__, _OBJECT_LITERAL: str(object)}
    try:
        return {_OBJECT_TYPE: full_qualified_name(cast(Any, type(object))), _OBJECT_JSON: json.dumps(object)}
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"a {type(object).__name__} is not JSON ({error}); emit the parts that you need") from error


def get_object_value(span: SpanLike) -> Any:
    """Return the value that `emit_object` recorded in this span; None for any other span."""
    attributes = agl_attributes(span.attributes or {})
    if _OBJECT_JSON in attributes:
        return json.loads(str(attributes[_OBJECT_JSON]))
    literal: Any = attributes.get(_OBJECT_LITERAL)
    if not isinstance(literal, str):
        return literal
    kind = str(attributes.get(_OBJECT_TYPE, "str"))
    if kind not in _LITERALS:
        raise RuntimeError(f"an object of type {kind!r} cannot be read back from text")
    return _LITERALS[kind](literal)


def get_message_value(span: SpanLike) -> str | None:
    """Return the text that `emit_message` recorded in this span; None for any other span."""
    value = agl_attributes(span.attributes or {}).get(LightningSpanAttributes.MESSAGE_BODY.value)
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"the message is a {type(value).__name__}; it must be a string")


def get_rewards_from_span(span: SpanLike) -> list[RewardPydanticModel]:
    """Return all dimensions of a reward span, the primary one first; an empty list for other spans."""
    attributes = agl_attributes(span.attributes or {})
    found = filter_and_unflatten_attributes(attributes, LightningSpanAttributes.REWARD.value)
    return [RewardPydanticModel.model_validate(dimension) for dimension in found]


def get_reward_value(span: SpanLike) -> float | None:
    """Return the primary reward of a span; None without a reward."""
    return native_reward_value(cast(Any, span)) if span.attributes else None


def find_final_reward(spans: Sequence[SpanLike]) -> float | None:
    """Return the primary reward of the last reward span; None without one."""
    return next((value for span in reversed(spans) if (value := get_reward_value(span)) is not None), None)


def reward(fn: F) -> F:
    """Return a function that records the result of each call of `fn` as a reward."""
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def rewarded_async(*args: Any, **kwargs: Any) -> Any:
            value = await fn(*args, **kwargs)
            emit_reward(value)
            return value

        return cast(F, rewarded_async)

    @functools.wraps(fn)
    def rewarded(*args: Any, **kwargs: Any) -> Any:
        value = fn(*args, **kwargs)
        emit_reward(value)
        return value

    return cast(F, rewarded)


class OperationContext:
    """A step of the agent's code: a context manager, and a decorator.

    Outside a trace the code runs unrecorded.
    """

    def __init__(self, name: str, attributes: Mapping[str, Any], propagate: bool = True) -> None:
        self.name = name
        self.initial_attributes = flatten_attributes(attributes)
        self.propagate = propagate
        self._open: AbstractContextManager[RecordingContext] | None = None
        self._recording: RecordingContext | None = None
        self._span: SpanCoreFields | None = None

    def _begin(self, attributes: Mapping[str, Any]) -> AbstractContextManager[RecordingContext]:
        tracer = (get_active_tracer() if self.propagate else None) or DetachedTracer()
        return tracer.operation_context(self.name, sanitize_attributes(attributes))

    def __enter__(self) -> OperationContext:
        self._open = self._begin(self.initial_attributes)
        self._recording = self._open.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        opened, recording = self._open, self._recording
        self._open = self._recording = None
        if opened is not None and recording is not None:
            try:
                opened.__exit__(*raised)
            finally:
                self._span = recording.get_recorded_span()

    def span(self) -> SpanCoreFields:
        """Return the recorded step. Raise RuntimeError while it is under way."""
        if self._span is None:
            raise RuntimeError("the operation has not ended yet")
        return self._span

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Record the operation's arguments, by position and by name."""
        self._record("set_input", _inputs({**({"args": _numbered(args)} if args else {}), **kwargs}))

    def set_output(self, output: Any) -> None:
        """Record the operation's result."""
        self._record("set_output", {LightningSpanAttributes.OPERATION_OUTPUT.value: output})

    def _record(self, what: str, values: Mapping[str, Any]) -> None:
        """Record values on the open span.

        what: the method that the program called, for the error's text.
        """
        if self._recording is None:
            raise RuntimeError(f"{what} is for the inside of `with operation(...) as op`")
        self._recording.record_attributes(sanitize_attributes(flatten_attributes(values)))

    def __call__(self, fn: F) -> F:
        """Return a function that records each call of `fn`: its arguments, and its result or exception."""
        signature = inspect.signature(fn)
        attributes = {LightningSpanAttributes.OPERATION_NAME.value: fn.__name__, **self.initial_attributes}
        output = LightningSpanAttributes.OPERATION_OUTPUT.value

        def record(recording: RecordingContext, values: Mapping[str, Any]) -> None:
            recording.record_attributes(sanitize_attributes(flatten_attributes(values)))

        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def recorded_async(*args: Any, **kwargs: Any) -> Any:
                with self._begin(attributes) as recording:
                    record(recording, _inputs(_bound(signature, args, kwargs)))
                    result = await fn(*args, **kwargs)
                    record(recording, {output: result})
                    return result

            return cast(F, recorded_async)

        @functools.wraps(fn)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self._begin(attributes) as recording:
                record(recording, _inputs(_bound(signature, args, kwargs)))
                result = fn(*args, **kwargs)
                record(recording, {output: result})
                return result

        return cast(F, recorded)


def operation(
    fn: Callable[..., Any] | None = None, *, propagate: bool = True, name: str | None = None, **attributes: Any
) -> Any:
    """Record a function's calls, or a block: `@operation`, `@operation(kind="search")`, `with operation(user=1) as op`.

    propagate: False records nothing.
    name: the step's name, as an attribute.
    attributes: further attributes of the step.
    Raise ValueError for a name that is given twice, and for a text instead of the function.
    """
    if name is not None:
        if LightningSpanAttributes.OPERATION_NAME.value in attributes:
            raise ValueError(f"name={name!r} and {LightningSpanAttributes.OPERATION_NAME.value!r} are both given")
        attributes[LightningSpanAttributes.OPERATION_NAME.value] = name
    context = OperationContext(AGL_OPERATION, attributes, propagate)
    if fn is None:
        return context
    if not callable(fn):
        raise ValueError(f"operation({fn!r}): a step has no name of its own; write operation(name={fn!r})")
    return context(fn)


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, with defaults. `*args` become a dict by position."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # wrong arguments: the call itself will raise the same error
        return {"args": _numbered(args), "kwargs": kwargs}
    bound.apply_defaults()
    several = {name for name, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_POSITIONAL}
    return {name: _numbered(value) if name in several else value for name, value in bound.arguments.items()}


def _numbered(values: Sequence[Any]) -> dict[str, Any]:
    return {str(index): value for index, value in enumerate(values)}


def _inputs(values: Mapping[str, Any]) -> dict[str, Any]:
    prefix = LightningSpanAttributes.OPERATION_INPUT.value
    return {f"{prefix}.{name}": value for name, value in values.items()}
