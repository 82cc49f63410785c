"""Requests that are refused before a model is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.dialects import DIALECTS, WrongType, check_types, parse_request

finite = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(st.characters()), finite, max_size=4))
def test_every_finite_object_is_read_as_json_reads_it(request: dict[str, Any]) -> None:
    raw = json.dumps(request).encode()
    assert repr(parse_request(raw)) == repr(json.loads(raw))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity", "9" * 400 + ".0"])
@pytest.mark.parametrize("template", ['{"a": %s}', '{"a": [{"b": [1, %s]}]}', '{"half": "\\ud800", "a": %s}'])
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(template: str, number: str) -> None:
    with pytest.raises(ValueError, match=r"number|value"):
        parse_request((template % number).encode())


@pytest.mark.parametrize("raw", [b"", b"[]", b'"text"', b"null", b"{", b'{"a": 1} x'])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"must be an object|line 1 column"):
        parse_request(raw)


WRONG: list[tuple[str, str, Any, str]] = [
    ("chat", "stream", "yes", 'stream must be true or false, got "yes"'),
    ("chat", "stream", 1, "stream must be true or false, got 1"),
    ("chat", "messages", {}, "messages must be a list, got {}"),
    ("chat", "messages", [{}, "hi"], r'messages\[1\] must be an object, got "hi"'),
    ("chat", "n", "2", 'n must be an integer, got "2"'),
    ("chat", "max_tokens", True, "max_tokens must be an integer, got true"),
    ("chat", "max_tokens", 1.5, "max_tokens must be an integer, got 1.5"),
    ("chat", "temperature", "hot", 'temperature must be a number, got "hot"'),
    ("completions", "prompt", {}, "prompt must be a string or a list, got {}"),
    ("responses", "previous_response_id", [], r"previous_response_id must be a string, got \[\]"),
    ("messages", "tool_choice", "auto", 'tool_choice must be an object, got "auto"'),
    ("embeddings", "input", 5, "input must be a string or a list, got 5"),
]


@pytest.mark.parametrize(("dialect", "field", "value", "message"), WRONG)
def test_a_field_of_the_wrong_type_is_named(dialect: str, field: str, value: Any, message: str) -> None:
    with pytest.raises(WrongType, match=message) as refused:
        check_types({field: value}, DIALECTS[dialect].field_types)
    assert refused.value.field.partition("[")[0] == field


def test_null_whole_floats_and_fields_that_no_api_defines_pass() -> None:
    request: dict[str, Any] = {"stream": None, "max_tokens": 5.0, "verve": "much", "logprobs": True, "messages": [{}]}
    check_types(request, DIALECTS["chat"].field_types)
