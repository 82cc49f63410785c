"""A call that several saw is one call, two calls are two, whatever is missing and in whatever order the spans come."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToMessages, model_calls
from leyden.types import Span
from tests.adapter.traces import agent, framework_call, gateway_call, reward, sdk_call, span

# ---- the rules, one by one -------------------------------------------------------------------------------------------------


def only_call(*spans: Span) -> Any:
    (call,) = model_calls(spans)
    return call


def test_one_response_id_is_one_call_with_the_tokens_of_the_gateway():
    call = only_call(
        sdk_call(1, 4, id=1, response_id="r", asked="as the SDK says it"),
        gateway_call(2, 3, id=2, prompt=[1], response=[2], response_id="r", asked="as it was sent"),
    )
    assert call.tokens.prompt_ids == [1]
    assert call.input_messages == [{"role": "user", "content": "as it was sent"}]
    assert [one.name for one in call.spans] == ["leyden.model_call", "chat model"]
    assert call.refused is None


def test_the_record_below_an_sdk_span_is_of_its_call_through_any_steps_between():
    call = only_call(
        sdk_call(1, 4, id=1, asked="said otherwise"),
        span("POST", 1.5, 3.5, id=2, parent=1),
        gateway_call(2, 3, id=3, parent=2, prompt=[1], response=[2], response_id="r"),
    )
    assert (call.response_id, len(call.spans)) == ("r", 2)


def test_numbers_that_come_twice_order_nothing():
    """A gateway that was started again, and whose store had lost the record, counts from 0."""
    calls = [
        gateway_call(start, start + 1, id=start, prompt=[start], response=[9], index=index)
        for start, index in ((1, 0), (3, 1), (5, 2), (7, 0), (9, 1))
    ]
    assert [call.tokens.prompt_ids for call in model_calls(calls)] == [[1], [3], [5], [7], [9]]
    rewards = [triplet.reward for triplet in LlmProxyTraceToTriplet().adapt([*calls, reward(0.5, 11, id=11)])]
    assert rewards == [None, None, None, None, 0.5]


def test_a_span_around_several_calls_is_no_call_of_its_own():
    calls = model_calls(
        [
            framework_call(1, 9, id=1, asked="both"),
            sdk_call(2, 3, id=2, parent=1, response_id="a"),
            sdk_call(4, 5, id=3, parent=1, response_id="b"),
        ]
    )
    assert [call.response_id for call in calls] == ["a", "b"]


def test_a_failed_try_and_the_answer_after_it_are_below_one_sdk_span():
    calls = model_calls(
        [
            sdk_call(1, 9, id=1),
            gateway_call(2, 3, id=2, parent=1, prompt=[1], response=[2], error=True),
            gateway_call(4, 5, id=3, parent=1, prompt=[1], response=[2], response_id="r"),
        ]
    )
    assert [(call.failed, len(call.spans)) for call in calls] == [(True, 1), (False, 2)]


def test_a_call_that_failed_is_one_whoever_saw_it_fail():
    call = only_call(
        framework_call(1, 6, id=1, error=True, asked="as the framework says it", answered=""),
        sdk_call(2, 5, id=2, parent=1, error=True, asked="as the SDK says it", answered=""),
        gateway_call(3, 4, id=3, parent=2, prompt=[1], response=[2], error=True, asked="as it was sent", answered=""),
    )
    assert (call.failed, len(call.spans)) == (True, 3)


def test_what_failed_several_times_below_one_span_failed_so_often():
    calls = model_calls(
        [
            framework_call(1, 9, id=1, error=True, asked="both", answered=""),
            sdk_call(2, 3, id=2, parent=1, error=True, asked="once", answered=""),
            sdk_call(4, 5, id=3, parent=1, error=True, asked="again", answered=""),
        ]
    )
    assert [(call.failed, len(call.spans)) for call in calls] == [(True, 1), (True, 1)]


def test_an_answer_that_was_not_recorded_is_not_taken_for_a_failed_try():
    calls = model_calls(
        [
            sdk_call(1, 9, id=1, answered=""),
            gateway_call(2, 3, id=2, prompt=[1], response=[2], answered="", error=True),
            gateway_call(4, 5, id=3, prompt=[1], response=[2], response_id="r"),
        ]
    )
    assert [(call.failed, len(call.spans)) for call in calls] == [(True, 1), (False, 2)]


def test_without_ids_and_parents_the_messages_and_their_order_tell():
    """Three calls: two equal, one not. The clocks of the two sides differ by an hour."""
    texts = ["same", "other", "same"]
    spans = [sdk_call(n, n + 0.5, id=n + 1, asked=text) for n, text in enumerate(texts)]
    spans += [
        gateway_call(3600 + n, 3600.5 + n, id=n + 11, prompt=[n], response=[n], asked=text)
        for n, text in enumerate(texts)
    ]
    calls = model_calls(spans)
    assert [[one.sequence_id for one in call.spans] for call in calls] == [[11, 1], [12, 2], [13, 3]]


def test_equal_questions_with_different_answers_are_told_apart_by_the_answers():
    calls = model_calls(
        [
            sdk_call(1, 5, id=1, answered="yes"),
            sdk_call(1.1, 5, id=2, answered="no"),
            gateway_call(2, 3, id=3, prompt=[1], response=[2], answered="no"),
            gateway_call(2.1, 3, id=4, prompt=[1], response=[3], answered="yes"),
        ]
    )
    assert [[one.sequence_id for one in call.spans] for call in calls] == [[3, 2], [4, 1]]


def test_two_equal_calls_of_one_source_stay_two():
    calls = model_calls([gateway_call(1, 2, id=n, prompt=[1], response=[2], response_id=f"r{n}") for n in (1, 2)])
    assert len(calls) == 2
    assert len(model_calls([framework_call(1, 2, id=n) for n in (1, 2)])) == 2


def test_an_upstream_that_gives_every_answer_one_id_loses_no_call():
    spans = [
        gateway_call(n, n + 0.5, id=n, prompt=[n], response=[n], response_id="chatcmpl-0", asked=f"q{n}")
        for n in (1, 2, 3)
    ]
    spans += [sdk_call(n, n + 0.6, id=10 + n, response_id="chatcmpl-0", asked=f"q{n}") for n in (1, 2, 3)]
    calls = model_calls(spans)
    assert [[one.sequence_id for one in call.spans] for call in calls] == [[1, 11], [2, 12], [3, 13]]
    assert len(LlmProxyTraceToTriplet().adapt(spans)) == 3


def test_calls_with_different_ids_are_never_one():
    spans = [sdk_call(1, 2, id=1, response_id="a"), gateway_call(1, 2, id=2, prompt=[1], response=[2], response_id="b")]
    assert len(model_calls(spans)) == 2
    assert len(model_calls([*spans, framework_call(1, 2, id=3, asked="another")])) == 3


def test_the_gateways_count_is_the_order_and_not_its_clock():
    spans = [
        gateway_call(10 - n, 11, id=n + 1, prompt=[n], response=[n], index=n, response_id=str(n)) for n in range(3)
    ]
    assert [triplet.prompt.token_ids for triplet in LlmProxyTraceToTriplet().adapt(spans)] == [[0], [1], [2]]


def test_parents_in_a_circle_are_no_trouble():
    spans = [
        sdk_call(1, 2, id=1, parent=2, response_id="a"),
        span("x", 1, 2, id=2, parent=1),
        span("y", 1, 2, id=3, parent=3),
    ]
    assert len(model_calls(spans)) == len(TracerTraceToTriplet().adapt(spans)) == 1


# ---- any attempt -------------------------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """What was recorded of an attempt, and what really happened in it."""

    spans: list[Span]
    truth: Counter[tuple[tuple[int, ...], tuple[int, ...]]]
    """Of each call the prompt's and the response's ids."""
    steps: set[str]
    """The ids of the spans that are no calls."""


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    """Agents and their calls, some of them equal, seen by the gateway and by any of an SDK's and a framework's instrumentation."""
    has_sdk, has_framework = draw(st.booleans()), draw(st.booleans())
    sdk_tells_id, sends_traceparent, nests = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    spans: list[Span] = [
        span("run", 0, 1000, id=1),
        agent("a", 1, 999, id=2, parent=1),
        agent("b", 2, 500, id=3, parent=2),
    ]
    steps = {one.span_id for one in spans}
    truth: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    next_id, moment = 10, 5.0
    for number in range(draw(st.integers(1, 6))):
        words = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
        prompt, response = [words[0], 9], [words[1], 8]
        truth[tuple(prompt), tuple(response)] += 1
        said: dict[str, Any] = {"asked": f"q{words[0]}", "answered": f"a{words[1]}"}
        moment += draw(st.sampled_from([0.0, 1.0, 10.0]))  # many start together
        start, end = moment, moment + 5
        parent = draw(st.sampled_from([1, 2, 3, None]))
        response_id = f"r{number}"
        if has_framework:
            spans.append(framework_call(start, end, id=next_id, parent=parent, **said))
            parent = next_id if nests else None
            next_id += 1
        if has_sdk:
            spans.append(
                sdk_call(
                    start + 0.1,
                    end,
                    id=next_id,
                    parent=parent,
                    response_id=response_id if sdk_tells_id else None,
                    **said,
                )
            )
            spans.append(span("POST", start + 0.2, end, id=next_id + 1, parent=next_id))
            steps.add(spans[-1].span_id)
            parent = next_id + 1
            next_id += 2
        spans.append(
            gateway_call(
                start + 0.3, end - 0.1, id=next_id, parent=parent if sends_traceparent else None, prompt=prompt,
                response=response, response_id=response_id, index=number, **said,
            )
        )  # fmt: skip
        next_id += 1
    spans.append(reward(0.5, 990, id=next_id, parent=1))
    return Attempt(spans, truth, steps)


def seen(spans: list[Span]) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    triplets = TracerTraceToTriplet().adapt(spans)
    return Counter((tuple(triplet.prompt.token_ids), tuple(triplet.response.token_ids)) for triplet in triplets)


@given(attempts())
@settings(max_examples=40)
def test_each_call_is_there_once_however_many_saw_it(attempt: Attempt):
    assert seen(attempt.spans) == attempt.truth


@given(attempts(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_any_permutation_of_the_spans_gives_the_same_answer(attempt: Attempt, shuffler: random.Random):
    shuffled = attempt.spans.copy()
    shuffler.shuffle(shuffled)
    for adapter in (
        TracerTraceToTriplet(),
        TracerTraceToTriplet(agent_match="b"),
        LlmProxyTraceToTriplet(),
        TraceToMessages(),
    ):
        assert adapter.adapt(shuffled) == adapter.adapt(attempt.spans)


@given(attempts(), st.data())
@settings(max_examples=40)
def test_any_subset_of_parents_may_be_missing_and_each_call_is_still_there_once(attempt: Attempt, data: st.DataObject):
    lost = data.draw(st.sets(st.sampled_from(sorted(attempt.steps))))
    assert seen([one for one in attempt.spans if one.span_id not in lost]) == attempt.truth


@given(attempts(), st.data())
@settings(max_examples=40)
def test_each_call_is_still_there_once_when_some_did_not_see_it(attempt: Attempt, data: st.DataObject):
    """Spans of calls are lost too, but the gateway's."""
    others = sorted({one.span_id for one in attempt.spans if one.tokens is None})
    lost = data.draw(st.sets(st.sampled_from(others)))
    assert seen([one for one in attempt.spans if one.span_id not in lost]) == attempt.truth
