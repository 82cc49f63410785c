"""The route table: everything is on the wire, as it is in the protocol."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from leyden.errors import ConfigError
from leyden.store import LightningStore
from leyden.store.ending import END
from leyden.store.openapi import openapi
from leyden.store.otlp import TRACES
from leyden.store.wire import BY_METHOD, PREFIX, ROUTES, find_route, verbs_at
from leyden.types import EnqueueRolloutRequest, RolloutConfig, Span, UpdateAttemptRequest

OVER_OTHERS = {
    "enqueue_rollout": "enqueue_many_rollouts",
    "dequeue_rollout": "dequeue_many_rollouts",
    "add_span": "add_many_spans",
    "get_next_span_sequence_id": "get_many_span_sequence_ids",
    "watch_spans": "poll_new_spans",
}
"""Methods that the protocol itself makes of others."""
NASTY_IDS = ["latest", "search", "..", ".", "a/b", "é漢🙂", "%2F", "a?b#c", "'\";--", "a b+c", "", "\0"]


def test_every_method_of_the_protocol_is_on_the_wire() -> None:
    methods = {
        name
        for name, member in vars(LightningStore).items()
        if not name.startswith("_") and (inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member))
    }
    assert methods - OVER_OTHERS.keys() - {"close"} == set(BY_METHOD)
    assert set(OVER_OTHERS.values()) <= set(BY_METHOD)


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_a_route_takes_every_parameter_of_its_method(route: Any) -> None:
    assert {*route.in_path, *route.elsewhere} <= route.signature.parameters.keys()
    if BY_METHOD[route.method] is route:
        assert {*route.in_path, *route.elsewhere} == route.signature.parameters.keys()
    assert isinstance(route.result_type, TypeAdapter)


@pytest.mark.parametrize("name", NASTY_IDS)
@pytest.mark.parametrize("method", [method for method, route in BY_METHOD.items() if route.in_path])
def test_any_id_comes_out_of_a_path_as_it_went_in(method: str, name: str) -> None:
    route = BY_METHOD[method]
    found = find_route(route.verb, route.path_of(dict.fromkeys(route.in_path, name)))
    assert found == (route, [name] * len(route.in_path))


def test_the_words_of_the_table_are_no_ids() -> None:
    def method(verb: str, path: str) -> str | None:
        found = find_route(verb, PREFIX + path)
        return None if found is None else found[0].method

    assert method("GET", "/resources/latest") == "get_latest_resources"
    assert method("GET", "/resources/%6Catest") == "get_resources_by_id"
    assert method("POST", "/rollouts/search") == "query_rollouts"
    assert method("POST", "/rollouts/search/attempts") == "start_attempt"
    assert method("POST", "/rollouts/a/b/c/d") is None
    assert method("DELETE", "/rollouts/a") is None
    assert find_route("GET", "/v2/rollouts/a") is None
    assert verbs_at(f"{PREFIX}/rollouts/a") == ["GET", "POST"]
    assert verbs_at(f"{PREFIX}/nothing") == []


def test_a_path_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match="UTF-8"):
        find_route("GET", f"{PREFIX}/rollouts/%ff")
    with pytest.raises(ConfigError, match="not Unicode"):
        BY_METHOD["get_rollout_by_id"].path_of({"rollout_id": "\ud800"})
    with pytest.raises(ConfigError, match=r"rollout_id.* must be a string, got 7"):
        BY_METHOD["get_rollout_by_id"].path_of({"rollout_id": 7})


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"input": 1, "inputs": 2}', "inputs: unknown parameter"),
        (b"{}", "input: missing"),
        (b'{"input": 1, "priority": "high"}', "priority: must be a valid integer, got 'high'"),
        (b'{"input": 1, "config": {"max_attempts": 0}}', "config.max_attempts: .*greater than or equal to 1, got 0"),
        (b'{"input": 1, "mode": "fun"}', "mode: must be 'train'"),
        (b'{"input": NaN}', "the number NaN"),
        (b'{"input": [-Infinity]}', "the number -Infinity"),
        (b'{"input": 1', "not valid JSON"),
        (b"\n", "not valid JSON"),
        (b"[1]", "valid dictionary|object"),
        (b'"\xff"', "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"input": "\\ud800"' + b"[" * 100_000, "JSON"),
    ],
)
def test_a_body_that_is_wrong_is_refused_with_what_and_where(body: bytes, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        BY_METHOD["start_rollout"].read([], b"", body)


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        (b"limit=x", "limit: must be a valid integer, got 'x'"),
        (b"limit=1&limit=2", "limit is given twice"),
        (b"lim=1", "lim: unknown parameter"),
        (b"limit", "cannot be read"),
        (b"sort_order=up", "sort_order"),
        (b"rollout_id_contains=%ff", "cannot be read"),
        (b"filter_logic=xor", "filter_logic"),
    ],
)
def test_a_query_that_is_wrong_is_refused_with_what_and_where(query: bytes, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        _by_query("query_rollouts").read([], query, b"")


def test_a_query_holds_lists_numbers_and_words() -> None:
    read = _by_query("query_rollouts").read([], b"status_in=failed&status_in=queuing&limit=5&rollout_id_contains=", b"")
    assert read == {"status_in": ["failed", "queuing"], "limit": 5, "rollout_id_contains": ""}
    with pytest.raises(ConfigError, match="attributes: unknown parameter"):  # a mapping needs a body
        _by_query("query_spans").read([], b"attributes=x", b"")
    with pytest.raises(ConfigError, match="in the body"):
        BY_METHOD["query_spans"].read([], b"limit=1", b"")


def test_a_call_is_bound_like_the_method_itself() -> None:
    route = BY_METHOD["start_rollout"]
    assert route.bind(("task", "train"), {"priority": 3}) == {"input": "task", "mode": "train", "priority": 3}
    assert BY_METHOD["update_rollout"].bind(("r",), {"mode": None}) == {"rollout_id": "r", "mode": None}
    for args, kwargs in (((), {}), (("a",), {"input": "b"}), (("a",), {"unknown": 1}), (tuple("abcdefgh"), {})):
        with pytest.raises(TypeError):
            route.bind(args, kwargs)


def test_what_is_not_json_is_named() -> None:
    request = EnqueueRolloutRequest(input={"f": object()})
    with pytest.raises(ConfigError, match=r"rollouts\[0\]\.input, field f is .*, which JSON does not have"):
        BY_METHOD["enqueue_many_rollouts"].body_of({"rollouts": [request]})
    with pytest.raises(ConfigError, match=r"metadata, field x\[1\] is"):
        BY_METHOD["start_rollout"].body_of({"input": 1, "metadata": {"x": [1, lambda: 0]}})


@pytest.mark.parametrize(
    "arguments",
    [
        {"input": {"n": None, "big": 2**80, "lone": "\ud800", "z": "\0"}, "config": RolloutConfig(timeout_seconds=1)},
        {"input": None, "metadata": {"é": [1.5, True]}, "priority": -3, "rollout_id": "\U0001f600"},
    ],
)
def test_arguments_come_out_as_they_went_in(arguments: dict[str, Any]) -> None:
    route = BY_METHOD["start_rollout"]
    assert route.read([], b"", route.body_of(arguments)) == arguments


def test_one_item_may_stand_for_a_list() -> None:
    route = BY_METHOD["add_many_spans"]
    span = Span(rollout_id="r", attempt_id="a", sequence_id=0, trace_id="t", span_id="s", name="n")
    assert route.read([], b"", span.model_dump_json().encode()) == {"spans": [span]}
    assert route.read([], b"", f" [{span.model_dump_json()}]".encode()) == {"spans": [span]}
    assert (route.is_one(b' {"a": 1}'), route.is_one(b" []")) == (True, False)


# ---- the document ------------------------------------------------------------------------------------------------------


def test_the_document_names_every_route_and_every_reference_in_it_leads_somewhere() -> None:
    document = openapi()
    assert json.loads(json.dumps(document)) == document
    described = {(verb.upper(), path) for path, verbs in document["paths"].items() for verb in verbs}
    others = {("GET", f"{PREFIX}/health"), ("POST", TRACES), ("POST", END)}
    assert described == {(route.verb, PREFIX + route.path) for route in ROUTES} | others
    names = [operation["operationId"] for verbs in document["paths"].values() for operation in verbs.values()]
    assert len(names) == len(set(names))
    for reference in _references(document):
        place: Any = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
        assert place, reference


def _references(part: Any) -> list[str]:
    if isinstance(part, dict):
        own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
        return own + [reference for value in part.values() for reference in _references(value)]
    return [reference for value in part for reference in _references(value)] if isinstance(part, list) else []


def _by_query(method: str) -> Any:
    return next(route for route in ROUTES if route.method == method and route.verb == "GET")


@pytest.mark.parametrize(
    ("model", "method"),
    [(EnqueueRolloutRequest, "enqueue_rollout"), (UpdateAttemptRequest, "update_attempt")],
)
def test_a_request_has_the_parameters_of_its_method(model: type[BaseModel], method: str) -> None:
    parameters = list(inspect.signature(getattr(LightningStore, method)).parameters)[1:]
    assert sorted(model.model_fields) == sorted(parameters)


def test_a_request_for_new_spans_without_a_cursor_depends_on_nobody_else() -> None:
    assert BY_METHOD["poll_new_spans"].read([], b"", b"{}") == {"after": None}
    assert BY_METHOD["poll_new_spans"].read([], b"", b'{"after": "latest"}') == {"after": "latest"}
    body = openapi()["paths"]["/v1/agl/spans/new"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["after"]["default"] is None
