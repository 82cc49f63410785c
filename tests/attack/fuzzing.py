"""Requests that are nearly right, or not at all, for every route of the store and the gateway.

The store's come from its OpenAPI document, the gateway's from requests that its clients send. Each is damaged in its parts: ids,
query, headers, encoding, types and values of the body. The generator knows no meaning of a request.
"""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from leyden.store.openapi import openapi
from leyden.testing import FakeUpstream, Misbehaviour

ODD_IDS = ["", ".", "..", "../..", "%2f", "a/b", "é雷🌩", " ", "\n", "\x00", "'; DROP TABLE rollouts; --", "x" * 5000]
ODD_IDS += ["latest", "search", "%", "?", "#", "a?b=c", "\ud7ff", "-1", "0", "null"]
ODD_VALUES: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**200, 0.5, -0.0, 1e308, 1e-320]
ODD_VALUES += ["", " ", "x", "\x00", "\ud800", "é雷🌩", "x" * 100_000, "1", "null", [], [[]], [None], {}, {"": {}}]
ODD_VALUES += [{"a": {"b": {"c": []}}}, ["x"] * 1000]
ODD_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "1e-999"]
VERBS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "FROB"]
HEADERS = {
    "content-type": [
        "application/json",
        "text/plain",
        "",
        "application/json; charset=utf-16",
        "application/x-protobuf",
    ],
    "content-encoding": ["gzip", "deflate", "br", "identity", "gzip, gzip", "x"],
    "accept": ["*/*", "text/html", ""],
    "authorization": ["Bearer x", "Basic ::", "Bearer ", "x" * 2000],
    "x-leyden-rollout": ["ro", "%00", "é".encode().decode("latin-1")],
    "x-leyden-attempt": ["at", ""],
    "baggage": ["leyden.rollout_id=ro,leyden.attempt_id=at", ",,,==;", "x" * 5000],
    "traceparent": ["00-" + "0" * 32 + "-" + "1" * 16 + "-01", "x"],
    "origin": ["null", "https://evil.example", "http://127.0.0.1"],
    "x-stainless-retry-count": ["1", "-1", "x"],
    "anthropic-version": ["2023-06-01", "x"],
    "range": ["bytes=0-1"],
    "expect": ["x"],
}
KNOWN = {
    "rollout_id": "ro",
    "attempt_id": "at",
    "resources_id": "rs",
    "worker_id": "w",
    "name": "pin",
    "rollout_ids": ["ro"],
}
WAITS = ("timeout", "timeout_seconds", "unresponsive_seconds")


@dataclass
class Request:
    """One request as it is sent."""

    verb: str
    path: str
    """Percent-encoded, with the query."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""


class Fuzzer:
    """Makes requests, each from the generator alone."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._document = openapi()
        self._operations = [
            (verb.upper(), path, operation)
            for path, verbs in self._document["paths"].items()
            for verb, operation in verbs.items()
        ]

    def for_store(self) -> Request:
        """Make a request for the store."""
        chance = self._chance
        verb, path, operation = chance.choice(self._operations)
        query = {
            parameter["name"]: self._of_schema(parameter["schema"])
            for parameter in operation.get("parameters", ())
            if parameter.get("in") == "query" and chance.random() < 0.5
        }
        content = operation.get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema")
        body = None if schema is None else self._of_schema(schema)
        path = path.replace("{", "\x01{").replace("}", "}\x01")
        parts = [self._id(part[1:-1]) if part.startswith("{") else part for part in path.split("\x01")]
        return self._damaged(verb, "".join(parts), query, body)

    def for_gateway(self) -> Request:
        """Make a request for the gateway."""
        chance = self._chance
        route = chance.choice([*GATEWAY_BODIES, "models", "responses/resp_1"])
        verb = "POST" if route in GATEWAY_BODIES else chance.choice(["GET", "DELETE"])
        place = f"/rollout/{self._id('rollout_id')}/attempt/{self._id('attempt_id')}"
        if chance.random() < 0.05:
            return self._damaged("POST", f"{place}/end", {}, None)
        start = f"{place}/v1/" if chance.random() < 0.8 else "/v1/"
        body = json.loads(json.dumps(GATEWAY_BODIES.get(route)))
        if body is not None and chance.random() < 0.4:
            body["stream"] = chance.choice([True, False, "yes", None, 1])
        return self._damaged(verb, start + route, {}, body)

    def raw(self) -> bytes:
        """Make bytes that are hardly HTTP, and end."""
        chance = self._chance
        request = self.for_store()
        head = f"{request.verb} {request.path or '/'} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += f"Content-Length: {len(request.body)}\r\n\r\n"
        data = bytearray(head.encode("utf-8", "replace") + request.body[:2000])
        for _ in range(chance.randint(1, 20)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data[: chance.randint(1, len(data))])

    def _id(self, name: str) -> str:
        chance = self._chance
        found = str(KNOWN.get(name, "x")) if chance.random() < 0.5 else chance.choice(ODD_IDS)
        return quote(found.encode("utf-8", "surrogatepass"), safe="" if chance.random() < 0.8 else "/%?#.")

    def _of_schema(self, schema: dict[str, Any], name: str = "", depth: int = 0) -> Any:
        """A value that the schema allows, more or less."""
        chance = self._chance
        if "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        if name in KNOWN and chance.random() < 0.6:
            return KNOWN[name]
        if "anyOf" in schema:
            return self._of_schema(chance.choice(schema["anyOf"]), name, depth + 1)
        if "enum" in schema:
            return chance.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "object" if depth < 6:
                required = schema.get("required", ())
                return {
                    key: self._of_schema(part, key, depth + 1)
                    for key, part in schema.get("properties", {}).items()
                    if key in required or chance.random() < 0.4
                }
            case "array" if depth < 6:
                items = schema.get("items", {})
                return [self._of_schema(items, name, depth + 1) for _ in range(chance.randint(0, 3))]
            case "object":
                return {}
            case "array":
                return []
            case "integer":
                return chance.choice([0, 1, 2, 100])
            case "number":
                return chance.choice([0, 0.5, 1, 1e6])
            case "boolean":
                return chance.random() < 0.5
            case "null":
                return None
            case "string":
                return chance.choice(["x", "ro", "é雷", *ODD_IDS[:8]])
            case _:
                return chance.choice(ODD_VALUES)

    def _damaged(self, verb: str, path: str, query: dict[str, Any], body: Any) -> Request:
        chance = self._chance
        if chance.random() < 0.05:
            verb = chance.choice(VERBS)
        if chance.random() < 0.03:
            path = "/" + quote(chance.choice(ODD_IDS).encode("utf-8", "surrogatepass"), safe="/%?#.") + path
        for _ in range(chance.choice([0, 0, 1, 2])):
            body = self._replaced(body)
            query = {**query, chance.choice(["limit", "offset", "sort_by", "timeout_seconds", "é"]): self._odd()}
        headers = {"content-type": "application/json"} if body is not None or chance.random() < 0.5 else {}
        for name in chance.sample(sorted(HEADERS), chance.choice([0, 0, 0, 1, 2])):
            headers[name] = chance.choice(HEADERS[name])
        data = b"" if body is None else self._encoded(hurried(body))
        if chance.random() < 0.1:
            data = gzip.compress(data)
            headers["content-encoding"] = "gzip"
        if data and chance.random() < 0.1:
            data = data[: chance.randrange(len(data))] + chance.randbytes(chance.randint(0, 8))
        pairs = [f"{quote(name)}={quote(_text(value))}" for name, value in hurried(query).items()]
        return Request(verb, path + ("?" + "&".join(pairs) if pairs else ""), headers, data)

    def _odd(self) -> Any:
        return self._chance.choice(ODD_VALUES)

    def _replaced(self, value: Any) -> Any:
        """The value with one of its parts replaced, removed or added."""
        chance = self._chance
        if isinstance(value, dict) and value and chance.random() < 0.85:
            key = chance.choice(list(value))
            if chance.random() < 0.15:
                return {name: part for name, part in value.items() if name != key}
            if chance.random() < 0.1:
                return {**value, chance.choice(["x", "", "é"]): self._odd()}
            return {**value, key: self._replaced(value[key])}
        if isinstance(value, list) and value and chance.random() < 0.85:
            at = chance.randrange(len(value))
            return [*value[:at], self._replaced(value[at]), *value[at + 1 :]]
        return self._odd()

    def _encoded(self, body: Any) -> bytes:
        """The body as JSON, some of it with numbers that JSON's readers take and no float holds."""
        chance = self._chance
        text = json.dumps(body, ensure_ascii=chance.random() < 0.7)
        if chance.random() < 0.05 and "1" in text:
            text = text.replace("1", chance.choice(ODD_NUMBERS), 1)
        if chance.random() < 0.02:
            text = "[" * chance.choice([100, 5000]) + text
        return text.encode(chance.choice(["utf-8", "utf-8", "utf-8", "utf-16"]), "surrogatepass")


def hurried(value: Any, name: str = "") -> Any:
    """The same value with no wait of more than a moment, so that a long answer is the server's own doing."""
    if isinstance(value, dict):
        return {key: hurried(part, key) for key, part in value.items()}
    if isinstance(value, list):
        return [hurried(part) for part in value]
    if name in WAITS and isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6:
        return 0.01
    return value


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value)).encode("utf-8", "replace").decode()


TOOL = {"type": "object", "properties": {"place": {"type": "string"}}}
GATEWAY_BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "20"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": TOOL}}],
        "temperature": 1,
        "max_tokens": 10,
        "logprobs": True,
        "n": 1,
        "stop": ["x"],
        "stream_options": {"include_usage": True},
    },
    "completions": {"model": "fake", "prompt": "hi", "max_tokens": 10, "temperature": 1, "logprobs": 1, "echo": False},
    "responses": {
        "model": "fake",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "20"},
        ],
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": TOOL, "strict": False}],
        "previous_response_id": None,
        "store": True,
        "max_output_tokens": 10,
    },
    "messages": {
        "model": "fake",
        "max_tokens": 10,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"place": "x"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "20"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": TOOL}],
        "temperature": 1,
    },
    "embeddings": {"model": "fake", "input": ["hi", "there"]},
}


def sound_model() -> FakeUpstream:
    """A model's server that answers every request in order, so that an error is the gateway's own."""

    def fault(body: dict[str, Any]) -> Misbehaviour:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if body.get("stream"):
            choice |= {"text": "x"} if "prompt" in body else {"delta": {"role": "assistant", "content": "x"}}
            event = json.dumps({"id": "r", "choices": [choice]})
            return Misbehaviour(body=f"data: {event}\n\ndata: [DONE]\n\n".encode(), content_type="text/event-stream")
        choice |= {"text": "x"} if "prompt" in body else {"message": {"role": "assistant", "content": "x"}}
        return Misbehaviour(body=json.dumps({"id": "r", "choices": [choice]}).encode())

    return FakeUpstream(fault=fault)
