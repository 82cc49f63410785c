"""The share of turns that merge, and the reason of each that does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyden.adapter import TurnMerges, turn_merges
from leyden.types import Span, TokenRecord, semconv
from tests.adapter.traces import span

USER, AGAIN = {"role": "user", "content": "Where?"}, {"role": "user", "content": "Sure?"}
ANSWER = {"role": "assistant", "content": "left"}
TOOL = {"type": "function", "function": {"name": "look"}}


def call(
    number: int, asked: list[Any], answered: Any, prompt: list[int], response: list[int], tools: Any = None, **more: Any
) -> Span:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps(asked),
        "gen_ai.output.messages": json.dumps([answered]),
        semconv.CALL_INDEX: number,
        **more,
    }
    if tools is not None:
        attributes["gen_ai.tool.definitions"] = json.dumps(tools)
    tokens = TokenRecord(prompt_ids=prompt, response_ids=response, logprobs=[-1.0] * len(response))
    return span(semconv.MODEL_CALL, number, number + 0.5, id=number + 1, tokens=tokens, **attributes)


def called(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


FIRST = call(0, [USER], ANSWER, [1, 2], [3, 4])


def test_turns_whose_ids_go_on_merge() -> None:
    second = call(1, [USER, ANSWER, AGAIN], ANSWER, [1, 2, 3, 4, 5], [6])
    third = call(2, [USER, ANSWER, AGAIN, ANSWER, USER], ANSWER, [1, 2, 3, 4, 5, 6, 7], [8])
    assert turn_merges([FIRST, second, third]) == TurnMerges(continued=2, merged=2)
    assert turn_merges([FIRST, second, third]).share == 1.0


def test_calls_that_continue_nothing_are_not_counted() -> None:
    alone = call(1, [AGAIN], ANSWER, [1, 9], [3])
    example = call(2, [USER, {"role": "assistant", "content": "an example"}, AGAIN], ANSWER, [7], [8])
    assert turn_merges([alone, example]).share is None
    assert turn_merges([]).share is None


@pytest.mark.parametrize(
    ("answered", "asked", "tools", "reason", "detail"),
    [
        (ANSWER, [USER, ANSWER, AGAIN], None, "re-tokenised", "the ids differ from 3 on, of 4"),
        (
            called('{"a": 1.0}'),
            [USER, called('{"a":1}'), AGAIN],
            None,
            "re-tokenised",
            "messages[1] spells the arguments of its calls in another way",
        ),
        (ANSWER, [USER, ANSWER, AGAIN], [TOOL], "other tools", "tools look instead of no tools"),
        (ANSWER, [AGAIN, ANSWER, AGAIN], None, "history rewritten", "messages[0] is not the earlier call's"),
        (
            ANSWER,
            [USER, {**ANSWER, "content": "to the left"}, AGAIN],
            None,
            "history rewritten",
            "messages[1] is not the answer",
        ),
        (
            {**ANSWER, "content": "<think>Hm.</think>\nleft"},
            [USER, ANSWER, AGAIN],
            None,
            "reasoning dropped",
            "before </think>",
        ),
        (
            {**ANSWER, "reasoning_content": "Hm."},
            [USER, ANSWER, AGAIN],
            None,
            "reasoning dropped",
            "no 'reasoning_content'",
        ),
    ],
)
def test_a_turn_that_does_not_merge_has_a_reason(
    answered: Any, asked: list[Any], tools: Any, reason: str, detail: str
) -> None:
    first = call(3, [USER], answered, [1, 2], [3, 4])
    found = turn_merges([first, call(5, asked, ANSWER, [1, 2, 3, 9, 5], [6], tools)])
    assert (found.continued, found.merged, found.share) == (1, 0, 0.0)
    (split,) = found.splits
    assert (split.call, split.earlier, split.reason) == (5, 3, reason)
    assert detail in split.detail


def test_a_template_that_drops_reasoning_is_told_from_a_tokenizer_that_cuts_otherwise() -> None:
    thought = {**ANSWER, "content": "<think>Hm.</think>\nleft"}
    first = call(0, [USER], thought, [1, 2], [3, 4, 5])
    for prompt, reason in (([1, 2, 5, 6], "reasoning dropped"), ([1, 2, 3, 4, 9, 6], "re-tokenised")):
        (split,) = turn_merges([first, call(1, [USER, thought, AGAIN], ANSWER, prompt, [7])]).splits
        assert split.reason == reason


def test_of_several_answers_to_one_prompt_the_one_that_was_sent_back_counts() -> None:
    other = {**ANSWER, "content": "right"}
    spans = [FIRST, call(1, [USER], other, [1, 2], [8, 4])]
    assert turn_merges([*spans, call(2, [USER, ANSWER, AGAIN], ANSWER, [1, 2, 3, 4, 5], [6])]).merged == 1
    assert turn_merges([*spans, call(2, [USER, other, AGAIN], ANSWER, [1, 2, 8, 4, 5], [6])]).merged == 1


def test_replayed_calls_are_not_counted_again() -> None:
    second = call(1, [USER, ANSWER, AGAIN], ANSWER, [1, 2, 3, 9], [6], **{semconv.REPLAYED: True})
    assert turn_merges([FIRST, second]).continued == 0
    third = call(2, [USER, ANSWER, AGAIN, ANSWER, USER], ANSWER, [1, 2, 3, 9, 6, 7], [8])
    assert turn_merges([FIRST, second, third]) == TurnMerges(continued=1, merged=1)
