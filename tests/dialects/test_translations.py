"""There and back: what is said in one dialect is said in every other, as a whole and as a stream, or refused by name.

The judge is `leyden.testing`'s own reading of each API: a request and its translation must become the same tokens.
"""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.dialects import DIALECTS, Dialect, StreamAssembler, Translation, WrongType, split_events
from leyden.dialects.fields import REASONING
from leyden.errors import Untranslatable
from leyden.testing import request_prompt_ids

CHAT, MESSAGES, RESPONSES = DIALECTS["chat"], DIALECTS["messages"], DIALECTS["responses"]
OTHERS = [MESSAGES, RESPONSES]
few = settings(max_examples=40)  # of a hundred, for the time they take
by_name = pytest.mark.parametrize("dialect", OTHERS, ids=lambda dialect: dialect.name)

words = st.text(min_size=1, max_size=12)
objects = st.dictionaries(
    st.text(max_size=4), st.text(max_size=4) | st.integers() | st.lists(st.booleans()), max_size=3
)
valid_arguments = objects.map(lambda value: json.dumps(value, ensure_ascii=False))
PICTURE = "data:image/png;base64,iVBORw0KGgo="
parts = st.one_of(
    words.map(lambda text: {"type": "text", "text": text}),
    st.sampled_from([PICTURE, "https://x/y.png"]).map(lambda url: {"type": "image_url", "image_url": {"url": url}}),
    words.map(
        lambda name: {"type": "file", "file": {"filename": name, "file_data": "data:application/pdf;base64,JVBERi0="}}
    ),
)
contents = words | st.lists(parts, min_size=2, max_size=3)


@st.composite
def thoughts(draw: Any) -> dict[str, Any]:
    """The reasoning of a message: none, its text, or signed blocks."""
    blocks = draw(
        st.lists(
            st.builds(lambda t, s: {"type": "thinking", "thinking": t, "signature": s}, st.text(max_size=6), words)
            | words.map(lambda data: {"type": "redacted_thinking", "data": data}),
            max_size=2,
        )
    )
    if blocks:
        text = "".join(block.get("thinking", "") for block in blocks)
        return {**(dict.fromkeys(REASONING, text) if text else {}), "thinking_blocks": blocks}
    text = draw(st.none() | words)
    return dict.fromkeys(REASONING, text) if text else {}


@st.composite
def assistant_messages(draw: Any, arguments: Any = valid_arguments) -> dict[str, Any]:
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": text}}
        for number, (name, text) in enumerate(draw(st.lists(st.tuples(words, arguments), max_size=3)))
    ]
    text = draw(st.none() | words) if calls else draw(words)
    message = {"role": "assistant", **draw(thoughts()), "content": text}
    return {**message, "tool_calls": calls} if calls else message


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = draw(st.lists(words.map(lambda t: {"role": "system", "content": t}), max_size=1))
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(contents)})
        said = draw(assistant_messages())
        messages.append(said)
        for call in said.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": draw(contents)})
    return [*messages, {"role": "user", "content": draw(contents)}]


tools = st.builds(
    lambda name, about: {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": {"type": "object"}, "strict": True},
    },
    words,
    words,
)
chat_requests = st.fixed_dictionaries(
    {"model": words, "messages": conversations()},
    optional={
        "max_completion_tokens": st.integers(1, 99),
        "temperature": st.floats(0, 1),
        "top_p": st.floats(0, 1),
        "tools": st.lists(tools, min_size=1, max_size=2),
        "tool_choice": st.sampled_from(
            ["auto", "none", "required", {"type": "function", "function": {"name": "weather"}}]
        ),
        "reasoning_effort": st.sampled_from(["low", "high"]),
        "response_format": st.just(
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}}
        ),
        "top_k": st.integers(1, 9),
        "chat_template_kwargs": objects,
    },
)


@by_name
@few
@given(request=chat_requests)
def test_a_chat_request_comes_back_as_it_was_and_reads_the_same_on_the_way(
    dialect: Dialect, request: dict[str, Any]
) -> None:
    there = dialect.request_from_chat(request)
    back = dialect.request_to_chat(there)
    wanted = request_prompt_ids("chat/completions", request)
    assert request_prompt_ids(dialect.path, there) == wanted
    assert request_prompt_ids("chat/completions", back) == wanted
    assert dialect.request_from_chat(back) == there
    limit = back.pop("max_tokens", None) or back.pop("max_completion_tokens", None)
    assert request.get("max_completion_tokens") in (limit, None)
    assert back == {name: value for name, value in request.items() if name != "max_completion_tokens"}


@few
@given(request=chat_requests)
def test_what_anthropics_client_asks_reads_the_same_to_a_server_of_openais_responses(request: dict[str, Any]) -> None:
    asked = MESSAGES.request_from_chat(request)
    told = RESPONSES.request_from_chat(MESSAGES.request_to_chat(asked))
    assert request_prompt_ids("responses", told) == request_prompt_ids("messages", asked)
    again = MESSAGES.request_from_chat(RESPONSES.request_to_chat(told))
    assert again == asked


def an_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


any_arguments = valid_arguments | words.filter(lambda text: not an_object(text))


@st.composite
def chat_answers(draw: Any) -> dict[str, Any]:
    message = draw(assistant_messages(any_arguments))
    reason = draw(st.sampled_from(["tool_calls" if "tool_calls" in message else "stop", "length", "content_filter"]))
    prompt, read, written, response, reasoned = (draw(st.integers(0, 99)) for _ in range(5))
    usage: dict[str, Any] = {"prompt_tokens": prompt + read + written, "completion_tokens": response + reasoned}
    usage["total_tokens"] = sum(usage.values())
    if read or written:
        usage["prompt_tokens_details"] = {"cached_tokens": read, "cache_write_tokens": written}
    if reasoned:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoned}
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return {"id": "a-1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


@by_name
@few
@given(answer=chat_answers())
def test_a_chat_answer_comes_back_as_it_was(dialect: Dialect, answer: dict[str, Any]) -> None:
    assert dialect.answer_to_chat(dialect.answer_from_chat(answer, {})) == answer


def cut(text: str, draw: Any) -> list[str]:
    """`text` in pieces, as a server may send it."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True) if start < stop]


@st.composite
def chat_streams(draw: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An answer, and the chunks of it."""
    answer = draw(chat_answers())
    choice = answer["choices"][0]
    message, deltas = choice["message"], [{"role": "assistant", "content": ""}]
    blocks = message.get("thinking_blocks")
    for block in blocks or [{"thinking": message.get(REASONING[0], "")}]:
        deltas += [dict.fromkeys(REASONING, piece) for piece in cut(block.get("thinking", ""), draw)]
        deltas += [{"thinking_blocks": [block]}] if blocks else []
    deltas += [{"content": piece} for piece in cut(message["content"] or "", draw)]
    for index, call in enumerate(message.get("tool_calls", ())):
        function = {"name": call["function"]["name"], "arguments": ""}
        deltas.append({"tool_calls": [{**call, "index": index, "function": function}]})
        for piece in cut(call["function"]["arguments"], draw):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return answer, chunks


def events_of(dialect: Dialect, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    stream = dialect.events_from_chat({})
    raw = b"".join(event for chunk in chunks for event in stream.feed(chunk)) + b"".join(stream.end())
    found = [json.loads(data) for _, data in split_events(bytearray(raw))]
    assert [line.split(b" ")[1].decode() for line in raw.splitlines() if line.startswith(b"event:")] == [
        event["type"] for event in found
    ]
    return found


@by_name
@few
@given(answer_and_chunks=chat_streams())
def test_a_stream_says_what_the_whole_answer_says(dialect: Dialect, answer_and_chunks: Any) -> None:
    answer, chunks = answer_and_chunks
    assembler, back = StreamAssembler(), dialect.events_to_chat()
    for event in events_of(dialect, chunks):
        assert not back.ended
        for chunk in back.feed(event):
            assembler.feed(chunk)
    assert back.ended
    assert assembler.finished
    found = assembler.answer()
    (choice,) = found["choices"]
    (wanted,) = answer["choices"]
    assert {**choice["message"], "content": choice["message"].get("content") or None} == wanted["message"]
    assert choice["finish_reason"] == wanted["finish_reason"]
    assert (found["id"], found["model"], found["usage"]) == (answer["id"], answer["model"], answer["usage"])


@few
@given(answer_and_chunks=chat_streams())
def test_the_last_event_of_a_responses_stream_holds_the_whole_response(answer_and_chunks: Any) -> None:
    answer, chunks = answer_and_chunks
    events = events_of(RESPONSES, chunks)
    whole = RESPONSES.answer_from_chat(answer, {})
    last = events[-1]["response"]
    for item in (*whole["output"], *last["output"]):
        item.setdefault("content", [])
    assert last == whole
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in done] == [item["id"] for item in whole["output"]]


@few
@given(answer_and_chunks=chat_streams())
def test_the_blocks_of_an_anthropic_stream_are_opened_and_closed_one_after_the_other(answer_and_chunks: Any) -> None:
    _, chunks = answer_and_chunks
    opened: int | None = None
    n_blocks = 0
    for event in events_of(MESSAGES, chunks):
        match event["type"]:
            case "content_block_start":
                assert opened is None
                assert event["index"] == n_blocks
                opened, n_blocks = n_blocks, n_blocks + 1
            case "content_block_delta":
                assert event["index"] == opened
            case "content_block_stop":
                assert event["index"] == opened
                opened = None
            case _:
                assert opened is None


# ---- what cannot be said ---------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "hello"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"messages": [USER], "container": "c"}, "container"),
        ({"messages": [USER], "mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"messages": [USER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"messages": [USER], "output_config": {"task_budget": 1}}, "output_config.task_budget"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        (user({"type": "search_result"}), "messages[0].content[0].type"),
        (user({"type": "image", "source": {"type": "file", "file_id": "f"}}), "messages[0].content[0].source.type"),
        (user({"type": "document", "source": {"type": "url", "url": "u"}}), "messages[0].content[0].source.type"),
        (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [USER], "system": [{"type": "image"}]}, "system[0].type"),
    ],
)
def test_what_chat_cannot_say_for_anthropics_client_is_named(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(Untranslatable) as refused:
        MESSAGES.request_to_chat({"model": "m", "max_tokens": 1, **request_})
    assert refused.value.field == field
    assert str(refused.value).startswith(field)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}}, "tool_choice.type"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"reasoning": {"context": "all"}}, "reasoning.context"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0].type"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": 5}, "input"),
    ],
)
def test_what_chat_cannot_say_for_the_responses_api_is_named(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(Untranslatable) as refused:
        RESPONSES.request_to_chat({"model": "m", "input": "x", **request_})
    assert refused.value.field == field


@by_name
@pytest.mark.parametrize("field", ["return_token_ids", "logprobs"])
def test_what_a_stream_has_no_place_for_is_named(dialect: Dialect, field: str) -> None:
    request = {"model": "m", "input": "x", "messages": [USER], field: True}
    if dialect is RESPONSES:
        del request["messages"]
    dialect.request_to_chat(request)
    with pytest.raises(Untranslatable) as refused:
        dialect.request_to_chat({**request, "stream": True})
    assert refused.value.field == field


@by_name
@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"n": 2}, "n"),
        ({"seed": 3}, "seed"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
    ],
)
def test_what_a_server_cannot_be_told_is_named(dialect: Dialect, request_: dict[str, Any], field: str) -> None:
    with pytest.raises(Untranslatable) as refused:
        dialect.request_from_chat({"model": "m", "messages": [USER], **request_})
    assert refused.value.field == field


@by_name
def test_values_that_change_nothing_are_no_obstacle(dialect: Dialect) -> None:
    harmless = {"n": 1, "logprobs": False, "frequency_penalty": 0, "logit_bias": {}, "seed": None, "store": False}
    request = dialect.request_from_chat({"model": "m", "messages": [USER], **harmless})
    assert not {"n", "logprobs", "frequency_penalty", "logit_bias", "seed"} & set(request)


@by_name
def test_an_answer_with_several_choices_is_refused(dialect: Dialect) -> None:
    with pytest.raises(Untranslatable, match="choices"):
        dialect.answer_from_chat({"id": "a", "choices": [{}, {}]}, {})


names = st.sampled_from(
    [
        *(
            "messages",
            "system",
            "content",
            "role",
            "type",
            "text",
            "tools",
            "tool_choice",
            "input",
            "output",
            "choices",
        ),
        *(
            "message",
            "tool_calls",
            "function",
            "arguments",
            "source",
            "usage",
            "thinking_blocks",
            "reasoning",
            "include",
        ),
    ]
)
values = st.sampled_from(
    [
        None,
        True,
        0,
        5,
        "",
        "user",
        "assistant",
        "text",
        "thinking",
        "tool_use",
        "message",
        "function",
        "image_url",
        "tool",
    ]
)
bodies = st.recursive(
    values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5), max_leaves=25
)


@few
@given(request=st.dictionaries(names, bodies, max_size=6))
def test_a_body_that_makes_no_sense_is_refused_or_left_to_the_server(request: dict[str, Any]) -> None:
    for client in DIALECTS.values():
        for upstream in DIALECTS.values():
            if client is upstream or (client.translates and upstream.translates):
                with nullcontext() if client is upstream else suppress(Untranslatable, WrongType):
                    translation = Translation(client, upstream, b"{}", request, model="m", record_tokens=True)
                    translation.answer(json.dumps(request).encode())


# ---- each dialect's own ways -----------------------------------------------------------------------------------------


def test_unknown_fields_survive_at_their_own_level() -> None:
    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    tool = {"name": "t", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "boom", "is_error": True}
    call = {"type": "tool_use", "id": "c", "name": "t", "input": {}, "caller": {"type": "direct"}}
    messages = [
        {"role": "user", "content": [cached]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    request = {"model": "m", "max_tokens": 9, "messages": messages, "tools": [tool], "thinking": {"type": "adaptive"}}
    chat = MESSAGES.request_to_chat({**request, "top_k": 3, "system": [cached]})
    assert chat["messages"][0]["content"] == chat["messages"][1]["content"] == [cached]
    assert chat["messages"][3]["is_error"] is True
    assert (chat["top_k"], chat["thinking"]) == (3, {"type": "adaptive"})
    assert chat["tools"][0]["cache_control"] == {"type": "ephemeral"}
    assert MESSAGES.request_from_chat(chat) == {**request, "top_k": 3, "system": [cached]}


def test_a_user_message_without_parts_is_translated_like_any_other() -> None:
    messages = [{"role": "user", "content": []}, {"role": "user", "content": "go on"}]
    assert MESSAGES.request_from_chat({"model": "m", "messages": messages})["messages"] == messages


def test_thinking_between_texts_stays_where_it_was() -> None:
    blocks = [
        {"type": "thinking", "thinking": "one", "signature": "s1"},
        {"type": "text", "text": "first"},
        {"type": "thinking", "thinking": "two", "signature": "s2"},
        {"type": "tool_use", "id": "c", "name": "t", "input": {"a": 1}},
    ]
    request = {"model": "m", "max_tokens": 9, "messages": [USER, {"role": "assistant", "content": blocks}]}
    chat = MESSAGES.request_to_chat(request)
    assert [message.get("reasoning_content") for message in chat["messages"]] == [None, "one", "two"]
    assert MESSAGES.request_from_chat(chat) == request


def test_arguments_that_are_no_json_are_shown_and_taken_back_as_anthropic_wants_it() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "t", "arguments": '{"place": "Zür'}}
    choice = {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [call]}}
    message = MESSAGES.answer_from_chat({"id": "a", "choices": [{**choice, "finish_reason": "length"}]}, {})
    (block,) = message["content"]
    assert block["input"] == {"INVALID_JSON": '{"place": "Zür'}
    request = {"messages": [USER, {"role": "assistant", "content": [block]}]}
    assert MESSAGES.request_to_chat(request)["messages"][1]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"finish_reason": "stop"}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": "###"}, ("stop_sequence", "###")),
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "content_filter"}, ("refusal", None)),
        ({"finish_reason": "abort"}, ("abort", None)),
    ],
)
def test_anthropics_client_learns_why_the_model_stopped(choice: dict[str, Any], reason: tuple[str, str | None]) -> None:
    whole = {"id": "a", "choices": [{"message": {"role": "assistant", "content": "x"}, **choice}]}
    message = MESSAGES.answer_from_chat(whole, {})
    assert (message["stop_reason"], message["stop_sequence"]) == reason


def test_tokens_of_the_cache_are_counted_as_each_api_counts_them() -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 7,
        "total_tokens": 107,
        "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 10},
    }
    answer = {"id": "a", "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": usage}
    assert MESSAGES.answer_from_chat(answer, {})["usage"] == {
        "input_tokens": 30,
        "output_tokens": 7,
        "cache_read_input_tokens": 60,
        "cache_creation_input_tokens": 10,
    }
    counted = RESPONSES.answer_from_chat(answer, {})["usage"]
    assert (counted["input_tokens"], counted["input_tokens_details"]["cached_tokens"]) == (100, 60)


def test_a_call_that_goes_on_after_the_next_one_began_is_refused() -> None:
    def part(index: int) -> dict[str, Any]:
        call = {"index": index, "id": f"c{index}", "function": {"name": "t", "arguments": "{"}}
        return {"id": "a", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}

    for dialect in OTHERS:
        stream = dialect.events_from_chat({})
        stream.feed(part(0))
        stream.feed(part(1))
        with pytest.raises(Untranslatable, match="call 0 after a later one"):
            stream.feed(part(0))


NOTHING: dict[str, list[Any]] = {
    "logit_bias": [{}, {"5": 0}, {"5": 0.0, "6": 0}],
    "stop": ["", [], [""], ["", ""]],
    "best_of": [1],
    "frequency_penalty": [0, 0.0],
    "presence_penalty": [0],
    "modalities": [["text"]],
    "truncation": ["disabled"],
    "functions": [[]],
    "seed": [],
    "prediction": [{"type": "content", "content": "x"}],
}


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("dialect", [MESSAGES, RESPONSES], ids=lambda dialect: dialect.name)
def test_what_changes_nothing_is_left_out_where_an_api_lacks_it(dialect: Dialect, name: str) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    plain = dialect.request_from_chat(chat)
    for value in [None, *NOTHING[name]]:
        assert dialect.request_from_chat({**chat, name: value}) == plain


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", {"5": 0, "6": 1}), ("logit_bias", {"5": False}), ("best_of", 2), ("n", True)]
)
@pytest.mark.parametrize("dialect", [MESSAGES, RESPONSES], ids=lambda dialect: dialect.name)
def test_what_changes_an_answer_is_refused_where_an_api_lacks_it(dialect: Dialect, name: str, value: Any) -> None:
    with pytest.raises(Untranslatable, match=f"^{name} is "):
        dialect.request_from_chat({"model": "m", "messages": [], name: value})


def test_null_is_no_option_of_reasoning_text_or_output() -> None:
    said = {"model": "m", "input": "x", "reasoning": {"context": None}, "text": {"other": None}}
    assert RESPONSES.request_to_chat(said) == RESPONSES.request_to_chat({"model": "m", "input": "x"})
    said = {"model": "m", "max_tokens": 1, "messages": [], "output_config": {"other": None}, "stop_sequences": [""]}
    assert MESSAGES.request_to_chat(said) == {"model": "m", "max_tokens": 1, "messages": []}


def test_allowed_tools_are_translated_and_all_of_them_are_no_choice() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    for mode, theirs in (("auto", "auto"), ("required", "any")):
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": n} for n in ("b", "a")]}
        response = {"model": "m", "input": "x", "tools": [{"type": "function", "name": n} for n in ("a", "b")]}
        chat = RESPONSES.request_to_chat({**response, "tool_choice": choice})
        assert chat["tool_choice"]["allowed_tools"]["tools"] == tools[::-1]
        assert RESPONSES.request_from_chat(chat)["tool_choice"] == choice
        assert MESSAGES.request_from_chat(chat)["tool_choice"] == {"type": theirs}
        some = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools[:1]}}
        with pytest.raises(Untranslatable, match=r"^tool_choice is .*allowed_tools"):
            MESSAGES.request_from_chat({**chat, "tool_choice": some})
