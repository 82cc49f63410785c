"""Any order of calls leaves a store where a small model says it is."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from leyden.errors import IllegalTransition
from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from leyden.types import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig, Span

OVER = ("succeeded", "failed", "cancelled")
ENDED = ("succeeded", "failed", "timeout")
TROUBLE = st.lists(st.sampled_from(["failed", "timeout", "unresponsive"]), unique=True)
SECONDS = st.sampled_from([None, 100.0])


@dataclass
class Tried:
    attempt_id: str
    status: str = "preparing"
    spans: list[int] = field(default_factory=list[int])
    drawn: int = 0


@dataclass
class Model:
    config: RolloutConfig
    status: str = "queuing"
    tries: list[Tried] = field(default_factory=list[Tried])
    interrupted: int = 0

    def follow(self, attempt: Tried) -> None:
        """The rollout after one of its attempts changed."""
        if self.status in OVER or attempt is not self.tries[-1]:
            return
        if attempt.status in ("preparing", "running", "succeeded"):
            self.status = attempt.status
        elif (
            attempt.status in self.config.retry_condition
            and len(self.tries) - self.interrupted < self.config.max_attempts
        ):
            self.status = "requeuing"
        else:
            self.status = "failed"


class Machine(RuleBasedStateMachine):
    """Calls in any order; the model beside them is a dict in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.store = self.open()
        self.model: dict[str, Model] = {}
        self.made = 0

    def open(self) -> LightningStore:
        return InMemoryLightningStore()

    def teardown(self) -> None:
        self.do(self.store.close())
        self.loop.close()

    def do(self, call: Any) -> Any:
        return self.loop.run_until_complete(call)

    def pick(self, data: st.DataObject) -> tuple[str, Model, Tried]:
        started = [key for key, rollout in self.model.items() if rollout.tries]
        key = data.draw(st.sampled_from(started))
        return key, self.model[key], data.draw(st.sampled_from(self.model[key].tries))

    def any_tried(self) -> bool:
        return any(rollout.tries for rollout in self.model.values())

    def waiting(self) -> list[str]:
        return [key for key, rollout in self.model.items() if rollout.status in ("queuing", "requeuing")]

    @rule(n=st.integers(1, 3), max_attempts=st.integers(1, 3), retry=TROUBLE, timeout=SECONDS, silence=SECONDS)
    def enqueue(self, n: int, max_attempts: int, retry: Any, timeout: float | None, silence: float | None) -> None:
        config = RolloutConfig(
            max_attempts=max_attempts, retry_condition=retry, timeout_seconds=timeout, unresponsive_seconds=silence
        )
        for rollout in self.do(self.store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, config=config)] * n)):
            self.model[rollout.rollout_id] = Model(config)

    @rule(limit=st.integers(1, 4))
    def claim(self, limit: int) -> None:
        found = self.do(self.store.dequeue_many_rollouts(limit=limit))
        assert [rollout.rollout_id for rollout in found] == self.waiting()[:limit]
        for rollout in found:
            self.try_again(rollout)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def start_attempt(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.model)))
        if self.model[key].status in OVER:
            with pytest.raises(IllegalTransition):
                self.do(self.store.start_attempt(key))
        else:
            self.try_again(self.do(self.store.start_attempt(key)))

    def try_again(self, rollout: AttemptedRollout) -> None:
        model = self.model[rollout.rollout_id]
        model.tries.append(Tried(rollout.attempt.attempt_id))
        model.status = "preparing"
        assert rollout.attempt.sequence_id == len(model.tries)

    @precondition(any_tried)
    @rule(data=st.data(), known=st.booleans(), number=st.integers(0, 6))
    def add_span(self, data: st.DataObject, known: bool, number: int) -> None:
        key, rollout, tried = self.pick(data)
        known = known and bool(tried.spans)
        self.made += not known
        span_id = f"{tried.attempt_id}-0" if known else f"{tried.attempt_id}-{len(tried.spans)}"
        span = Span(
            rollout_id=key, attempt_id=tried.attempt_id, sequence_id=number, trace_id="t", span_id=span_id, name="n"
        )
        added = self.do(self.store.add_span(span))
        assert (added is None) == known
        if added is None:
            return
        expected = number or tried.drawn + 1
        assert added.sequence_id == expected
        tried.drawn = max(tried.drawn, expected)
        tried.spans.append(expected)
        if tried.status in ("preparing", "unresponsive"):
            tried.status = "running"
            rollout.follow(tried)

    @precondition(any_tried)
    @rule(data=st.data())
    def draw_number(self, data: st.DataObject) -> None:
        key, _, tried = self.pick(data)
        tried.drawn += 1
        assert self.do(self.store.get_next_span_sequence_id(key, tried.attempt_id)) == tried.drawn

    @precondition(any_tried)
    @rule(
        data=st.data(),
        status=st.sampled_from(["preparing", "running", "succeeded", "failed", "timeout", "unresponsive"]),
    )
    def report(self, data: st.DataObject, status: Any) -> None:
        key, rollout, tried = self.pick(data)
        legal = status == tried.status or (tried.status not in ENDED and status != "preparing")
        call = self.store.update_attempt(key, tried.attempt_id, status=status)
        if not legal:
            with pytest.raises(IllegalTransition):
                self.do(call)
            return
        self.do(call)
        if tried.status != status:
            tried.status = status
            rollout.follow(tried)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), status=st.sampled_from(["cancelled", "requeuing", "failed"]))
    def decide(self, data: st.DataObject, status: Any) -> None:
        key = data.draw(st.sampled_from(list(self.model)))
        rollout = self.model[key]
        refused = rollout.status in OVER or (status == "requeuing" and rollout.status == "queuing")
        call = self.store.update_rollout(key, status=status)
        if refused and status != rollout.status:
            with pytest.raises(IllegalTransition):
                self.do(call)
        else:
            self.do(call)
            rollout.status = status

    @rule()
    def sweep_much_later(self) -> None:
        self.do(self.store.sweep(time.time() + 10_000))
        for rollout in self.model.values():
            for tried in rollout.tries:
                before = tried.status
                if before in ENDED:
                    continue
                if rollout.config.timeout_seconds is not None:
                    tried.status = "timeout"
                elif rollout.config.unresponsive_seconds is not None:
                    tried.status = "unresponsive"
                if tried.status != before:
                    rollout.follow(tried)

    @rule()
    def release(self) -> None:
        expected: set[str] = set()
        for key, rollout in self.model.items():
            for tried in rollout.tries:
                if tried.status in ENDED:
                    continue
                tried.status = "failed"
                if rollout.status not in OVER:
                    rollout.status = "requeuing"
                    rollout.interrupted += 1
                    expected.add(key)
        assert set(self.do(self.store.release_claims())) == expected

    @invariant()
    def the_store_is_where_the_model_is(self) -> None:
        for rollout in self.do(self.store.query_rollouts()):
            model = self.model[rollout.rollout_id]
            assert rollout.status == model.status
            assert (rollout.end_time is not None) == (rollout.status in OVER)
            assert isinstance(rollout, AttemptedRollout) == bool(model.tries)
            attempts = self.do(self.store.query_attempts(rollout.rollout_id))
            assert [(a.attempt_id, a.status) for a in attempts] == [(t.attempt_id, t.status) for t in model.tries]
            assert all((a.end_time is not None) == (a.status in ENDED) for a in attempts)

    @invariant()
    def every_span_is_kept_once(self) -> None:
        assert self.do(self.store.statistics())["total_spans"] == self.made
        for key, rollout in self.model.items():
            for tried in rollout.tries:
                spans = self.do(self.store.query_spans(key, tried.attempt_id))
                assert [span.sequence_id for span in spans] == sorted(tried.spans)


class FileMachine(Machine):
    """The same over a file."""

    def open(self) -> LightningStore:
        self.directory = tempfile.TemporaryDirectory()
        return SqliteLightningStore(Path(self.directory.name) / "x.db")

    def teardown(self) -> None:
        super().teardown()
        self.directory.cleanup()


TestMemory = Machine.TestCase
TestMemory.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSqlite = FileMachine.TestCase
TestSqlite.settings = settings(TestMemory.settings, max_examples=12)
