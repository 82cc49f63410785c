"""Chat and completions: what is added to a request, hidden from an answer, and put together from a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.dialects import DONE, Hidden, StreamAssembler, dump, parse, prepare, split_events, sse_event, visible

LOGPROBS_OF_CHAT, LOGPROBS_OF_COMPLETIONS = True, 0

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def prepared(request: dict[str, Any], **options: Any) -> tuple[dict[str, Any], Hidden]:
    raw = json.dumps(request).encode()
    body, hidden = prepare(raw, request, **{"model": "m", "logprobs": LOGPROBS_OF_CHAT, "seed": None, **options})
    return json.loads(body), hidden


@given(st.dictionaries(st.text(), json_values))
def test_a_prepared_request_is_the_agents_and_a_few_fields_more(fields: dict[str, Any]) -> None:
    request = {**fields, "model": "m"}
    body, _ = prepared(request, seed=3)
    asked = ("return_token_ids", "logprobs", "stream_options", "seed")
    assert {k: v for k, v in body.items() if k not in asked} == {k: v for k, v in request.items() if k not in asked}
    assert body["return_token_ids"] is True
    assert body["logprobs"] not in (None, False)
    assert body["seed"] is not None


def test_the_agents_bytes_are_kept_where_something_is_only_added() -> None:
    raw = b' {"model" : "m",\n "big": 12345678901234567890123, "x": 1.50, "x": 2}'
    body, _ = prepare(raw, json.loads(raw), model="m", logprobs=True, seed=None)
    assert body.endswith(raw.strip()[1:])
    assert body.startswith(b'{"return_token_ids":true,"logprobs":true,')
    assert prepare(raw, json.loads(raw), model="m", logprobs=None, seed=None) == (raw, Hidden())


@pytest.mark.parametrize(
    ("request_", "hidden"),
    [
        ({}, Hidden(token_ids=True, logprobs=True)),
        ({"return_token_ids": True}, Hidden(logprobs=True)),
        ({"logprobs": True}, Hidden(token_ids=True)),
        ({"return_token_ids": False, "logprobs": None}, Hidden(token_ids=True, logprobs=True)),
        ({"stream": False}, Hidden(token_ids=True, logprobs=True)),
        ({"stream": True}, Hidden(token_ids=True, logprobs=True, usage=True)),
        ({"stream": True, "stream_options": {"include_usage": True}}, Hidden(token_ids=True, logprobs=True)),
        ({"stream": True, "stream_options": {"x": 1}}, Hidden(token_ids=True, logprobs=True, usage=True)),
    ],
)
def test_only_what_the_agent_did_not_ask_for_is_hidden(request_: dict[str, Any], hidden: Hidden) -> None:
    body, found = prepared({"model": "m", **request_})
    assert found == hidden
    assert body["return_token_ids"] is True
    assert body["logprobs"] is True
    if request_.get("stream"):
        assert body["stream_options"] == {**request_.get("stream_options", {}), "include_usage": True}


def test_completions_ask_for_log_probabilities_by_number_and_a_zero_is_a_wish() -> None:
    assert prepared({"model": "m"}, logprobs=LOGPROBS_OF_COMPLETIONS)[0]["logprobs"] == 0
    assert prepared({"model": "m", "logprobs": 2}, logprobs=LOGPROBS_OF_COMPLETIONS)[0]["logprobs"] == 2
    body, hidden = prepared({"model": "m", "logprobs": 0}, logprobs=LOGPROBS_OF_COMPLETIONS)
    assert body["logprobs"] == 0
    assert not hidden.logprobs


def test_a_seed_of_the_agent_wins_and_a_null_is_none() -> None:
    assert prepared({"model": "m", "seed": 0}, seed=9)[0]["seed"] == 0
    assert prepared({"model": "m", "seed": None}, seed=9)[0]["seed"] == 9


def test_the_model_gets_its_own_name() -> None:
    assert prepared({"model": "alias", "x": 1})[0]["model"] == "m"


@given(st.lists(json_values), st.booleans(), st.data())
def test_a_stream_is_split_into_the_same_events_however_it_arrives(values: list[Any], crlf: bool, data: Any) -> None:
    events = [sse_event(dump(value)) for value in values] + [b": a comment\n\n", sse_event(DONE)]
    if crlf:
        events = [event.replace(b"\n", b"\r\n") for event in events]
    stream = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    buffer = bytearray()
    found: list[tuple[bytes, bytes]] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        buffer += stream[start:stop]
        found += split_events(buffer)
    assert not buffer
    assert [event for event, _ in found] == events
    assert [json.loads(line) for _, line in found[:-2]] == values
    assert [line for _, line in found[-2:]] == [b"", DONE]


def test_a_rewritten_event_keeps_its_name_and_id() -> None:
    event = b"event: delta\nid: 7\ndata: {}\n\n"
    assert sse_event(b"1", like=event) == b"event: delta\nid: 7\ndata: 1\n\n"


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=[]))
)


@given(st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))
def test_what_is_written_is_read_as_it_was(value: Any) -> None:
    written = dump(value)
    assert json.loads(written) == value == parse(written)
    assert b"\n" not in written  # it may stand in an event


def test_half_a_surrogate_pair_and_deep_nesting_pass_as_json_says_them() -> None:
    assert json.loads(dump({"x": "\ud83d"})) == {"x": "\ud83d"}
    deep: Any = 1
    for _ in range(600):
        deep = [deep]
    assert json.loads(dump(deep)) == deep


def test_hiding_leaves_the_answer_itself_as_it_was() -> None:
    choice = {
        "index": 0,
        "token_ids": [1],
        "policy_versions": [2],
        "logprobs": {"content": []},
        "message": {"content": "x"},
    }
    answer: dict[str, Any] = {"id": "i", "prompt_token_ids": [3], "choices": [choice], "usage": {"prompt_tokens": 1}}
    before = json.dumps(answer)
    shown = visible(answer, Hidden(token_ids=True, logprobs=True))
    assert shown == {
        "id": "i",
        "choices": [{"index": 0, "logprobs": None, "message": {"content": "x"}}],
        "usage": {"prompt_tokens": 1},
    }
    assert json.dumps(answer) == before


def test_a_chunk_of_hidden_usage_alone_is_not_shown() -> None:
    usage = Hidden(usage=True)
    assert visible({"choices": [], "usage": {"prompt_tokens": 1}}, usage) is None
    assert visible({"choices": [{"index": 0}], "usage": None}, usage) == {"choices": [{"index": 0}]}
    assert visible({"choices": [], "prompt_filter_results": []}, usage) == {"choices": [], "prompt_filter_results": []}


def test_tool_calls_and_reasoning_are_put_together() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None},
        {"reasoning_content": "thi"},
        {"reasoning_content": "nk"},
        {"tool_calls": [{"index": 0, "id": "t0", "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 1, "id": "t1", "type": "function", "function": {"name": "sub", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {},
    ]
    assembler = StreamAssembler()
    for number, delta in enumerate(deltas):
        assert not assembler.finished
        finish_reason = "tool_calls" if number == len(deltas) - 1 else None
        assembler.feed({"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})
    assert assembler.finished
    assert assembler.answer() == {
        "id": "c",
        "choices": [
            {
                "index": 0,
                "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "think",
                    "tool_calls": [
                        {"id": "t0", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                        {"id": "t1", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
                    ],
                },
            }
        ],
    }


def test_a_stream_with_several_choices_is_finished_when_all_are() -> None:
    assembler = StreamAssembler()
    for index, reason in ((0, None), (1, None), (1, "stop")):
        assembler.feed({"choices": [{"index": index, "text": "x", "finish_reason": reason}]})
    assert not assembler.finished
    assembler.feed({"choices": [{"index": 0, "text": "y", "finish_reason": "length"}]})
    assert assembler.finished
    assert [choice["text"] for choice in assembler.answer()["choices"]] == ["xy", "xx"]


@pytest.mark.parametrize("index", [-1, 10**9])
def test_a_tool_call_of_an_absurd_number_is_no_chunk(index: int) -> None:
    call = {"index": index, "id": "a", "function": {"name": "look", "arguments": "{}"}}
    with pytest.raises(ValueError, match=str(index)):
        StreamAssembler().feed({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
