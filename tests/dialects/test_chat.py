"""Chat and completions: what is added to a request, hidden from an answer, and put together from a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.dialects import (
    DIALECTS,
    DONE,
    Hidden,
    StreamAssembler,
    TranslatedStream,
    dump,
    parse,
    prepare,
    split_events,
    sse_event,
    visible,
)

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


@pytest.mark.parametrize("index", [-1, 10**9, 1024])
def test_a_tool_call_of_an_absurd_number_is_named_and_left_out(index: int) -> None:
    call = {"index": index, "id": "a", "function": {"name": "look", "arguments": "{}"}}
    assembler = StreamAssembler()
    assembler.feed({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
    assert [problem.field for problem in assembler.reader.problems] == ["choices[0].delta.tool_calls[0].index"]
    assert "tool_calls" not in assembler.answer()["choices"][0]["message"]


def piece(index: Any = None, call_id: Any = None, name: Any = None, arguments: Any = None) -> dict[str, Any]:
    """A piece of a tool call; what is None is left out."""
    given = {"name": name, "arguments": arguments}
    function = {key: value for key, value in given.items() if value is not None}
    head = {"index": index, "id": call_id}
    return {"function": function, **{key: value for key, value in head.items() if value is not None}}


WEATHER, TIME = ("get_w", {"city": "Oslo"}), ("get_t", {"tz": "UTC"})
OSLO, UTC = '{"city":"Oslo"}', '{"tz":"UTC"}'
TOOL_CALL_STREAMS: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    "interleaved": (
        [piece(0, "x1", "get_w", ""), piece(1, "x2", "get_t", ""), piece(0, arguments=OSLO), piece(1, arguments=UTC)],
        [WEATHER, TIME],
    ),
    "interleaved in halves": (
        [
            *(piece(0, "x1", "get_w", OSLO[:5]), piece(1, "x2", "get_t", UTC[:5])),
            *(piece(0, arguments=OSLO[5:]), piece(1, arguments=UTC[5:])),
        ],
        [WEATHER, TIME],
    ),
    "the second first": ([piece(1, "x2", "get_t", UTC), piece(0, "x1", "get_w", OSLO)], [WEATHER, TIME]),
    "counted from one": ([piece(1, "x1", "get_w", OSLO), piece(2, "x2", "get_t", UTC)], [WEATHER, TIME]),
    "one index, two ids": ([piece(0, "x1", "get_w", OSLO), piece(0, "x2", "get_t", UTC)], [WEATHER, TIME]),
    "one index, two ids, one name": (
        [piece(0, "x1", "get_w", OSLO), piece(0, "x2", "get_w", OSLO)],
        [WEATHER, WEATHER],
    ),
    "one index, two ids, interleaved": (
        [
            *(piece(0, "x1", "get_w", ""), piece(0, "x2", "get_t", "")),
            *(piece(0, "x1", arguments=OSLO), piece(0, "x2", arguments=UTC)),
        ],
        [WEATHER, TIME],
    ),
    "one index and one id for two calls": (
        [piece(0, "x", "get_w", OSLO), piece(0, "x", "get_t", UTC)],
        [WEATHER, TIME],
    ),
    "one index, no id": ([piece(0, None, "get_w", OSLO), piece(0, None, "get_t", UTC)], [WEATHER, TIME]),
    "no index, in pieces": ([piece(None, "x1", "get_w", OSLO[:8]), piece(arguments=OSLO[8:])], [WEATHER]),
    "no index, whole calls": ([piece(None, "x1", "get_w", OSLO), piece(None, "x2", "get_t", UTC)], [WEATHER, TIME]),
    "no index, no id, whole calls": (
        [piece(name="get_w", arguments=OSLO), piece(name="get_t", arguments=UTC)],
        [WEATHER, TIME],
    ),
    "no index, interleaved by id": (
        [
            *(piece(None, "x1", "get_w", OSLO[:5]), piece(None, "x2", "get_t", UTC[:5])),
            *(piece(None, "x1", arguments=OSLO[5:]), piece(None, "x2", arguments=UTC[5:])),
        ],
        [WEATHER, TIME],
    ),
    "index null": ([{**piece(None, "x1", "get_w", OSLO), "index": None}], [WEATHER]),
    "index as text": ([piece("0", "x1", "get_w", OSLO[:5]), piece("0", arguments=OSLO[5:])], [WEATHER]),
    "the name in pieces": ([piece(0, "x1", "get", ""), piece(0, name="_w"), piece(0, arguments=OSLO)], [WEATHER]),
    "the name repeated": ([piece(0, "x1", "get_w", OSLO[:5]), piece(0, "x1", "get_w", OSLO[5:])], [WEATHER]),
    "a new id and the name with each piece": (
        [piece(0, "x1", "get_w", OSLO[:5]), piece(0, "x2", "get_w", OSLO[5:])],
        [WEATHER],
    ),
    "a new id with each piece": ([piece(0, "x1", "get_w", OSLO[:5]), piece(0, "x2", "", OSLO[5:])], [WEATHER]),
    "the name repeated at the end": ([piece(0, "x1", "get_w", OSLO), piece(0, "x1", "get_w", "")], [WEATHER]),
    "the id late": ([piece(0, None, "get_w", ""), piece(0, "x1", arguments=OSLO)], [WEATHER]),
    "no id at all": ([piece(0, None, "get_w", ""), piece(0, arguments=OSLO)], [WEATHER]),
    "without arguments": ([piece(0, "x1", "now"), piece(1, "x2", "get_t", UTC)], [("now", {}), TIME]),
    "arguments as an object": (
        [piece(0, "x1", "get_w", {"city": "Oslo"}), piece(1, "x2", "get_t", UTC)],
        [WEATHER, TIME],
    ),
    "calls as an object": ([piece(0, "x1", "get_w", OSLO)], [WEATHER]),
}


@pytest.mark.parametrize("form", TOOL_CALL_STREAMS)
def test_tool_calls_of_a_stream_are_the_same_in_the_record_and_for_every_client(form: str) -> None:
    pieces, right = TOOL_CALL_STREAMS[form]
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *({"tool_calls": [each]} for each in pieces)]
    if form == "calls as an object":
        deltas[-1] = {"tool_calls": pieces[-1]}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    for name in ("chat", "messages", "responses"):
        stream, raw = stream_of(name, chunks)
        message = stream.answer()["choices"][0]["message"]
        assert called(call["function"] for call in message["tool_calls"]) == right
        assert stream.unread is None
        if name == "messages":
            assert [(block["name"], block["input"]) for block in blocks_of(raw)] == right
        if name == "responses":
            output = events_in(raw)[-1]["response"]["output"]
            assert called(output) == right
            assert all(item["call_id"] for item in output)


def test_a_legacy_function_call_is_a_tool_call_for_other_clients_and_stays_itself_in_the_record() -> None:
    deltas = [{"function_call": {"name": "get_w", "arguments": OSLO[:4]}}, {"function_call": {"arguments": OSLO[4:]}}]
    chunks: list[Any] = [{"id": "c", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "function_call"}]})
    stream, raw = stream_of("messages", chunks)
    assert [(block["name"], block["input"]) for block in blocks_of(raw)] == [WEATHER]
    assert stream.answer()["choices"][0]["message"] == {"function_call": {"name": "get_w", "arguments": OSLO}}


def test_text_after_an_incomplete_call_waits_until_the_call_is_whole() -> None:
    deltas = [
        {"tool_calls": [piece(0, "x1", "get_w", OSLO[:4])]},
        {"content": "so"},
        {"tool_calls": [piece(0, arguments=OSLO[4:])]},
    ]
    chunks: list[Any] = [{"id": "c", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    _, raw = stream_of("messages", [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}])
    assert [(block["type"], block.get("input", block.get("text"))) for block in blocks_of(raw)] == [
        ("tool_use", WEATHER[1]),
        ("text", "so"),
    ]


def stream_of(client: str, chunks: list[Any]) -> tuple[TranslatedStream, bytes]:
    """The chunks of a chat server as a client gets them, who must have every event."""
    stream = TranslatedStream(DIALECTS[client], DIALECTS["chat"], Hidden(), {})
    raw = b"".join(stream.feed(sse_event(dump(chunk)), dump(chunk)) for chunk in chunks)
    return stream, raw + stream.feed(sse_event(DONE), DONE)


def events_in(raw: bytes) -> list[Any]:
    return [json.loads(data) for _, data in split_events(bytearray(raw))]


def blocks_of(raw: bytes) -> list[Any]:
    """The content blocks of an Anthropic stream, put together; one is open at a time."""
    blocks: list[Any] = []
    open_block: int | None = None
    for event in events_in(raw):
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = event["index"]
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert event["index"] == open_block
                delta = event["delta"]
                blocks[-1]["json"] += delta.get("partial_json", "")
                blocks[-1]["text"] = blocks[-1].get("text", "") + delta.get("text", "")
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case _:
                assert open_block is None
    return [
        {**block, "input": json.loads(block["json"] or "{}")} if block["type"] == "tool_use" else block
        for block in blocks
    ]


def called(functions: Any) -> list[tuple[str, Any]]:
    return [(function["name"], json.loads(function["arguments"] or "{}")) for function in functions]
