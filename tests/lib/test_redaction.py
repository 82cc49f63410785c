"""Which texts lose a password or a key before a person, a log or a store sees them."""

from __future__ import annotations

import time

import pytest

from leyden._lib.attempt_key import attempt_key
from leyden._lib.text import describe_error, storable
from leyden.errors import ConfigError, StoreError, redact
from leyden.gateway.upstream import UpstreamModel
from leyden.store import open_store
from leyden.types import LLM


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot reach http://user:S3CRET@gpu:8000/v1", "cannot reach http://user:***@gpu:8000/v1"),
        ("postgresql://me:S3:CR@T@db/x is away", "postgresql://me:***@db/x is away"),
        ("postgresql://:S3CRET@db/x", "postgresql://:***@db/x"),
        ("postgresql://me@db/x?sslpassword=S3CRET&sslmode=on", "postgresql://me@db/x?sslpassword=***&sslmode=on"),
        ("https://x/v1?api_key=S3CRET", "https://x/v1?api_key=***"),
        ("https://x/v1?key=S3CRET#top", "https://x/v1?key=***#top"),
        ("{'Authorization': 'Bearer S3CRET'}", "{'Authorization': 'Bearer ***'}"),
        ("Authorization: Basic bWU6S3=", "Authorization: Basic ***"),
        ('{"api_key": "S3CRET", "model": "m"}', '{"api_key": "***", "model": "m"}'),
        ("{'password': 'S3 CRET', 'n': 1}", "{'password': '***', 'n': 1}"),
        ("host=db password=S3CRET user=me", "host=db password=*** user=me"),
        ("postgresql://me:S3/CRET@db/x", "postgresql://me:***@db/x"),
        ("postgresql://me:x1/S3@CRET@db/x?a=b", "postgresql://me:***@db/x?a=b"),
        ("https://x/v1?apikey=S3CRET", "https://x/v1?apikey=***"),
        ("https://x/blob?sv=1&sig=S3CRET", "https://x/blob?sv=1&sig=***"),
        ("https://x/blob?X-Amz-Signature=S3CRET&a=b", "https://x/blob?X-Amz-Signature=***&a=b"),
        ("https://x/?user=me&passwd=S3CRET", "https://x/?user=me&passwd=***"),
        ("password = 'S3 CR\\'ET' user=me", "password = *** user=me"),
    ],
)
def test_a_password_in_an_address_is_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert str(StoreError(text)) == shown
    assert storable(text) == shown
    assert describe_error(ValueError(text)) == shown


def test_the_secret_of_an_attempts_key_is_hidden_and_its_ids_stay() -> None:
    """Clients quote the key that they were given, in their own errors."""
    key = attempt_key("tok", "ro-1", "at-2")
    text = f"401: Bearer {key} is not valid, '{key}'"
    shown = "401: Bearer sk-leyden-ro-1.at-2.*** is not valid, 'sk-leyden-ro-1.at-2.***'"
    assert describe_error(ValueError(text)) == shown
    assert storable(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://gpu:8000/v1",
        "http://me@gpu:8000/v1",
        "http://gpu:8000/mail?to=a@b",
        "http://gpu:8000/users/@me",
        "http://[::1]:8000/users/@me",
        "http://[2001:db8::1]/users/@me",
        "give the server's token as token=..., or password=...",
        "the token is monkey=5",
        "3 rollouts, 2 failed: user:name@host",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("part", ["://a:", "://a:b/", "x:", "?key", "password", "a@"])
def test_the_time_for_a_long_text_grows_with_its_length(part: str) -> None:
    began = time.process_time()
    redact("://a:" + part * 50_000)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("address", ["postgressql://me:S3CRET@db/x", "postgresql://me:S3CRET@db/x?schema=a-b"])
def test_a_store_that_cannot_be_opened_does_not_show_its_password(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(address)
    assert "S3CRET" not in str(caught.value)


def test_the_password_of_a_models_server_is_kept_apart_from_its_address() -> None:
    model = UpstreamModel("m", "http://me:S3%2FCRET@gpu:8000/v1")
    assert model.endpoint == model.address == "http://gpu:8000/v1"
    assert model.login == ("me", "S3/CRET")
    assert "CRET" not in repr(model)


def test_a_password_and_a_key_for_one_server_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="give one of them") as caught:
        UpstreamModel("m", "http://me:S3CRET@gpu:8000/v1", api_key="K3Y")
    assert "S3CRET" not in str(caught.value)
    assert "K3Y" not in str(caught.value)


def test_keys_are_shown_neither_by_a_resource_nor_by_the_error_of_a_wrong_one() -> None:
    assert "K3Y" not in repr(LLM(endpoint="http://x/v1", model="m", api_key="K3Y"))
    with pytest.raises(ValueError, match="endpoint") as caught:
        LLM.model_validate({"model": "m", "api_key": "K3Y"})
    assert "K3Y" not in str(caught.value)
