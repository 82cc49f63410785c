"""The benchmark of prompt optimisers: what its statistics say of runs that end before their goal, and what its clock counts."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

pytest.importorskip("openai")
pytest.importorskip("gepa")

from benchmarks import prompts
from benchmarks.peers.prompts_world import BUDGET, LIMIT, REFLECTION_SECONDS, SLOTS, Clock, Run, Trace, follow
from leyden.testing import FakeUpstream, Misbehaviour


def run(*curve: tuple[int, float, float], side: str = "ours", seed: int = 0) -> Run:
    truth = curve[-1][2]
    return Run(side, "additive", seed, BUDGET, BUDGET, 1, 100.0, truth, 0.1, list(curve), 1.0)


def test_a_run_that_never_reached_the_goal_counts_with_its_whole_budget() -> None:
    reached, ended = run((40, 1.0, 0.0), (200, 5.0, 0.96)), run((40, 1.0, 0.0), (200, 5.0, 0.94))
    assert [prompts.rollouts_needed(each) for each in (reached, ended)] == [200, BUDGET]
    assert [prompts.rollouts_needed(each, 0.8) for each in (reached, ended)] == [200, 200]
    assert [prompts.seconds_needed(each) for each in (reached, ended)] == [5.0, 100.0]


def test_a_run_that_went_on_after_its_budget_counts_with_where_it_came_to_the_goal_or_was_given_up() -> None:
    late = replace(run((40, 1.0, 0.0), (900, 120.0, 0.96)), followed=(900, 120.0))
    given_up = replace(run((40, 1.0, 0.0), (900, 120.0, 0.94)), followed=(LIMIT, 450.0))
    ended, soon = run((40, 1.0, 0.0)), run((40, 1.0, 0.0), (200, 5.0, 0.96))
    assert [prompts.rollouts_needed(each) for each in (late, given_up, ended, soon)] == [BUDGET, BUDGET, BUDGET, 200]
    found = [prompts.followed_to_share(each) for each in (late, given_up, ended, soon)]
    assert found == [(900, 120.0), (LIMIT, 450.0), (LIMIT, 100.0 * LIMIT / BUDGET), (200, 5.0)]


def test_a_prompt_that_only_the_larger_budget_found_early_counts_as_found_after_the_smaller_one() -> None:
    short = run((40, 1.0, 0.0), (200, 5.0, 0.9), (790, 60.0, 0.94))

    def repeat(trace: Trace, _: int) -> tuple[dict[str, str], float]:
        trace.curve += [(40, 1.0, 0.0), (200, 5.0, 0.9), (780, 59.0, 0.96)]
        return {}, 0.0

    followed = follow(short, repeat)
    assert followed.reached() is None
    assert followed.reached(within=LIMIT) == (BUDGET + 1, 59.0)
    assert prompts.mean_truth(followed) == prompts.mean_truth(short)


def test_the_mean_truth_weighs_each_prompt_by_the_rollouts_for_which_it_was_the_best() -> None:
    assert prompts.mean_truth(run((0, 0.0, 1.0))) == 1.0
    assert prompts.mean_truth(run((0, 0.0, 0.0), (BUDGET // 2, 0.0, 1.0))) == 0.5
    assert prompts.mean_truth(run((40, 0.0, 0.0), (BUDGET, 0.0, 1.0))) == 0.0


def test_a_ratio_is_of_the_runs_that_both_sides_have() -> None:
    ours = [run((100 * seed, 0.0, 1.0), seed=seed) for seed in (1, 2, 3)]
    theirs = [run((200 * seed, 0.0, 1.0), side="theirs", seed=seed) for seed in (1, 2)]
    row = prompts.paired_row("rollouts", "rollouts", ours, theirs, prompts.rollouts_needed)
    assert (row.leyden, row.peer, row.ratio, row.n) == (150, 300, 2.0, 2)


def test_rollouts_beyond_the_slots_and_what_follows_a_reflection_start_later() -> None:
    clock = Clock()
    clock.run([1.0] * SLOTS)
    assert clock.end == 1.0
    clock.run([1.0] * (SLOTS + 1))
    assert clock.end == 3.0
    clock.reflect()
    assert clock.end == 3.0 + REFLECTION_SECONDS


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.parametrize("side", [prompts.APO, prompts.GEPA])
def test_a_run_repeats_exactly_whatever_the_order_in_which_answers_come(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat(jitter: int) -> Run:
        chance = random.Random(jitter)
        late = functools.partial(FakeUpstream, fault=lambda body: Misbehaviour(delay_seconds=chance.uniform(0, 0.03)))
        monkeypatch.setattr(prompts, "FakeUpstream", late)
        return replace(prompts.run_here((side, "additive", 3)), wall_s=0.0)

    monkeypatch.setattr(prompts, "BUDGET", 120)
    assert repeat(1) == repeat(2)
