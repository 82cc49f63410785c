"""The unseen families of the benchmark of prompt optimisers: what makes them hard, and that their optimum can be reached."""

from __future__ import annotations

import random
import statistics

import pytest

pytest.importorskip("openai")
pytest.importorskip("gepa")

from benchmarks import prompts
from benchmarks.peers.prompts_world import HELD_OUT, N_TRAIN, SHARE, UNSEEN, measure, world

FAMILIES = sorted(UNSEEN)
SEEDS = range(20)


def reflections_of_an_oracle(family: str, seed: int) -> int:
    """Keep a rewritten prompt if its exact score is better, and return how many it takes to come to 95 % of the optimum."""
    sim, chance = world(family, seed), random.Random(seed)
    best, tasks = sim.initial_prompts["prompt"], sim.tasks(N_TRAIN)
    for number in range(1, 1000):
        answers = [answer for task in chance.sample(tasks, 4) for answer in sim.attempt(best, task).answers]
        request = "\n".join([f"<prompt>\n{best}\n</prompt>", *answers, "Write a better prompt."])
        best = max(best, sim.reflect(request, replica=number), key=sim.expected_score)
        if sim.normalised_score(best) >= SHARE:
            return number
    raise AssertionError("never reached")


def lines_by_rule(family: str, seed: int) -> dict[str, str]:
    """Return the lines of the first prompt that state a rule."""
    sim = world(family, seed)
    lines = sim.initial_prompts["prompt"].splitlines()
    return {rule.name: line for rule in sim.world.rules for line in lines if rule.stated_in(line)}


def test_the_unseen_families_are_among_those_held_out() -> None:
    assert HELD_OUT.keys() > UNSEEN


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_prompt_is_far_from_an_optimum_that_is_nearly_perfect(family: str) -> None:
    for seed in SEEDS[:3]:
        sim = world(family, seed)
        assert 0.04 < sim.expected_score(sim.initial_prompts) < 0.1
        assert sim.optimum().score > 0.95
        needed = {name for kind in sim.world.kinds for name in kind.needs}
        assert sim.optimum().stated == needed


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reflection_model_can_write_a_prompt_near_the_optimum(family: str) -> None:
    found = [reflections_of_an_oracle(family, seed) for seed in SEEDS]
    assert statistics.median(found) < 40
    assert max(found) < 150


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_rewriting_at_random_rarely_comes_near_the_optimum(family: str) -> None:
    found = [measure("random rewriting", prompts.SIDES["random rewriting"], family, seed) for seed in SEEDS]
    assert sum(run.reached() is not None for run in found) <= 3
    assert statistics.fmean(run.truth for run in found) < 0.75


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_an_inherited_prompt_has_to_lose_two_statements_that_no_symptom_tells_of(seed: int) -> None:
    sim, stated = world("inherited", seed), lines_by_rule("inherited", seed)
    first, needed = sim.initial_prompts["prompt"], sim.optimum().stated
    harmful = stated.keys() - needed
    assert (len(stated.keys() & needed), len(harmful)) == (3, 2)
    for name in stated:
        without = "\n".join(line for line in first.splitlines() if line != stated[name])
        assert (sim.expected_score(without) > sim.expected_score(first)) == (name in harmful)
    best = sim.optimum().prompts["prompt"]
    assert all(sim.normalised_score(f"{best}\n{stated[name]}") < SHARE for name in harmful)
    answers = [sim.attempt(first, task).answers[0] for task in sim.tasks(200)]
    symptoms = {rule.name for rule in sim.world.rules for answer in answers if rule.symptom in answer}
    assert symptoms == needed - stated.keys()


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_two_rules_of_the_uneven_family_matter_more_than_each_other_one(seed: int) -> None:
    sim = world("uneven", seed)
    clauses = {rule.name: rule.clauses[0] for rule in sim.world.rules}
    needed = sim.optimum().stated

    def loss(missing: str) -> float:
        return sim.optimum().score - sim.expected_score("\n".join(clauses[name] for name in needed - {missing}))

    losses = sorted(map(loss, needed))
    assert len(losses) == 8
    assert losses[6] > 3 * losses[5]
    assert losses[0] > 0.01
