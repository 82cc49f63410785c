"""Make the OpenAPI document of the REST interface, which a server shows at `/openapi.json`.

It is made from `wire.ROUTES` and the annotations and docstrings of the protocol, so it describes what the server does.
Each route outside of that table has a function here. `docs/rest.md` is the guide for people.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from leyden import __version__
from leyden._lib.json import Json
from leyden.store.base import LightningStore
from leyden.store.ending import END, EndReply, WaitForEnd
from leyden.store.otlp import JSON, PROTOBUF, TRACES, receive
from leyden.store.wire import PREFIX, ROUTES, Route
from leyden.types import Unset

_ABOUT = (
    "A store of Leyden: rollouts, their attempts and spans, resources, workers, runs and their metrics. "
    "Request bodies and replies are JSON. An id in a path is percent-encoded; one that is also a word of these paths "
    "has all its bytes encoded. Request bodies may be gzip. Times are Unix seconds."
)
_ERRORS: dict[str, str] = {
    "400": "A parameter is wrong, unknown or missing, or the store does not take its value; nothing has changed.",
    "401": "The token is missing or wrong.",
    "403": "A web page of another site sent the request; or the host name is not this machine's, and there is no token.",
    "404": "There is nothing under this id, or at this path.",
    "405": "The path takes other verbs; `Allow` names them.",
    "409": "The lifecycle does not allow this change; nothing has changed.",
    "413": "The body is larger than the server takes at once.",
    "415": "The body is not JSON, or its compression is not supported.",
    "500": "An unexpected error; the server's log has it under the number in the message.",
    "503": "The store cannot do this now, or the server stops (`Retry-After`).",
}
_ERROR_SCHEMA: Json = {
    "type": "object",
    "required": ["error", "message"],
    "properties": {
        "error": {"type": "string", "description": "The kind: the name of a class in `leyden.errors`."},
        "message": {"type": "string", "description": "What happened, to what, and what to do about it."},
    },
}


_STATUS_SCHEMA: Json = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {"code": {"type": "integer"}, "message": {"type": "string"}},
    "description": "`google.rpc.Status`, as OTLP asks.",
}


@cache
def openapi_json() -> bytes:
    """Return the OpenAPI document as JSON."""
    return json.dumps(openapi()).encode()


@cache
def openapi() -> Json:
    """Return the OpenAPI 3.1 document."""
    schemas, definitions = _schemas()
    paths: Json = {f"{PREFIX}/health": {"get": _health()}, TRACES: {"post": _traces()}, END: {"post": _end()}}
    for route in ROUTES:
        paths.setdefault(PREFIX + route.path, {})[route.verb.lower()] = _operation(route, schemas)
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Leyden store", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "security": [{"token": []}, {}],
        "components": {
            "schemas": {**definitions, "Error": _ERROR_SCHEMA},
            "responses": {status: {"description": text, "content": error} for status, text in _ERRORS.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


Key = tuple[Route, str]
"""A route, and the name of one of its parameters, or "return" (its result), "body" (all parameters of a POST), "item"
or "items" (one or several things that a POST adds)."""


def _schemas() -> tuple[Mapping[Key, Json], Json]:
    """Return the JSON schema of each parameter, body and result in the table, and the definitions that they share."""
    adapters: dict[Key, TypeAdapter[Any]] = {}
    for route in ROUTES:
        adapters[route, "return"] = route.result_type
        if route.item is not None and route.items is not None:
            adapters[route, "item"], adapters[route, "items"] = route.item, route.items
        elif route.verb == "POST":
            adapters[route, "body"] = route.arguments
        for name in (*route.in_path, *(route.elsewhere if route.verb == "GET" else ())):
            adapters[route, name] = TypeAdapter(route.hints[name])
    made, shared = TypeAdapter.json_schemas(
        [(key, "validation", adapter) for key, adapter in adapters.items()],
        ref_template="#/components/schemas/{model}",
    )
    definitions = shared.get("$defs", {})
    schemas = {key: schema for (key, _), schema in made.items()}
    for (_, what), schema in schemas.items():
        if what == "body" and "$ref" in schema:  # no other route shares it, so write it in place
            schema |= definitions.pop(schema.pop("$ref").rpartition("/")[2])
    return schemas, definitions


def _operation(route: Route, schemas: Mapping[Key, Json]) -> Json:
    """Return a route's OpenAPI operation: its texts, parameters, request body and responses."""
    description = inspect.getdoc(getattr(LightningStore, route.method)) or ""
    by_query = route.verb == "GET" and any(other.method == route.method and other.verb == "POST" for other in ROUTES)
    answer = schemas[route, "return"]
    if (route, "items") in schemas and answer.get("type") == "array":
        answer = {
            "anyOf": [answer, {"anyOf": [answer["items"], {"type": "null"}]}],
            "description": "A list for a request with a list; for a request with one item, that item or null.",
        }
    responses: Json = {
        str(route.status): {"description": "The result.", "content": {"application/json": {"schema": answer}}}
    }
    if route.cached:
        responses["304"] = {"description": "The result that `If-None-Match` names is unchanged."}
    responses |= {status: {"$ref": f"#/components/responses/{status}"} for status in _ERRORS}
    operation: Json = {
        "operationId": f"{route.method}_by_query" if by_query else route.method,
        "summary": " ".join(description.partition("\n\n")[0].split()),
        "description": description,
        "tags": [route.segments[0]],
        "responses": responses,
    }
    parameters = [_parameter(route, name, schemas) for name in route.in_path]
    if route.verb == "GET":
        parameters += [_parameter(route, name, schemas) for name in route.elsewhere]
    else:
        operation["requestBody"] = _body(route, schemas)
    if parameters:
        operation["parameters"] = parameters
    return operation


def _parameter(route: Route, name: str, schemas: Mapping[Key, Json]) -> Json:
    in_path = name in route.in_path
    schema = _with_default(schemas[route, name], route, name)
    return {"name": name, "in": "path" if in_path else "query", "required": in_path, "schema": schema}


def _body(route: Route, schemas: Mapping[Key, Json]) -> Json:
    """Return the OpenAPI object of a request body: one or several items, or parameters by name."""
    if (route, "items") in schemas:
        schema: Json = {"anyOf": [schemas[route, "items"], schemas[route, "item"]]}
        required = True
    else:
        fields = schemas[route, "body"].get("properties", {})
        fields = {name: _with_default(part, route, name) for name, part in fields.items()}
        schema = schemas[route, "body"] | {"properties": fields}
        required = bool(schema.get("required"))
    return {"required": required, "content": {"application/json": {"schema": schema}}}


def _with_default(schema: Json, route: Route, name: str) -> Json:
    default = dict(route.left_out).get(name, route.signature.parameters[name].default)
    if default is inspect.Parameter.empty or isinstance(default, Unset):
        return schema
    return schema | {"default": to_jsonable_python(default)}


def _health() -> Json:
    answer = {"type": "object", "properties": {"status": {"const": "ok"}}, "required": ["status"]}
    return {
        "operationId": "health",
        "summary": "Whether the server runs. It needs no token.",
        "tags": ["health"],
        "security": [{}],
        "responses": {"200": {"description": "The server runs.", "content": {"application/json": {"schema": answer}}}},
    }


def _traces() -> Json:
    """Return the OpenAPI operation of OTLP/HTTP's `/v1/traces`, which is not in the table of routes."""
    encodings = {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}, JSON: {"schema": {"type": "object"}}}
    errors = {status: {"$ref": f"#/components/responses/{status}"} for status in _ERRORS}
    error = {"anyOf": [{"$ref": "#/components/schemas/Error"}, _STATUS_SCHEMA]}
    refused = {PROTOBUF: encodings[PROTOBUF], JSON: {"schema": error}}
    errors |= {status: {"description": _ERRORS[status], "content": refused} for status in ("400", "415")}
    return {
        "operationId": "export_traces",
        "summary": "OTLP/HTTP: spans from any OpenTelemetry exporter.",
        "description": (inspect.getdoc(receive) or ""),
        "tags": ["traces"],
        "requestBody": {"required": True, "content": encodings},
        "responses": {
            "200": {"description": "Stored; `partialSuccess` counts the refused spans.", "content": encodings}
        }
        | errors,
    }


def _end() -> Json:
    contents = {model: {"application/json": {"schema": model.model_json_schema()}} for model in (WaitForEnd, EndReply)}
    return {
        "operationId": "wait_for_end",
        "summary": "Wait for the end of the run that this server runs for.",
        "description": inspect.getdoc(WaitForEnd) or "",
        "tags": ["waits"],
        "requestBody": {"required": True, "content": contents[WaitForEnd]},
        "responses": {"200": {"description": "Whether the run has ended.", "content": contents[EndReply]}}
        | {status: {"$ref": f"#/components/responses/{status}"} for status in _ERRORS},
    }
