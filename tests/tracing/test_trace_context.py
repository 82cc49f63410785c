"""A span belongs to the attempt in whose trace it started: in tasks, threads, pools, nested traces, and late."""

# ruff: noqa: PT012 -- blocks that raise are what is tested here

import asyncio
import contextvars
import gc
import logging
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace

from leyden.agent.emitter import emit_message, emit_reward, get_message_value
from leyden.errors import ConfigError, NoActiveTrace
from leyden.store import InMemoryLightningStore, LightningStore
from leyden.tracing import LOCAL, DummyTracer, OtelTracer, TraceContext, Tracer, current_trace
from leyden.tracing.otel_tracer import collector
from leyden.types import AttemptedRollout


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as store:
        yield store


@pytest.fixture(params=[OtelTracer, DummyTracer])
def tracer(request: pytest.FixtureRequest) -> Tracer:
    return request.param()


def instrumented() -> otel_trace.Tracer:
    """What a library with OpenTelemetry instrumentation has."""
    return otel_trace.get_tracer("some.library")


def attempt_of(tracer: Tracer, store: LightningStore, rollout: AttemptedRollout) -> TraceContext:
    return tracer.trace_context(store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id)


async def arrives(store: LightningStore, rollout: AttemptedRollout) -> None:
    """Returns when the rollout has a span."""
    async with asyncio.timeout(20):
        while not await names(store, rollout):  # noqa: ASYNC110 -- the test looks on from outside
            await asyncio.sleep(0.01)


async def names(store: LightningStore, rollout: AttemptedRollout) -> list[str]:
    return [span.name for span in await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id)]


async def test_256_concurrent_rollouts_each_have_their_own_spans_and_only_those(store: LightningStore):
    tracer = OtelTracer()
    rollouts = [await store.start_rollout(index) for index in range(256)]

    async def agent(rollout: AttemptedRollout) -> None:
        async with attempt_of(tracer, store, rollout):
            for step in range(3):
                with instrumented().start_as_current_span(f"step-{rollout.input}-{step}"):
                    await asyncio.sleep(random.random() / 100)
                    await asyncio.create_task(child(f"task-{rollout.input}-{step}"))
                    await asyncio.to_thread(emit_message, f"thread-{rollout.input}-{step}")

    async def child(name: str) -> None:
        await asyncio.sleep(0)
        instrumented().start_span(name).end()

    await asyncio.gather(*(agent(rollout) for rollout in rollouts))
    for rollout in rollouts:
        spans = await store.query_spans(rollout.rollout_id)
        expected = [
            (f"task-{rollout.input}-{n}", f"thread-{rollout.input}-{n}", f"step-{rollout.input}-{n}") for n in range(3)
        ]
        assert [get_message_value(span) or span.name for span in spans] == [name for step in expected for name in step]
        assert [span.sequence_id for span in spans] == list(range(1, 10))
        assert len({span.trace_id for span in spans}) == 1
        steps = {span.name: span.span_id for span in spans if span.name.startswith("step")}
        assert {span.parent_id for span in spans} == {None, *steps.values()}


def test_32_threads_with_a_trace_each_keep_their_spans_apart():
    store, tracer = InMemoryLightningStore(), OtelTracer()
    rollouts = [asyncio.run(store.start_rollout(index)) for index in range(32)]
    barrier = threading.Barrier(32)

    def agent(rollout: AttemptedRollout) -> None:
        barrier.wait()
        with attempt_of(tracer, store, rollout):
            for step in range(20):
                with instrumented().start_as_current_span(f"{rollout.input}-{step}"):
                    pass
            assert len(tracer.get_last_trace()) == 20

    threads = [threading.Thread(target=agent, args=(rollout,)) for rollout in rollouts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rollout in rollouts:
        spans = asyncio.run(names(store, rollout))
        assert spans == [f"{rollout.input}-{step}" for step in range(20)]
    asyncio.run(store.close())


async def test_a_trace_without_a_store_keeps_its_spans_and_counts_them_itself(tracer: Tracer):
    with tracer.trace_context() as trace:
        emit_message("one")
        emit_message("two")
        assert tracer.get_last_trace() == trace.spans
    assert [(span.rollout_id, span.attempt_id, span.sequence_id) for span in tracer.get_last_trace()] == [
        (LOCAL, LOCAL, 1),
        (LOCAL, LOCAL, 2),
    ]


async def test_after_the_trace_the_spans_say_which_sequence_ids_the_store_drew(tracer: Tracer, store: LightningStore):
    rollout = await store.start_rollout(None)
    await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id)
    async with attempt_of(tracer, store, rollout):
        emit_message("one")
        emit_message("two")
        assert [span.sequence_id for span in tracer.get_last_trace()] == [0, 0]
    assert [span.sequence_id for span in tracer.get_last_trace()] == [2, 3]
    assert tracer.get_last_trace() == list(await store.query_spans(rollout.rollout_id))


async def test_a_nested_trace_takes_the_spans_and_gives_the_trace_back(tracer: Tracer, store: LightningStore):
    outer, inner = await store.start_rollout("outer"), await store.start_rollout("inner")
    async with attempt_of(tracer, store, outer):
        with tracer.operation_context("around"):
            async with attempt_of(tracer, store, inner):
                emit_message("in")
                instrumented().start_span("library").end()
            emit_message("out")
        assert [span.name for span in tracer.get_last_trace()] == ["leyden.message", "around"]
    inner_spans = await store.query_spans(inner.rollout_id)
    assert "leyden.message" in [span.name for span in inner_spans]
    assert {span.parent_id for span in inner_spans} == {None}
    assert await names(store, outer) == ["leyden.message", "around"]
    assert [span.name for span in tracer.get_last_trace()] == ["leyden.message", "around"]


async def test_an_operation_is_the_parent_of_what_happens_in_it_and_records_how_it_failed(store: LightningStore):
    rollout = await store.start_rollout(None)
    tracer = OtelTracer()
    with pytest.raises(ZeroDivisionError):
        async with attempt_of(tracer, store, rollout):
            with tracer.operation_context("divide", {"by": 0}) as step:
                step.set({"tried": True})
                instrumented().start_span("library").end()
                emit_message("below")
                raise ZeroDivisionError("by nothing")
    library, message, divide = await store.query_spans(rollout.rollout_id)
    assert library.parent_id == message.parent_id == divide.span_id
    assert library.trace_id == message.trace_id == divide.trace_id
    assert divide.parent_id is None
    assert divide.status.status_code == "ERROR"
    assert divide.status.description == "ZeroDivisionError: by nothing"
    assert divide.attributes["by"] == 0
    assert divide.attributes["tried"] is True
    assert divide.attributes["exception.type"] == "ZeroDivisionError"


async def test_spans_carry_attributes_events_status_and_times(store: LightningStore):
    rollout = await store.start_rollout(None)
    async with attempt_of(OtelTracer(), store, rollout):
        with pytest.raises(ValueError, match="wrong"), instrumented().start_as_current_span("call") as span:
            span.set_attributes({"s": "x", "i": 3, "f": 0.5, "b": True, "list": ("a", "b"), "numbers": [1, 2]})
            span.add_event("token", {"n": 1})
            raise ValueError("wrong")
    (call,) = await store.query_spans(rollout.rollout_id)
    assert call.attributes == {"s": "x", "i": 3, "f": 0.5, "b": True, "list": ["a", "b"], "numbers": [1, 2]}
    assert [event.name for event in call.events] == ["token", "exception"]
    assert call.events[0].attributes == {"n": 1}
    assert call.status.status_code == "ERROR"
    assert call.start_time is not None
    assert call.end_time is not None
    assert call.start_time <= call.end_time
    assert call.resource["telemetry.sdk.language"] == "python"


async def test_a_conversation_of_a_thousand_attributes_is_kept_whole(store: LightningStore):
    rollout = await store.start_rollout(None)
    async with attempt_of(OtelTracer(), store, rollout):
        instrumented().start_span("call", attributes={f"gen_ai.prompt.{n}.content": "x" for n in range(1000)}).end()
    (call,) = await store.query_spans(rollout.rollout_id)
    assert len(call.attributes) == 1000


async def test_an_agent_that_seeds_random_does_not_repeat_span_ids(store: LightningStore):
    rollout = await store.start_rollout(None)
    async with attempt_of(OtelTracer(), store, rollout):
        for _ in range(5):
            random.seed(42)
            instrumented().start_span("call").end()
            emit_message("x")
    assert len(await names(store, rollout)) == 10


async def test_spans_outside_a_trace_are_ignored_and_emitting_there_says_what_to_do(store: LightningStore):
    rollout = await store.start_rollout(None)
    tracer = OtelTracer()
    tracer.init()
    outside = instrumented().start_span("started before")
    async with attempt_of(tracer, store, rollout):
        outside.end()
    with pytest.raises(NoActiveTrace, match=r"create_span was called where no trace is open.*trace_context"):
        tracer.create_span("nowhere")
    with pytest.raises(RuntimeError):
        tracer.operation_context("nowhere")
    assert await names(store, rollout) == []


async def test_an_exception_leaves_the_trace_with_its_spans_delivered(tracer: Tracer, store: LightningStore):
    rollout = await store.start_rollout(None)
    with pytest.raises(KeyError, match="gone"):
        async with attempt_of(tracer, store, rollout):
            emit_reward(1.0)
            raise KeyError("gone")
    assert await names(store, rollout) == ["leyden.reward"]
    assert current_trace() is None


async def test_a_cancelled_agent_leaves_the_trace_with_its_spans_delivered(tracer: Tracer, store: LightningStore):
    rollout = await store.start_rollout(None)
    started = asyncio.Event()

    async def agent() -> None:
        async with attempt_of(tracer, store, rollout):
            emit_message("before")
            started.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(agent())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await names(store, rollout) == ["leyden.message"]


async def test_threads_and_pools_carry_the_trace_and_are_put_back_afterwards(tracer: Tracer, store: LightningStore):
    rollout = await store.start_rollout(None)
    original = threading.Thread.start, ThreadPoolExecutor.submit
    with ThreadPoolExecutor(1) as pool:
        async with attempt_of(tracer, store, rollout):
            thread = threading.Thread(target=emit_message, args=("thread",))
            thread.start()
            thread.join()
            pool.submit(emit_message, "pool").result()
            list(pool.map(emit_message, ["map"]))
            await asyncio.get_running_loop().run_in_executor(None, emit_message, "loop's executor")
        spans = await store.query_spans(rollout.rollout_id)
        assert [get_message_value(span) for span in spans] == ["thread", "pool", "map", "loop's executor"]
        assert (threading.Thread.start, ThreadPoolExecutor.submit) == original
        assert "run" not in vars(thread)


async def test_a_pool_thread_belongs_to_no_trace_beyond_the_work_it_was_given(store: LightningStore):
    first, second = await store.start_rollout(1), await store.start_rollout(2)
    tracer = OtelTracer()
    with ThreadPoolExecutor(1) as pool:
        async with attempt_of(tracer, store, first):
            pool.submit(emit_message, "first").result()
        async with attempt_of(tracer, store, second):
            pool.submit(emit_message, "second").result()
        with pytest.raises(NoActiveTrace):
            pool.submit(emit_message, "nobody's").result()
        pool.submit(instrumented().start_span("nobody's").end).result()
    assert [get_message_value(span) for span in await store.query_spans(first.rollout_id)] == ["first"]
    assert [get_message_value(span) for span in await store.query_spans(second.rollout_id)] == ["second"]


async def test_a_replacement_of_thread_start_made_while_a_trace_is_open_survives(
    store: LightningStore, monkeypatch: pytest.MonkeyPatch
):
    tracer, seen = DummyTracer(), []
    before = threading.Thread.start

    def run(message: str) -> None:
        thread = threading.Thread(target=emit_message, args=(message,))
        thread.start()
        thread.join()

    with tracer.trace_context():
        below = threading.Thread.start

        def theirs(self: threading.Thread) -> None:
            seen.append(self.name)
            below(self)

        monkeypatch.setattr(threading.Thread, "start", theirs)
        run("one")
    assert threading.Thread.start is theirs
    for _ in range(2):
        with tracer.trace_context() as trace:
            run("again")
        assert [get_message_value(span) for span in trace.spans] == ["again"]
    assert len(seen) == 3
    monkeypatch.undo()
    with tracer.trace_context():
        pass
    assert threading.Thread.start is before


async def test_a_thread_from_before_the_trace_is_reached_by_opentelemetrys_own_context(store: LightningStore):
    work: Queue[tuple[otel_context.Context, otel_trace.Span | None] | None] = Queue()

    def worker() -> None:
        while (item := work.get()) is not None:
            context, parent = item
            if parent is None:
                token = otel_context.attach(context)
                instrumented().start_span("by context").end()
                emit_message("by context")
                otel_context.detach(token)
            else:
                instrumented().start_span("by parent", context=otel_trace.set_span_in_context(parent)).end()

    thread = threading.Thread(target=worker)
    thread.start()
    rollout = await store.start_rollout(None)
    async with attempt_of(OtelTracer(), store, rollout):
        with instrumented().start_as_current_span("parent") as parent:
            work.put((otel_context.get_current(), None))
            work.put((otel_context.get_current(), parent))
            work.put(None)
            await asyncio.to_thread(thread.join)
    assert await names(store, rollout) == ["by context", "leyden.message", "by parent", "parent"]


async def test_a_late_span_still_reaches_its_own_attempt(
    tracer: Tracer, store: LightningStore, caplog: pytest.LogCaptureFixture
):
    first, second = await store.start_rollout(1), await store.start_rollout(2)
    caplog.set_level(logging.DEBUG, logger="leyden.tracing")
    async with attempt_of(tracer, store, first):
        late_context = contextvars.copy_context()
    async with attempt_of(tracer, store, second):
        late_context.run(emit_message, "late")
    await arrives(store, first)
    assert await names(store, first) == ["leyden.message"]
    assert await names(store, second) == []
    assert "ended after its trace was closed" in caplog.text


async def test_an_opentelemetry_span_that_ends_in_another_trace_belongs_to_where_it_started(store: LightningStore):
    first, second = await store.start_rollout(1), await store.start_rollout(2)
    tracer = OtelTracer()
    async with attempt_of(tracer, store, first):
        span = instrumented().start_span("from the first")
    async with attempt_of(tracer, store, second):
        span.end()
    await arrives(store, first)
    assert await names(store, second) == []


async def test_an_opentelemetry_context_that_is_given_decides_before_the_running_code(store: LightningStore):
    first, second = await store.start_rollout(1), await store.start_rollout(2)
    tracer = OtelTracer()
    async with attempt_of(tracer, store, first):
        of_the_first = otel_context.get_current()
        async with attempt_of(tracer, store, second):
            instrumented().start_span("given", context=of_the_first).end()
            instrumented().start_span("running").end()
    assert await names(store, first) == ["given"]
    assert await names(store, second) == ["running"]


async def test_spans_that_are_never_ended_are_not_kept_alive(store: LightningStore):
    rollout = await store.start_rollout(None)
    async with attempt_of(OtelTracer(), store, rollout):
        for _ in range(100):
            instrumented().start_span("abandoned")
        gc.collect()
        assert len(collector()._started) == 0


@pytest.mark.parametrize("ids", [{"rollout_id": "ro-1"}, {"attempt_id": "at-1"}])
async def test_one_id_without_the_other_is_refused(tracer: Tracer, ids: dict[str, str]):
    with pytest.raises(ConfigError, match="rollout_id and attempt_id or neither"):
        tracer.trace_context(**ids)


async def test_a_store_without_ids_is_refused(tracer: Tracer, store: LightningStore):
    with pytest.raises(ConfigError, match=r"memory://.* needs rollout_id and attempt_id"):
        tracer.trace_context(store=store)


async def test_a_trace_of_an_attempt_goes_to_the_store_of_its_worker(tracer: Tracer, store: LightningStore):
    rollout = await store.start_rollout("task")
    tracer.init_worker(0, store)
    tracer.init_worker(1, store)
    async with tracer.trace_context(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
        emit_message("kept")
    assert await names(store, rollout) == ["leyden.message"]
    async with tracer.trace_context() as local:
        emit_message("of no attempt")
    assert (len(local.spans), len(await names(store, rollout))) == (1, 1)
    tracer.teardown_worker(0)
    tracer.teardown_worker(1)
    async with tracer.trace_context(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
        emit_message("after the worker")
    assert await names(store, rollout) == ["leyden.message"]


async def test_a_trace_without_a_store_is_refused_where_workers_have_different_stores(
    tracer: Tracer, store: LightningStore
):
    async with InMemoryLightningStore() as another:
        tracer.init_worker(0, store)
        tracer.init_worker(1, another)
        with pytest.raises(ConfigError, match="different stores"):
            tracer.trace_context(rollout_id="rollout", attempt_id="attempt")


async def test_a_trace_context_is_entered_once(tracer: Tracer):
    context = tracer.trace_context(name="mine")
    with context:
        pass
    with pytest.raises(ConfigError, match="'mine' was opened before"):
        context.__enter__()


async def test_a_trace_that_is_closed_in_another_context_leaves_no_trace_behind(tracer: Tracer):
    context = tracer.trace_context()
    contextvars.copy_context().run(context.__enter__)
    context.__exit__(None, None, None)
    assert current_trace() is None
