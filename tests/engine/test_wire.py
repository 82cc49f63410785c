"""Fields of a request's body: which values are taken, and how the others are refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from leyden._lib.host.http import Refusal
from leyden.engine.wire import ChatRequest, Kind, TextRequest, parse_request

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "policy", "prompt": "hi"}


def parse(kind: Kind, **fields: Any) -> ChatRequest | TextRequest:
    if kind == "chat.completion":
        return parse_request(json.dumps(CHAT | fields).encode(), ChatRequest)
    return parse_request(json.dumps(TEXT | fields).encode(), TextRequest)


REFUSED: list[tuple[Kind, str, list[Any], str]] = [
    ("chat.completion", "temperature", [True, "3", math.nan, math.inf, -1, 10**400], "must be a number from 0 to 1000"),
    ("chat.completion", "top_p", [True, "1", math.nan, 0, 1.1], "must be a number from 1e-06 to 1"),
    ("chat.completion", "max_tokens", [True, "3", math.nan, 0, 1.5], "must be an integer of at least 1"),
    ("chat.completion", "max_completion_tokens", [True, "3", 0], "must be an integer of at least 1"),
    ("chat.completion", "seed", [True, "3", 2**64 + 1, -(2**63) - 1], "must be an integer from "),
    ("chat.completion", "n", [True, "3", 0, 129], "must be an integer from 1 to 128"),
    ("chat.completion", "stream", [1, "true"], "must be true or false"),
    ("chat.completion", "stop", [3, [3]], "must be a string or a list of strings"),
    ("chat.completion", "stop_token_ids", [3, [-1], [True], ["3"]], "must be a list of token ids"),
    ("chat.completion", "stream_options", [True, {"usage": True}], "must be an object with 'include_usage'"),
    ("chat.completion", "response_format", ["json"], "must be an object"),
    ("chat.completion", "tools", [{}], "must be a list"),
    ("chat.completion", "messages", [None], "is missing"),
    ("chat.completion", "top_logprobs", [2], r"must be 0 \(nothing else is supported\)"),
    ("chat.completion", "logit_bias", [{"5": 1}], r"must be {} \(nothing else is supported\)"),
    ("chat.completion", "prompt", ["hi"], "is not supported here"),
    (
        "text_completion",
        "prompt",
        [3, "", [], [-1], [True], ["a"] * 100_000],
        "must be a string or a list of token ids",
    ),
    ("text_completion", "logprobs", [1, True], r"must be 0 \(nothing else is supported\)"),
    ("text_completion", "best_of", [2], r"must be 1 \(nothing else is supported\)"),
    ("text_completion", "messages", [[]], "is not supported here"),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "says"),
    [(kind, name, value, says) for kind, name, values, says in REFUSED for value in values],
    ids=lambda value: f"{value!r:.20}",
)
def test_a_wrong_field_is_refused_by_its_name_and_value(kind: Kind, name: str, value: Any, says: str) -> None:
    with pytest.raises(Refusal, match=f"^'{name}' {says}") as refused:
        parse(kind, **{name: value})
    assert (refused.value.status, refused.value.param) == (400, name)
    assert len(str(refused.value)) < 250


def test_of_several_wrong_fields_the_first_of_the_body_is_named() -> None:
    with pytest.raises(Refusal, match="'n'"):
        parse("chat.completion", n=0, temperature="hot")
    with pytest.raises(Refusal, match="'temperature'"):
        parse("chat.completion", temperature="hot", n=0)


def test_null_stands_for_the_default() -> None:
    names = ("temperature", "top_p", "n", "stop", "seed", "stream", "stream_options", "logprobs", "max_tokens")
    for kind in ("chat.completion", "text_completion"):
        assert parse(kind, **dict.fromkeys(names)) == parse(kind)
    assert (parse("chat.completion").max_tokens, parse("text_completion").max_tokens) == (None, 16)


def test_log_probabilities_are_a_flag_for_chats_and_a_number_for_texts() -> None:
    assert [parse("chat.completion", logprobs=value).logprobs for value in (True, False)] == [True, False]
    assert [parse("text_completion", logprobs=value).logprobs for value in (0, False, None)] == [True, False, False]


NOTHING: dict[str, Any] = {
    "top_k": [-1, 0],
    "min_p": [0, 0.0],
    "typical_p": [1.0],
    "repetition_penalty": [1, 1.0],
    "frequency_penalty": [0],
    "logit_bias": [{}, {"5": 0}, {"5": 0.0, "6": 0, "7": None}],
    "best_of": [1],
    "truncation": ["disabled"],
    "modalities": [["text"]],
    "parallel_tool_calls": [True],
    "tools": [[]],
    "tool_choice": ["auto"],
    "top_logprobs": [0],
    "functions": [[]],
    "prediction": [{"type": "content", "content": "x"}],
    "min_tokens": [0],
    "bad_words": [[]],
    "use_beam_search": [False],
    "length_penalty": [1.0, 2.0],
    "skip_special_tokens": [True],
    "user": ["me"],
    "metadata": [{"a": "b"}],
    "store": [True, False],
    "service_tier": ["auto"],
    "safety_identifier": ["x"],
    "prompt_cache_key": ["x"],
    "echo": [False],
    "extra_body": [{}],
    "guided_json": [None],
    "what_is_this": [None],
}


def test_what_changes_nothing_is_accepted_in_both_forms() -> None:
    for name, values in NOTHING.items():
        for value in values:
            for kind in ("chat.completion", "text_completion"):
                assert parse(kind, **{name: value}) == parse(kind), (name, value)
    only_chat: dict[str, Any] = {"function_call": "none"}
    assert parse("chat.completion", **only_chat) == parse("chat.completion")
    assert parse("text_completion", suffix="") == parse("text_completion")


@pytest.mark.parametrize("kind", ["chat.completion", "text_completion"])
@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [
        ("top_k", [40, "0", True], r"-1 or 0"),
        ("min_p", [0.1, False], "0"),
        ("repetition_penalty", [1.2, True, "1"], "1"),
        ("presence_penalty", [0.5], "0"),
        ("bad_words", [["no"], "no"], r"\[\]"),
        ("ignore_eos", [True, 0], "false"),
        ("do_sample", [False, 1], "true"),
        ("extra_body", [{"top_k": 3}], "{}"),
    ],
)
def test_a_parameter_that_the_engine_lacks_is_refused_with_its_neutral_value(
    kind: Kind, name: str, values: list[Any], wanted: str
) -> None:
    for value in values:
        with pytest.raises(Refusal, match=rf"^'{name}' must be {wanted} \(nothing else is supported\), got "):
            parse(kind, **{name: value})


def test_thinking_effort_and_verbosity_become_variables_of_the_template() -> None:
    def options(**fields: Any) -> dict[str, Any]:
        request = parse("chat.completion", **fields)
        assert isinstance(request, ChatRequest)
        return request.template_options

    off, on = {"enable_thinking": False, "thinking": False}, {"enable_thinking": True, "thinking": True}
    assert options() == options(chat_template_kwargs={}) == options(thinking=None, reasoning_effort=None) == {}
    assert options(chat_template_kwargs={"enable_thinking": False, "mine": [1]}) == {
        "enable_thinking": False,
        "mine": [1],
    }
    assert options(reasoning_effort="none") == options(thinking={"type": "disabled"}) == off
    assert options(reasoning_effort="low") == {"reasoning_effort": "low"}
    assert options(thinking={"type": "adaptive", "display": "omitted"}) == on
    assert options(thinking={"type": "enabled", "budget_tokens": 1024}) == {**on, "thinking_budget": 1024}
    assert options(verbosity="high") == {"verbosity": "high"}
    assert (
        options(thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False})["enable_thinking"]
        is False
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reasoning_effort", "much"),
        ("reasoning_effort", 3),
        ("thinking", {"type": "sometimes"}),
        ("thinking", {"type": "enabled", "budget_tokens": 0}),
        ("thinking", True),
        ("verbosity", "loud"),
        ("chat_template_kwargs", ["enable_thinking"]),
        ("chat_template_kwargs", {"tools": []}),
        ("chat_template_kwargs", {"tokenize": True}),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("functions", [{"name": "f"}]),
    ],
)
def test_wrong_options_of_thinking_and_rendering_are_refused(name: str, value: Any) -> None:
    with pytest.raises(Refusal) as refused:
        parse("chat.completion", **{name: value})
    assert (refused.value.status, refused.value.param) == (400, name)
    with pytest.raises(Refusal):
        parse("text_completion", **{name: value})


def test_a_whole_float_is_an_integer_as_in_the_gateway() -> None:
    given = {"model": "policy", "prompt": "a", "max_tokens": 5.0, "n": 2.0, "seed": -3.0, "detokenize": True}
    request = parse_request(json.dumps(given).encode(), TextRequest)
    assert [request.max_tokens, request.n, request.seed] == [5, 2, -3]
    assert [type(each) for each in (request.max_tokens, request.n, request.seed)] == [int, int, int]
    for value in (1.5, 1e300):
        with pytest.raises(Refusal, match="'n' must be an integer from 1 to 128"):
            parse_request(json.dumps({**given, "n": value}).encode(), TextRequest)


@pytest.mark.parametrize("kind", ["chat.completion", "text_completion"])
def test_an_empty_stop_string_ends_nothing(kind: Kind) -> None:
    for stop in ("", [], [""], ["", ""], None):
        assert parse(kind, stop=stop).stops == ()
    assert parse(kind, stop=["", "x"]).stops == ("x",)


@pytest.mark.parametrize("kind", ["chat.completion", "text_completion"])
def test_the_best_of_as_many_as_are_wanted_are_all_of_them(kind: Kind) -> None:
    assert parse(kind, n=3, best_of=3) == parse(kind, n=3)
    for best_of, n in ((3, 2), (2, None), (True, 1)):
        with pytest.raises(Refusal, match=r"^'best_of' must be 1"):
            parse(kind, best_of=best_of, n=n)


@pytest.mark.parametrize("bias", [{"5": 1}, {"5": 0, "6": -100}, {"5": False}, {"5": "0"}])
def test_a_bias_of_one_token_is_refused(bias: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"^'logit_bias' must be {}"):
        parse("chat.completion", logit_bias=bias)


def test_allowed_tools_limit_a_required_call_and_are_no_choice_if_all_are_allowed() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]

    def chosen(mode: str, *names: str) -> tuple[Any, tuple[str, ...], bool]:
        given = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": given}}
        request = parse("chat.completion", tools=tools, tool_choice=choice)
        assert isinstance(request, ChatRequest)
        return request.tool_choice, request.callable_tools, request.may_call_often

    assert chosen("required", "c", "a", "a") == ("required", ("a", "c"), True)
    assert chosen("required", "a", "b", "c") == ("required", ("a", "b", "c"), True)
    assert chosen("auto", "c", "b", "a") == ("auto", ("a", "b", "c"), True)
    for mode, names, says in (
        ("auto", ("a",), "allows some of the tools"),
        ("auto", (), "must be 'none'"),
        ("required", ("z",), "names 'z'"),
        ("never", ("a",), "must be 'none'"),
    ):
        with pytest.raises(Refusal, match=says) as refused:
            chosen(mode, *names)
        assert refused.value.param == "tool_choice"
