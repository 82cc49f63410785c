"""What may differ between an answer and the message that brings it back, so that both are one turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.dialects.turns import arguments_value, turn_of

SAME = [
    ('{"a": 1}', '{"a":1}'),
    ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}'),
    ('{"a": {"x": 1, "y": [2]}}', '{"a":{"y":[2],"x":1}}'),
    ('{"a": 1.0}', '{"a": 1}'),
    ('{"a": 1e2}', '{"a": 100}'),
    ('{"a": 0.10}', '{"a": 0.1}'),
    ('{"a": -0.0}', '{"a": 0}'),
    ('{"a": 12345678901234567890123456789012345.0}', '{"a": 12345678901234567890123456789012345}'),
    ('{"a": "Gr\\u00f6\\u00dfe \\ud83c\\udf29"}', '{"a": "Größe 🌩"}'),
    ('{"a": "\\/"}', '{"a": "/"}'),
    ('{"a": 1, "a": 2}', '{"a": 2}'),
    ("", "{}"),
    ("  ", "{}"),
    ("{ }\n", "{}"),
    ('{"a": "\\ud800"}', '{"a":"\\ud800"}'),
]
OTHER = [
    ('{"a": 1}', '{"a": "1"}'),
    ('{"a": 1}', '{"a": true}'),
    ('{"a": 0}', '{"a": false}'),
    ('{"a": null}', "{}"),
    ('{"a": []}', '{"a": {}}'),
    ('{"a": [1, 2]}', '{"a": [2, 1]}'),
    ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}'),
    ('{"a": 0.1234567890123456789}', '{"a": 0.12345678901234568}'),
    ('{"a": "{\\"b\\": 1}"}', '{"a": "{\\"b\\":1}"}'),
    ('"{\\"a\\": 1}"', '{"a": 1}'),
    ('{"a": "x "}', '{"a": "x"}'),
    ('{"a": 1', "{}"),
    ('{"a": NaN}', '{"a": null}'),
    ('{"a": NaN}', '{"a":  NaN}'),
    ('{"a": 1e99999999999999999999}', '{"a":1e99999999999999999999}'),
    ('{"a": "é"}', '{"a": "e\\u0301"}'),
]


def message(arguments: Any, content: Any = None) -> dict[str, Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize(("one", "other"), SAME)
def test_arguments_of_one_value_are_one_turn(one: str, other: str) -> None:
    assert turn_of(message(one)) == turn_of(message(other))


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_arguments_of_another_value_are_another_turn(one: str, other: str) -> None:
    assert turn_of(message(one)) != turn_of(message(other))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, json_values)
def test_values_are_spelled_alike_only_if_they_are_equal(one: Any, other: Any) -> None:
    def typed(value: Any) -> Any:  # Python holds True and 1 for equal
        if isinstance(value, bool):
            return ("bool", value)
        if isinstance(value, list):
            return [typed(each) for each in value]
        return {name: typed(each) for name, each in value.items()} if isinstance(value, dict) else value

    alike = arguments_value(json.dumps(one)) == arguments_value(json.dumps(other, indent=2, ensure_ascii=False))
    assert alike == (typed(one) == typed(other))
    assert arguments_value(json.dumps([one])) == arguments_value([one])


@pytest.mark.parametrize("empty", [None, "", [], [{"type": "text", "text": ""}], " \n"])
def test_no_text_is_no_text_however_it_is_written(empty: Any) -> None:
    assert turn_of(message("{}", empty)) == turn_of(message("{}"))


def test_text_in_parts_or_trimmed_is_one_turn_and_a_picture_is_none() -> None:
    parts = [{"type": "text", "text": "I will"}, {"type": "text", "text": " look.\n"}]
    assert turn_of(message("{}", parts)) == turn_of(message("{}", "\nI will look."))
    assert turn_of(message("{}", [{"type": "image_url"}])) != turn_of(message("{}", ""))


def test_the_order_of_calls_counts_and_their_ids_do_not() -> None:
    one, two = message('{"n": 1}')["tool_calls"][0], message('{"n": 2}')["tool_calls"][0]
    said = [turn_of({"role": "assistant", "tool_calls": calls}) for calls in ([one, two], [two, one])]
    assert said[0] != said[1]
    assert turn_of({"tool_calls": [{**one, "id": "other"}, two]}) == said[0]


@pytest.mark.parametrize("calls", [5, [5], [{"function": 5}], [{"function": {"arguments": {"a": 1}}}]])
def test_calls_that_make_no_sense_are_read_without_an_error(calls: Any) -> None:
    assert turn_of({"role": "assistant", "content": 5, "tool_calls": calls})
