"""OpenTelemetry has one global provider a process, set once: each case is a process of its own."""

import subprocess
import sys
import textwrap
from pathlib import Path

COMMON = """
import asyncio, logging, sys, threading
from opentelemetry import trace
from leyden.agent.emitter import emit_reward, operation
from leyden.store import InMemoryLightningStore, SqliteLightningStore
from leyden.tracing import DummyTracer, OtelTracer

def agent():
    with operation(name="op"):
        with trace.get_tracer("library").start_as_current_span("call"):
            emit_reward(1.0)

def recorded(tracer=None):
    with (tracer or OtelTracer()).trace_context() as t:
        agent()
    return [span.name for span in t.spans]
"""


def in_a_process(script: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMMON + textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_without_a_provider_ours_becomes_the_global_one_and_collects_each_span_once():
    in_a_process("""
        OtelTracer().init(), OtelTracer().init()
        assert recorded() == ["leyden.reward", "call", "leyden.operation"], recorded()
        assert recorded() == ["leyden.reward", "call", "leyden.operation"], recorded()
        OtelTracer().teardown()
        assert recorded() == ["leyden.reward", "call", "leyden.operation"], recorded()
    """)


def test_a_library_that_took_its_tracer_before_ours_is_heard_too():
    in_a_process("""
        early = trace.get_tracer("library")
        with OtelTracer().trace_context() as t:
            early.start_span("call").end()
        assert [span.name for span in t.spans] == ["call"]
    """)


def test_the_users_provider_stays_the_global_one_and_keeps_its_exporter():
    in_a_process("""
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        exporter, theirs = InMemorySpanExporter(), TracerProvider()
        theirs.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(theirs)
        for _ in range(2):
            assert recorded() == ["leyden.reward", "call", "leyden.operation"]
        with trace.get_tracer("library").start_as_current_span("outside"):
            pass
        assert trace.get_tracer_provider() is theirs
        assert [span.name for span in exporter.get_finished_spans()] == ["call", "call", "outside"]
    """)


def test_a_sampler_of_the_users_loses_their_spans_but_no_reward():
    in_a_process("""
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
        trace.set_tracer_provider(TracerProvider(sampler=ALWAYS_OFF))
        assert recorded() == ["leyden.reward", "leyden.operation"], recorded()
    """)


def test_a_disabled_sdk_loses_no_reward():
    in_a_process(
        """
        assert recorded() == ["leyden.reward", "leyden.operation"], recorded()
        """,
        OTEL_SDK_DISABLED="true",
    )


def test_a_provider_that_takes_no_processor_is_named_once():
    printed = in_a_process("""
        logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
        class Silent(trace.NoOpTracerProvider): pass
        trace.set_tracer_provider(Silent())
        for _ in range(3):
            assert recorded() == ["leyden.reward", "leyden.operation"], recorded()
    """)
    assert printed.count("the global OpenTelemetry provider is a Silent") == 1


def test_the_dummy_tracer_touches_no_global_state_and_records_what_is_emitted():
    in_a_process("""
        assert recorded(DummyTracer()) == ["leyden.reward", "leyden.operation"]
        assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    """)


def test_a_late_span_at_the_very_end_of_the_process_still_arrives(tmp_path: Path):
    in_a_process(
        """
        import contextvars
        store = SqliteLightningStore(sys.argv[1])
        async def main():
            rollout = await store.start_rollout(None, rollout_id="ro-1")
            async with OtelTracer().trace_context(store=store, rollout_id="ro-1", attempt_id=rollout.attempt.attempt_id):
                return contextvars.copy_context()
        asyncio.run(main()).run(emit_reward, 0.5)
        """,
        str(tmp_path / "store.db"),
    )
    in_a_process(
        """
        async def main():
            async with SqliteLightningStore(sys.argv[1]) as store:
                assert [span.name for span in await store.query_spans("ro-1")] == ["leyden.reward"]
        asyncio.run(main())
        """,
        str(tmp_path / "store.db"),
    )


def test_a_forked_child_has_a_background_of_its_own():
    in_a_process("""
        import os, warnings
        def trace_one():
            store = InMemoryLightningStore()  # one made before the fork is not the child's
            rollout = asyncio.run(store.start_rollout(None))
            with OtelTracer().trace_context(store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
                agent()
            assert asyncio.run(store.query_spans(rollout.rollout_id)).total == 3
        trace_one()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forking with threads, which is the point here
            child = os.fork()
        if child == 0:
            trace_one()
            sys.stdout.flush(); os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        trace_one()
    """)
