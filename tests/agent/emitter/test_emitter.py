"""What is emitted is what is read back; what cannot be recorded is refused with the value named."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.agent.emitter import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    find_final_reward,
    get_message_value,
    get_object_value,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
)
from leyden.errors import InvalidEmission, NoActiveTrace
from leyden.store import InMemoryLightningStore
from leyden.tracing import DummyTracer, Trace
from leyden.types import Span, semconv

finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.fixture
def trace() -> Iterator[Trace]:
    with DummyTracer().trace_context() as trace:
        yield trace


@given(rewards=st.dictionaries(st.text(), finite, min_size=1), data=st.data())
def test_rewards_are_read_back_by_name_with_the_primary_one_first(rewards: dict[str, float], data: st.DataObject):
    primary = data.draw(st.sampled_from(sorted(rewards)))
    span = emit_reward(rewards, primary_key=primary, propagate=False)
    stored = Span.model_validate_json(span.model_dump_json())
    assert get_rewards_from_span(stored) == rewards
    assert next(iter(get_rewards_from_span(stored))) == primary
    assert get_reward_value(stored) == rewards[primary]


def test_a_reward_is_readable_for_backends_that_know_opentelemetry_only(trace: Trace):
    emit_reward({"speed": 3, "right": 1}, primary_key="right")
    (span,) = trace.spans
    assert [(event.name, event.attributes) for event in span.events] == [
        ("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "right", "gen_ai.evaluation.score.value": 1.0}),
        ("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "speed", "gen_ai.evaluation.score.value": 3.0}),
    ]
    assert {event.timestamp for event in span.events} == {span.start_time}


@given(json_values)
def test_an_object_is_read_back_as_it_was_emitted(value: Any):
    span = emit_object(value, propagate=False)
    read = get_object_value(Span.model_validate_json(span.model_dump_json()))
    assert read == value
    assert type(read) is type(value)


@given(st.text())
def test_a_message_is_read_back_as_it_was_emitted(message: str):
    span = emit_message(message, propagate=False)
    assert get_message_value(Span.model_validate_json(span.model_dump_json())) == message


async def test_what_was_emitted_is_in_the_store():
    async with InMemoryLightningStore() as store:
        rollout = await store.start_rollout(None)
        async with DummyTracer().trace_context(
            store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
        ):
            emit_reward(0.25, attributes={"judge": "me"})
            emit_message("hello")
            emit_object({"a": [1, None]})
            emit_annotation({"tag": {"kind": "x", "n": 2}, "list": [1, 2]})
            emit_reward(True)
        spans = list(await store.query_spans(rollout.rollout_id))
    assert [span.name for span in spans] == [
        semconv.REWARD,
        semconv.MESSAGE,
        semconv.OBJECT,
        semconv.ANNOTATION,
        semconv.REWARD,
    ]
    assert get_rewards_from_span(spans[0]) == {"primary": 0.25}
    assert spans[0].attributes["judge"] == "me"
    assert get_message_value(spans[1]) == "hello"
    assert get_object_value(spans[2]) == {"a": [1, None]}
    assert spans[3].attributes == {"tag.kind": "x", "tag.n": 2, "list": [1, 2]}
    assert find_final_reward(spans) == 1.0
    assert [is_reward_span(span) for span in spans] == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("reward", "options", "message"),
    [
        (math.nan, {}, "'primary' is nan, which is no finite number"),
        (-math.inf, {}, "'primary' is -inf"),
        (10**400, {}, "'primary' is a whole number of 1,329 bits, more than a float can hold"),
        ({"a": 1.0, "b": math.inf}, {"primary_key": "a"}, "'b' is inf"),
        ("1", {}, r"'primary' is '1' \(a str\), which is no number"),
        (None, {}, r"'primary' is None \(a NoneType\)"),
        ([1.0], {}, r"'primary' is \[1.0\] \(a list\), which is no number"),
        ({}, {}, "the dict of rewards is empty"),
        ({"a": 1, "b": 2}, {}, "give primary_key, one of 'a', 'b'"),
        ({"a": 1}, {"primary_key": "c"}, r"primary_key='c' is not among the rewards \('a'\)"),
        ({1: 1}, {}, "the reward name 1 is a int"),
        (1.0, {"primary_key": "a"}, "primary_key='a' is for a dict"),
        (1.0, {"attributes": {"leyden.reward.0.value": 2.0}}, r"\['leyden.reward.0.value'\] say what is emitted"),
        (
            1.0,
            {"attributes": {"note": None}},
            r"attribute 'note' is None \(a NoneType\), .*possible: str, bool, int, float",
        ),
        (1.0, {"attributes": {"": 1}}, "the attribute key '' is not a string with"),
    ],
)
def test_a_reward_that_is_no_reward_is_refused(trace: Trace, reward: Any, options: dict[str, Any], message: str):
    with pytest.raises(InvalidEmission, match=message):
        emit_reward(reward, **options)
    assert trace.spans == []


@pytest.mark.parametrize("reward", [1, True, 0.5, Fraction(1, 2), {"only": 3}])
def test_any_real_number_is_a_reward(trace: Trace, reward: Any):
    value = get_reward_value(emit_reward(reward))
    assert value == (reward if not isinstance(reward, dict) else 3)
    assert type(value) is float


def test_numpy_numbers_are_rewards(trace: Trace):
    numpy = pytest.importorskip("numpy")
    assert get_reward_value(emit_reward(numpy.float32(0.5))) == 0.5
    assert get_reward_value(emit_reward(numpy.int64(2))) == 2.0


@pytest.mark.parametrize(
    "value", [object(), {"a": object()}, [math.nan], float("inf"), {(1, 2): 3}, b"bytes", {1, 2}, lambda: None]
)
def test_an_object_that_is_not_json_is_refused(trace: Trace, value: Any):
    with pytest.raises(InvalidEmission, match=r"is not JSON: .*Emit the parts that you need"):
        emit_object(value)
    assert trace.spans == []


def test_an_object_in_a_circle_is_refused(trace: Trace):
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(InvalidEmission, match="Circular"):
        emit_object(circle)


def test_a_message_that_is_no_string_is_refused(trace: Trace):
    with pytest.raises(InvalidEmission, match="a message is a string, not a dict; use emit_object"):
        emit_message({"a": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ({}, "is empty"),
        ({"a": {}}, "is empty"),
        ({"a.b": 1, "a": {"b": 2}}, "'a.b' twice"),
        ({"a": None}, "attribute 'a' is None"),
        (
            {"a": [1, "b"]},
            r"attribute 'a' is 'b' \(a str\), which is no number; possible: str.*or a list of one of these",
        ),
        ({"a": math.nan}, "attribute 'a' is nan, a number that JSON does not have"),
        ({"a": [1.0, -math.inf]}, "a number that JSON does not have"),
        ({"a": [{"b": 1}]}, "Record anything else with emit_object"),
    ],
)
def test_an_annotation_that_has_no_attribute_form_is_refused(trace: Trace, annotation: Any, message: str):
    with pytest.raises(InvalidEmission, match=message):
        emit_annotation(annotation)
    assert trace.spans == []


def test_lists_of_numbers_of_both_kinds_become_floats(trace: Trace):
    assert emit_annotation({"a": (1, 2.5), "b": []}).attributes == {"a": [1.0, 2.5], "b": []}


def test_an_exception_is_recorded_with_its_type_message_and_stack(trace: Trace):
    class OutOfLuck(Exception):
        pass

    try:
        raise OutOfLuck("today")
    except OutOfLuck as error:
        span = emit_exception(error, {"turn": 3})
    assert span.name == semconv.EXCEPTION
    assert span.status.status_code == "ERROR"
    assert span.attributes[semconv.EXCEPTION_TYPE].endswith("OutOfLuck")
    assert span.attributes[semconv.EXCEPTION_MESSAGE] == "today"
    assert 'raise OutOfLuck("today")' in span.attributes[semconv.EXCEPTION_STACKTRACE]
    assert span.attributes["turn"] == 3
    with pytest.raises(InvalidEmission, match="'oops' is a str, not an exception"):
        emit_exception("oops")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("group", "kind", "message"),
    [
        (ExceptionGroup("unhandled", [ConnectionError("refused")]), "ConnectionError", "refused"),
        (
            ExceptionGroup("unhandled", [KeyError("k"), ConnectionError("refused")]),
            "ExceptionGroup",
            "ConnectionError: refused; KeyError: 'k'",
        ),
    ],
)
def test_a_group_is_recorded_as_the_errors_in_it(trace: Trace, group: Exception, kind: str, message: str):
    span = emit_exception(group)
    assert span.attributes[semconv.EXCEPTION_TYPE] == kind
    assert span.attributes[semconv.EXCEPTION_MESSAGE] == message
    assert "refused" in str(span.status.description)


EMISSIONS: list[tuple[Callable[..., Span], Any]] = [
    (emit_reward, 1.0),
    (emit_message, "x"),
    (emit_object, {}),
    (emit_exception, ValueError("x")),
    (emit_annotation, {"a": 1}),
]


@pytest.mark.parametrize(("emit", "value"), EMISSIONS)
def test_emitting_where_no_trace_is_open_says_what_to_do(emit: Callable[..., Span], value: Any):
    with pytest.raises(NoActiveTrace, match=rf"{emit.__name__} was called where no trace is open.*trace_context"):
        emit(value)
    with pytest.raises(RuntimeError):
        emit(value)


@pytest.mark.parametrize(("emit", "value"), EMISSIONS)
def test_what_is_not_propagated_is_made_and_recorded_nowhere(trace: Trace, emit: Callable[..., Span], value: Any):
    assert emit(value, propagate=False).name == emit(value).name
    assert len(trace.spans) == 1
