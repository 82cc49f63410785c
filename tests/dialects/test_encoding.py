"""JSON as bytes: read as `json` reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.dialects import parse

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(json_values, st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
def test_every_value_is_read_as_json_reads_it(value: Any, encoding: str) -> None:
    raw = json.dumps(value).encode(encoding)
    assert repr(parse(raw)) == repr(json.loads(raw))  # told apart by it: NaN is itself, 0.0 is not -0.0, 1 is not 1.0


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_numbers_are_the_same_however_they_are_written(number: Any) -> None:
    raw = str(number).encode()
    assert repr(parse(raw)) == repr(json.loads(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b'"\\ud800"',
        b'{"a":1,"a":2}',
        b"-0",
        b"1e999",
        b"-Infinity",
        b"[" * 300 + b"]" * 300,
        b"9" * 4000,
    ],
    ids=["half a surrogate pair", "twice the same key", "-0", "1e999", "-Infinity", "300 deep", "4,000 digits"],
)
def test_what_parsers_disagree_about_is_read_as_json_reads_it(raw: bytes) -> None:
    assert repr(parse(raw)) == repr(json.loads(raw))


@pytest.mark.parametrize("raw", [b"", b"{", b"[1,]", b"01", b"nan", b'"\xff"', b'"\t"', b"1 2"])
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"line 1 column|codec"):
        parse(raw)
