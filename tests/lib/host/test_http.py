"""The kit of HTTP applications: who sent a request, its body within limits, and how an application replies."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest

from leyden._lib.host.http import (
    JSON,
    LARGE_BYTES,
    ClientGone,
    Message,
    Receive,
    Refusal,
    SiteGuard,
    bearer_token,
    check_method,
    header,
    is_secret,
    on_disconnect,
    parsed,
    raw_path,
    read_body,
    send_reply,
)

HOST = ("host", "localhost:4747")


def scope(*headers: tuple[str, str], method: str = "POST") -> dict[str, Any]:
    return {"method": method, "headers": [(name.encode(), value.encode()) for name, value in headers]}


def status(guard: SiteGuard, *headers: tuple[str, str], method: str = "POST") -> int:
    try:
        guard.check(scope(*headers, method=method))
    except Refusal as refused:
        return refused.status
    return 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("sec-fetch-mode", "cors")],  # what `fetch` of Node.js sends
        [("origin", "http://localhost:4747"), ("sec-fetch-site", "same-origin")],
        [("origin", "http://localhost:4747")],
        [("origin", "http://LOCALHOST:4747")],
        [("sec-fetch-site", "none"), ("sec-fetch-mode", "navigate")],
        [("origin", "https://store.example"), ("sec-fetch-site", "same-origin")],  # behind a proxy with its own name
    ],
)
def test_programs_and_the_servers_own_pages_are_served(headers: list[tuple[str, str]]):
    for local_only in (True, False):
        assert status(SiteGuard(local_only=local_only), HOST, *headers) == 200


@pytest.mark.parametrize(
    "headers",
    [
        [("origin", "https://evil.example")],
        [("origin", "https://evil.example"), ("sec-fetch-site", "cross-site")],
        [("sec-fetch-site", "cross-site")],
        [("origin", "http://localhost:3000"), ("sec-fetch-site", "same-site")],
        [("origin", "http://localhost:3000")],
        [("origin", "http://localhost")],
        [("origin", "null")],
        [("origin", "")],
        [("origin", "http://localhost:4747.evil.example")],
        [("sec-fetch-site", "")],
    ],
)
def test_pages_of_another_origin_are_refused_whatever_they_send(headers: list[tuple[str, str]]):
    for local_only in (True, False):
        for method in ("GET", "POST", "OPTIONS"):
            assert status(SiteGuard(local_only=local_only), HOST, *headers, method=method) == 403


def test_a_link_elsewhere_may_open_a_page_of_the_server_and_nothing_more():
    click = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")]
    guard = SiteGuard(local_only=True)
    assert status(guard, HOST, *click, method="GET") == 200
    assert status(guard, HOST, *click, method="POST") == 403  # a form
    assert status(guard, HOST, *click[:2], ("sec-fetch-dest", "iframe"), method="GET") == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.9:4747", "[::1]:4747"])
def test_a_server_without_a_token_answers_to_this_machines_names(host: str):
    assert status(SiteGuard(local_only=True), ("host", host)) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:4747", "0.0.0.0:4747", "localhost.evil.example", "[", ""]
)
def test_a_server_without_a_token_answers_to_no_other_name(host: str):
    assert status(SiteGuard(local_only=True), ("host", host)) == 403
    assert status(SiteGuard(local_only=False), ("host", host)) == 200
    assert status(SiteGuard(local_only=True, also=["Gateway.Example"]), ("host", "gateway.example:80")) == 200


def test_a_request_that_names_no_host_or_two_is_refused():
    assert status(SiteGuard(local_only=True)) == 403
    assert status(SiteGuard(local_only=False)) == 200
    for local_only in (True, False):
        assert status(SiteGuard(local_only=local_only), ("host", "evil.example"), HOST) == 400


def test_a_refusal_names_the_page_and_the_remedy():
    with pytest.raises(Refusal, match=r"'https://evil\.example'.*from a program.*reverse proxy"):
        SiteGuard(local_only=True).check(scope(HOST, ("origin", "https://evil.example")))
    with pytest.raises(Refusal, match=r"'evil\.example' is not this machine.*token"):
        SiteGuard(local_only=True).check(scope(("host", "evil.example")))


# ---- bodies --------------------------------------------------------------------------------------------------------------


def client(parts: Iterable[bytes], *, leaves: bool = False) -> Receive:
    """A client that sends a body in these parts; it leaves before the end, or stays connected after it."""
    parts = list(parts)
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if leaves:
        messages.append({"type": "http.disconnect"})
    else:
        messages[-1]["more_body"] = False

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    return receive


@pytest.mark.parametrize("parts", [[b""], [b"abc"], [b"a", b"bc", b""]])
async def test_a_body_is_its_parts_in_order(parts: list[bytes]):
    assert await read_body({}, client(parts), max_bytes=3) == b"".join(parts)


async def test_a_gzip_body_is_unpacked_also_from_several_files_cut_anywhere():
    packed = gzip.compress(b"ab") + gzip.compress(b"c")
    headers = {b"content-encoding": b"GZIP"}
    parts = [packed[index : index + 1] for index in range(len(packed))]
    assert await read_body(headers, client(parts), max_bytes=3) == b"abc"
    assert await read_body(headers, client([packed]), max_bytes=99, unpack=False) == packed


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({}, b"12345", 413, "body_too_large"),
        ({b"content-length": b"5"}, b"12345", 413, "body_too_large"),
        ({b"content-encoding": b"gzip"}, gzip.compress(b"12345", mtime=0), 413, "body_too_large"),
        ({b"content-encoding": b"gzip"}, gzip.compress(b"", mtime=0) * 2001, 413, "body_too_large"),
        ({b"content-encoding": b"gzip"}, b"1234", 400, "bad_encoding"),
        ({b"content-encoding": b"gzip"}, gzip.compress(b"1", mtime=0)[:-1], 400, "bad_encoding"),
        ({b"content-encoding": b"br"}, b"1", 415, "unknown_encoding"),
    ],
)
async def test_a_body_that_cannot_be_taken_is_refused(headers: dict[bytes, bytes], body: bytes, status: int, code: str):
    with pytest.raises(Refusal) as refused:
        await read_body(headers, client([body]), max_bytes=4, option="max_body_bytes")
    assert (refused.value.status, refused.value.code) == (status, code)


async def test_a_client_that_announces_a_large_body_and_waits_is_refused_before_it_sends():
    async def receive() -> Message:
        raise AssertionError("nothing is read")

    with pytest.raises(Refusal, match="larger than the 4 bytes"):
        await read_body({b"content-length": b"5", b"expect": b"100-continue"}, receive, max_bytes=4)


async def test_a_client_that_leaves_before_the_end_of_its_body_gets_no_reply():
    for headers in ({}, {b"content-encoding": b"gzip"}, {b"content-length": b"99"}):
        with pytest.raises(ClientGone):
            await read_body(headers, client([gzip.compress(b"1")[:5]], leaves=True), max_bytes=9)


HOSTILE = {
    "empty objects": b"[" + b"{}," * 600_000 + b"1]",
    "empty lists in a field": b'{"input": [' + b"[]," * 600_000 + b"1]}",
    "whole numbers": b'{"input": [' + b"1," * 4_100_000 + b"1]}",
    "floats": b"[" + b"1e9," * 4_100_000 + b"1]",
    "null": b"[" + b"null," * 4_100_000 + b"1]",
    "strings": b"[" + b'"",' * 2_100_000 + b"1]",
    "keys": b"{" + b'"a":1,' * 3_000_000 + b'"b":1}',
    "deep lists": b"[" * 1000 + b"]" * 1000,
    "deep objects": b'{"a":' * 300 + b"1" + b"}" * 300,
    "deep after many that are not": b"[" + b"[1]," * 50_000 + b"[" * 300,
    "UTF-16": ("[" + "\u2222[]," * 600_000 + "1]").encode("utf-16"),
    "after an escaped quote": b'["\\\\\\"",' + b"{}," * 600_000 + b"1]",
}
"""Bodies that take seconds or gigabytes to parse."""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_body_that_is_too_much_work_is_refused_before_it_is_parsed(name: str, packed: bool):
    body = gzip.compress(HOSTILE[name], 1) if packed else HOSTILE[name]
    headers = {b"content-encoding": b"gzip"} if packed else {}
    began = time.process_time()
    with pytest.raises(Refusal, match="too much work") as refused:
        await read_body(headers, client([body]), max_bytes=2**26)
    assert refused.value.status == 413
    assert time.process_time() - began < 2


async def test_measuring_a_body_takes_little_memory():
    body = HOSTILE["whole numbers"]
    tracemalloc.start()
    try:
        with pytest.raises(Refusal):
            await read_body({}, client([body]), max_bytes=2**26)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"content": [{"image_url": "data:" + "Ab+/" * 2**22}]}]},
        {"prompt": list(range(10**9, 10**9 + 200_000)), "logprobs": [-1.2345678901234567] * 200_000},
        {"text": '"{[,]}\\' * 2**20},
        {"ids": [150_000] * 2_500_000},
        [{"name": "chat", "attributes": {f"key.{k}": "value, [1]" for k in range(20)}} for _ in range(20_000)],
        [[[[[1] * 10] * 10] * 10] * 10],
    ],
    ids=["an image", "a long prompt", "brackets in a string", "16 MB of tokens", "20,000 spans", "nested lists"],
)
async def test_a_large_body_of_little_work_is_taken(body: Any):
    raw = json.dumps(body).encode()
    assert await read_body({}, client([raw]), max_bytes=2**26) == raw
    packed = gzip.compress(raw, 1)
    cut = [packed[start : start + 10_007] for start in range(0, len(packed), 10_007)]
    assert await read_body({b"content-encoding": b"gzip"}, client(cut), max_bytes=2**26) == raw


async def test_a_body_that_is_not_json_is_not_measured_as_json():
    body = HOSTILE["empty objects"]
    assert await read_body({}, client([body]), max_bytes=2**26, is_json=False) == body


async def test_large_bodies_are_parsed_in_another_thread_one_at_a_time_and_small_ones_are_not():
    here, busy, most = threading.get_ident(), 0, 0

    def parse(body: bytes) -> bool:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        time.sleep(0.01)
        busy -= 1
        return threading.get_ident() != here

    assert not await parsed(bytes(LARGE_BYTES - 1), parse)
    assert await asyncio.gather(*(parsed(bytes(LARGE_BYTES), parse) for _ in range(5))) == [True] * 5
    assert most == 1


# ---- keys, methods, replies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("authorization", "token"),
    [
        (None, b""),
        (b"", b""),
        (b"Bearer abc", b"abc"),
        (b"bearer  abc ", b"abc"),
        (b"Basic abc", b""),
        (b"Bearerabc", b""),
        (b"abc", b""),
    ],
)
def test_a_token_is_read_from_a_bearer_header_alone(authorization: bytes | None, token: bytes):
    assert bearer_token(authorization) == token
    assert is_secret(token, b"abc") == (token == b"abc")


def test_the_first_header_of_a_name_counts():
    assert header(scope(("a", "1"), ("b", "2"), ("b", "3")), b"b") == b"2"
    assert header(scope(("a", "1")), b"b") is None


def test_a_path_is_read_as_it_was_sent():
    assert raw_path({"raw_path": b"/a%2Fb", "path": "/a/b"}) == "/a%2Fb"
    assert raw_path({"path": "/a"}) == "/a"  # a client of ours that speaks ASGI need not give the raw one


def test_a_method_that_a_path_does_not_take_is_refused_with_those_that_it_takes():
    request = {"method": "PUT", "raw_path": b"/x"}
    check_method({**request, "method": "GET"}, "GET", "DELETE")
    with pytest.raises(Refusal, match="/x takes GET, DELETE, not PUT") as refused:
        check_method(request, "GET", "DELETE")
    assert refused.value.status == 405
    assert refused.value.headers == [(b"allow", b"GET, DELETE")]


def test_a_refusal_shows_no_secret_and_says_when_to_try_again():
    refusal = Refusal(503, "away", "cannot reach postgresql://me:hunter2@db", param="p", retry_after_seconds=2)
    assert "hunter2" not in str(refusal) == refusal.message
    assert (refusal.param, refusal.headers) == ("p", [(b"retry-after", b"2")])
    assert Refusal(400, "bad", "wrong").headers == ()


async def test_a_reply_carries_its_length_and_is_json_unless_it_says_otherwise():
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await send_reply(send, b"{}")
    await send_reply(send, b"", status=204, headers=[(b"x", b"y")])
    starts = sent[::2]
    assert [start["status"] for start in starts] == [200, 204]
    assert starts[0]["headers"] == [JSON, (b"content-length", b"2")]
    assert starts[1]["headers"] == [(b"x", b"y"), (b"content-length", b"0")]
    assert [end["body"] for end in sent[1::2]] == [b"{}", b""]


# ---- clients that leave --------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_is_reported_once_while_the_block_runs():
    left: list[str] = []
    with on_disconnect(client([b""], leaves=True), lambda: left.append("gone")) as watcher:
        await asyncio.sleep(0.01)
        assert watcher.done()
    assert left == ["gone"]


async def test_a_client_that_stays_is_watched_no_longer_than_the_block():
    left: list[str] = []
    with on_disconnect(client([b""]), lambda: left.append("gone")) as watcher:
        await asyncio.sleep(0)
    await asyncio.wait([watcher])
    assert watcher.cancelled()
    assert left == []
