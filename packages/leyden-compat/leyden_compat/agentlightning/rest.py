# pyright: reportIncompatibleMethodOverride=false, reportReturnType=false, reportAbstractUsage=false
"""The REST interface for Agent Lightning 0.3's `LightningStoreClient`, over any store of Leyden.

The paths are Leyden's own. `OldStoreApp` differs in the bodies: rollouts under a key, resources as the whole body,
spans one by one with `links`, `context`, `parent` and `resource.schema_url`, and `null` for an unknown id. `EitherApp`
serves both kinds of client at one address. The module knows no socket; `store.LightningStoreServer` of this package and
`agl store` open one.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from typing import Any, Final, cast

from pydantic import model_serializer

from leyden._lib.host.http import Message, Receive, Scope, Send
from leyden.store.base import LightningStore
from leyden.store.store_app import JsonStore, StoreApp, StoreApplication
from leyden.store.wire import LEYDEN_JSON, Route, dump
from leyden.types import PaginatedResult, semconv
from leyden.types import Span as NativeSpan
from leyden_compat.agentlightning.store import OldStore
from leyden_compat.agentlightning.types import OtelResource, Span

_LEYDENS: Final = LEYDEN_JSON.encode()
"""The Accept header of Leyden's own client."""


class WireSpan(Span):
    """A span whose JSON is that of Agent Lightning 0.3."""

    @model_serializer(mode="wrap")
    def _with_old_fields(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return the span as Agent Lightning 0.3 writes it: links, context and parent are fields, the resource has a
        schema URL, and there are no token arrays.

        write: pydantic's serialiser of the present fields.
        """
        fields = write(self)
        fields.pop("tokens", None)
        fields["attributes"] = {name: value for name, value in fields["attributes"].items() if name != semconv.LINKS}
        fields["resource"] = {
            "attributes": fields["resource"],
            "schema_url": cast(OtelResource, self.resource).schema_url,
        }
        fields["links"] = [link.model_dump(mode="json") for link in self.links]
        fields["context"] = self.context.model_dump(mode="json")
        fields["parent"] = None if self.parent is None else self.parent.model_dump(mode="json")
        return fields


def _passed_on(name: str) -> Any:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(self.native, name)(*args, **options)

    return method


_METHODS: Final = sorted(LightningStore.__abstractmethods__ - {"url", "capabilities"})
PassedOn: Any = type("PassedOn", (LightningStore,), {name: _passed_on(name) for name in _METHODS})
"""Passes every method on to the attribute `native`."""


class NativeView(PassedOn):
    """A store whose methods return what Leyden's clients expect, also if the wrapped store returns what Agent
    Lightning's does.
    """

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self.native: Any = super(OldStore, store) if isinstance(store, OldStore) else store

    @property
    def url(self) -> str:
        """Return this property of the wrapped store."""
        return self._store.url

    @property
    def capabilities(self) -> Any:
        """Return the capabilities of the wrapped store."""
        return self._store.capabilities

    @property
    def json_methods(self) -> Container[str]:
        """The methods whose result the wrapped store writes as JSON itself."""
        return self._store.json_methods if isinstance(self._store, JsonStore) else ()

    def json_of(self, method: str, arguments: Mapping[str, Any], *, packed: bool) -> Awaitable[bytes]:
        """Return the result of a store method as the wrapped store writes it.

        packed: write tokens as base64 of their arrays.
        """
        return cast(JsonStore, self._store).json_of(method, arguments, packed=packed)


class OldView(OldStore, PassedOn):
    """A store whose methods return what Agent Lightning's store does, with spans in the form that its client reads."""

    def __init__(self, store: LightningStore) -> None:
        self.native = NativeView(store)

    @property
    def url(self) -> str:
        """Return this property of the wrapped store."""
        return self.native.url

    @property
    def capabilities(self) -> Any:
        """Return the capabilities of the wrapped store."""
        return self.native.capabilities

    async def query_spans(
        self, rollout_id: str | None = None, attempt_id: str | None = None, **options: Any
    ) -> PaginatedResult[NativeSpan]:
        """Return spans; none for an unknown id."""
        page = await super().query_spans(rollout_id, attempt_id, **options)
        return PaginatedResult([WireSpan.of(span) for span in page], page.limit, page.offset, page.total, page.exact)

    async def add_many_spans(self, spans: Sequence[NativeSpan]) -> Sequence[NativeSpan]:
        """Record spans and return them."""
        return [WireSpan.of(span) for span in await self.native.add_many_spans(spans)]


class OldStoreApp(StoreApp):
    """Serves a store to clients of Agent Lightning 0.3."""

    def __init__(self, store: LightningStore, **options: Any) -> None:
        super().__init__(OldView(store), **options)

    def read_arguments(self, route: Route, in_path: Sequence[str], query: bytes, body: bytes) -> dict[str, Any]:
        """Return the arguments of a request in the old form."""
        return route.read(in_path, query, _native_body(route.method, body))

    def write_result(
        self, route: Route, arguments: Mapping[str, Any], result: Any, body: bytes, *, packed: bool
    ) -> bytes:
        """Return the reply as Agent Lightning 0.3 writes it."""
        if route.method == "get_many_span_sequence_ids":
            return dump({"sequence_id": result[0]})
        if route.method == "enqueue_many_rollouts":
            return dump(result, packed=packed)
        return super().write_result(route, arguments, result, body, packed=packed)


class EitherApp:
    """Serves Leyden's clients by one application, and all others by another one."""

    def __init__(self, store: LightningStore, **options: Any) -> None:
        """Make both applications.

        options: those of `StoreApp`.
        """
        self._native, self._old = StoreApp(NativeView(store), **options), OldStoreApp(store, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Leyden's clients are known by the form of JSON that they accept."""
        is_leydens = dict(scope["headers"]).get(b"accept") == _LEYDENS
        await (self._native if is_leydens else self._old)(scope, receive, send)

    def stop_waiting(self) -> None:
        """Reply to every waiting request now, because the server stops."""
        self._native.stop_waiting()
        self._old.stop_waiting()


class AllowsPages:
    """An ASGI application before the store's, which admits web pages of the origins that a program has named (CORS).
    Without it, pages of other sites are refused.

    origins: such as `https://page.example`; `*` admits every page that a browser opens.
    """

    def __init__(self, app: StoreApplication, origins: Sequence[str]) -> None:
        self._app, self._origins = app, frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. A page's preflight request is answered here."""
        headers: list[tuple[bytes, bytes]] = scope.get("headers", [])
        origin = dict(headers).get(b"origin")
        if scope["type"] != "http" or origin is None or not self._origins & {"*", origin.decode("latin-1")}:
            return await self._app(scope, receive, send)
        allowed = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        allowed.append((b"access-control-allow-credentials", b"true"))
        if scope["method"] == "OPTIONS":
            asked = dict(headers).get(b"access-control-request-headers", b"content-type")
            allowed += [
                (b"access-control-allow-headers", asked),
                (b"access-control-allow-methods", b"GET, POST, DELETE"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": [*allowed, (b"content-length", b"0")]})
            return await send({"type": "http.response.body", "body": b""})

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                exposed = (b"access-control-expose-headers", b"*")
                message = {**message, "headers": [*message["headers"], *allowed, exposed]}
            await send(message)

        own = [(name, value) for name, value in headers if name not in (b"origin", b"sec-fetch-site")]
        await self._app({**scope, "headers": own}, receive, send_allowed)

    def stop_waiting(self) -> None:
        """Reply to every waiting request now, because the server stops."""
        self._app.stop_waiting()


def _native_body(method: str, body: bytes) -> bytes:
    """Convert a request body of Agent Lightning's client to Leyden's form.

    A body that cannot be converted is returned as it is; reading its arguments then refuses it.
    """
    if method not in _BODIES:
        return body
    try:
        return json.dumps(_BODIES[method](json.loads(body))).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return body


def _native_span(given: Mapping[str, Any]) -> dict[str, Any]:
    span = Span.model_validate(given)
    kept = NativeSpan.model_fields.keys() - {"tokens"}
    return {name: value for name, value in span.model_dump(mode="json").items() if name in kept}


_BODIES: Final[Mapping[str, Callable[[Any], Any]]] = {
    "enqueue_many_rollouts": lambda body: body["rollouts"],
    "add_resources": lambda body: {"resources": body},
    "update_resources": lambda body: {"resources": body},
    "add_many_spans": _native_span,
    "get_many_span_sequence_ids": lambda body: {"rollout_attempt_ids": [[body["rollout_id"], body["attempt_id"]]]},
}
"""Functions that turn a request body of Agent Lightning's client into Leyden's, by store method."""
