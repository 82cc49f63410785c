"""What a store server must not be sent: each is a 4xx that says what is wrong, nothing is changed, and nobody else notices."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from yarl import URL

from leyden.store import LightningStore, SqliteLightningStore
from leyden.store.ending import END
from leyden.store.otlp import JSON, PROTOBUF
from leyden.store.server import LightningStoreServer
from leyden.types import LLM

TOKEN = "a-token-of-the-test"
AGL = "/v1/agl"
MIB = 2**20


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LightningStore]:
    """A store with a claimed rollout, one in the queue, resources and a worker."""
    async with SqliteLightningStore(tmp_path / "store.db") as opened:
        await opened.add_resources({"llm": LLM(endpoint="http://x", model="m")}, resources_id="rs")
        await opened.start_rollout("task", worker_id="w", rollout_id="ro", attempt_id="at")
        await opened.enqueue_rollout("waiting", rollout_id="ro-2")
        yield opened


@pytest.fixture
async def server(store: LightningStore) -> AsyncIterator[LightningStoreServer]:
    async with LightningStoreServer(store, token=TOKEN) as running:
        yield running


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


async def asked(
    server: LightningStoreServer,
    verb: str,
    path: str,
    body: bytes | None = None,
    *,
    token: str | None = TOKEN,
    content_type: str | None = "application/json",
    **headers: str,
) -> tuple[int, bytes]:
    """The answer to one request; the path goes out as it is given."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        sent["authorization"] = f"Bearer {token}"
    if content_type is not None:
        sent["content-type"] = content_type
    async with (
        aiohttp.ClientSession() as session,
        session.request(verb, URL(server.endpoint + path, encoded=True), data=body, headers=sent) as answer,
    ):
        return answer.status, await answer.read()


async def exchanged(server: LightningStoreServer, parts: Iterable[bytes], *, close: bool = False) -> bytes:
    """What comes back for bytes sent as they are. close: hang up instead of waiting for an answer."""
    url = URL(server.endpoint)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if close:
            return b""
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:  # it did not care to hear more
        return b""
    finally:
        writer.close()


def head(verb: str, path: str, **headers: str | int) -> bytes:
    """The head of a request that asks for the connection to be closed after it."""
    lines = [f"{verb} {path} HTTP/1.1", "host: x", f"authorization: Bearer {TOKEN}", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def everything(store: LightningStore) -> Any:
    """What is in the store, as it could be changed."""
    counts = await store.statistics()
    return (
        {key: value for key, value in counts.items() if key not in ("uptime_seconds", "time")},
        list(await store.query_rollouts()),
        [list(await store.query_spans(rollout_id)) for rollout_id in ("ro", "ro-2")],
        list(await store.query_resources()),
        list(await store.query_workers()),
    )


def check_error(status: int, body: bytes) -> str:
    """An error is a JSON object with a class and a message, and shows no code. Answers the message."""
    assert 400 <= status < 500, body
    assert b"Traceback" not in body
    assert b".py" not in body
    error = json.loads(body)
    assert set(error) == {"error", "message"}
    assert len(error["message"]) < 15_000
    return error["message"]


# ---- bodies and parameters --------------------------------------------------------------------------------------------------

ENQUEUE = f"{AGL}/queues/rollouts/enqueue"
SPAN = {
    "rollout_id": "ro",
    "attempt_id": "at",
    "sequence_id": 0,
    "trace_id": "f" * 32,
    "span_id": "a" * 16,
    "name": "s",
}


def span(**fields: Any) -> str:
    return json.dumps(SPAN | fields)


BODIES = [
    # not JSON
    (ENQUEUE, "", "rollouts"),
    (ENQUEUE, "{", "JSON"),
    (ENQUEUE, '{"input": 1', "JSON"),
    (ENQUEUE, '{"input": 1}}', "JSON"),
    (ENQUEUE, '[{"input": 1}', "JSON"),
    (ENQUEUE, "{'input': 1}", "JSON"),
    (ENQUEUE, '{"input": NaN}', "NaN"),
    (ENQUEUE, '{"input": [1, -Infinity]}', "Infinity"),
    (ENQUEUE, '{"input": 01}', "JSON"),
    (ENQUEUE, '{"input": "\x01"}', "JSON"),
    (ENQUEUE, b'{"input": "\xff\xfe"}', "JSON"),
    (ENQUEUE, b"\x00", "JSON"),
    (ENQUEUE, b"\xef\xbb\xbf{}", "JSON"),
    (ENQUEUE, '{"input": 1}'.encode("utf-16"), "JSON"),
    (ENQUEUE, "[" * 100_000, "200 deep"),
    (ENQUEUE, '{"input": ' + "[" * 100_000 + "]" * 100_000 + "}", "200 deep"),
    (ENQUEUE, '{"a":' * 100_000, "200 deep"),
    # not what is asked for
    (ENQUEUE, "5", "object"),
    (ENQUEUE, "null", "object"),
    (ENQUEUE, '"text"', "object"),
    (ENQUEUE, "[5]", "object"),
    (ENQUEUE, "{}", "input"),
    (ENQUEUE, '{"input": 1, "priorty": 5}', "priorty"),
    (ENQUEUE, '{"input": 1, "priority": "high"}', "priority"),
    (ENQUEUE, '{"input": 1, "priority": 1.5}', "priority"),
    (ENQUEUE, '{"input": 1, "priority": 1001}', "priority"),
    (ENQUEUE, '{"input": 1, "priority": 1e400}', "priority"),
    (ENQUEUE, '{"input": 1, "mode": "trian"}', "mode"),
    (ENQUEUE, '{"input": 1, "metadata": [1]}', "metadata"),
    (ENQUEUE, '{"input": 1, "rollout_id": 5}', "rollout_id"),
    (ENQUEUE, '{"input": 1, "rollout_id": ""}', "rollout_id"),
    (ENQUEUE, '{"input": 1, "rollout_id": "a\\u0000b"}', "rollout_id"),
    (ENQUEUE, '{"input": 1, "rollout_id": "\\ud800"}', "'"),
    (ENQUEUE, json.dumps({"input": 1, "rollout_id": "x" * 10_000}), "(10000 characters)"),
    (ENQUEUE, '{"input": 1, "resources_id": "nowhere"}', "nowhere"),
    (ENQUEUE, '{"input": 1, "config": {"max_attempts": 0}}', "max_attempts"),
    (ENQUEUE, '{"input": 1, "config": {"timeout_seconds": -1}}', "timeout_seconds"),
    (ENQUEUE, '{"input": 1, "config": {"timeout_seconds": 1e999}}', "timeout_seconds"),
    (ENQUEUE, '{"input": 1, "config": {"retry": 1}}', "retry"),
    (ENQUEUE, '[{"input": "good"}, {"input": "good too", "rollout_id": "ok"}, {"inptu": "bad"}]', "inptu"),
    (ENQUEUE, '[{"input": "good"}, {"input": "no such resources", "resources_id": "nowhere"}]', "nowhere"),
    (f"{AGL}/queues/rollouts/dequeue", '{"limit": "all"}', "limit"),
    (f"{AGL}/queues/rollouts/dequeue", '{"worker_id": "a\\u0000b"}', "worker_id"),
    (f"{AGL}/queues/rollouts/dequeue", '{"timeout_seconds": "soon"}', "timeout_seconds"),
    (f"{AGL}/rollouts", '{"input": 1, "rollout_id": "ro"}', "already"),
    (f"{AGL}/rollouts", '{"input": 1, "attempt_id": "latest"}', "latest"),
    (f"{AGL}/rollouts/ro", '{"status": "done"}', "status"),
    (f"{AGL}/rollouts/ro", '{"priority": 10000}', "priority"),
    (f"{AGL}/rollouts/ro", '{"rollout_id": "other"}', "rollout_id"),
    (f"{AGL}/rollouts/nowhere", '{"status": "cancelled"}', "nowhere"),
    (f"{AGL}/rollouts/ro-2", '{"status": "running"}', "running"),
    (f"{AGL}/rollouts/ro/attempts/at", '{"last_heartbeat_time": 1e999}', "last_heartbeat_time"),
    (f"{AGL}/rollouts/ro/attempts/at", '{"metadata": {"x": NaN}}', "NaN"),
    (f"{AGL}/rollouts/ro/attempts/nowhere", '{"status": "failed"}', "nowhere"),
    (f"{AGL}/spans", "{}", "rollout_id"),
    (f"{AGL}/spans", span(sequence_id=-1), "sequence_id"),
    (f"{AGL}/spans", span(sequence_id=2**63 - 1), "sequence_id"),
    (f"{AGL}/spans", span(sequence_id=2**64), "sequence_id"),
    (f"{AGL}/spans", span(span_id="a\0"), "span_id"),
    (f"{AGL}/spans", span(rollout_id="nowhere"), "nowhere"),
    (f"{AGL}/spans", f"[{span()}, {span(attempt_id='nowhere')}]", "nowhere"),
    (f"{AGL}/spans", f"[{span()}, {span(span_id='b', kind='OTHER')}]", "kind"),
    (f"{AGL}/spans", span(attributes={"a": {"b": 1}}), "attributes"),
    (f"{AGL}/spans", span(attributes={"a": None}), "attributes"),
    (f"{AGL}/spans", span(tokens={"prompt_ids": [2**40], "response_ids": []}), "prompt_ids"),
    (f"{AGL}/spans", span(tokens={"prompt_ids": ["a"], "response_ids": []}), "prompt_ids"),
    (f"{AGL}/spans", span(tokens="AAAA"), "token"),
    (f"{AGL}/resources", '{"resources": {"llm": {"resource_type": "none"}}}', "resource_type"),
    (f"{AGL}/resources", '{"resources": {}, "resources_id": "rs"}', "rs"),
    (f"{AGL}/workers/w%00", "{}", "worker_id"),
    (f"{AGL}/spans/search", '{"attributes": {"not.indexed": 1}}', "index_span_attribute"),
    (f"{AGL}/spans/search", '{"rollout_id": "ro", "attributes": {"list": [1]}}', "list"),
    (f"{AGL}/spans/search", '{"rollout_id": "ro", "started_from": NaN}', "NaN"),
    (f"{AGL}/spans/new", '{"after": "never"}', "cursor"),
    (f"{AGL}/pins/p", '{"rollout_ids": ["nowhere"]}', "nowhere"),
    (f"{AGL}/waits/rollouts", '{"rollout_ids": ["nowhere"]}', "nowhere"),
    (f"{AGL}/waits/rollouts", '{"rollout_ids": "ro", "timeout": 0}', "rollout_ids"),
]


async def test_a_body_that_cannot_be_meant_is_refused_with_the_reason_and_changes_nothing(
    server: LightningStoreServer, store: LightningStore, log: pytest.LogCaptureFixture
):
    before = await everything(store)
    wrong: list[str] = []
    for path, body, reason in BODIES:
        sent = body if isinstance(body, bytes) else body.encode()
        status, answer = await asked(server, "POST", path, sent)
        shown = f"{path} {sent[:80]!r} -> {status} {answer[:300]!r}"
        try:
            if reason not in check_error(status, answer):
                wrong.append(f"{shown}: {reason!r} is not named")
        except (AssertionError, ValueError) as error:
            wrong.append(f"{shown}: {error}"[:500])
        if await everything(store) != before:
            wrong.append(f"{shown}: something is changed")
            before = await everything(store)
    assert wrong == [], "\n".join(wrong)
    assert log.records == []


PATHS = [
    ("GET", "/", 404),
    ("GET", "/v1", 404),
    ("GET", AGL, 404),
    ("GET", f"{AGL}/", 404),
    ("GET", f"{AGL}/nothing", 404),
    ("GET", f"{AGL}/rollouts/", 404),
    ("GET", f"{AGL}/rollouts//attempts", 404),
    ("GET", f"{AGL}/rollouts/ro/../ro-2", 404),
    ("GET", f"{AGL}/rollouts/..%2F..%2Fetc%2Fpasswd", 404),
    ("GET", f"{AGL}/rollouts/a%00b", 404),
    ("GET", f"{AGL}/rollouts/%FF", 400),
    ("GET", f"{AGL}/rollouts/%ZZ", 404),
    ("GET", f"{AGL}/rollouts/%ED%A0%80", 400),
    ("GET", f"{AGL}/rollouts/'%20OR%201=1--", 404),
    ("GET", f"{AGL}/rollouts/{'x' * 10_000}", 404),
    ("GET", f"{AGL}/rollouts/%E6%BC%A2", 404),
    ("GET", f"{AGL}/rollouts?limit=0", 400),
    ("GET", f"{AGL}/rollouts?limit=-2", 400),
    ("GET", f"{AGL}/rollouts?limit=ten", 400),
    ("GET", f"{AGL}/rollouts?limit=1&limit=2", 400),
    ("GET", f"{AGL}/rollouts?offset=-1", 400),
    ("GET", f"{AGL}/rollouts?sort_by=input;--", 400),
    ("GET", f"{AGL}/rollouts?status_in=done", 400),
    ("GET", f"{AGL}/rollouts?stauts_in=running", 400),
    ("GET", f"{AGL}/rollouts?filter_logic=xor", 400),
    ("GET", f"{AGL}/rollouts?%FF=1", 400),
    ("GET", f"{AGL}/spans?attempt_id=at", 400),
    ("GET", f"{AGL}/spans?rollout_id=ro&started_from=nan", 400),
    ("GET", f"{AGL}/spans?started_before=tomorrow", 400),
    ("GET", f"{AGL}/spans?kind=OTHER", 400),
    ("GET", f"{AGL}/rollouts?limit=soon", 400),
    ("POST", f"{AGL}/rollouts/ro?status=cancelled", 400),
    ("DELETE", f"{AGL}/rollouts/ro", 405),
    ("PUT", f"{AGL}/rollouts/ro", 405),
    ("PATCH", f"{AGL}/rollouts/ro", 405),
    ("OPTIONS", f"{AGL}/rollouts/ro", 405),
    ("TRACE", f"{AGL}/rollouts/ro", 405),
    ("GET", f"{AGL}/queues/rollouts/dequeue", 405),
    ("POST", f"{AGL}/statistics", 405),
    ("GET", "/v1/traces", 405),
    ("POST", "/v1/metrics", 404),
    ("POST", "/v1/logs", 404),
]


async def test_a_path_a_parameter_or_a_verb_that_is_not_there_is_refused(
    server: LightningStoreServer, store: LightningStore, log: pytest.LogCaptureFixture
):
    before = await everything(store)
    wrong: list[str] = []
    for verb, path, expected in PATHS:
        status, answer = await asked(server, verb, path, content_type=None)
        shown = f"{verb} {path[:80]} -> {status} {answer[:200]!r}"
        try:
            check_error(status, answer)
        except (AssertionError, ValueError) as error:
            wrong.append(f"{shown}: {error}"[:300])
        if status != expected:
            wrong.append(f"{shown}, not {expected}")
    assert wrong == [], "\n".join(wrong)
    assert await everything(store) == before
    assert log.records == []


async def test_a_key_that_is_given_twice_is_one_rollout(server: LightningStoreServer, store: LightningStore):
    status, answer = await asked(server, "POST", ENQUEUE, b'{"input": 1, "input": 2, "rollout_id": "twice"}')
    assert status in (201, 400)
    assert json.loads(answer).get("input") in (2, None)


# ---- who asks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer é",
        "Bearer " + "x" * 10_000,
        f"Bearer {TOKEN}, Bearer {TOKEN}",
    ],
    ids=lambda value: ascii(value)[:20],
)
async def test_without_the_token_nothing_is_told_or_done(
    server: LightningStoreServer, store: LightningStore, authorization: str | None
):
    before = await everything(store)
    headers = {} if authorization is None else {"authorization": authorization}
    for verb, path, body in (
        ("GET", f"{AGL}/rollouts", None),
        ("GET", f"{AGL}/nothing", None),
        ("POST", ENQUEUE, b'{"input": 1}'),
        ("POST", f"{AGL}/queues/rollouts/dequeue", b"{}"),
        ("POST", "/v1/traces", b"{}"),
    ):
        status, answer = await asked(server, verb, path, body, token=None, **headers)
        assert status == 401, (verb, path, answer)
        assert TOKEN not in check_error(status, answer)
    assert await everything(store) == before
    assert (await asked(server, "GET", f"{AGL}/health", token=None))[0] == 200


# ---- how it is sent ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
async def test_a_body_of_another_type_is_refused(
    server: LightningStoreServer, store: LightningStore, content_type: str | None
):
    before = await everything(store)
    status, answer = await asked(server, "POST", ENQUEUE, b'{"input": 1}', content_type=content_type or "")
    assert status == 415
    check_error(status, answer)
    assert await everything(store) == before


@pytest.mark.parametrize(
    ("encoding", "body", "expected"),
    [
        ("gzip", b'{"input": 1}', 400),
        ("gzip", gzip.compress(b'{"input": 1}', mtime=0)[:-4], 400),
        ("gzip", gzip.compress(b'{"input": 1}', mtime=0)[:-9] + b"\0" * 9, 400),
        ("gzip", gzip.compress(b'{"input": 1}', mtime=0) + b"more", 400),
        ("gzip", b"", 400),
        ("br", b'{"input": 1}', 415),
        ("gzip, gzip", gzip.compress(gzip.compress(b'{"input": 1}', mtime=0), mtime=0), 415),
        ("deflate", b'{"input": 1}', 415),
    ],
)
async def test_a_body_that_cannot_be_unpacked_is_refused(
    server: LightningStoreServer, store: LightningStore, encoding: str, body: bytes, expected: int
):
    before = await everything(store)
    status, answer = await asked(server, "POST", ENQUEUE, body, content_encoding=encoding)
    assert status == expected, answer
    check_error(status, answer)
    assert await everything(store) == before


def grown(before: int) -> float:
    """By how many MiB this process has grown."""
    return (psutil.Process().memory_info().rss - before) / MIB


async def still_serves(server: LightningStoreServer) -> None:
    status, _ = await asyncio.wait_for(asked(server, "GET", f"{AGL}/rollouts/ro"), 5)
    assert status == 200


async def test_a_gzip_bomb_is_refused_before_it_is_unpacked(server: LightningStoreServer, store: LightningStore):
    bomb = gzip.compress(bytes(200 * MIB), 9)
    before, resident = await everything(store), psutil.Process().memory_info().rss
    for path, content_type in ((ENQUEUE, JSON), (f"{AGL}/spans", JSON), ("/v1/traces", PROTOBUF)):
        status, answer = await asked(server, "POST", path, bomb, content_type=content_type, content_encoding="gzip")
        assert status == 413, answer
        assert "larger than" in check_error(status, answer)
    assert grown(resident) < 180  # 64 MiB, which may be unpacked, and what the allocator has not given back
    assert await everything(store) == before
    await still_serves(server)


@pytest.mark.parametrize("values", [b'{"input":1},', b"[],", b"1,"])
async def test_a_body_of_too_much_work_is_refused_before_it_is_parsed(
    server: LightningStoreServer, store: LightningStore, values: bytes
):
    before = await everything(store)
    for start, end, path in (
        (b"[", b"1]", ENQUEUE),
        (b'{"input":[', b"1]}", ENQUEUE),
        (b"[", b"1]", f"{AGL}/spans"),
        (b'{"watcher":[', b"1]}", END),
        (b'{"resourceSpans":[', b"1]}", "/v1/traces"),
    ):
        bomb = gzip.compress(start + values * 4_100_000 + end, 1)
        for content_type in (JSON, PROTOBUF):
            status, answer = await asked(server, "POST", path, bomb, content_type=content_type, content_encoding="gzip")
            assert status in ((413,) if content_type == JSON else (400, 413, 415)), answer
    assert await everything(store) == before
    await still_serves(server)


@pytest.mark.parametrize("how", ["told", "chunked", "lied"])
async def test_a_span_of_100_megabytes_is_refused_without_being_held(store: LightningStore, how: str):
    """told: its length is in the head; chunked: it is not; lied: the head says less than what comes."""
    before = await everything(store)
    text = b"x" * MIB
    opening = span(name="@").encode().partition(b"@")[0]
    async with LightningStoreServer(store, token=TOKEN, max_body_bytes=16 * MIB) as server:
        resident = psutil.Process().memory_info().rss

        def parts() -> Iterable[bytes]:
            path = f"{AGL}/spans"
            if how == "chunked":
                yield head("POST", path, content_type="application/json", transfer_encoding="chunked")
                yield b"%x\r\n%s\r\n" % (len(opening), opening)
                for _ in range(100):
                    yield b"%x\r\n%s\r\n" % (MIB, text)
                yield b"0\r\n\r\n"
                return
            length = len(opening) + (100 * MIB if how == "told" else 10)
            yield head("POST", path, content_type="application/json", content_length=length) + opening
            for _ in range(100):
                yield text

        answer = await exchanged(server, parts())
        assert answer.split(b" ")[1:2] in ([b"413"], [b"400"], []), answer[:200]  # none: it hung up on us
        if how != "lied" and answer:
            check_error(413, answer.partition(b"\r\n\r\n")[2])
        assert grown(resident) < 60
        await still_serves(server)
    assert await everything(store) == before


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.parametrize(
    ("path", "start", "nonsense", "end"),
    [
        (ENQUEUE, b"[", b"{},", b"5]"),
        (ENQUEUE, b'{"input": 1, "config": {"retry_condition": [', b"5,", b"5]}}"),
        (f"{AGL}/rollouts/search", b'{"rollout_id_in": [', b"5,", b"5]}"),
        (f"{AGL}/spans", b"[", b"[],", b"5]"),
        (f"{AGL}/spans", span(events="@").encode().partition(b'"@"')[0] + b"[", b"[],", b"[]]}"),
        (f"{AGL}/spans", span(attributes={"a": "@"}).encode().partition(b'"@"')[0] + b"[", b"{},", b"{}]}}"),
        (f"{AGL}/spans", span(attributes="@").encode().partition(b'"@"')[0] + b"{", b'"a":{},', b'"b":{}}}'),
        (f"{AGL}/spans", span(tokens={"prompt_ids": "@"}).encode().partition(b'"@"')[0] + b"[", b'"",', b'""]}}'),
        ("/v1/traces", b'{"resourceSpans":[{"scopeSpans":[{"spans":[', b"{},", b"{}]}]}]}"),
    ],
    ids=lambda value: ascii(value)[-12:],
)
async def test_a_body_that_is_wrong_in_a_million_places_is_refused_at_the_first(
    server: LightningStoreServer, path: str, start: bytes, nonsense: bytes, end: bytes
):
    resident = psutil.Process().memory_info().rss
    body = start + nonsense * (900_000 // len(nonsense)) + end
    status, answer = await asyncio.wait_for(asked(server, "POST", path, body), 10)
    # So many spans are refused by their number, before the first is read.
    assert status == (413 if path == "/v1/traces" else 400), answer[:300]
    assert len(answer) < 1000
    assert grown(resident) < 150  # the JSON, parsed, takes half of that
    await still_serves(server)


RAW = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", b"400"),  # TLS to a plain port
    (b"GET\r\n\r\n", b"400"),
    (b"\r\n" * 1000 + b"nonsense\r\n\r\n", b"400"),
    (head("BREW", f"{AGL}/rollouts/ro"), b"4"),
    (head("CONNECT", "x:80"), b"4"),
    (head("OPTIONS", "*"), b"4"),
    (b"GET /v1/agl/rollouts/\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
    (b"GET / HTTP/9.9\r\nhost: x\r\nconnection: close\r\n\r\n", b"4"),
    (head("POST", ENQUEUE, content_length="abc"), b"400"),
    (head("POST", ENQUEUE, content_length="-5"), b"400"),
    (head("POST", ENQUEUE, content_length="99999999999999999999999"), b"4"),
    (head("POST", ENQUEUE, content_type=JSON, transfer_encoding="chunked") + b"zz\r\n{}\r\n0\r\n\r\n", b"400"),
    (
        head("POST", ENQUEUE, content_type=JSON, content_length=4, transfer_encoding="chunked")
        + b'0\r\n\r\nPOST /v1/agl/rollouts HTTP/1.1\r\nhost: x\r\ncontent-length: 12\r\n\r\n{"input": 1}',
        b"4",
    ),
    (head("GET", f"{AGL}/rollouts/{'x' * 200_000}"), b"4"),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_what_is_not_http_is_refused_and_changes_nothing(server: LightningStoreServer, store: LightningStore):
    before = await everything(store)
    for sent, expected in RAW:
        answer = await exchanged(server, [sent])
        status = answer.split(b" ")[1] if b" " in answer else b""
        assert status.startswith(expected) or answer == b"", (sent[:80], answer[:200])
        assert b"Traceback" not in answer
    assert await everything(store) == before
    await still_serves(server)


@pytest.mark.parametrize("line", [b"x-a: " + b"y" * MIB, b"x-a: y\r\n" * 100_000, b""])
async def test_a_head_that_never_ends_is_cut_off(server: LightningStoreServer, line: bytes):
    """One long header, many short ones, or no end of the path; before anybody asked for a token."""
    resident = psutil.Process().memory_info().rss
    beginning = b"GET /" + (b"x" * MIB if not line else b" HTTP/1.1\r\n")
    answer = await exchanged(server, [beginning, *[line or b"x" * MIB] * 100])
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431")), answer[:200]
    assert grown(resident) < 20
    await still_serves(server)


async def test_a_request_that_breaks_off_changes_nothing(server: LightningStoreServer, store: LightningStore):
    before = await everything(store)
    whole = b'{"input": 1}'
    for length, sent in ((len(whole) + 1, whole), (10**6, whole), (len(whole), whole[:-1])):
        head_of = head("POST", ENQUEUE, content_type=JSON, content_length=length)
        await exchanged(server, [head_of, sent], close=True)
    await exchanged(
        server,
        [head("POST", ENQUEUE, content_type=JSON, transfer_encoding="chunked"), b'c\r\n{"input": 1}\r\n'],
        close=True,
    )
    await still_serves(server)
    assert await everything(store) == before


async def test_a_hundred_clients_that_never_finish_their_request_hold_up_nobody(server: LightningStoreServer):
    url = URL(server.endpoint)
    beginnings = [
        b"GET /v1/agl/roll",
        b"GET /v1/agl/rollouts HTTP/1.1\r\nhost: x\r\nx-slow: ",
        head("POST", ENQUEUE, content_type=JSON, content_length=1000) + b"{",
        head("POST", ENQUEUE, content_type=JSON, transfer_encoding="chunked") + b"1\r\n{",
    ]
    connections = [await asyncio.open_connection(url.host, url.port) for _ in range(100)]
    try:
        for index, (_, writer) in enumerate(connections):
            writer.write(beginnings[index % len(beginnings)])
            await writer.drain()
        for _ in range(5):
            await asyncio.wait_for(asked(server, "POST", ENQUEUE, b'{"input": 1}'), 5)
        await still_serves(server)
    finally:
        for _, writer in connections:
            writer.close()
