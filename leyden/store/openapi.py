"""The REST interface for people and their tools: an OpenAPI document and a page to read, both made from the table.

Both come from `wire.ROUTES` and the protocol's annotations and docstrings, so they say what the server does.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from html import escape
from typing import Any

from pydantic import TypeAdapter

from leyden import __version__
from leyden.host.http import HttpReply
from leyden.store.base import LightningStore
from leyden.store.ending import END, EndAnswer, WaitForEnd
from leyden.store.otlp import JSON, PROTOBUF, TRACES, receive
from leyden.store.wire import PREFIX, ROUTES, Route
from leyden.types import Unset

Schema = dict[str, Any]

_ABOUT = (
    "A store of Leyden: rollouts, their attempts and spans, resources, workers, runs and their metrics. "
    "Bodies and answers are JSON. An id in a path is percent-encoded; one that is also a word of these paths "
    "has all its bytes encoded. Request bodies may be gzip. Times are Unix seconds."
)
_ERRORS: dict[str, str] = {
    "400": "A parameter is wrong, unknown or missing, or there is a value that the store does not take; nothing has changed.",
    "401": "The token is missing or wrong.",
    "403": "A web page of another site sent the request; or the host name is not this machine's, and there is no token.",
    "404": "There is nothing under this id, or at this path.",
    "405": "The path takes other verbs; `Allow` names them.",
    "409": "The lifecycle does not allow this change; nothing has changed.",
    "413": "The body is larger than the server takes at once.",
    "415": "The body is not JSON, or compressed in a way that is not read here.",
    "500": "An error that nobody foresaw; the server's log has it under the number in the message.",
    "503": "The store cannot do this now, or the server stops (`Retry-After`).",
}
_ERROR_SCHEMA: Schema = {
    "type": "object",
    "required": ["error", "message"],
    "properties": {
        "error": {"type": "string", "description": "The kind: the name of a class in `leyden.errors`."},
        "message": {"type": "string", "description": "What happened, to what, and what to do about it."},
    },
}


_STATUS_SCHEMA: Schema = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {"code": {"type": "integer"}, "message": {"type": "string"}},
    "description": "`google.rpc.Status`, as OTLP asks.",
}


def pages() -> Mapping[str, Callable[[], HttpReply]]:
    """What a server shows at `/openapi.json` and `/docs`."""
    return {"/openapi.json": _document_page, "/docs": _reading_page}


@cache
def openapi() -> Schema:
    """The OpenAPI 3.1 document."""
    schemas, definitions = _schemas()
    paths: Schema = {f"{PREFIX}/health": {"get": _health()}, TRACES: {"post": _traces()}, END: {"post": _end()}}
    for route in ROUTES:
        paths.setdefault(PREFIX + route.path, {})[route.verb.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Leyden store", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "security": [{"token": []}, {}],
        "components": {
            "schemas": {**definitions, "Error": _ERROR_SCHEMA},
            "responses": {status: _error_response(text) for status, text in _ERRORS.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


# ---- the document ------------------------------------------------------------------------------------------------------

Key = tuple[Route, str]
"""A route and one of its parameters, or "return", "body", "item", "items"."""


def _schemas() -> tuple[Mapping[Key, Schema], Schema]:
    """The JSON schema of everything in the table, and the definitions that they share."""
    adapters: dict[Key, TypeAdapter[Any]] = {}
    for route in ROUTES:
        adapters[route, "return"] = route.answer
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
        if what == "body" and "$ref" in schema:  # of one route alone, so it stands there
            schema |= definitions.pop(schema.pop("$ref").rpartition("/")[2])
    return schemas, definitions


def _operation(route: Route, schemas: Mapping[Key, Schema]) -> Schema:
    summary, description = _doc(route)
    answer = schemas[route, "return"]
    if (route, "items") in schemas and answer.get("type") == "array":
        answer = {
            "anyOf": [answer, _item_of(answer)],
            "description": "A list for a list; for one item that one, or null.",
        }
    responses: Schema = {
        str(route.status): {"description": "The answer.", "content": {"application/json": {"schema": answer}}}
    }
    if route.cached:
        responses["304"] = {"description": "What `If-None-Match` names still holds."}
    responses |= {status: {"$ref": f"#/components/responses/{status}"} for status in _ERRORS}
    operation: Schema = {
        "operationId": route.method
        if route.verb == "POST" or not _has_body_twin(route)
        else f"{route.method}_by_query",
        "summary": summary,
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


def _has_body_twin(route: Route) -> bool:
    return any(other.method == route.method and other.verb == "POST" for other in ROUTES)


def _doc(route: Route) -> tuple[str, str]:
    """The first sentence of the method's docstring, and the whole."""
    text = inspect.getdoc(getattr(LightningStore, route.method)) or ""
    return text.partition("\n")[0], text


def _parameter(route: Route, name: str, schemas: Mapping[Key, Schema]) -> Schema:
    in_path = name in route.in_path
    schema = _with_default(schemas[route, name], route, name)
    return {"name": name, "in": "path" if in_path else "query", "required": in_path, "schema": schema}


def _body(route: Route, schemas: Mapping[Key, Schema]) -> Schema:
    if (route, "items") in schemas:
        schema: Schema = {"anyOf": [schemas[route, "items"], schemas[route, "item"]]}
        required = True
    else:
        fields = schemas[route, "body"].get("properties", {})
        fields = {name: _with_default(part, route, name) for name, part in fields.items()}
        schema = schemas[route, "body"] | {"properties": fields}
        required = bool(schema.get("required"))
    return {"required": required, "content": {"application/json": {"schema": schema}}}


def _with_default(schema: Schema, route: Route, name: str) -> Schema:
    default = dict(route.left_out).get(name, route.signature.parameters[name].default)
    if default is inspect.Parameter.empty or isinstance(default, Unset):
        return schema
    return schema | {"default": default}


def _item_of(answer: Schema) -> Schema:
    return {"anyOf": [answer["items"], {"type": "null"}]}


def _health() -> Schema:
    answer = {"type": "object", "properties": {"status": {"const": "ok"}}, "required": ["status"]}
    return {
        "operationId": "health",
        "summary": "Whether the server answers; asks for no token.",
        "tags": ["health"],
        "security": [{}],
        "responses": {"200": {"description": "It does.", "content": {"application/json": {"schema": answer}}}},
    }


def _traces() -> Schema:
    encodings = {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}, JSON: {"schema": {"type": "object"}}}
    errors = {status: {"$ref": f"#/components/responses/{status}"} for status in _ERRORS}
    told = {"anyOf": [{"$ref": "#/components/schemas/Error"}, _STATUS_SCHEMA]}
    refused = {PROTOBUF: encodings[PROTOBUF], JSON: {"schema": told}}
    errors |= {status: {"description": _ERRORS[status], "content": refused} for status in ("400", "415")}
    return {
        "operationId": "export_traces",
        "summary": "OTLP/HTTP: spans from any OpenTelemetry exporter.",
        "description": (inspect.getdoc(receive) or ""),
        "tags": ["traces"],
        "requestBody": {"required": True, "content": encodings},
        "responses": {
            "200": {"description": "Taken; `partialSuccess` counts the spans that were not.", "content": encodings}
        }
        | errors,
    }


def _end() -> Schema:
    contents = {model: {"application/json": {"schema": model.model_json_schema()}} for model in (WaitForEnd, EndAnswer)}
    return {
        "operationId": "wait_for_end",
        "summary": "Wait for the end of the run that this server runs for.",
        "description": inspect.getdoc(WaitForEnd) or "",
        "tags": ["waits"],
        "requestBody": {"required": True, "content": contents[WaitForEnd]},
        "responses": {"200": {"description": "The answer.", "content": contents[EndAnswer]}}
        | {status: {"$ref": f"#/components/responses/{status}"} for status in _ERRORS},
    }


def _error_response(text: str) -> Schema:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


# ---- the pages -----------------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #1d2330 }
code, pre { font: 14px/1.45 ui-monospace, monospace } pre { white-space: pre-wrap; color: #4a5264 }
h2 { margin-top: 2em; border-bottom: 1px solid #d5dae3 } h3 { margin: 1.6em 0 .2em } h3 code { font-size: 15px }
b { display: inline-block; min-width: 3.2em; color: #0a6b50 } table { border-collapse: collapse; margin: .4em 0 }
td { padding: .15em 1.2em .15em 0; vertical-align: top } a { color: #0b57a4; text-decoration: none }
@media (prefers-color-scheme: dark) { body { background: #14171d; color: #dfe4ee } pre { color: #a9b2c3 }
  h2 { border-color: #343b49 } b { color: #59c9a5 } a { color: #7db4f0 } }
"""


@cache
def _document_page() -> HttpReply:
    return HttpReply(200, json.dumps(openapi()).encode(), (b"content-type", b"application/json"))


@cache
def _reading_page() -> HttpReply:
    """One page without scripts and without anything from elsewhere."""
    document = openapi()
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Leyden store</title><style>{_STYLE}</style>",
        f"<h1>Leyden store {escape(__version__)}</h1><p>{escape(_ABOUT)}</p>",
        "<p>For tools: <a href=/openapi.json>openapi.json</a>. With a token: <code>Authorization: Bearer ...</code>.</p>",
    ]
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).append(_operation_html(verb, path, operation))
    for tag, operations in by_tag.items():
        parts += [f"<h2>{escape(tag)}</h2>", *operations]
    parts.append("<h2>Errors</h2><table>")
    parts += [f"<tr><td>{status}<td>{escape(text)}" for status, text in _ERRORS.items()]
    parts.append("</table><h2>Nouns</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f"<h3 id={escape(name)}><code>{escape(name)}</code></h3>")
        parts.append(f"<pre>{escape(schema.get('description', ''))}</pre>{_fields_html(schema)}")
    headers = ((b"content-type", b"text/html; charset=utf-8"), (b"content-security-policy", _ONLY_ITSELF))
    return HttpReply(200, "\n".join(parts).encode(), *headers)


_ONLY_ITSELF = b"default-src 'none'; style-src 'unsafe-inline'"


def _operation_html(verb: str, path: str, operation: Schema) -> str:
    status, answer = next(iter(operation["responses"].items()))
    body = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema")
    rows = [
        (parameter["name"], f"{_type_html(parameter['schema'])}, in the {parameter['in']}")
        for parameter in operation.get("parameters", ())
    ]
    return "".join(
        (
            f"<h3><code><b>{verb.upper()}</b> {escape(path)}</code></h3>",
            f"<pre>{escape(operation.get('description', operation['summary']))}</pre>",
            _table_html(rows),
            "" if body is None else _fields_html(body) if "properties" in body else f"<p>body: {_type_html(body)}",
            f"<p>{status}: {_type_html(answer['content'][JSON]['schema'])}",
        )
    )


def _fields_html(schema: Schema) -> str:
    required = schema.get("required", ())
    return _table_html(
        (name, _type_html(part) + (", required" if name in required else ""))
        for name, part in schema.get("properties", {}).items()
    )


def _table_html(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td><code>{escape(name)}</code><td>{text}" for name, text in rows)
    return f"<table>{body}</table>" if body else ""


def _type_html(schema: Schema) -> str:
    """A schema in a few words."""
    text = _type_words(schema)
    if "default" in schema:
        text += f" = <code>{escape(json.dumps(schema['default']))}</code>"
    return text


def _type_words(schema: Schema) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(_type_words(part) for part in schema.get("anyOf") or schema["oneOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(escape(json.dumps(value)) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type_words(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type_words(schema['additionalProperties'])}"
    return str(schema.get("type", "any JSON value"))
