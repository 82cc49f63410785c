"""Which requests a server takes for those of a program or of its own pages."""

from __future__ import annotations

import time
from typing import Any

import pytest

from leyden.host.http import MAX_JSON_PARTS, RequestRefused, SiteGuard, has_too_many_parts

HOST = ("host", "localhost:4747")


def scope(*headers: tuple[str, str], method: str = "POST") -> dict[str, Any]:
    return {"method": method, "headers": [(name.encode(), value.encode()) for name, value in headers]}


def status(guard: SiteGuard, *headers: tuple[str, str], method: str = "POST") -> int:
    try:
        guard.check(scope(*headers, method=method))
    except RequestRefused as refused:
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
    with pytest.raises(RequestRefused, match=r"'https://evil\.example'.*from a program.*reverse proxy"):
        SiteGuard(local_only=True).check(scope(HOST, ("origin", "https://evil.example")))
    with pytest.raises(RequestRefused, match=r"'evil\.example' is not this machine.*token"):
        SiteGuard(local_only=True).check(scope(("host", "evil.example")))


def test_a_string_that_never_ends_is_counted_in_linear_time():
    body = b"[" * (MAX_JSON_PARTS + 1) + b'"' + b'\\"' * 2**20
    began = time.process_time()
    assert has_too_many_parts(body)
    assert time.process_time() - began < 1


def test_brackets_in_strings_are_no_parts():
    brackets = b"[" * (MAX_JSON_PARTS + 1)
    assert not has_too_many_parts(b'["' + brackets + b'", "\\"' + brackets + b'\\\\"]')
    assert has_too_many_parts(b'["a\\\\"' + brackets + b"]")
