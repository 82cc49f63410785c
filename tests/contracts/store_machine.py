"""Any order of calls leaves a store where a small model says it is. A store passes by giving `StoreMachine` an `open`:

    class FileMachine(StoreMachine):
        def open(self): ...

    @pytest.mark.parametrize("seed", range(10))
    def test_file(seed): walk(FileMachine, seed, steps=100)

    TestFile = FileMachine.TestCase  # the same by Hypothesis

A step is one number, which says what is called and with what: the method of a name in `CALLS` draws the rest from it. `walk` takes
numbers at random, and finds more than Hypothesis in the same time, which repeats itself; that one takes them from what it knows of
trouble. Either cuts a failing run short.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, currently_in_test_context, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from leyden.errors import (
    ConfigError,
    LeydenError,
    UnknownAttempt,
    UnknownResources,
    UnknownRollout,
    UnknownRun,
    UnknownWorker,
)
from leyden.store import LightningStore
from leyden.testing import audit_store
from leyden.types import (
    UNSET,
    AttemptedRollout,
    EnqueueRolloutRequest,
    MetricPoint,
    PromptTemplate,
    Retention,
    Rollout,
    RolloutConfig,
    RunRecord,
    Span,
    TokenRecord,
    UpdateAttemptRequest,
    semconv,
)
from tests.contracts.store_model import Model, Promise, Try

__all__ = ["Chance", "StoreMachine", "thorough", "walk"]

T = TypeVar("T")

SOON = 10.0
"""Seconds that nothing here should need."""
NOBODY = "nobody"
"""An id that is in no store."""
LIMITS = [None, 100.0, 10_000.0]
"""Far from what a test lasts, and from each other: whether time is over depends on no clock."""
WORKERS = [None, "w0", "w0", "w1"]
FIELDS = ["input", "mode", "resources_id", "config", "metadata", "priority"]
"""What the user of a rollout may change."""
GIVEN = [*FIELDS, "run_id", "group_id"]
RUNS = ["run0", "run1"]
RUN_STATUSES = ["running", "running", "succeeded", "failed", "stopped"]
ROLLOUT_STATUSES = ["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
ATTEMPT_STATUSES = [
    "preparing",
    "running",
    "running",
    "unresponsive",
    "failed",
    "failed",
    "succeeded",
    "timeout",
    "cancelled",
]


def thorough(examples: int, steps: int = 30) -> settings:
    """How often, and how long, a machine is run."""
    return settings(
        max_examples=examples,
        report_multiple_bugs=False,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
    )


def walk(make: Callable[[], StoreMachine], seed: int, steps: int) -> None:
    """Take `steps` steps. Raise AssertionError with the fewest that were found to fail."""
    numbers = [random.Random(f"{seed} {index}").getrandbits(32) for index in range(steps)]
    error, called = walked(make, seed, numbers)
    if error is None:
        return
    numbers = numbers[: len(called)]
    size = len(numbers) // 2
    while size:
        for at in range(0, len(numbers), size):
            fewer = numbers[:at] + numbers[at + size :]
            again, fewer_called = walked(make, seed, fewer)
            if again is not None:
                error, called, numbers = again, fewer_called, fewer[: len(fewer_called)]
                break
        else:
            size //= 2
    raise AssertionError(f"seed {seed}, numbers {numbers}: {', '.join(called)}: {error!r}") from error


def walked(
    make: Callable[[], StoreMachine], seed: int, numbers: Sequence[int]
) -> tuple[BaseException | None, list[str]]:
    """What these steps raise, and what was called up to then."""
    machine = make()
    try:
        machine.begin(seed)
        for number in numbers:
            machine.step(number)
        machine.teardown()
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 -- whatever it is, it is a fault
        with suppress(Exception):
            machine.teardown()
        return error, machine.called
    return None, machine.called


class Chance(random.Random):
    """What is drawn for one step."""

    def mostly(self, usual: T, *others: T) -> T:
        """Three times of four the usual."""
        return usual if self.random() < 0.75 else self.choice(others)

    def field(self, name: str) -> Any:
        """A value for what the user of a rollout may choose."""
        match name:
            case "input":
                return self.choice([None, 1, {"a": ["é\x00"]}])
            case "mode":
                return self.choice([None, "train", "val"])
            case "resources_id":
                return self.choice([None] * 10 + ["s0"] * 8 + ["s1", NOBODY])
            case "metadata":
                return self.choice([{}, {"m": 1}])
            case "priority":
                return self.randint(-2, 2)
            case "run_id":
                return self.choice([None] * 10 + ["run0"] * 8 + ["run1", NOBODY])
            case "group_id":
                return self.choice([None, "g0", "g1"])
            case _:
                return RolloutConfig(
                    max_attempts=self.randint(1, 5),
                    retry_condition=self.choice(
                        [[], ["failed"], ["unresponsive"]] + 2 * [["failed", "timeout", "unresponsive"]]
                    ),
                    timeout_seconds=self.choice(LIMITS),
                    unresponsive_seconds=self.choice(LIMITS),
                )

    def fields(self) -> dict[str, Any]:
        return {name: self.field(name) for name in GIVEN}

    def rollout_id(self) -> str:
        """Of a rollout that may be there already."""
        return f"r{self.randrange(8)}"


class StoreMachine(RuleBasedStateMachine):
    """Calls in any order, many of them refused, to a store and to the model beside it."""

    CALLS: ClassVar[dict[str, int]] = {
        "enqueue": 4,
        "start_rollout": 2,
        "start_attempt": 3,
        "claim": 3,
        "undo_claim": 1,
        "work": 4,
        "add_spans": 5,
        "draw_number": 2,
        "report": 6,
        "report_many": 2,
        "decide": 3,
        "sweep": 2,
        "pin": 1,
        "prune": 2,
        "release": 1,
        "find": 1,
        "look_who_is_finished": 1,
        "read_spans_of_many": 1,
        "index": 1,
        "search": 2,
        "watch": 2,
        "write_resources": 2,
        "beat": 1,
        "fit": 2,
    }
    """What is called, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.model = Model()
        self.began = time.time()
        self.cursor: str | None = None
        self.watched = 0
        self.indexed = False
        self.claims = ["c0", "c1", "c2"]
        self.stores: Sequence[LightningStore] = []
        self.turn = 0
        self.seed = 0
        self.seen: Counter[int] = Counter()
        self.called: list[str] = []
        self.calls = 0

    def open(self) -> Sequence[LightningStore]:
        """Handles of one new, empty store; each call goes through the next of them."""
        raise NotImplementedError

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        """A store with some work in it."""
        self.seed = seed
        self.stores = self.open()
        self.start_run("run0", {})
        for _ in range(2):
            self.enqueue(Chance(seed))

    @rule(number=st.integers(0, 2**32))
    def step(self, number: int) -> None:
        self.seen[number] += 1  # the same number again is another step
        chance = Chance(f"{self.seed} {number} {self.seen[number]}")
        call = chance.choices(list(self.CALLS), list(self.CALLS.values()))[0]
        self.called.append(call)
        if currently_in_test_context():
            note(call)
        getattr(self, call)(chance)
        self.look_inside()
        self.do(self.compare())

    def look_inside(self) -> None:
        """What must hold of this kind of store besides, after each call."""

    def teardown(self) -> None:
        if self.stores:
            self.ask_for_nobody()
        for store in self.stores:
            self.do(store.close())
        self.loop.close()

    # ---- calling both ------------------------------------------------------------------------------------------------

    @property
    def store(self) -> LightningStore:
        self.turn += 1
        return self.stores[self.turn % len(self.stores)]

    def do(self, call: Awaitable[T]) -> T:
        self.calls += 1
        self.model.now = (0.0, self.calls)
        return self.loop.run_until_complete(call)  # type: ignore[arg-type]

    def both(self, model: Callable[[], Any], store: Callable[[], Awaitable[T]]) -> tuple[Any, T] | None:
        """The answers of both; None when both refuse, for the same reason."""
        try:
            expected = model()
        except LeydenError as error:
            with pytest.raises(type(error)):
                self.do(store())
            return None
        return expected, self.do(store())

    def a_rollout(self, chance: Chance) -> str:
        """The id of one that is there, nearly always."""
        known = list(self.model.rollouts)
        return NOBODY if not known or chance.random() < 0.03 else chance.choice(known)

    def rollouts(self, chance: Chance, most: int) -> list[str]:
        return [self.a_rollout(chance) for _ in range(chance.randint(0, most))]

    def an_attempt(self, chance: Chance, rollout_id: str) -> str:
        """The id of one of its attempts, nearly always; more often of the latest."""
        tries = self.model.rollouts[rollout_id].tries if rollout_id in self.model.rollouts else []
        if not tries or chance.random() < 0.03:
            return NOBODY
        return chance.choice([tries[-1], *tries]).attempt_id

    # ---- the queue ---------------------------------------------------------------------------------------------------

    def enqueue(self, chance: Chance) -> None:
        rollouts = [(chance.rollout_id(), chance.fields()) for _ in range(chance.randint(1, 3))]
        requests = [EnqueueRolloutRequest(rollout_id=rollout_id, **fields) for rollout_id, fields in rollouts]
        answers = self.both(lambda: self.model.enqueue(*rollouts), lambda: self.store.enqueue_many_rollouts(requests))
        if answers is not None:
            for promise, found in zip(*answers, strict=True):
                self.same(promise, found)

    def start_rollout(self, chance: Chance) -> None:
        ids = {"rollout_id": chance.rollout_id(), "attempt_id": chance.choice(["a0", "a1"])}
        given = ids | {"worker_id": chance.choice(WORKERS)} | chance.fields()
        answers = self.both(lambda: self.model.start_rollout(**given), lambda: self.store.start_rollout(**given))
        if answers is not None:
            self.same(*answers, ids["attempt_id"])

    def start_attempt(self, chance: Chance) -> None:
        rollout_id, attempt_id, worker = (
            self.a_rollout(chance),
            chance.choice(["a0", "a1", "a2"]),
            chance.choice(WORKERS),
        )
        answers = self.both(
            lambda: self.model.start_attempt(rollout_id, attempt_id, worker),
            lambda: self.store.start_attempt(rollout_id, worker, attempt_id=attempt_id),
        )
        if answers is not None:
            self.same(*answers, attempt_id)

    def claim(self, chance: Chance) -> None:
        self.claim_some(chance.randint(0, 3), chance.choice(WORKERS), chance.choice([None, *self.claims]))

    def claim_some(self, limit: int, worker: str | None, claim_id: str | None) -> list[str]:
        """Returns the rollouts that were claimed."""
        again, waiting = self.model.claimed_under(claim_id), self.model.queue[:limit]
        found = self.do(self.store.dequeue_many_rollouts(limit=limit, worker_id=worker, claim_id=claim_id))
        if limit == 0:
            assert list(found) == []
        elif again:
            assert sorted((rollout.rollout_id, rollout.attempt.attempt_id) for rollout in found) == sorted(again)
        else:
            assert [rollout.rollout_id for rollout in found] == [rollout.rollout_id for rollout in waiting]
            for rollout in found:
                promise = self.model.rollouts[rollout.rollout_id]
                self.model.begin(promise, rollout.attempt.attempt_id, worker, claim_id)
            if not found and worker is not None:
                self.model.workers[worker] = ("idle", None)
        for rollout in found:
            self.same(self.model.rollouts[rollout.rollout_id], rollout, rollout.attempt.attempt_id)
        return [rollout.rollout_id for rollout in found]

    def undo_claim(self, chance: Chance) -> None:
        claim = chance.randrange(len(self.claims))
        self.do(self.store.undo_claim(self.claims[claim]))
        self.model.undo_claim(self.claims[claim])
        self.claims[claim] += "'"  # one that was taken back is not made again

    # ---- reports -----------------------------------------------------------------------------------------------------

    def work(self, chance: Chance) -> None:
        """What a worker usually does; at random, these calls would rarely come in this order."""
        for rollout_id in self.claim_some(1, chance.choice(WORKERS), None):
            attempt_id = self.model.rollouts[rollout_id].tries[-1].attempt_id
            for number in range(chance.randint(0, 3)):
                self.add([(rollout_id, attempt_id, f"s{number}", 0)])
            if chance.random() < 0.5:
                self.tell(rollout_id, attempt_id, {"status": chance.choice(ATTEMPT_STATUSES)})

    def add_spans(self, chance: Chance) -> None:
        owners = [self.a_rollout(chance) for _ in range(chance.randint(1, 3))]
        self.add(
            [
                (
                    rollout_id,
                    self.an_attempt(chance, rollout_id),
                    f"s{chance.randrange(6)}",
                    chance.choice([0, 0, 1, 5]),
                )
                for rollout_id in owners
            ]
        )

    def add(self, spans: list[tuple[str, str, str, int]]) -> None:
        answers = self.both(
            lambda: self.model.add_spans(spans),
            lambda: self.store.add_many_spans([span_of(*span) for span in spans]),
        )
        if answers is not None:
            assert [span.sequence_id for span in answers[1]] == answers[0]

    def draw_number(self, chance: Chance) -> None:
        rollout_id = self.a_rollout(chance)
        attempt_id = self.an_attempt(chance, rollout_id)

        def draw() -> int:
            tried = self.model.rollout(rollout_id).find(attempt_id)
            tried.drawn += 1
            return tried.drawn

        answers = self.both(draw, lambda: self.store.get_next_span_sequence_id(rollout_id, attempt_id))
        assert answers is None or answers[0] == answers[1]

    def report(self, chance: Chance) -> None:
        self.tell(*self.a_report(chance))

    def report_many(self, chance: Chance) -> None:
        lines = [self.a_report(chance) for _ in range(chance.randint(1, 3))]
        requests = [
            UpdateAttemptRequest(rollout_id=rollout_id, attempt_id=attempt_id, **self.told(given))
            for rollout_id, attempt_id, given in lines
        ]
        answers = self.both(
            lambda: self.model.update_many_attempts(*lines),
            lambda: self.store.update_many_attempts(requests),
        )
        if answers is not None:
            for tried, found in zip(*answers, strict=True):
                self.same_attempt(tried, found)

    def a_report(self, chance: Chance) -> tuple[str, str, dict[str, Any]]:
        rollout_id = self.a_rollout(chance)
        attempt_id = chance.mostly(self.an_attempt(chance, rollout_id), "latest")
        possible = {
            "status": chance.choice(ATTEMPT_STATUSES),
            "worker_id": chance.choice(WORKERS[1:]),
            "last_heartbeat_time": chance.choice([950.0, 50_000.0]),
            "metadata": chance.choice([{}, {"k": 1}, {"k": 2, "l": None}, {"reason_kind": "interrupted"}]),
        }
        often = {"status": 0.7, "worker_id": 0.2, "last_heartbeat_time": 0.3, "metadata": 0.3}
        return rollout_id, attempt_id, {name: possible[name] for name in often if chance.random() < often[name]}

    def told(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the store is told, whose clock did not begin with the test."""
        heard = given.get("last_heartbeat_time")
        return given if heard is None else given | {"last_heartbeat_time": self.began + heard}

    def tell(self, rollout_id: str, attempt_id: str, given: dict[str, Any]) -> None:
        answers = self.both(
            lambda: self.model.update_attempt(rollout_id, attempt_id, **given),
            lambda: self.store.update_attempt(rollout_id, attempt_id, **self.told(given)),
        )
        if answers is not None:
            self.same_attempt(*answers)

    def decide(self, chance: Chance) -> None:
        rollout_id = self.a_rollout(chance)
        status: Any = chance.choice([None] * 8 + ["requeuing", *ROLLOUT_STATUSES])
        changes = {name: chance.field(name) for name in FIELDS if chance.random() < 0.2}
        answers = self.both(
            lambda: self.model.update_rollout(rollout_id, status, **changes),
            lambda: self.store.update_rollout(rollout_id, status=status or UNSET, **changes),
        )
        if answers is not None:
            self.same(*answers)

    def sweep(self, chance: Chance) -> None:
        seconds = chance.choice([1_000.0, 100_000.0])
        changed = self.do(self.store.sweep(self.began + seconds))
        self.model.now = (seconds, 0)
        assert sorted((a.rollout_id, a.attempt_id, a.status) for a in changed) == sorted(self.model.sweep(seconds))

    def pin(self, chance: Chance) -> None:
        name, ids = chance.choice(["p0", "p1"]), self.rollouts(chance, 2)
        self.both(lambda: self.model.pin(name, ids), lambda: self.store.pin(name, ids))

    def prune(self, chance: Chance) -> None:
        most, limit = chance.randint(0, 3), chance.randint(1, 3)
        gone = self.do(self.store.prune(Retention(max_rollouts=most), limit=limit))
        assert gone == self.model.prune(most, limit)

    def release(self, chance: Chance) -> None:
        workers = chance.mostly(None, ["w0"], ["w1", "w2"])
        assert set(self.do(self.store.release_claims(worker_ids=workers))) == self.model.release_claims(workers)

    # ---- questions ---------------------------------------------------------------------------------------------------

    def find(self, chance: Chance) -> None:
        status_in: Any = chance.choice([None, chance.sample(ROLLOUT_STATUSES, 3)])
        ids = chance.choice([None, self.rollouts(chance, 4)])
        part = chance.choice([None, "1", "r"])
        mode_in: Any = chance.choice([None, ["train"], ["train", "val"], []])
        logic, order = chance.choice(["and", "or"]), chance.choice(["asc", "desc"])
        sort_by = chance.choice([None, "rollout_id", "status", "start_time", "end_time"])
        limit, offset = chance.choice([-1, 1, 3]), chance.randint(0, 3)
        run_id, group_id = chance.mostly(None, *RUNS, NOBODY), chance.mostly(None, "g0", "g1")

        def wanted(rollout: Promise) -> bool:
            if run_id not in (None, rollout.fields["run_id"]) or group_id not in (None, rollout.fields["group_id"]):
                return False
            asked = [
                status_in is None or rollout.status in status_in,
                ids is None or rollout.rollout_id in ids,
                part is None or part in rollout.rollout_id,
                mode_in is None or rollout.fields["mode"] in mode_in,
            ]
            given = [yes for yes, what in zip(asked, (status_in, ids, part, mode_in), strict=True) if what is not None]
            return all(given) if logic == "and" else not given or any(given)

        def match() -> list[Promise]:
            if run_id is not None:
                self.model.run(run_id)
            return sorted(
                filter(wanted, self.model.rollouts.values()),
                key=lambda r: (getattr(r, sort_by, "") if sort_by else "", r.place),
                reverse=order == "desc",
            )

        answers = self.both(
            match,
            lambda: self.store.query_rollouts(
                status_in=status_in,
                rollout_id_in=ids,
                rollout_id_contains=part,
                mode_in=mode_in,
                run_id=run_id,
                group_id=group_id,
                filter_logic=logic,  # type: ignore[arg-type]
                sort_by=sort_by,
                sort_order=order,  # type: ignore[arg-type]
                limit=limit,
                offset=offset,
            ),
        )
        if answers is None:
            return
        matching, page = answers
        until = None if limit == -1 else offset + limit
        if sort_by is None or not sort_by.endswith("_time"):  # the model has no clock
            assert [found.rollout_id for found in page] == [rollout.rollout_id for rollout in matching[offset:until]]
        else:
            assert len(page) == len(matching[offset:until])
            self.is_sorted([getattr(found, sort_by) for found in page], descending=order == "desc")
        assert (page.total, page.exact) == (len(matching), True)

    def is_sorted(self, times: list[float | None], *, descending: bool) -> None:
        """In order, None last."""
        known = [time for time in times if time is not None]
        assert times == sorted(known, reverse=descending) + [None] * (len(times) - len(known))

    def look_who_is_finished(self, chance: Chance) -> None:
        ids = self.rollouts(chance, 4)

        def finished() -> list[str]:
            asked = [self.model.rollout(rollout_id) for rollout_id in ids]
            return list(dict.fromkeys(rollout.rollout_id for rollout in asked if rollout.over))

        for wait in (self.store.wait_for_rollouts, self.store.wait_for_any_rollout):
            answers = self.both(finished, lambda wait=wait: wait(rollout_ids=ids, timeout=0))
            assert answers is None or [rollout.rollout_id for rollout in answers[1]] == answers[0]

    def read_spans_of_many(self, chance: Chance) -> None:
        ids = self.rollouts(chance, 3)

        def spans() -> dict[str, list[str]]:
            latest = {rollout_id: self.model.rollout(rollout_id).tries[-1:] for rollout_id in ids}
            return {rollout_id: in_order(tries[0]) if tries else [] for rollout_id, tries in latest.items()}

        answers = self.both(spans, lambda: self.store.query_spans_of(ids))
        if answers is not None:
            assert {key: [span.span_id for span in spans] for key, spans in answers[1].items()} == answers[0]

    def index(self, _: Chance) -> None:
        self.do(self.store.index_span_attribute("k"))
        self.indexed = True

    def search(self, chance: Chance) -> None:
        name, kind = chance.choice([None, "chat", "tool", "no"]), chance.choice([None, "CLIENT"])
        since, before = chance.choice([None, 1.0, 2.5]), chance.choice([None, 3.0, 100.0])
        k = chance.choice([None, None, 0, 1, 1.0, True, "1"])
        logic, order = chance.choice(["and", "or"]), chance.choice(["asc", "desc"])
        limit, offset = chance.choice([-1, 2]), chance.randint(0, 2)

        def wanted(span: Span) -> bool:
            asked = [given == found for given, found in ((name, span.name), (kind, span.kind)) if given is not None]
            value = span.attributes.get("k")
            return (
                (all(asked) if logic == "and" else not asked or any(asked))
                and (since is None or (span.start_time is not None and span.start_time >= since))
                and (before is None or (span.start_time is not None and span.start_time < before))
                and (k is None or (k == value and kind_of(k) == kind_of(value)))
            )

        def answer() -> Awaitable[Any]:
            asked: Any = {"name": name, "kind": kind, "started_from": since, "started_before": before}
            page: Any = {"filter_logic": logic, "sort_order": order, "limit": limit, "offset": offset}
            return self.store.query_spans(**asked, attributes=None if k is None else {"k": k}, **page)

        if k is not None and not self.indexed:
            with pytest.raises(ConfigError, match="index_span_attribute"):
                self.do(answer())
            return
        matching = [span for span in (span_of(*owner) for _, owner in self.model.arrived) if wanted(span)]
        if order == "desc":
            matching.reverse()
        until = None if limit == -1 else offset + limit
        found = self.do(answer())
        assert [name_of(span) for span in found] == [name_of(span) for span in matching[offset:until]]
        assert found.total == len(matching)

    def watch(self, chance: Chance) -> None:
        limit = chance.randint(1, 4)
        expected = [(number, owner) for number, owner in self.model.arrived if number > self.watched][:limit]
        seconds = SOON if expected else 0.0  # what another handle has added may be told a moment later
        page = self.do(self.store.poll_new_spans(after=self.cursor, limit=limit, timeout_seconds=seconds))
        found = [name_of(span) for span in page.spans]
        assert found == [owner for _, owner in expected[: len(found) or None]]
        assert [span.tokens for span in page.spans] == [span_of(*owner).tokens for owner in found]
        self.cursor = page.after
        self.watched = expected[len(found) - 1][0] if found else self.watched

    def ask_for_nobody(self) -> None:
        store = self.store
        with pytest.raises(UnknownRollout, match=NOBODY):
            self.do(store.get_rollout_by_id(NOBODY))
        with pytest.raises(UnknownRun, match=NOBODY):
            self.do(store.get_run_by_id(NOBODY))
        with pytest.raises(UnknownWorker, match=NOBODY):
            self.do(store.get_worker_by_id(NOBODY))
        with pytest.raises(UnknownResources, match=NOBODY):
            self.do(store.get_resources_by_id(NOBODY))
        for rollout_id in self.model.rollouts:
            with pytest.raises(UnknownAttempt, match=NOBODY):
                self.do(store.get_attempt_by_id(rollout_id, NOBODY))

    # ---- resources and workers ---------------------------------------------------------------------------------------

    def write_resources(self, chance: Chance) -> None:
        resources_id, content, update = chance.choice(["s0", "s1"]), chance.choice(["x", "y"]), chance.random() < 0.5

        def write() -> Awaitable[Any]:
            if update:
                return self.store.update_resources(resources_id, named(content))
            return self.store.add_resources(named(content), resources_id=resources_id)

        answers = self.both(lambda: self.model.write_resources(resources_id, content, update=update), write)
        if answers is not None:
            version, written = answers
            assert (written.resources_id, written.version, written.resources) == (resources_id, version, named(content))
            assert written == self.do(self.store.get_resources_by_id(resources_id))

    def beat(self, chance: Chance) -> None:
        worker = chance.choice(["w0", "w1"])
        self.model.workers.setdefault(worker, ("unknown", None))
        assert self.do(self.store.update_worker(worker)).status == self.model.workers[worker][0]

    # ---- runs --------------------------------------------------------------------------------------------------------

    def fit(self, chance: Chance) -> None:
        run_id = chance.mostly("run0", "run1", NOBODY)
        match chance.randrange(5):
            case 0:
                self.start_run(chance.choice(RUNS), chance.choice([{}, {"lr": 1e-5}]))
            case 1:
                changes: dict[str, Any] = {
                    "status": chance.choice(RUN_STATUSES),
                    "config": {"seed": chance.randrange(3)},
                }
                changes["cause"] = chance.choice([None, "why"])
                changes = {name: value for name, value in changes.items() if chance.random() < 0.5}
                answers = self.both(
                    lambda: self.model.update_run(run_id, **changes), lambda: self.store.update_run(run_id, **changes)
                )
                assert answers is None or answers[1].status == answers[0].status
            case 2:
                iteration = chance.randrange(5)
                self.both(
                    lambda: self.model.cut_metrics(run_id, iteration),
                    lambda: self.store.cut_metrics(run_id, after_iteration=iteration),
                )
            case _:
                self.add_metrics(run_id, chance)

    def start_run(self, run_id: str, config: dict[str, Any]) -> None:
        self.model.start_run(run_id, config)
        started = RunRecord(run_id=run_id, name=run_id, kind="fit", start_time=self.began, config=config)
        assert self.do(self.store.start_run(started)).status == "running"

    def add_metrics(self, run_id: str, chance: Chance) -> None:
        places = [
            (chance.randrange(6), chance.choice(["train", "val"]), chance.choice(["loss", "reward"]))
            for _ in range(chance.randint(0, 4))
        ]
        points = [(place, chance.choice([None, 0.5, -2.0])) for place in places]
        self.both(
            lambda: self.model.add_metrics(run_id, points),
            lambda: self.store.add_metrics(
                run_id,
                [
                    MetricPoint(stage=stage, iteration=iteration, name=name, value=value, time=self.began)
                    for (iteration, stage, name), value in points
                ],
            ),
        )

    # ---- where the store is ------------------------------------------------------------------------------------------

    async def compare(self) -> None:
        """The store is where the model is, in all that can be read, and its records agree with each other."""
        rollouts = await self.store.query_rollouts()
        for promise, found in zip(self.model.rollouts.values(), rollouts, strict=True):
            self.same(promise, found, promise.tries[-1].attempt_id if promise.tries else None)
            attempts = await self.store.query_attempts(promise.rollout_id)
            for number, (tried, attempt) in enumerate(zip(promise.tries, attempts, strict=True), 1):
                assert attempt.sequence_id == number
                self.same_attempt(tried, attempt)
                spans = await self.store.query_spans(promise.rollout_id, tried.attempt_id)
                owner = (promise.rollout_id, tried.attempt_id)
                assert list(spans) == [span_of(*owner, span_id, tried.spans[span_id]) for span_id in in_order(tried)]
        workers = {
            w.worker_id: (w.status, w.current_rollout_id and (w.current_rollout_id, w.current_attempt_id))
            for w in await self.store.query_workers()
        }
        assert workers == self.model.workers
        latest = await self.store.get_latest_resources()
        newest = self.model.resources[-1][:2] if self.model.resources else None
        assert (latest and (latest.resources_id, latest.version)) == newest
        written = {each.resources_id: (each.version, each.resources) for each in await self.store.query_resources()}
        versions = {resources_id: self.model.versions(resources_id) for resources_id, _, _ in self.model.resources}
        assert written == {key: (len(contents), named(contents[-1])) for key, contents in versions.items()}
        runs = {run.run_id: run for run in await self.store.query_runs()}
        assert runs.keys() == self.model.runs.keys()
        for run_id, expected in self.model.runs.items():
            run = runs[run_id]
            assert (run.status, run.cause, run.config) == (expected.status, expected.cause, expected.config)
            assert (run.end_time is None) == (run.status == "running")
            metrics = [((m.iteration, m.stage, m.name), m.value) for m in await self.store.query_metrics(run_id)]
            assert metrics == sorted(expected.metrics.items(), key=lambda item: item[0])
        assert await audit_store(self.store) == []

    def same(self, promise: Promise, found: Rollout, attempt_id: str | None = None) -> None:
        """A rollout, and the attempt that it was answered with (None: any)."""
        assert found.rollout_id == promise.rollout_id
        assert found.status == promise.status
        assert {name: getattr(found, name) for name in GIVEN} == promise.fields
        assert isinstance(found, AttemptedRollout) == bool(promise.tries)
        if isinstance(found, AttemptedRollout) and attempt_id is not None:
            assert found.attempt.attempt_id == attempt_id
            self.same_attempt(promise.find(attempt_id), found.attempt)

    def same_attempt(self, tried: Try, found: Any) -> None:
        assert (found.attempt_id, found.status) == (tried.attempt_id, tried.status)
        assert found.worker_id == tried.worker_id
        assert {key: value for key, value in found.metadata.items() if key != "reason"} == tried.metadata


def named(content: str) -> Any:
    return {"p": PromptTemplate(template=content)}


def span_of(rollout_id: str, attempt_id: str, span_id: str, sequence_id: int = 0) -> Span:
    """A span of an attempt, the same whenever it is made; as in a conversation, long prompts begin like short ones."""
    number = int(span_id[1:])
    prompt = [7] * 6 * number + ([8, number] if number > 3 else [])
    tokens = TokenRecord(prompt_ids=prompt, response_ids=[7] * 3 + [number], logprobs=[-0.5] * 4)
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        span_id=span_id,
        sequence_id=sequence_id,
        trace_id="t",
        name="tool" if number == 2 else "chat",
        kind="CLIENT" if number % 2 else "INTERNAL",
        start_time=None if number == 0 else float(number),
        attributes={
            "k": [0, 1, True, "1", 1.0, 2][number],
            semconv.GOES_ON_FROM: f"{span_id[0]}{number - 1}",
            semconv.KNOWN_PREFIX: 6 * number - 3,
        },
        tokens=None if number == 2 else tokens,
    )


def name_of(span: Span) -> tuple[str, str, str]:
    return span.rollout_id, span.attempt_id, span.span_id


def kind_of(value: Any) -> str:
    return "number" if type(value) in (int, float) else type(value).__name__


def in_order(tried: Try) -> list[str]:
    return sorted(tried.spans, key=lambda span_id: (tried.spans[span_id], list(tried.spans).index(span_id)))
