"""Labels move while eight processes serve: each request runs with one version, which was released when the request began."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from leyden.serving.assignment import place_of
from leyden.store import LightningStore, LightningStoreClient
from leyden.testing import audit_store
from leyden.types import AttemptedRollout, LabelMove, semconv
from tests.serving.processes import KEY, opened_forker, opened_place, resources
from tests.serving.visitors import CANARY_PERCENT, N_USERS, Labels, Request, requests_in
from tests.store.killing import Forker, dead

N_PROCESSES = 8
LAG_SECONDS = 4.0
"""How old the labels may be that a session serves with: the time in which it notices that it is cut off."""


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    with opened_forker(tmp_path_factory.mktemp("forker"), "tests.serving.visitors") as forker:
        yield forker


@pytest.mark.parametrize(
    ("n_requests", "n_moves"),
    [pytest.param(800, 40, marks=pytest.mark.slow), pytest.param(10_000, 100, marks=pytest.mark.long)],
)
@pytest.mark.timeout(600)
async def test_each_request_runs_with_one_version_that_was_released_then(
    forker: Forker, tmp_path: Path, n_requests: int, n_moves: int
) -> None:
    ledger = tmp_path / "ledger"
    ledger.touch()
    async with (
        opened_place(forker, tmp_path, "gateway") as place,
        LightningStoreClient(place.url("store")) as store,
    ):
        texts = {1: "old", 2: "new"}
        for number in range(3, n_moves + 3):
            texts[number] = f"version {number}"
            await store.update_resources("rs", resources(texts[number]))
        operators = Operators(store)
        await operators.move(canary=2)
        command = ("tests.serving.visitors:visit",)
        where = (place.url("store"), place.url("gateway"))
        processes = [
            forker.start(*command, name, *where, tmp_path / name, n_requests // N_PROCESSES, ledger)
            for name in (f"process {n}" for n in range(N_PROCESSES))
        ]
        for number in range(n_moves):
            await until_written(ledger, (number + 1) * n_requests // (n_moves + 2), forker)
            await operators.move_at_random()
        await until_written(ledger, n_requests, forker)
        await asyncio.to_thread(wait_for_the_end, processes)
        forker.alive.difference_update(processes)
        requests = requests_in(ledger)
        check_versions(requests, operators, texts)
        check_places(requests)
        await check_record(store, requests, texts)
        await check_audit(store, operators)


class Operators:
    """Two operators who move labels in turn, and a note of every move."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._chance = random.Random(7)
        self._now: dict[str, int] = {"production": 1}
        self._before = [1]
        """Versions that were in production, for rollbacks."""
        self.moves: list[tuple[str, int | None, int, str]] = [("production", None, 1, "")]
        self.states: dict[Labels, int] = {}
        """Each state of both labels, and its place in time. No state comes twice."""
        self.times: list[tuple[float, float]] = []
        """Of each state: when its move was begun, and when it was acknowledged."""

    async def move_at_random(self) -> None:
        """A new canary, the canary into production with a new canary behind it, or the way back."""
        production, canary = self._now["production"], self._now["canary"]
        kind = self._chance.choice(["canary", "promotion", "rollback"])
        if kind == "rollback" and self._before[-1] != production and (self._before[-1], canary) not in self.states:
            await self.move(production=self._before[-1])
        elif kind == "promotion":
            self._before.append(production)
            await self.move(production=canary, canary=canary + 1)
        else:
            await self.move(canary=canary + 1)

    async def move(self, **to: int) -> None:
        who = f"operator {len(self.states) % 2}"
        moves = [
            LabelMove(label=label, to=("rs", version), expected=("rs", at) if (at := self._now.get(label)) else None)
            for label, version in to.items()
        ]
        began = time.time()
        await self._store.move_labels(moves, who=who, why="test")
        self.times.append((began, time.time()))
        self.moves += [(label, self._now.get(label), version, who) for label, version in to.items()]
        self._now |= to
        self.states[self._now["production"], self._now["canary"]] = len(self.states)


def wait_for_the_end(processes: list[int]) -> None:
    deadline = time.monotonic() + 80
    while not all(map(dead, processes)):
        assert time.monotonic() < deadline, "a process does not end"
        time.sleep(0.01)


async def until_written(ledger: Path, n_lines: int, forker: Forker) -> None:
    deadline = time.monotonic() + 120
    while (written := _n_lines(ledger)) < n_lines:
        assert time.monotonic() < deadline, f"{written} of {n_lines} requests: {forker.log.read_text()[-2000:]}"
        await asyncio.sleep(0.005)


def _n_lines(ledger: Path) -> int:
    return ledger.read_bytes().count(b"\n")


def check_versions(requests: list[Request], operators: Operators, texts: dict[int, str]) -> None:
    """Each request has the version of its arm, of a state that was released when it began, and no process goes back."""
    latest: Counter[str] = Counter()
    for one in sorted(requests, key=lambda one: one.time):
        assert one.text == texts[one.version]
        between = range(operators.states[one.before], operators.states[one.after] + 1)
        arm = 1 if one.arm == "canary" else 0
        fitting = [
            place for labels, place in operators.states.items() if place in between and labels[arm] == one.version
        ]
        assert fitting, f"{one}: the version is of no state that the session knew"
        assert between[0] >= latest[one.process], f"{one}: older labels than before"
        latest[one.process] = between[0]
        began, _ = operators.times[fitting[0]]
        assert one.time >= began, f"{one}: the version was not released yet"
        if fitting[-1] + 1 < len(operators.times):
            _, ended = operators.times[fitting[-1] + 1]
            assert one.time <= ended + LAG_SECONDS, f"{one}: the version was no longer released"
    assert len({one.version for one in requests}) > len(operators.states) // 4
    assert {one.arm for one in requests} == {"control", "canary"}


def check_places(requests: list[Request]) -> None:
    """Every user has one arm, in every process and at all times."""
    arms = {f"user {n}": "canary" if place_of(KEY, f"user {n}") < CANARY_PERCENT else "control" for n in range(N_USERS)}
    assert {(one.user, one.arm) for one in requests} == set(arms.items())
    assert {len({one.process for one in requests if one.user == user}) for user in arms} == {N_PROCESSES}


async def check_record(store: LightningStore, requests: list[Request], texts: dict[int, str]) -> None:
    """Each request is one rollout with its version, its arm, its call and its feedback."""
    by_id = {one.rollout_id: one for one in requests}
    assert len(by_id) == len(requests)
    rollouts = await store.query_rollouts()
    assert {each.rollout_id for each in rollouts} == by_id.keys()
    for each in rollouts:
        assert isinstance(each, AttemptedRollout)
        one = by_id[each.rollout_id]
        said = (each.status, each.attempt.sequence_id, each.resources_id, each.resources_version, each.arm)
        assert said == ("succeeded", 1, "rs", one.version, one.arm)
    ids = list(by_id)
    for at in range(0, len(ids), 500):
        for rollout_id, spans in (await store.query_spans_of(ids[at : at + 500])).items():
            (call,) = spans
            assert texts[by_id[rollout_id].version] in str(call.attributes[semconv.GEN_AI_INPUT_MESSAGES])
    feedback = await store.query_feedback()
    assert {each.feedback_id: each.rollout_id for each in feedback} == {
        one.feedback_id: one.rollout_id for one in requests
    }
    assert len(feedback) == len(requests)
    assert all((each.version, each.arm) == by_id[each.rollout_id][4:2:-1] for each in feedback)
    assert await audit_store(store) == []


async def check_audit(store: LightningStore, operators: Operators) -> None:
    """The audit log has each move once, in order."""
    audit = await store.query_audit(sort_order="asc")
    found = [
        (each.label, each.before and each.before[1], each.after and each.after[1], each.who or "") for each in audit
    ]
    assert found == operators.moves
    for label in ("production", "canary"):
        of_label = [each for each in audit if each.label == label]
        assert all(earlier.after == later.before for earlier, later in pairwise(of_label))
