"""The REST interface, fuzzed through its own OpenAPI document: whatever is sent, the document says what comes back.

No answer is a 5xx, every status and every body is one that the document names, what the document forbids is refused, and
a refused request has changed nothing in the database. The examples are the same in every run.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CheckFunction, load_all_checks, not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from leyden._lib.json import MAX_JSON_PARTS
from leyden.store import LightningStore, LightningStoreServer, PostgresLightningStore, SqliteLightningStore
from leyden.store.openapi import openapi
from leyden.types import LLM, Span
from tests.store.postgres_server import fresh_url, given_or_own_server

TOKEN = "a-token-of-the-test"
KNOWN: dict[str, Any] = {
    "rollout_id": "ro",
    "attempt_id": "at",
    "resources_id": "rs",
    "worker_id": "w",
    "rollout_ids": ["ro"],
}
TABLES = ("rollouts", "attempts", "spans", "pins", "resources", "workers")
SLOW = 1e6
"""Seconds; a timeout that is shorter would let the server's own schedule change something meanwhile."""

FUZZ = settings(
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

load_all_checks()
SCHEMA = schemathesis.openapi.from_dict(openapi())
OPERATIONS = {operation.label: operation for operation in (found.ok() for found in SCHEMA.get_all_operations())}


@dataclass
class Served:
    """A server, and how to see whether anything in its database has changed."""

    url: str
    session: requests.Session
    contents: Callable[[], Any]
    """All that is in it, or a digest of that."""
    examples: int
    """How many requests are made of each operation."""


@contextmanager
def on_sqlite(path: Path) -> Iterator[tuple[LightningStore, Callable[[], Any]]]:
    store = SqliteLightningStore(path / "store.db")
    with closing(sqlite3.connect(path / "store.db")) as file:
        yield store, lambda: [file.execute(f"SELECT * FROM {name}").fetchall() for name in TABLES]
    asyncio.run(store.close())


@contextmanager
def on_postgres(_: Path) -> Iterator[tuple[LightningStore, Callable[[], Any]]]:
    query = " UNION ALL ".join(f"SELECT md5(string_agg(t::text, '' ORDER BY t::text)) FROM {name} t" for name in TABLES)
    with given_or_own_server() as server, fresh_url(server) as url:
        store = PostgresLightningStore(url)
        address, _, schema = url.partition("&schema=")
        with psycopg.connect(address, autocommit=True, options=f"-c search_path={schema}") as connection:
            yield store, lambda: connection.execute(query).fetchall()
        asyncio.run(store.close())


@pytest.fixture(scope="module", params=[(on_sqlite, 30), (on_postgres, 12)], ids=["sqlite", "postgres"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    opened, examples = request.param
    with opened(tmp_path_factory.mktemp("fuzz")) as (store, contents), requests.Session() as session:
        asyncio.run(furnish(store))
        server = LightningStoreServer(store, token=TOKEN)
        asyncio.run(server.start())
        session.headers["authorization"] = f"Bearer {TOKEN}"
        yield Served(server.endpoint, session, contents, examples)
        asyncio.run(server.stop())


async def furnish(store: LightningStore) -> None:
    """Something under each id of KNOWN."""
    await store.add_resources({"llm": LLM(endpoint="http://x", model="m")}, resources_id="rs")
    await store.start_rollout("task", worker_id="w", rollout_id="ro", attempt_id="at")
    await store.add_span(Span(rollout_id="ro", attempt_id="at", sequence_id=0, trace_id="t", span_id="s", name="step"))
    await store.pin("pinned", ["ro"])


def patient(case: schemathesis.Case) -> None:
    """Let a case wait for nothing, and ask for nothing that the server's own schedule would do a moment later."""
    if isinstance(case.body, dict):
        waits = case.path in ("/v1/agl/waits/rollouts", "/v1/agl/waits/any")
        now = {"timeout": 0} if waits else {"timeout_seconds": 0} if "timeout_seconds" in case.body else {}
        case.body = {**unhurried(case.body), **now}
    elif isinstance(case.body, list):
        case.body = unhurried(case.body)
    if case.query and "timeout_seconds" in case.query:
        case.query = {**case.query, "timeout_seconds": 0}


def unhurried(value: Any) -> Any:
    """The same with long timeouts."""
    if isinstance(value, dict):
        slow = ("timeout_seconds", "unresponsive_seconds")
        return {
            key: SLOW if key in slow and isinstance(part, int | float) else unhurried(part)
            for key, part in value.items()
        }
    return [unhurried(part) for part in value] if isinstance(value, list) else value


def of_something_there(value: Any) -> Any:
    """The same with the ids of what is there."""
    if isinstance(value, Mapping):
        return {key: KNOWN.get(key) or of_something_there(part) for key, part in value.items()}
    return [of_something_there(part) for part in value] if isinstance(value, list) else value


def forbidden(label: str, case: schemathesis.Case) -> bool:
    """False where a query may be legal once it is text: `?worker_id=false` is a worker with that name."""
    return all(
        isinstance(value, str)
        if types == {"string"}
        else isinstance(value, list) and all(isinstance(part, str) for part in value)
        for name, types in free_text(label).items()
        for value in ([case.query[name]] if case.query and name in case.query else [])
    )


@cache
def free_text(label: str) -> dict[str, set[str]]:
    """The parameters of the query that take any text, or a list of any texts: {"string"} or {"array"}."""
    found: dict[str, set[str]] = {}
    for parameter in OPERATIONS[label].definition.raw.get("parameters", []):
        schemas = parameter["schema"].get("anyOf", [parameter["schema"]])
        for schema in schemas:
            text = schema.get("items", schema)
            if parameter["in"] == "query" and text.get("type") == "string" and "enum" not in text:
                found.setdefault(parameter["name"], set()).add(schema["type"])
    return found


def sent(served: Served, case: schemathesis.Case, *more: CheckFunction) -> None:
    """Send a case and check its answer."""
    before = served.contents()
    response = case.call(base_url=served.url, session=served.session)
    if response.status_code == 413:
        # Right for a list of more items than the document allows (20,000): a server measures a body before it reads it, and so
        # many items may hold more objects than it parses (500,000). Schemathesis does not count it as a refusal of data.
        assert len(response.request.body) > 2 * MAX_JSON_PARTS, response.text
        more = ()
    case.validate_response(response, checks=[*CHECKS, *more])
    assert b"Traceback" not in response.content
    if response.status_code >= 400:
        assert served.contents() == before, f"{response.status_code}, and something has changed"


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_the_document_allows_is_answered_as_it_says(served: Served, label: str):
    @settings(FUZZ, max_examples=served.examples)
    @given(
        case=OPERATIONS[label].as_strategy(generation_mode=GenerationMode.POSITIVE),
        known=st.booleans(),
    )
    def fuzzed(case: schemathesis.Case, known: bool) -> None:
        patient(case)
        if known:
            case.path_parameters = of_something_there(case.path_parameters or {})
            case.body = of_something_there(case.body)
        sent(served, case)

    fuzzed()


@pytest.mark.parametrize(
    "label", [label for label, operation in OPERATIONS.items() if operation.body or operation.query]
)
def test_what_the_document_forbids_is_refused_and_changes_nothing(served: Served, label: str):
    @settings(FUZZ, max_examples=served.examples)
    @given(case=OPERATIONS[label].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def fuzzed(case: schemathesis.Case) -> None:
        assume(forbidden(label, case))
        sent(served, case, negative_data_rejection)

    fuzzed()


@pytest.mark.parametrize("label", [label for label in OPERATIONS if not label.endswith("/health")])
def test_without_the_token_nothing_is_answered_or_changed(served: Served, label: str):
    @settings(FUZZ, max_examples=2)
    @given(case=OPERATIONS[label].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def fuzzed(case: schemathesis.Case) -> None:
        before = served.contents()
        response = case.call(base_url=served.url, headers={"authorization": "Bearer another"})
        assert response.status_code == 401
        assert served.contents() == before

    fuzzed()


def test_a_change_would_be_seen(served: Served):
    before = served.contents()
    url = f"{served.url}/v1/agl/queues/rollouts/enqueue"
    assert served.session.post(url, json={"input": 1}).status_code == 201
    assert served.contents() != before
