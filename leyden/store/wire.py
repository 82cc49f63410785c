"""The store's REST interface as one table that server, client and OpenAPI document read.

A line of `ROUTES` names a method of `LightningStore`, its verb and its path. The rest comes from the protocol's
annotations: parameters named in the path are read from the path, all others from the JSON body (POST) or the query
string (GET). A parameter that is left out has the protocol's default. The reply is the method's result as JSON.

The module knows no socket. To serve a new method, add a line to `ROUTES`. A test compares the table with the protocol.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, NotRequired
from urllib.parse import parse_qsl, quote, unquote, unquote_to_bytes, urlencode

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python
from typing_extensions import TypedDict

import leyden.errors
from leyden._lib.numbers import exact_number
from leyden._lib.text import fault_reason
from leyden.errors import (
    ConfigError,
    IllegalTransition,
    LabelMoved,
    LeydenError,
    ReleaseAdvanced,
    StoreError,
    UnknownAttempt,
    UnknownRelease,
    UnknownResources,
    UnknownRollout,
    UnknownRun,
    UnknownWorker,
    VersionFrozen,
)
from leyden.store.base import LightningStore
from leyden.store.sql.rows import numbered
from leyden.types import AttemptedRollout, PaginatedResult, Rollout, Span, Unset
from leyden.types.checks import MAX_JSON_DEPTH, json_value
from leyden.types.tokens import PACKED

PREFIX = "/v1/agl"
LEYDEN_JSON = "application/json;dialect=leyden"
"""The media type of replies to Leyden's own client. Token records are the bytes of `TokenRecord.pack` in base64, an
eighth of the lists that other clients get. For added spans, which the client has itself, the reply holds only their
indices in the request and their sequence ids."""

_STATUS: dict[type[LeydenError], int] = {
    UnknownRollout: 404,
    UnknownAttempt: 404,
    UnknownResources: 404,
    UnknownRun: 404,
    UnknownWorker: 404,
    IllegalTransition: 409,
    LabelMoved: 409,
    ReleaseAdvanced: 409,
    VersionFrozen: 409,
    UnknownRelease: 404,
    ConfigError: 400,
    StoreError: 503,
}

_ON_THE_WIRE: dict[str, Any] = {
    "int": Annotated[int, Field(ge=-(2**63), lt=2**63)],
    "float": Annotated[float, Field(allow_inf_nan=False)],
    "Rollout": Annotated[AttemptedRollout | Rollout, Field(union_mode="left_to_right")],
}
"""Types that replace the protocol's for JSON: numbers are limited to those that a database takes, and a rollout with an
attempt is read as such."""


@dataclass(frozen=True)
class Route:
    """One line of the route table, and what the protocol's annotations add to it."""

    verb: Literal["GET", "POST"]
    path: str
    """The path below PREFIX. `{name}` is a parameter of the method."""
    method: str
    status: int = 200
    body_is: str | None = None
    """The parameter that is the whole body: a list of items, or one item, to which the reply is one item too. None: the
    body is an object with the parameters by name."""
    repeatable: bool = True
    """Whether a client may send the request again without knowing the outcome of the first; see the protocol."""
    left_out: tuple[tuple[str, Any], ...] = ()
    """Defaults of parameters in a request, instead of the protocol's defaults, which would depend on the state of the
    server's store object."""
    cached: bool = False
    """Whether the reply has an ETag, so that a client need not load it twice."""
    echoes: bool = False
    """Whether the reply repeats spans of the body with their sequence ids, which LEYDEN_JSON abbreviates."""

    @cached_property
    def segments(self) -> tuple[str, ...]:
        return tuple(self.path.strip("/").split("/"))

    @cached_property
    def signature(self) -> inspect.Signature:
        """The method's parameters, without `self`."""
        signature = inspect.signature(getattr(LightningStore, self.method))
        return signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "self"])

    @cached_property
    def hints(self) -> dict[str, Any]:
        """Each parameter's type on the wire, and the result's type under "return"."""
        function = getattr(LightningStore, self.method)
        hints = typing.get_type_hints(function, localns=_ON_THE_WIRE, include_extras=True)
        return {name: _without_unset(hint) for name, hint in hints.items()}

    @cached_property
    def in_path(self) -> tuple[str, ...]:
        return tuple(re.findall(r"{(\w+)}", self.path))

    @cached_property
    def elsewhere(self) -> tuple[str, ...]:
        """The parameters that body or query hold."""
        names = [name for name in self.signature.parameters if name not in self.in_path]
        if self.verb == "GET":
            names = [name for name in names if _kind(self.hints[name]) != "mapping"]
        return tuple(names)

    @cached_property
    def waits(self) -> str | None:
        """The parameter with the seconds that the request may wait; None if it never waits."""
        return next((name for name in ("timeout_seconds", "timeout") if name in self.signature.parameters), None)

    @cached_property
    def arguments(self) -> TypeAdapter[dict[str, Any]]:
        """The type of the body's or query's parameters by name. Those with a default are optional."""
        fields: dict[str, Any] = {}
        for name in self.elsewhere:
            required = self.signature.parameters[name].default is inspect.Parameter.empty
            hint = _failing_fast(self.hints[name])
            fields[name] = hint if required else NotRequired[hint]
        title = "".join(word.capitalize() for word in self.method.split("_")) + "Request"
        return TypeAdapter(with_config(ConfigDict(extra="forbid"))(_typed_dict(title, fields)))

    @cached_property
    def item(self) -> TypeAdapter[Any] | None:
        return None if self.body_is is None else TypeAdapter(typing.get_args(self.hints[self.body_is])[0])

    @cached_property
    def items(self) -> TypeAdapter[Any] | None:
        if self.body_is is None:
            return None
        hint: Any = Annotated[_failing_fast(self.hints[self.body_is]), Field(max_length=MAX_ITEMS)]
        return TypeAdapter(hint)

    @cached_property
    def result_type(self) -> TypeAdapter[Any]:
        """The type of the method's result, or the fields of a page."""
        hint = self.hints["return"]
        return TypeAdapter(_page_of(typing.get_args(hint)[0]) if self.is_page else hint)

    @property
    def is_page(self) -> bool:
        return typing.get_origin(self.hints["return"]) is PaginatedResult

    # ---- the server's side -----------------------------------------------------------------------

    def read(self, in_path: Sequence[str], query: bytes, body: bytes) -> dict[str, Any]:
        """Return the method's arguments by name. Raise ConfigError, which names the fault and where it is."""
        # `in` for one letter is faster than for a word, and most bodies contain neither letter.
        if (b"N" in body and b"NaN" in body) or (b"I" in body and b"Infinity" in body):
            _refuse_constants(body)
        arguments: dict[str, Any] = dict(self.left_out) | dict(zip(self.in_path, in_path, strict=True))
        try:
            if self.verb == "GET":
                return arguments | self.arguments.validate_python(self._from_query(query))
            if query:
                raise ConfigError(f"{self} takes its parameters in the body, got the query {query.decode('latin-1')!r}")
            if self.items is None:
                return arguments | load(self.arguments, body or b"{}")
            assert self.body_is is not None and self.item is not None
            if self.is_one(body):
                return arguments | {self.body_is: [load(self.item, body)]}
            return arguments | {self.body_is: load(self.items, body)}
        except ValidationError as error:
            if self.items is not None and error.errors(include_url=False, include_input=False)[0]["type"] == "too_long":
                raise ConfigError(
                    f"{self}: the list has more than {MAX_ITEMS:,} {self.body_is}, the most of one request; send fewer at a time"
                ) from None
            raise ConfigError(f"{self}: {_faults(error)}") from None

    def encode_result(self, arguments: Mapping[str, Any], result: Any, body: bytes, *, packed: bool) -> bytes:
        """Return a result as the JSON of the reply. A request for one item (`body`) gets one item or null.

        packed: write tokens as base64 of their arrays (LEYDEN_JSON), for Leyden's client.
        """
        if self.echoes and packed:
            assert self.body_is is not None
            indices: dict[tuple[str, str, str], int] = {}
            for index, span in enumerate(arguments[self.body_is]):
                indices.setdefault((span.rollout_id, span.attempt_id, span.span_id), index)
            short = [(indices[span.rollout_id, span.attempt_id, span.span_id], span.sequence_id) for span in result]
            return dump(short)
        return dump((result[0] if result else None) if self.is_one(body) else result, packed=packed)

    def is_one(self, body: bytes) -> bool:
        return self.body_is is not None and not body.lstrip().startswith(b"[")

    def _from_query(self, query: bytes) -> dict[str, Any]:
        """Return the parameters of a query string by name, as text. A list's parameter may repeat.

        Raise ConfigError for a malformed query, or if a single-valued parameter is given twice.
        """
        try:
            pairs = parse_qsl(
                query.decode("ascii"), keep_blank_values=True, strict_parsing=bool(query), errors="strict"
            )
        except ValueError as error:
            raise ConfigError(f"{self}: the query {query.decode('latin-1')!r} cannot be read: {error}") from None
        given: dict[str, Any] = {}
        for name, value in pairs:
            if name in self.hints and _kind(self.hints[name]) == "list":
                given.setdefault(name, []).append(value)
            elif name in given:
                raise ConfigError(f"{self}: {name} is given twice")
            else:
                given[name] = value
        return given

    # ---- the client's side -----------------------------------------------------------------------

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without UNSET. Raise TypeError as the call does."""
        positional, names, required = self._parameters
        if len(args) <= len(positional):
            arguments = dict(zip(positional, args, strict=False))
            if kwargs.keys() <= names and arguments.keys().isdisjoint(kwargs):
                arguments.update(kwargs)
                if required <= arguments.keys():
                    return {name: value for name, value in arguments.items() if not isinstance(value, Unset)}
        self.signature.bind(*args, **kwargs)
        raise AssertionError(
            f"`bind` refused a call of {self.method} that its signature allows; this is a bug in Leyden"
        )

    def path_of(self, arguments: Mapping[str, Any]) -> str:
        """Return the path of one call, with the query of a GET. Raise ConfigError for an id that no URL can hold."""
        parts = [_quoted(arguments[part[1:-1]], part) if part[0] == "{" else part for part in self.segments]
        query: dict[str, Any] = {}
        if self.verb == "GET":
            query = {name: arguments[name] for name in self.elsewhere if arguments.get(name) is not None}
        return f"{PREFIX}/{'/'.join(parts)}" + (f"?{urlencode(query)}" if query else "")

    def body_of(self, arguments: Mapping[str, Any]) -> bytes:
        """Return the body of one call.

        Raise ConfigError, which names it, for a value that is not JSON.
        """
        given = {
            name: _exact(value, name, free=_is_free(self.hints[name])) if name in self._holding_any_json else value
            for name, value in arguments.items()
            if name not in self.in_path
        }
        return dump(given, "") if self.body_is is None else dump(given[self.body_is], self.body_is)

    def result_from(self, arguments: Mapping[str, Any], body: bytes) -> Any:
        """Return the method's result from a reply in LEYDEN_JSON. Raise ValueError for another body."""
        if self.echoes:
            assert self.body_is is not None
            sent: Sequence[Span] = arguments[self.body_is]
            short: list[tuple[int, int]] = load(_SHORT, body)
            return [
                sent[index] if sent[index].sequence_id == number else numbered(sent[index], number)
                for index, number in short
            ]
        result = load(self.result_type, body)
        return PaginatedResult(**result) if self.is_page else result

    @cached_property
    def _parameters(self) -> tuple[list[str], frozenset[str], frozenset[str]]:
        """The names of the parameters that may be given by position, of all, and of those without a default."""
        parameters = self.signature.parameters.values()
        positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        required = frozenset(p.name for p in parameters if p.default is inspect.Parameter.empty)
        return positional, frozenset(self.signature.parameters), required

    @cached_property
    def _holding_any_json(self) -> frozenset[str]:
        """The arguments that hold parts which may be any JSON."""
        return frozenset(name for name, hint in self.hints.items() if _is_free(hint) or _has_free_fields(hint))

    def __str__(self) -> str:
        return f"{self.verb} {PREFIX}{self.path}"


ROUTES: tuple[Route, ...] = (
    Route("GET", "/statistics", "statistics"),
    # the queue
    Route("POST", "/queues/rollouts/enqueue", "enqueue_many_rollouts", status=201, body_is="rollouts"),
    Route("POST", "/queues/rollouts/dequeue", "dequeue_many_rollouts"),
    Route("POST", "/queues/rollouts/undo", "undo_claim"),
    Route("POST", "/queues/rollouts/release", "release_claims", repeatable=False),
    # rollouts and their attempts
    Route("POST", "/rollouts", "start_rollout", status=201),
    Route("GET", "/rollouts", "query_rollouts"),
    Route("POST", "/rollouts/search", "query_rollouts"),
    Route("POST", "/rollouts/summary", "summarise_rollouts"),
    Route("POST", "/pins/{name}", "pin"),
    Route("POST", "/prune", "prune"),
    Route("GET", "/rollouts/{rollout_id}", "get_rollout_by_id"),
    Route("POST", "/rollouts/{rollout_id}", "update_rollout"),
    Route("GET", "/rollouts/{rollout_id}/attempts", "query_attempts"),
    Route("POST", "/rollouts/{rollout_id}/attempts", "start_attempt", status=201),
    Route("POST", "/rollouts/{rollout_id}/attempts/search", "query_attempts"),
    Route("GET", "/rollouts/{rollout_id}/attempts/latest", "get_latest_attempt"),
    Route("GET", "/rollouts/{rollout_id}/attempts/{attempt_id}", "get_attempt_by_id"),
    Route("POST", "/rollouts/{rollout_id}/attempts/{attempt_id}", "update_attempt"),
    Route("POST", "/attempts/update", "update_many_attempts", body_is="updates"),
    # spans
    Route("POST", "/spans", "add_many_spans", status=201, body_is="spans", echoes=True),
    Route("GET", "/spans", "query_spans"),
    Route("POST", "/spans/search", "query_spans"),
    Route("POST", "/spans/of", "query_spans_of"),
    Route("POST", "/spans/next", "get_many_span_sequence_ids"),
    Route("POST", "/spans/new", "poll_new_spans", left_out=(("after", None),)),
    Route("POST", "/spans/index", "index_span_attribute"),
    # waiting, and the owner's schedule
    Route("POST", "/waits/rollouts", "wait_for_rollouts"),
    Route("POST", "/waits/any", "wait_for_any_rollout"),
    Route("POST", "/waits/news", "get_news"),
    Route("POST", "/sweep", "sweep"),
    Route("GET", "/sweep/next", "next_deadline"),
    # resources
    Route("POST", "/resources", "add_resources", status=201),
    Route("GET", "/resources", "query_resources"),
    Route("POST", "/resources/search", "query_resources"),
    Route("GET", "/resources/latest", "get_latest_resources", cached=True),
    Route("GET", "/resources/{resources_id}", "get_resources_by_id", cached=True),
    Route("GET", "/labels", "get_labels"),
    Route("GET", "/labels/{label}", "get_labelled_resources", cached=True),
    Route("POST", "/labels/{label}", "set_label"),
    Route("POST", "/labels/{label}/remove", "remove_label"),
    Route("POST", "/labels", "move_labels"),
    Route("POST", "/endpoints/{name}", "set_endpoint"),
    Route("POST", "/resources/{resources_id}/freeze", "freeze_resources"),
    Route("GET", "/audit", "query_audit"),
    # releases and feedback
    Route("GET", "/releases", "query_releases"),
    Route("POST", "/releases/search", "query_releases"),
    Route("GET", "/releases/{release_id}", "get_release"),
    Route("POST", "/releases/{release_id}", "create_release", status=201),
    Route("POST", "/releases/{release_id}/advance", "advance_release"),
    Route("POST", "/live", "record_live_rollouts", body_is="rollouts"),
    Route("POST", "/feedback", "add_many_feedback", status=201, body_is="feedback"),
    Route("GET", "/feedback", "query_feedback"),
    Route("POST", "/feedback/search", "query_feedback"),
    Route("POST", "/resources/{resources_id}", "update_resources"),
    # workers
    Route("GET", "/workers", "query_workers"),
    Route("POST", "/workers/search", "query_workers"),
    Route("GET", "/workers/{worker_id}", "get_worker_by_id"),
    Route("POST", "/workers/{worker_id}", "update_worker"),
    Route("POST", "/workers/{worker_id}/pause", "pause_worker"),
    # samples
    Route("POST", "/samples", "add_many_samples", status=201, body_is="samples"),
    Route("GET", "/samples", "query_samples"),
    Route("POST", "/samples/search", "query_samples"),
    # runs and their metrics
    Route("POST", "/runs", "start_run", status=201),
    Route("GET", "/runs", "query_runs"),
    Route("POST", "/runs/search", "query_runs"),
    Route("GET", "/runs/{run_id}", "get_run_by_id"),
    Route("GET", "/runs/{run_id}/spending", "sum_spending"),
    Route("POST", "/runs/{run_id}", "update_run"),
    Route("POST", "/runs/{run_id}/metrics", "add_metrics", status=201, body_is="points"),
    Route("GET", "/runs/{run_id}/metrics", "query_metrics"),
    Route("POST", "/runs/{run_id}/metrics/search", "query_metrics"),
    Route("POST", "/runs/{run_id}/metrics/cut", "cut_metrics"),
)

BY_METHOD: Mapping[str, Route] = {route.method: route for route in ROUTES}
"""The route that a client takes for each method. Of two routes it is the one with a body, which can hold every
parameter, unlike a query."""

_WORDS = frozenset(part for route in ROUTES for part in route.segments if part[0] != "{")
"""The fixed segments of all paths."""


# ---- finding a route -----------------------------------------------------------------------------


class _Node:
    """A node in the tree of paths: the nodes below it by fixed segment and by id, and its routes by verb."""

    def __init__(self) -> None:
        self.by_word: dict[str, _Node] = {}
        self.by_id: _Node | None = None
        self.routes: dict[str, Route] = {}


def _tree() -> _Node:
    """Return the root of the tree of all routes' paths."""
    root = _Node()
    for route in ROUTES:
        node = root
        for part in route.segments:
            if part[0] == "{":
                node.by_id = node = node.by_id or _Node()
            else:
                node = node.by_word.setdefault(part, _Node())
        node.routes[route.verb] = route
    return root


_ROOT = _tree()
_WITHOUT_IDS = {(route.verb, PREFIX + route.path): route for route in ROUTES if not route.in_path}
"""The routes whose whole path is fixed, which need no walk through the tree."""


def find_route(verb: str, raw_path: str) -> tuple[Route, list[str]] | None:
    """Return the route at a raw (quoted) path of a request and the ids in it; None if there is none.

    A fixed segment of the table is never read as an id: a client quotes an id that looks like one. Raise ConfigError
    for an id that is not UTF-8.
    """
    if route := _WITHOUT_IDS.get((verb, raw_path)):
        return route, []
    for node, ids in _nodes_at(raw_path):
        if verb in node.routes:
            return node.routes[verb], [_unquoted(part) for part in ids]
    return None


def verbs_at(raw_path: str) -> list[str]:
    return sorted({verb for node, _ in _nodes_at(raw_path) for verb in node.routes})


def _nodes_at(raw_path: str) -> Iterator[tuple[_Node, list[str]]]:
    """Yield the nodes that a path leads to: by its fixed segments first, then by ids."""
    if not raw_path.startswith(f"{PREFIX}/"):
        return
    found: list[tuple[_Node, list[str]]] = [(_ROOT, [])]
    for part in raw_path[len(PREFIX) + 1 :].split("/"):
        step = [(node.by_word[part], ids) for node, ids in found if part in node.by_word]
        found = step + [(node.by_id, [*ids, part]) for node, ids in found if node.by_id is not None]
    yield from found


def _quoted(value: Any, part: str) -> str:
    """Return an id for the path, percent-encoded. Raise ConfigError for one that no URL can hold.

    part: the segment of the route's path, `{name}`.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{part[1:-1]} must be a string, got {value!r}")
    try:
        quoted = quote(value, safe="")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{part[1:-1]} {value!r} is not Unicode text: {error.reason}") from None
    # Encode every byte of an id that would be taken for a fixed segment, or for a relative path.
    if quoted in _WORDS or quoted in (".", ".."):
        quoted = "".join(f"%{byte:02X}" for byte in value.encode())
    return quoted


def _unquoted(part: str) -> str:
    if "%" not in part:
        return part
    try:
        return unquote(part, errors="strict")
    except UnicodeDecodeError:
        raise ConfigError(f"the id {unquote_to_bytes(part)!r} in the path is not UTF-8") from None


# ---- JSON ----------------------------------------------------------------------------------------


def dump(value: Any, name: str = "the result", *, packed: bool = True) -> bytes:
    """Return `value` as JSON. Raise ConfigError, which names it, for a part that is not JSON.

    name: how the error calls `value`.
    packed: write tokens as base64 of their arrays (LEYDEN_JSON), for Leyden's client.
    """
    context = PACKED if packed else None
    try:
        return to_json(value, context=context, fallback=exact_number)
    except PydanticSerializationError as error:
        try:  # a lone surrogate is no UTF-8, and still a JSON string
            return json.dumps(to_jsonable_python(value, context=context, fallback=exact_number)).encode()
        except (TypeError, ValueError, RecursionError):
            where, reason = _culprit(value, name, error)
            raise ConfigError(f"{where} must be a JSON value: {reason}") from None


def _exact(value: Any, name: str, *, free: bool) -> Any:
    """Return an argument of the protocol with its free parts as JSON has them (`json_value`).

    name: how errors call the argument.
    free: whether it may be any JSON.
    """
    if free:
        return json_value(value, name)
    if isinstance(value, BaseModel):
        given = {field: getattr(value, field) for field in _free_fields(type(value))}
        parts = {field: json_value(part, f"{name}.{field}") for field, part in given.items()}
        return value.model_copy(update=parts) if any(parts[field] is not given[field] for field in parts) else value
    if isinstance(value, Mapping):
        named = typing.cast("Mapping[str, Any]", value).items()
        return {key: _exact(part, f"{name}[{key!r}]", free=False) for key, part in named}
    if isinstance(value, list | tuple):
        parts_of = enumerate(typing.cast("Sequence[Any]", value))
        return [_exact(part, f"{name}[{index}]", free=False) for index, part in parts_of]
    return value


@cache
def _free_fields(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name, field in model.model_fields.items() if _is_free(field.annotation))


def _has_free_fields(hint: Any) -> bool:
    """Return whether a type is, or a mapping or a list of, a model with a field that may be any JSON."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return bool(_free_fields(hint))
    return any(map(_has_free_fields, typing.get_args(hint)))


def _is_free(hint: Any) -> bool:
    return hint is Any or any(map(_is_free, typing.get_args(hint)))


def _culprit(value: Any, name: str, error: Exception) -> tuple[str, Exception]:
    """Return the innermost part of `value` that cannot be JSON, and why."""
    path = [name]
    while len(path) <= MAX_JSON_DEPTH:
        for where, part in _parts(value, path[-1]):
            try:
                to_json(part, fallback=exact_number)
            except PydanticSerializationError as reason:
                value, error = part, reason
                path.append(where)
                break
        else:
            return path[-1], error
    return path[3], ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a mapping, a list or a model, each with its path under `name`."""
    if isinstance(value, Mapping):
        for key, part in typing.cast("Mapping[Any, Any]", value).items():
            yield (f"{name}[{key!r}]" if name else str(key)), part
    elif isinstance(value, list | tuple):
        for index, part in enumerate(typing.cast("Sequence[Any]", value)):
            yield f"{name}[{index}]", part
    elif isinstance(value, BaseModel):
        for field in type(value).model_fields:
            yield f"{name}.{field}", getattr(value, field)


def load(adapter: TypeAdapter[Any], body: bytes) -> Any:
    """Return the value that `dump` wrote as JSON. Raise ValidationError for another type."""
    try:
        return adapter.validate_json(body, strict=True)
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid" or b"\\u" not in body:
            raise
        try:  # the body may hold a lone surrogate, which pydantic's parser refuses and Python's does not
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            raise error from None
        return adapter.validate_python(parsed)


MAX_ITEMS = 20_000
"""The most items of one bulk request.

It is one transaction, which delays other writes by about half a second.
"""
_SHORT: TypeAdapter[list[tuple[int, int]]] = TypeAdapter(list[tuple[int, int]])
"""The index of each added span among those that were sent, and its sequence id."""


def _refuse_constants(body: bytes) -> None:
    """Raise ConfigError if the body has NaN or infinity, which parsers may accept. Validation finds other faults."""

    def refuse(name: str) -> None:
        raise ConfigError(f"the body has the number {name}, and JSON has finite ones only; leave it out, or write null")

    try:
        json.loads(body, parse_constant=refuse)
    except ConfigError:
        raise
    except (ValueError, RecursionError):  # also a number with too many digits
        pass


def _faults(error: ValidationError) -> str:
    """Return the first three faults and where they are, in one line."""
    if error.error_count() > _FAULTS:
        return f"the request has {error.error_count()} faults, too many to name; send one item to see its fault"
    faults: list[str] = []
    for fault in error.errors(include_url=False)[:3]:
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
        what = "unknown parameter" if fault["type"] == "extra_forbidden" else fault_reason(fault)
        text = repr(fault["input"])
        text = text if len(text) <= 80 else f"{text[:80]}..."
        got = "" if fault["type"] in ("missing", "extra_forbidden", "json_invalid") else f", got {text}"
        faults.append(f"{where or 'the body'}: {what}{got}")
    more = error.error_count() - len(faults)
    return "; ".join(faults) + (f"; and {more} more" if more > 0 else "")


_FAULTS = 1000
"""The most faults of which the first are named. With more, that takes seconds, because pydantic lists all faults or
none."""


def _without_unset(hint: Any) -> Any:
    """Return the type without `Unset`: a parameter that is UNSET is left out of the request."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _union(part for part in typing.get_args(hint) if part is not Unset)
    return hint


def _union(hints: Iterator[Any]) -> Any:
    union = next(hints)
    for hint in hints:
        union |= hint
    return union


def _page_of(item: Any) -> Any:
    """Return the JSON type of a `PaginatedResult` of these items."""
    named: Any = item
    while typing.get_origin(named) is not None:  # the page is named after the last member of a union
        parts = typing.get_args(named)
        named = parts[0] if typing.get_origin(named) is Annotated else parts[-1]
    fields = {"items": list[item], "limit": int, "offset": int, "total": int, "exact": bool}
    return _typed_dict(f"PageOf{named.__name__}", fields)


_typed_dict: Any = TypedDict
"""`TypedDict` for fields that are made at run time, which type checkers refuse."""


def _failing_fast(hint: Any) -> Any:
    """Return the type with lists that fail fast, because a fault's report takes a hundred times the byte's memory."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Sequence:
        return Annotated[list[arguments[0]], Field(fail_fast=True)]
    if origin in (typing.Union, types.UnionType):
        return _union(map(_failing_fast, arguments))
    return hint


def _kind(hint: Any) -> Literal["list", "mapping", "value"]:
    origins = {typing.get_origin(part) for part in (hint, *typing.get_args(hint))}
    if origins & {Mapping, dict}:
        return "mapping"
    return "list" if origins & {Sequence, list} else "value"


# ---- errors --------------------------------------------------------------------------------------


def status_of(error: LeydenError) -> int:
    """Return the HTTP status that stands for an error."""
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)


def error_from(status: int, body: bytes, url: str) -> LeydenError:
    """Return the error that a server replied with, as it was raised; a StoreError for a reply that is no store's."""
    try:
        sent = json.loads(body)
        kind, message = getattr(leyden.errors, sent["error"]), sent["message"]
        if issubclass(kind, LeydenError) and isinstance(message, str):
            return kind(message)
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    text = body[:200].decode("utf-8", "replace").strip()
    return StoreError(
        f"{url} replied with status {status} and no error of a Leyden store; is another program there? "
        f"It says: {text or '(no text)'}"
    )
