"""A search for a prompt that is killed at random points ends as if it had not been, and pays for nothing twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from leyden.testing import FakeUpstream
from tests.algorithm.apo import rules
from tests.algorithm.gepa import evolving
from tests.algorithm.killing import Asked, Search, kill_at_random

pytest.importorskip("openai")
pytest.importorskip("gepa")

_IN_FLIGHT_SECONDS = (-0.5, 1.5)
"""A request that arrived so long before a kill was under way, and its answer was lost. One that was sent may arrive after it."""
_MANY: Any = [pytest.mark.long, pytest.mark.timeout(900)]
_FEW: Any = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("program", "budget", "kills"),
    [
        *(pytest.param(program, 2000, 3, marks=_FEW) for program in (rules, evolving)),
        *(pytest.param(program, 2000, 20, marks=_MANY) for program in (rules, evolving)),
        pytest.param(rules, 90, 1, marks=_FEW),  # these two end because their rollouts are spent
        pytest.param(evolving, 70, 2, marks=_FEW),
    ],
)
async def test_a_search_that_is_killed_at_random_points_ends_as_if_it_had_not_been(
    tmp_path: Path, program: ModuleType, budget: int, kills: int
) -> None:
    asked_whole, asked = Asked(program.reply), Asked(program.reply)
    async with FakeUpstream(reply=asked_whole, delay_seconds=0.02) as upstream:
        whole = Search(tmp_path / "whole", program, upstream, asked_whole, budget)
        wanted = await whole.finish()
    async with FakeUpstream(reply=asked, delay_seconds=0.02) as upstream:
        killed = Search(tmp_path / "killed", program, upstream, asked, budget)
        await kill_at_random(killed, kills, asked_whole.total, seed=kills + budget)
        found = await killed.finish()
    assert found == wanted
    assert all(rule in found for rule in rules.RULES.values()) == (budget == 2000)
    repeats_steps = program is evolving  # GEPA begins again, with its budget as it was at the kill
    assert killed.metrics(budget=not repeats_steps) == whole.metrics(budget=not repeats_steps)
    assert killed.metrics()[-1] == whole.metrics()[-1]
    assert len(killed.read("SELECT label FROM labels")) == 1
    assert not list(killed.directory.rglob("*.bin")), "the package has written a pickle"

    assert len(killed.rollouts()) == len(whole.rollouts()) <= budget
    _no_rollout_is_run_twice(killed)
    _no_answer_is_asked_for_twice(killed, whole)
    assert killed.used_seconds() >= 0.9 * killed.worked_seconds + killed.last_seconds, "the time before a kill is lost"


def _no_rollout_is_run_twice(search: Search) -> None:
    """A rollout that the store has is never run again; of those that a kill cut off, the agent's calls are lost."""
    attempts: dict[int, list[str]] = {}
    of_the_agent = "FROM attempts JOIN rollouts ON rollout = seq WHERE run IS NOT NULL"
    for rollout, status in search.read(f"SELECT rollout, attempts.status {of_the_agent} ORDER BY sequence_id"):
        attempts.setdefault(rollout, []).append(status)
    assert {statuses[-1] for statuses in attempts.values()} == {"succeeded"}
    assert max(statuses.count("succeeded") for statuses in attempts.values()) == 1
    repeated = sum(len(statuses) - 1 for statuses in attempts.values())
    assert search.asked.tasks <= len(attempts) + repeated
    of_the_algorithm = "SELECT 1 FROM attempts JOIN rollouts ON rollout = seq WHERE run IS NULL AND sequence_id > 1"
    assert search.read(of_the_algorithm) == [], "the agent was given a call of the algorithm"


def _no_answer_is_asked_for_twice(search: Search, whole: Search) -> None:
    """A question is repeated only if a kill came while it was under way."""
    places = search.reflections()
    assert max(Counter(places).values()) == 1
    assert sorted(places) == sorted(whole.reflections())
    asked: dict[str, list[float]] = {}
    for moment, question in search.asked.reflections:
        asked.setdefault(question, []).append(moment)
    earliest, latest = _IN_FLIGHT_SECONDS
    usual = Counter(question for _, question in whole.asked.reflections)
    for question, moments in asked.items():
        again = len(moments) - usual[question]
        lost = sum(any(earliest <= kill - moment <= latest for kill in search.kills) for moment in moments)
        before = [[round(kill - moment, 2) for kill in search.kills] for moment in moments]
        assert again <= lost, f"{before} s before a kill, {usual[question]} needed: {question[:200]}"
