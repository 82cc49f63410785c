"""An operation records input, output, failure and what happened within; it never changes what the code does."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from leyden.agent.emitter import emit_message, operation
from leyden.errors import ConfigError, InvalidEmission
from leyden.tracing import DummyTracer, Trace
from leyden.types import Span, semconv


@pytest.fixture
def trace() -> Iterator[Trace]:
    with DummyTracer().trace_context() as trace:
        yield trace


def recorded(span: Span) -> tuple[Any, Any, Any]:
    name, given, answer = (
        span.attributes.get(key) for key in (semconv.OPERATION_NAME, semconv.OPERATION_INPUT, semconv.OPERATION_OUTPUT)
    )
    return name, given and json.loads(given), answer and json.loads(answer)


def test_a_decorated_function_records_its_arguments_by_name_and_its_result(trace: Trace):
    @operation
    def add(a: int, b: int = 2) -> int:
        """Adds."""
        return a + b

    assert add(1) == 3
    assert add(a=5, b=6) == 11
    assert add.__doc__ == "Adds."
    first, second = trace.spans
    assert first.name == semconv.OPERATION
    assert recorded(first)[0].endswith("add")
    assert recorded(first)[1:] == ({"a": 1}, 3)
    assert recorded(second)[1:] == ({"a": 5, "b": 6}, 11)


async def test_a_decorated_coroutine_function_stays_one_and_concurrent_calls_keep_apart(trace: Trace):
    @operation(name="fetch", attributes={"kind": "io"})
    async def fetch(n: int) -> int:
        await asyncio.sleep(0.01)
        emit_message(str(n))
        return n * 2

    assert asyncio.iscoroutinefunction(fetch)
    assert await asyncio.gather(*(fetch(n) for n in range(10))) == [n * 2 for n in range(10)]
    operations = {span.span_id: recorded(span) for span in trace.spans if span.name == semconv.OPERATION}
    assert sorted(operations.values(), key=str) == sorted((("fetch", {"n": n}, n * 2) for n in range(10)), key=str)
    for span in trace.spans:
        if span.name == semconv.MESSAGE:
            assert operations[str(span.parent_id)][1] == {"n": int(str(span.attributes[semconv.MESSAGE_BODY]))}
        else:
            assert span.attributes["kind"] == "io"


def test_a_failure_is_recorded_and_goes_on(trace: Trace):
    @operation
    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        fail()
    (span,) = trace.spans
    assert span.status.status_code == "ERROR"
    assert span.status.description == "KeyError: 'lost'"
    assert semconv.OPERATION_OUTPUT not in span.attributes


def test_a_block_says_itself_what_went_in_and_out(trace: Trace):
    with operation(name="outer") as outer:
        outer.set_input([1])
        with operation(name="inner") as inner:
            inner.set_attributes({"hits": 3})
            with pytest.raises(InvalidEmission, match="'bad'"):
                inner.set_attributes({"bad": object()})
        outer.set_output({"found": None})
    inner_span, outer_span = trace.spans
    assert recorded(outer_span) == ("outer", [1], {"found": None})
    assert inner_span.parent_id == outer_span.span_id
    assert inner_span.attributes["hits"] == 3


def test_what_json_cannot_say_is_recorded_as_its_repr(trace: Trace):
    circle: list[Any] = []
    circle.append(circle)

    @operation
    def echo(value: Any) -> Any:
        return value

    for value in (object(), {(1, 2): 3}, circle):
        assert echo(value) is value
    assert "object object at" in str(trace.spans[0].attributes[semconv.OPERATION_OUTPUT])
    assert len(trace.spans) == 3


def test_methods_and_wrong_calls_behave_as_without_it(trace: Trace):
    class Searcher:
        @operation(name="search")
        def search(self, query: str) -> str:
            return query.upper()

    assert Searcher().search("x") == "X"
    with pytest.raises(TypeError, match="search"):
        Searcher().search()  # type: ignore[call-arg]


async def test_outside_a_trace_the_code_runs_unrecorded():
    @operation
    def double(n: int) -> int:
        return n * 2

    assert double(2) == 4
    with operation(name="block") as step:
        step.set_input(1)
        step.set_output(2)


def test_what_cannot_be_recorded_as_a_call_is_refused():
    def numbers() -> Iterator[int]:
        yield 1

    async def more() -> Any:
        yield 1

    for generator in (numbers, more):
        with pytest.raises(ConfigError, match="is a generator; use `with operation"):
            operation(generator)
    with pytest.raises(ConfigError, match="needs a name"), operation():
        pass
    block = operation(name="once")
    with block, pytest.raises(ConfigError, match="'once' is open already"), block:
        pass
