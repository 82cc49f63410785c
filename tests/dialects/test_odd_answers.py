"""Answers that break their API's rules: they pass as they came where nothing is translated, and a translation of them
is a good answer or a refusal that names the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.dialects import (
    DIALECTS,
    DONE,
    Dialect,
    Hidden,
    TranslatedStream,
    Translation,
    dump,
    split_events,
    sse_event,
)
from leyden.errors import Untranslatable
from leyden.gateway.record import ModelCall, span_of

some = settings(max_examples=60)
HEAD = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
CALL = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "hm", "reasoning": "hm"},
    {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
    {"content": "hi"},
    {"refusal": "no"},
    {"tool_calls": [CALL, {**CALL, "index": 1, "id": "y"}]},
    {"function_call": {"name": "f", "arguments": "{}"}},
    {"audio": {"id": "a", "data": "AA"}, "annotations": [{"a": 1}]},
]
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
ENTRY = {"token": "h", "logprob": -1.0, "bytes": [104], "top_logprobs": []}
CHUNKS: list[Any] = [
    *({**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in DELTAS),
    {**HEAD, "choices": [{"index": 0, "delta": {"content": "!"}, "logprobs": {"content": [ENTRY]}, "token_ids": [1]}]},
    {**HEAD, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": None}]},
    {**HEAD, "choices": [], "usage": USAGE},
]
TEXTS: list[Any] = [
    {"id": "t", "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}
    for text, reason in (("h", None), ("i", "stop"))
]
MESSAGE = {k: v for delta in DELTAS for k, v in delta.items()}
ANSWER = {
    **HEAD,
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop", "logprobs": {"content": [ENTRY]}}],
    "usage": USAGE,
}


def streamed(dialect: Dialect) -> list[Any]:
    """The events of a good stream of a dialect."""
    if dialect.name == "completions":
        return TEXTS
    stream = TranslatedStream(dialect, DIALECTS["chat"], Hidden(), {})
    raw = b"".join(stream.feed(sse_event(dump(chunk)), dump(chunk)) for chunk in CHUNKS) + stream.feed(
        sse_event(DONE), DONE
    )
    return [json.loads(data) for _, data in split_events(bytearray(raw)) if data != DONE]


def answered(dialect: Dialect) -> Any:
    """A good whole answer of a dialect."""
    if dialect.name == "completions":
        return {**TEXTS[-1], "usage": USAGE}
    if dialect.name == "embeddings":
        return {"object": "list", "data": [{"index": 0, "embedding": [0.5]}], "usage": USAGE}
    return dialect.answer_from_chat(ANSWER, {})


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


odd = st.sampled_from(
    [
        *(None, True, -1, 0, 7, 10**30, 0.5, "", "h", "0", "\ud83d", [], {}, [None], [1], ["h"], [[]], {"a": 1}),
        *(
            {"type": "text", "text": "h"},
            [{"type": "text", "text": "h"}],
            [{"type": "image"}],
            {"error": 1},
            {"type": 1},
        ),
    ]
)


def changed(value: Any, path: tuple[Any, ...], new: Any, *, drop: bool) -> Any:
    """A copy of a JSON value with another value, or none, at a place."""
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    if drop and len(path) == 1:
        del copied[path[0]]
    else:
        copied[path[0]] = changed(value[path[0]], path[1:], new, drop=drop)
    return copied


@st.composite
def broken(draw: Any, value: Any) -> Any:
    for _ in range(draw(st.integers(1, 2))):
        value = changed(value, draw(st.sampled_from(places(value))), draw(odd), drop=draw(st.booleans()))
    return value


@st.composite
def broken_streams(draw: Any, dialect: Dialect) -> list[bytes]:
    """The events of a stream, a few of them broken, lost, repeated or out of order."""
    events = list(streamed(dialect))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(events) - 1))
        events[at : at + 1] = draw(st.sampled_from([[draw(broken(events[at]))], [], [events[at]] * 2])) or [{}]
    if draw(st.booleans()):
        events = draw(st.permutations(events))
    data = [json.dumps(event).encode() for event in events]
    for junk in draw(st.lists(st.sampled_from([b"{oops", b"[1,2]", b"null", b"3", b'"x"', b"\xff", b""]), max_size=2)):
        data.insert(draw(st.integers(0, len(data))), junk)
    return [b"event: x\ndata: " + each + b"\n\n" for each in [*data, DONE]]


def record_of(response: Any, unread: str | None) -> str:
    """The span of a call with this response, as the store gets it."""
    call = ModelCall("r", "a", "t" * 32, None, 0, "chat", 0.0, response=response, unread=unread, end_time=1.0)
    return span_of(call).model_dump_json()


@contextmanager
def refused_by_name() -> Iterator[None]:
    """Suppress the refusal of an answer, unless it shows an error of the translation itself."""
    try:
        yield
    except Untranslatable as error:
        internal = ("TypeError", "KeyError", "AttributeError", "object has no", "NoneType")
        if any(name in str(error) for name in internal):
            raise


BY_NAME = [dialect for dialect in DIALECTS.values() if dialect.name != "embeddings"]


@pytest.mark.parametrize("dialect", BY_NAME, ids=lambda dialect: dialect.name)
@some
@given(data=st.data())
def test_every_event_of_a_broken_stream_passes_as_it_came_and_the_record_is_made(dialect: Dialect, data: Any) -> None:
    events = data.draw(broken_streams(dialect))
    stream = TranslatedStream(dialect, dialect, Hidden(), {})
    for event in events:
        ((_, content),) = split_events(bytearray(event))
        assert stream.feed(event, content) == event
    assert stream.finished
    assert record_of(stream.answer(), stream.unread)


@pytest.mark.parametrize("client", ["chat", "messages", "responses"])
@pytest.mark.parametrize("server", ["chat", "messages", "responses"])
@some
@given(data=st.data())
def test_a_broken_stream_is_translated_or_refused_by_a_name_of_the_api(client: str, server: str, data: Any) -> None:
    if client == server:
        return
    stream = TranslatedStream(DIALECTS[client], DIALECTS[server], Hidden(), {})
    raw = b""
    with refused_by_name():
        for event in data.draw(broken_streams(DIALECTS[server])):
            ((_, content),) = split_events(bytearray(event))
            raw += stream.feed(event, content)
    for _, content in split_events(bytearray(raw)):
        assert content == DONE or isinstance(json.loads(content), dict)
    if client == "messages":
        opened: list[int] = []
        for kind, index in ((event["type"], event.get("index")) for event in map(json.loads, data_of(raw))):
            if kind == "content_block_start":
                opened.append(index)
                assert index == len(opened) - 1
            elif kind in ("content_block_delta", "content_block_stop"):
                assert index == len(opened) - 1
    assert record_of(stream.answer(), stream.unread)


def data_of(raw: bytes) -> list[bytes]:
    return [content for _, content in split_events(bytearray(raw))]


@pytest.mark.parametrize("server", DIALECTS)
@some
@given(data=st.data())
def test_a_broken_whole_answer_passes_as_it_came_or_is_translated_or_refused_by_name(server: str, data: Any) -> None:
    body = json.dumps(data.draw(broken(answered(DIALECTS[server])))).encode()
    for client in DIALECTS.values():
        if client.name == server:
            chat, shown, unread = Translation(client, client, b"{}", {}, model="m", record_tokens=False).answer(body)
            assert shown is body
            assert chat is None or record_of(chat, unread)
        elif client.translates and DIALECTS[server].translates:
            request = {"messages": [], "input": []}
            translation = Translation(client, DIALECTS[server], b"{}", request, model="m", record_tokens=False)
            with refused_by_name():
                _, shown, unread = translation.answer(body)
                assert isinstance(json.loads(shown), dict)
                assert unread is None


PARTS: list[Any] = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
    {"type": "text", "text": "h"},
    {"type": "text", "text": "i"},
]


@pytest.mark.parametrize(
    ("message", "text", "reasoning", "calls"),
    [
        ({"content": PARTS[1:]}, "hi", None, []),
        ({"content": PARTS}, "hi", "hm", []),
        ({"content": ["h", {"text": "i"}]}, "hi", None, []),
        ({"content": "hi", "reasoning": [{"type": "text", "text": "hm"}]}, "hi", "hm", []),
        ({"content": "hi", "tool_calls": None}, "hi", None, []),
        (
            {"content": None, "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {"a": 1}}}]},
            None,
            None,
            ["x"],
        ),
        (
            {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
            None,
            None,
            ["call_c_0"],
        ),
        (
            {"content": None, "tool_calls": {"id": "x", "function": {"name": "f", "arguments": '{"a": 1}'}}},
            None,
            None,
            ["x"],
        ),
        ({"content": None, "function_call": {"name": "f", "arguments": {"a": 1}}}, None, None, ["call_c_0"]),
    ],
)
def test_the_forms_of_a_whole_answer_mean_the_same_to_every_client(
    message: dict[str, Any], text: str | None, reasoning: str | None, calls: list[str]
) -> None:
    answer = {"id": "c", "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": None}]}
    found = {}
    for name in ("chat", "messages", "responses"):
        request: dict[str, Any] = {"messages": [], "input": []}
        translation = Translation(DIALECTS[name], DIALECTS["chat"], b"{}", request, model="m", record_tokens=False)
        chat, shown, unread = translation.answer(json.dumps(answer).encode())
        assert unread is None
        assert chat is not None
        said = chat["choices"][0]["message"]
        assert (said["content"], said.get("reasoning_content") or said.get("reasoning")) == (text, reasoning)
        found[name] = json.loads(shown)
    blocks = [
        [block["type"], *[v for k, v in block.items() if k in ("text", "thinking", "id", "input")]]
        for block in found["messages"]["content"]
    ]
    assert blocks == [
        *([["thinking", reasoning]] if reasoning else []),
        *([["text", text]] if text else []),
        *(["tool_use", call_id, {"a": 1}] for call_id in calls),
    ]
    output = found["responses"]["output"]
    assert "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"]) == (
        text or ""
    )
    assert [(item["call_id"], json.loads(item["arguments"])) for item in output if item["type"] == "function_call"] == [
        (call_id, {"a": 1}) for call_id in calls
    ]


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        (None, (0, 0)),
        ({"prompt_tokens": "3", "completion_tokens": 2.0}, (3, 2)),
        ({"prompt_tokens_details": None}, (0, 0)),
    ],
)
def test_token_counts_as_text_or_missing_are_counted_as_far_as_they_go(usage: Any, tokens: tuple[int, int]) -> None:
    answer = {"id": "c", "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": usage}
    translation = Translation(
        DIALECTS["messages"], DIALECTS["chat"], b"{}", {"messages": []}, model="m", record_tokens=False
    )
    counted = json.loads(translation.answer(json.dumps(answer).encode())[1])["usage"]
    assert (counted["input_tokens"], counted["output_tokens"]) == tokens
