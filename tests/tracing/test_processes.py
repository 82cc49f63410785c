"""A rollout goes with its agent into other processes: pools, `multiprocessing`, programs, and back
comes every span.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import Pool, ThreadPool
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace as otel_trace

from leyden.agent.emitter import emit_message, emit_reward, get_message_value, operation
from leyden.errors import InvalidEmission, NoActiveTrace, StoreError, UnknownAttempt
from leyden.store import InMemoryLightningStore, LightningStore
from leyden.tracing import OtelTracer, TraceContext, active_trace, current_trace
from leyden.tracing.remote import RemoteDestination
from leyden.types import AttemptedRollout, Span

ROOT = Path(__file__).parents[2]
WANTED = ("TRACEPARENT", "BAGGAGE", "OTEL_EXPORTER_OTLP_ENDPOINT", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL")
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"

OTLP = """
import http.client, json, os, sys
url, names = os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"].removeprefix("http://"), sys.argv[1:]
place = dict(pair.split("=") for pair in os.environ["OTEL_RESOURCE_ATTRIBUTES"].split(","))
_, trace_id, parent, _ = os.environ["TRACEPARENT"].split("-")
def attribute(key, value): return {"key": key, "value": {"stringValue": value}}
spans = [{"traceId": trace_id, "spanId": os.urandom(8).hex(), "parentSpanId": parent, "name": name,
          "startTimeUnixNano": "1000000000", "endTimeUnixNano": "2000000000"} for name in names]
body = {"resourceSpans": [{"resource": {"attributes": [attribute(*pair) for pair in place.items()]},
                           "scopeSpans": [{"spans": spans}]}]}
host, _, secret = url.partition("/")
connection = http.client.HTTPConnection(host)
connection.request("POST", f"/{secret}/v1/traces", json.dumps(body), {"content-type": "application/json"})
assert connection.getresponse().status == 200
"""
"""What a program's OpenTelemetry exporter sends, without the packages."""


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as store:
        yield store


def attempt_of(store: LightningStore, rollout: AttemptedRollout) -> TraceContext:
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    return OtelTracer().trace_context(store=store, **ids)


async def spans_of(store: LightningStore, rollout: AttemptedRollout) -> Sequence[Span]:
    return await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id)


def work(message: str) -> str:
    """Runs in another process."""
    with operation(name="work"):
        emit_message(message)
        otel_trace.get_tracer("library").start_span("library").end()
    return f"{message} {active_trace('work').rollout_id}"


def refused(_: Any) -> str:
    try:
        emit_message("nobody's")
    except NoActiveTrace as error:
        return str(error)
    return "emitted"


def in_a_child(script: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    ).stdout


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
async def test_a_process_of_multiprocessing_records_below_the_step_that_started_it(store: LightningStore, method: str):
    rollout = await store.start_rollout(None)
    context: Any = multiprocessing.get_context(method)
    async with attempt_of(store, rollout):
        with operation(name="outside"):
            process = context.Process(target=work, args=("hello",))
            process.start()
            await asyncio.to_thread(process.join)
            assert process.exitcode == 0
            assert "run" not in vars(process)
    message, library, inner, outer = await spans_of(store, rollout)
    assert (get_message_value(message), library.name) == ("hello", "library")
    assert message.parent_id == library.parent_id == inner.span_id
    assert inner.parent_id == outer.span_id
    assert outer.parent_id is None
    assert len({span.trace_id for span in (message, library, inner, outer)}) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.merge
async def test_256_rollouts_share_the_workers_of_a_process_pool_and_each_has_its_own_spans(store: LightningStore):
    rollouts = [await store.start_rollout(index) for index in range(256)]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:

        async def agent(rollout: AttemptedRollout) -> None:
            async with attempt_of(store, rollout):
                loop = asyncio.get_running_loop()
                answer = await loop.run_in_executor(pool, work, f"pool-{rollout.input}")
                assert answer == f"pool-{rollout.input} {rollout.rollout_id}"
                await asyncio.to_thread(emit_message, f"thread-{rollout.input}")

        await asyncio.gather(*(agent(rollout) for rollout in rollouts))
        assert "called where no trace is open" in pool.submit(refused, None).result()
    for rollout in rollouts:
        spans = await spans_of(store, rollout)
        assert [get_message_value(span) or span.name for span in spans] == [
            f"pool-{rollout.input}",
            "library",
            "leyden.operation",
            f"thread-{rollout.input}",
        ]
        assert {span.parent_id for span in spans} == {None, spans[2].span_id}


def test_the_pools_of_multiprocessing_carry_each_piece_of_work():
    with multiprocessing.get_context("spawn").Pool(1) as pool, ThreadPool(2) as threads:  # both older than the trace
        with OtelTracer().trace_context() as trace:
            pool.apply(work, ("apply",))
            pool.map(work, ["map-1", "map-2"])
            list(pool.imap(work, ["imap"]))
            list(pool.imap_unordered(work, ["unordered"]))
            threads.map(emit_message, [f"thread-{n}" for n in range(20)])
            messages = [value for span in trace.spans if (value := get_message_value(span))]
        assert sorted(messages) == sorted(
            ["apply", "map-1", "map-2", "imap", "unordered", *(f"thread-{n}" for n in range(20))]
        )
        assert "called where no trace is open" in pool.apply(refused, (None,))


async def test_256_programs_at_once_find_their_own_rollout(store: LightningStore):
    rollouts = [await store.start_rollout(index) for index in range(256)]
    at_most = asyncio.Semaphore(32)

    async def agent(rollout: AttemptedRollout) -> None:
        async with attempt_of(store, rollout):
            trace = active_trace("test")
            trace.route.base_url = f"http://gateway/rollout/{rollout.rollout_id}/v1"
            async with at_most:
                program = await asyncio.create_subprocess_exec(
                    "/bin/sh", "-c", " ".join(f'echo "${name}";' for name in WANTED), stdout=asyncio.subprocess.PIPE
                )
                output, _ = await program.communicate()
            parent, baggage, otlp, openai, anthropic = output.decode().split()
            assert parent.startswith(f"00-{trace.trace_id}-")
            assert rollout.rollout_id in baggage
            assert rollout.attempt.attempt_id in baggage
            assert otlp == trace.address()
            assert openai == f"http://gateway/rollout/{rollout.rollout_id}/v1"
            assert anthropic == f"http://gateway/rollout/{rollout.rollout_id}"

    await asyncio.gather(*(agent(rollout) for rollout in rollouts))


async def run_exporters(store: LightningStore, count: int) -> None:
    rollouts = [await store.start_rollout(index) for index in range(count)]
    at_most = asyncio.Semaphore(8)

    async def agent(rollout: AttemptedRollout) -> None:
        async with attempt_of(store, rollout), at_most:
            program = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", OTLP, f"a-{rollout.input}", f"b-{rollout.input}")
            )
            assert await program.wait() == 0

    await asyncio.gather(*(agent(rollout) for rollout in rollouts))
    for rollout in rollouts:
        spans = await spans_of(store, rollout)
        assert [(span.name, span.parent_id) for span in spans] == [
            (f"a-{rollout.input}", None),
            (f"b-{rollout.input}", None),
        ]


async def test_what_programs_export_is_in_the_rollout_of_each_when_it_is_reported(store: LightningStore):
    await run_exporters(store, 8)


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.timeout(240)
async def test_what_256_programs_export_is_in_the_rollout_of_each(store: LightningStore):
    await run_exporters(store, 256)


async def test_a_python_program_emits_into_the_rollout_that_started_it(store: LightningStore):
    rollout = await store.start_rollout(None)
    async with attempt_of(store, rollout):
        with operation(name="outside"):
            await asyncio.to_thread(
                in_a_child,
                """
                from leyden.agent.emitter import emit_reward, operation
                with operation(name="tool"):
                    emit_reward(0.5)
                """,
            )
    reward, tool, outside = await spans_of(store, rollout)
    assert reward.parent_id == tool.span_id
    assert tool.parent_id == outside.span_id


def test_a_calls_own_variables_count_and_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACEPARENT", "outer")
    before = dict(os.environ), subprocess.Popen.__init__, multiprocessing.Process.start, ProcessPoolExecutor.submit
    pool = Pool.apply_async, Pool.imap

    def seen(env: dict[str, str] | None = None) -> dict[str, str]:
        done = subprocess.run([sys.executable, "-I", "-S", "-c", SHOW], env=env, capture_output=True, check=True)
        return json.loads(done.stdout)

    with OtelTracer().trace_context() as trace:
        trace.route.base_url = "http://gateway/v1"
        assert seen()["OPENAI_BASE_URL"] == "http://gateway/v1"
        assert trace.trace_id in seen()["TRACEPARENT"]
        own = seen({**os.environ, "OPENAI_BASE_URL": "mine", "X": "y"})
        assert (own["OPENAI_BASE_URL"], own["X"]) == ("mine", "y")
        assert trace.trace_id in own["TRACEPARENT"]
        bare = seen({"X": "y"})  # what this process has and the call has not was taken away on purpose
        assert "TRACEPARENT" not in bare
        assert "PATH" not in bare
        assert bare["OTEL_EXPORTER_OTLP_ENDPOINT"] == trace.address()
        assert dict(os.environ) == before[0]
    assert seen()["TRACEPARENT"] == "outer"
    assert before == (
        dict(os.environ),
        subprocess.Popen.__init__,
        multiprocessing.Process.start,
        ProcessPoolExecutor.submit,
    )
    assert pool == (Pool.apply_async, Pool.imap)


def test_uvloops_programs_are_reached_too():
    uvloop = pytest.importorskip("uvloop")
    before = vars(uvloop.Loop).get("subprocess_exec")

    async def main() -> str:
        async with OtelTracer().trace_context() as trace:
            program = await asyncio.create_subprocess_shell('echo "$BAGGAGE"', stdout=asyncio.subprocess.PIPE)
            output, _ = await program.communicate()
            assert output.decode().strip() == trace.route.baggage()
        return "done"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == "done"
    assert vars(uvloop.Loop).get("subprocess_exec") is before


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_child_of_a_bare_fork_is_refused_not_lost():
    with OtelTracer().trace_context() as trace:
        child = os.fork()
        if child == 0:
            os._exit(7 if current_trace() is None and "os.fork" in refused(None) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        emit_reward(1.0)
        assert len(trace.spans) == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [(404, UnknownAttempt), (400, InvalidEmission), (413, InvalidEmission), (500, StoreError), (503, StoreError)],
)
async def test_only_an_error_of_the_receiver_itself_may_be_retried(status: int, error: type[Exception]):
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} Status\r\nconnection: close\r\n\r\nthe reason".encode())
        writer.close()

    span = Span(rollout_id="r", attempt_id="a", sequence_id=0, trace_id="t", span_id="s", name="n")
    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        destination = RemoteDestination(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(error, match=rf"status {status}: the reason"):
            await destination.add_many_spans([span])


async def test_an_address_tells_an_attempt_that_is_over_from_a_span_that_is_wrong(store: LightningStore):
    rollout = await store.start_rollout(None)
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    span = Span(**ids, sequence_id=0, trace_id="t", span_id="s", name="n")
    async with attempt_of(store, rollout) as trace:
        destination = RemoteDestination(trace.address())
        await destination.add_many_spans([span])
        with pytest.raises(UnknownAttempt, match="is not the one that this address is for"):
            await destination.add_many_spans([span.model_copy(update={"attempt_id": "other"})])
    with pytest.raises(UnknownAttempt, match="it is over"):
        await destination.add_many_spans([span])
    assert [each.name for each in await spans_of(store, rollout)] == ["n"]


async def test_spans_of_an_attempt_that_is_over_are_refused(store: LightningStore):
    rollout = await store.start_rollout(None)
    async with attempt_of(store, rollout) as trace:
        environment = trace.environment()
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", OTLP, "late"), env=environment, stderr=asyncio.subprocess.DEVNULL
    )
    assert await program.wait() == 1
    assert list(await spans_of(store, rollout)) == []
