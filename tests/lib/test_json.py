"""The work of parsing a JSON text, counted before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import leyden._lib.json as measured
from leyden._lib.json import MAX_JSON_DEPTH, JsonMeter, TooMuchJson, check_json_work

json_texts = st.text(st.sampled_from('"\\[]{},:\u2222a'), max_size=6)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | json_texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(json_texts, inner, max_size=5),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """The objects and lists, the commas between entries, and the strings of a value."""
    if isinstance(value, str):
        return 0, 0, 1
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counted(part) for part in (value if isinstance(value, list) else value.values())]
    parts, commas, strings = (sum(each) for each in zip(*inner, strict=True)) if inner else (0, 0, 0)
    keys = len(value) if isinstance(value, dict) else 0
    return parts + 1, commas + max(len(value) - 1, 0), strings + keys


@given(json_values, st.integers(1, 9), st.booleans())
def test_a_text_in_pieces_is_counted_as_its_parsed_value_is(value: Any, size: int, ascii_only: bool):
    text = json.dumps({"value": value}, ensure_ascii=ascii_only).encode()
    meter = JsonMeter()
    for start in range(0, len(text), size):
        meter.add(text[start : start + size])
    parts, commas, strings = counted({"value": value})
    assert (meter.parts, meter.values) == (parts, parts + commas + strings)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'["]]]]",', b'[[[[],{}]],"\\\\",'])
def test_what_is_nested_deeper_than_the_limit_is_refused_wherever_it_begins(opening: bytes):
    for before in (b"", b"[1,[2]]," * 50_000):
        check_json_work(b"[" + before + opening * (MAX_JSON_DEPTH - 4))
        with pytest.raises(TooMuchJson, match="200 deep"):
            check_json_work(b"[" + before + opening * MAX_JSON_DEPTH)


def test_the_limits_are_those_of_the_message(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "MAX_JSON_PARTS", 3)
    monkeypatch.setattr(measured, "MAX_JSON_VALUES", 9)
    for text in ("[[],[]]", "[1,2,3,4,5,6,7,8]", '{"a":1,"b":2,"c":3}', '["a","b","c"]'):
        JsonMeter().add(text.encode())
    for text, limit in (
        ("[[],[],[]]", "3 objects and lists"),
        ("[1,2,3,4,5,6,7,8,9,10]", "9 values"),
        ('["a","b","c","d","e"]', "9 values"),
    ):
        with pytest.raises(TooMuchJson, match=limit):
            JsonMeter().add(text.encode())
