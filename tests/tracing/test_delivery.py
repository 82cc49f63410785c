"""Spans reach the store in few calls, soon, completely; what goes wrong on the way surfaces in its own trace."""

# ruff: noqa: PT012 -- blocks that raise are what is tested here

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from opentelemetry import trace as otel_trace

from leyden.agent.emitter import emit_message, get_message_value
from leyden.errors import StoreClosed, StoreError, UnknownAttempt
from leyden.store import InMemoryLightningStore
from leyden.tracing import DummyTracer, OtelTracer, TraceContext, delivery
from leyden.types import AttemptedRollout, Span


class CountingStore(InMemoryLightningStore):
    """The memory store; remembers each batch, and fails or waits on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[Span]] = []
        self.failures: list[Exception] = []
        self.delay_seconds = 0.0
        self.loops: set[asyncio.AbstractEventLoop] = set()

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        self.batches.append(list(spans))
        self.loops.add(asyncio.get_running_loop())
        await asyncio.sleep(self.delay_seconds)
        if self.failures:
            raise self.failures.pop(0)
        return await super().add_many_spans(spans)


@pytest.fixture
async def store() -> AsyncIterator[CountingStore]:
    async with CountingStore() as store:
        yield store


def attempt_of(store: CountingStore, rollout: AttemptedRollout) -> TraceContext:
    return DummyTracer().trace_context(
        store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
    )


async def test_many_spans_go_in_several_requests(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_MAX_SPANS", 100)
    rollout = await store.start_rollout({})
    store.delay_seconds = 0.1
    async with attempt_of(store, rollout):
        for number in range(450):
            emit_message(f"{number}")
    assert await count(store, rollout) == 450
    assert max(map(len, store.batches)) == 100


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 -- the test looks on from outside
            await asyncio.sleep(0.01)


async def count(store: CountingStore, rollout: AttemptedRollout) -> int:
    return (await store.query_spans(rollout.rollout_id)).total


async def test_a_small_attempt_is_one_call_at_its_end(store: CountingStore):
    rollout = await store.start_rollout(None)
    async with attempt_of(store, rollout):
        for _ in range(3):
            emit_message("x")
    assert [len(batch) for batch in store.batches] == [3]
    async with attempt_of(store, await store.start_rollout(None)):
        pass
    assert len(store.batches) == 1


async def test_a_span_is_a_heartbeat_while_the_attempt_runs(store: CountingStore):
    rollout = await store.start_rollout(None)
    async with attempt_of(store, rollout):
        emit_message("one")
        await eventually(lambda: store.batches)
        await asyncio.sleep(0.01)
        assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "running"


async def test_64_spans_do_not_wait(store: CountingStore):
    rollout = await store.start_rollout(None)
    async with attempt_of(store, rollout):
        for _ in range(64):
            emit_message("x")
        await asyncio.sleep(0.05)
        assert await count(store, rollout) == 64
    assert [len(batch) for batch in store.batches] == [64]


async def test_500_attempts_at_a_time_share_few_calls_and_leave_nothing_behind(store: CountingStore):
    store.delay_seconds = 0.002
    rollouts = [await store.start_rollout(index) for index in range(500)]

    async def agent(rollout: AttemptedRollout) -> None:
        async with attempt_of(store, rollout):
            emit_message("one")
            await asyncio.sleep(0.01)
            emit_message("two")
        assert await count(store, rollout) == 2

    await asyncio.gather(*(agent(rollout) for rollout in rollouts))
    assert len(store.batches) < 60
    assert delivery._deliveries == {}


def test_a_sync_trace_delivers_from_the_background_and_returns_when_all_is_there():
    store = CountingStore()
    rollout = asyncio.run(store.start_rollout(None))
    with attempt_of(store, rollout):
        for _ in range(100):
            emit_message("x")
    assert asyncio.run(count(store, rollout)) == 100
    assert store.loops == {delivery.background_loop()}
    asyncio.run(store.close())


async def test_a_sync_trace_works_under_a_running_loop(store: CountingStore):
    rollout = await store.start_rollout(None)
    with attempt_of(store, rollout):
        emit_message("x")
    assert await count(store, rollout) == 1


async def test_a_failed_flush_is_tried_again_while_the_attempt_runs(
    store: CountingStore, caplog: pytest.LogCaptureFixture
):
    rollout = await store.start_rollout(None)
    store.failures = [StoreError("disk full"), ConnectionResetError("gone")]
    async with attempt_of(store, rollout):
        emit_message("x")
        await eventually(lambda: not store.failures)
    assert await count(store, rollout) == 1
    assert "disk full" in caplog.text


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), StoreError("disk full")])
async def test_a_flush_that_keeps_failing_is_raised_when_the_trace_closes(store: CountingStore, error: Exception):
    rollout = await store.start_rollout(None)
    store.failures = [error] * 10
    with pytest.raises(StoreError, match=r"disk full|1 spans of attempt .* could not be delivered to memory.*gone"):
        async with attempt_of(store, rollout):
            emit_message("x")
    assert delivery._deliveries == {}
    store.failures = []
    await asyncio.sleep(0.3)
    assert await count(store, rollout) == 0  # given up, and the trace said so


def test_a_sync_trace_raises_it_too():
    store = CountingStore()
    rollout = asyncio.run(store.start_rollout(None))
    asyncio.run(store.close())
    with pytest.raises(StoreClosed), attempt_of(store, rollout):
        emit_message("x")


async def test_what_the_agent_raised_is_the_cause_beside_a_failed_flush(store: CountingStore):
    rollout = await store.start_rollout(None)
    store.failures = [StoreError("disk full")] * 10
    with pytest.raises(StoreError) as caught:
        async with attempt_of(store, rollout):
            emit_message("x")
            raise KeyError("the agent's own")
    assert isinstance(caught.value.__context__, KeyError)


async def test_a_cancellation_is_not_replaced_by_a_failed_flush(store: CountingStore, caplog: pytest.LogCaptureFixture):
    rollout = await store.start_rollout(None)
    store.failures = [StoreError("disk full")] * 10
    with pytest.raises(asyncio.CancelledError):
        async with attempt_of(store, rollout):
            emit_message("x")
            raise asyncio.CancelledError
    assert "incomplete in the store" in caplog.text


async def test_an_unknown_attempt_hurts_its_own_trace_only(store: CountingStore):
    good, bad = await store.start_rollout("good"), await store.start_rollout("bad")
    bad.attempt.attempt_id = "at-nowhere"
    both_open = asyncio.Barrier(2)

    async def agent(rollout: AttemptedRollout) -> None:
        async with attempt_of(store, rollout):
            emit_message("one")
            await both_open.wait()
            await asyncio.sleep(0.3)  # both travel in one batch
            emit_message("two")

    outcomes = await asyncio.gather(agent(good), agent(bad), return_exceptions=True)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], UnknownAttempt)
    assert "2 spans" in " ".join(outcomes[1].__notes__)
    assert await count(store, good) == 2
    assert len([batch for batch in store.batches if any(span.attempt_id == "at-nowhere" for span in batch)]) == 2


class PickyStore(CountingStore):
    """Refuses the message `unstorable`."""

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        if any(get_message_value(span) == "unstorable" for span in spans):
            self.batches.append(list(spans))
            await asyncio.sleep(self.delay_seconds)
            raise TypeError("no column for that")
        return await super().add_many_spans(spans)


async def test_what_is_delivered_after_a_refusal_does_not_hide_it():
    async with PickyStore() as store:
        rollout = await store.start_rollout(None)
        store.delay_seconds = 0.1
        with pytest.raises(StoreError, match=r"64 spans of .* no column for that"):
            async with attempt_of(store, rollout):
                for _ in range(64):
                    emit_message("unstorable")
                await asyncio.sleep(0.05)  # the refusal is under way
                emit_message("fine")
        assert await count(store, rollout) == 1


async def test_a_value_that_the_store_cannot_keep_hurts_its_own_trace_only():
    async with PickyStore() as store:
        good, bad = await store.start_rollout("good"), await store.start_rollout("bad")
        async with attempt_of(store, good):
            emit_message("one")
            with pytest.raises(StoreError, match=r"1 spans of attempt .* TypeError: no column for that"):
                async with attempt_of(store, bad):
                    emit_message("unstorable")
        assert [len(batch) for batch in store.batches] == [2, 1, 1]  # together, then each by itself
        assert await count(store, good) == 1
        assert await count(store, bad) == 0


async def test_delivery_itself_is_not_traced(store: CountingStore):
    """A store whose client is instrumented must not record its own requests in the attempt, for ever."""

    class InstrumentedStore(CountingStore):
        async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
            with otel_trace.get_tracer("http.client").start_as_current_span("POST /spans"):
                return await super().add_many_spans(spans)

    async with InstrumentedStore() as instrumented:
        rollout = await instrumented.start_rollout(None)
        async with OtelTracer().trace_context(
            store=instrumented, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
        ):
            emit_message("x")
            await asyncio.sleep(0.3)
            for _ in range(100):  # these do not wait for the timer
                emit_message("y")
            await asyncio.sleep(0.3)
        await asyncio.sleep(0.3)
        assert [span.name for span in await instrumented.query_spans(rollout.rollout_id)] == ["leyden.message"] * 101
        assert len(instrumented.batches) >= 2


async def test_a_slow_store_holds_up_no_agent_and_gets_one_batch_at_a_time(store: CountingStore):
    rollout = await store.start_rollout(None)
    store.delay_seconds = 1.0
    async with attempt_of(store, rollout):
        began = time.monotonic()
        for _ in range(1000):
            emit_message("x")
            await asyncio.sleep(0)
        assert time.monotonic() - began < 8.0  # ten batches that are waited for take ten seconds
    assert await count(store, rollout) == 1000
    assert len(store.batches) <= 3


async def test_spans_of_many_threads_all_arrive(store: CountingStore):
    rollout = await store.start_rollout(None)

    def work() -> None:
        for _ in range(200):
            emit_message("x")

    async with attempt_of(store, rollout):
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert await count(store, rollout) == 3200


def test_a_late_span_arrives_although_its_loop_is_closed(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    store = CountingStore()

    async def main() -> tuple[AttemptedRollout, threading.Thread, threading.Event]:
        rollout = await store.start_rollout(None)
        go = threading.Event()

        def straggler() -> None:
            go.wait()
            emit_message("late")

        async with attempt_of(store, rollout):
            thread = threading.Thread(target=straggler)
            thread.start()
        return rollout, thread, go

    rollout, thread, go = asyncio.run(main())
    go.set()
    thread.join()
    deadline = time.monotonic() + 5
    while not asyncio.run(count(store, rollout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert asyncio.run(count(store, rollout)) == 1
    assert caplog.text == ""
    asyncio.run(store.close())


def test_a_trace_that_outlives_its_loop_still_delivers():
    store = CountingStore()

    async def open_one() -> tuple[AttemptedRollout, TraceContext, contextvars.Context]:
        rollout = await store.start_rollout(None)
        context = attempt_of(store, rollout)
        await context.__aenter__()
        return rollout, context, contextvars.copy_context()

    async def close(context: TraceContext) -> None:
        await context.__aexit__(None, None, None)

    rollout, context, inside = asyncio.run(open_one())
    inside.run(emit_message, "after the loop")
    deadline = time.monotonic() + 5
    while not asyncio.run(count(store, rollout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert asyncio.run(count(store, rollout)) == 1
    inside.run(asyncio.run, close(context))
    asyncio.run(store.close())


async def test_late_spans_for_a_store_that_cannot_be_reached_are_given_up_in_the_end(
    store: CountingStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(delivery, "_LATE_TRIES", 3)
    monkeypatch.setattr(delivery, "_RETRY_SECONDS", 0.01)
    rollout = await store.start_rollout(None)
    async with attempt_of(store, rollout):
        late = contextvars.copy_context()
    store.failures = [ConnectionResetError("gone")] * 10
    late.run(emit_message, "late")
    await eventually(lambda: "1 spans of attempt" in caplog.text and "are refused: gone" in caplog.text)
    assert len(store.batches) == 3


async def test_a_late_span_for_a_closed_store_is_dropped_with_a_word(
    store: CountingStore, caplog: pytest.LogCaptureFixture
):
    rollout = await store.start_rollout(None)
    async with attempt_of(store, rollout):
        late = contextvars.copy_context()
    await store.close()
    late.run(emit_message, "late")
    await eventually(lambda: "refused" in caplog.text)
