"""Parsers of tool calls: what one writes is read back, however it is cut into pieces."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leyden.engine.tools import PARSERS, Reader, ToolCall, ToolParser, parse

HERMES = PARSERS["hermes"]
TEXTS = st.text(st.sampled_from('a "\\\n<>{}/=[]\u00e9\U0001f600') | st.characters(codec="utf-8"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
NAMES = st.text(st.sampled_from("abc_09-"), min_size=1, max_size=8)
CALLS = st.lists(st.builds(ToolCall, NAMES, st.dictionaries(TEXTS, VALUES, max_size=3)), min_size=1, max_size=3)


def hermes(calls: list[ToolCall]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in calls
    )


def in_pieces(text: str, sizes: list[int], parser: ToolParser, schemas: Any) -> tuple[str, list[ToolCall]]:
    reader, content, calls, start, turn = Reader(parser, schemas), "", list[ToolCall](), 0, 0
    while True:
        end = min(len(text), start + sizes[turn % len(sizes)])
        piece, found = reader.feed(text[start:end], final=end == len(text))
        content += piece
        calls += found
        if end == len(text):
            return content, calls
        start, turn = end, turn + 1


@settings(max_examples=40)
@given(CALLS)
@example([ToolCall("a", {"text": "</tool_call>"}), ToolCall("b", {})])
def test_hermes_reads_the_calls_that_were_written(calls: list[ToolCall]):
    assert parse(hermes(calls), HERMES, {}) == ("", calls)


COMMON = [
    "\n",
    " ",
    "text",
    "{",
    "}",
    '"',
    "<",
    "[",
    ";",
    '{"name": "f", "arguments": {}}',
    '{"name": 1}',
    "12",
    "null",
]
PIECES = {
    "hermes": [
        *("<tool_call>", "</tool_call>", "<tool_", "call>"),
        '{"name": "f", "arguments": {"x": "</tool_call>"}}',
        *('<tool_call>{"name": "g", "arguments": {"y": 1}}</tool_call>', "<tool_call>{}</tool_call>"),
    ],
    "qwen3_coder": [
        *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>"),
        "<tool_call>\n<function=g>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    ],
    "llama3_json": ["<|python_tag|>", "<|python", '{"name": "g", "parameters": {"x": [1]}}'],
    "mistral": [
        *("[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]", "f", "]", ","),
        *('[TOOL_CALLS] [{"name": "g", "arguments": {}}]', '[TOOL_CALLS]g[ARGS]{"x": 1}'),
    ],
}
OUTPUTS = st.sampled_from(sorted(PARSERS)).flatmap(
    lambda name: st.tuples(
        st.just(PARSERS[name]), st.lists(st.sampled_from(COMMON + PIECES[name]), max_size=8).map("".join)
    )
)
SCHEMAS = {"f": {"properties": {"x": {"type": "integer"}}}}


@settings(max_examples=60)
@given(OUTPUTS, st.lists(st.integers(1, 5), min_size=1, max_size=4))
@example((PARSERS["mistral"], "[TOOL_CALLS]12{}"), [13])
def test_any_text_reads_alike_whole_and_in_pieces(output: tuple[ToolParser, str], sizes: list[int]):
    parser, text = output
    assert in_pieces(text, sizes, parser, SCHEMAS) == parse(text, parser, SCHEMAS)


@settings(max_examples=60)
@given(OUTPUTS)
def test_text_without_a_call_is_its_content_to_the_letter(output: tuple[ToolParser, str]):
    parser, text = output
    content, calls = parse(text, parser, SCHEMAS)
    assert calls or content == text


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('Look:\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', "Look:", [ToolCall("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone.', "\nDone.", [ToolCall("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [ToolCall("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, []),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', None, []),
        ("<tool_call>" + '{"a":' * 100_000, None, []),
        (
            '<tool_call>oops</tool_call> <tool_call>{"name": "f", "arguments": {}}</tool_call>',
            "<tool_call>oops</tool_call>",
            [ToolCall("f", {})],
        ),
    ],
)
def test_hermes_at_its_edges(text: str, content: str | None, calls: list[ToolCall]):
    """content: None where the text is no call and stays as it is."""
    assert parse(text, HERMES, {}) == (text if content is None else content, calls)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("qwen3_coder", "Hm.\n<function=f>\n</function>", "Hm.", [ToolCall("f", {})]),
        ("qwen3_coder", "<tool_call><function=f>stray</function></tool_call>", None, []),
        (
            "qwen3_coder",
            "<function=f>\n<parameter=x>\n7\n</parameter>\n<parameter=y>\n7\n</parameter>\n</function>",
            "",
            [ToolCall("f", {"x": 7, "y": "7"})],
        ),
        ("qwen3_coder", "<function=f><parameter=x>seven</parameter></function>", "", [ToolCall("f", {"x": "seven"})]),
        ("qwen3_coder", "<function=f><parameter=x>None</parameter></function>", "", [ToolCall("f", {"x": None})]),
        (
            "qwen3_coder",
            "<function=f><parameter=z>a</parameter>b</parameter></function>",
            "",
            [ToolCall("f", {"z": "a</parameter>b"})],
        ),
        (
            "llama3_json",
            '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}',
            "",
            [ToolCall("f", {}), ToolCall("g", {})],
        ),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [ToolCall("f", {})]),
        ("llama3_json", "<|python_tag|>print(1)", None, []),
        ("llama3_json", '{"name": "f", "parameters": {}} is my call', None, []),
        ("llama3_json", 'My call: {"name": "f", "parameters": {}}', None, []),
        ("mistral", 'So: [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"}]', "So:", [ToolCall("f", {})]),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]x1[ARGS]{}[TOOL_CALLS]g{}", "", [ToolCall("f", {}), ToolCall("g", {})]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 5]', None, []),
        ("mistral", "[TOOL_CALLS] []", None, []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}},', "", [ToolCall("f", {})]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"na', None, []),
    ],
)
def test_other_forms_at_their_edges(name: str, text: str, content: str | None, calls: list[ToolCall]):
    """content: None where the text is no call and stays as it is."""
    assert parse(text, PARSERS[name], SCHEMAS) == (text if content is None else content, calls)


def test_arguments_are_text_that_utf8_can_hold():
    assert ToolCall("f", {"x": "\u00e9"}).arguments_text == '{"x": "\u00e9"}'
    assert ToolCall("f", {"x": "\ud800"}).arguments_text == '{"x": "\\ud800"}'


@pytest.mark.parametrize("begun", ["<function=look>", "<tool_call>", "<tool_call>\n<function=look>\n<parameter=a>"])
def test_a_policy_that_writes_a_call_without_end_costs_little(begun: str):
    text = begun + "\n" * 20_000
    started = time.process_time()
    assert parse(text, PARSERS["qwen3_coder"], {})[1] == []
    assert time.process_time() - started < 1.0
