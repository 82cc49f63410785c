"""`PromptSim` tells the truth: outcomes agree with exact scores, and each family has the property
that it is named for.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
import statistics
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.promptsim import FAMILIES, AnswerRule, Behaviour, Kind, PromptSetting, PromptSim, RuleInteraction, World
from benchmarks.promptsim.vocabulary import DISTRACTORS, FLUFF, RULES
from leyden.errors import ConfigError

TEXTS = [*(clause for rule in RULES for clause in rule.clauses), *DISTRACTORS, *FLUFF]
CLAUSES = {rule.name: rule.clauses[0] for rule in RULES}
SIMS = [*((family, 1) for family in FAMILIES if family != "faulty_component"), *((family, 3) for family in FAMILIES)]


def written(rules: Any) -> str:
    return "\n".join(CLAUSES[rule] for rule in rules)


def random_prompts(sim: PromptSim, chance: random.Random) -> dict[str, str]:
    return {name: "\n".join(chance.sample(TEXTS, chance.randrange(24))) for name in sim.world.components}


# ---- reading prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_paraphrase_counts_as_the_clause(rule: AnswerRule) -> None:
    sim = PromptSim()
    assert len({*rule.clauses}) == 6
    scores = {sim.expected_score(f"{clause}\n") for clause in rule.clauses}
    assert len(scores) == 1
    assert all(sim.world.stated("prompt", clause.upper()) == {rule.name} for clause in rule.clauses)


@pytest.mark.parametrize(
    "near_miss",
    [
        "Ask for the number.",
        "Ask for the order. Give a number.",
        "Never ask for the order number.",
        "Request a password.",
        "Renumbered footsteps.",
        "Greet the customer by nickname.",
        "Refunds take fifty-five days.",
        *DISTRACTORS,
        *FLUFF,
        *(rule.symptom for rule in RULES),
    ],
)
def test_a_near_miss_states_nothing(near_miss: str) -> None:
    assert PromptSim().world.stated("prompt", near_miss) == set()


def test_the_order_of_a_prompt_does_not_matter_and_its_length_does() -> None:
    sim, chance = PromptSim(seed=4), random.Random(1)
    lines = chance.sample(TEXTS, 12)
    score = sim.expected_score("\n".join(lines))
    for _ in range(10):
        chance.shuffle(lines)
        assert sim.expected_score("\n".join(lines)) == score
    best = sim.optimum().prompts["prompt"]
    scores = [sim.expected_score("\n".join([best, *FLUFF * times])) for times in range(6)]
    assert scores[0] == scores[1] == sim.optimum().score, "the first fluff fits into the free words"
    assert scores[2] > scores[3] > scores[4] > scores[5]


# ---- the truth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "prompts"), SIMS)
def test_the_mean_of_many_outcomes_is_the_expected_score_within_its_standard_error(family: str, prompts: int) -> None:
    sim = PromptSim(family, seed=7, prompts=prompts)
    now, best = sim.world.drifts_at or 0, sim.optimum(at=sim.world.drifts_at or 0).prompts
    half = {name: "\n".join([text, *best[name].splitlines()[::2]]) for name, text in sim.initial_prompts.items()}
    for prompts_ in (half, best):
        attempts = [sim.attempt(prompts_, task) for task in sim.tasks(800, start=now)]
        solved = [attempt.solved for attempt in attempts if attempt.answers]
        rewards = [attempt.reward for attempt in attempts]
        for values, truth in (
            (solved, sim.expected_score(prompts_, at=now)),
            (rewards, sim.expected_reward(prompts_, at=now)),
        ):
            assert 0.01 < truth < 0.99
            standard_error = math.sqrt(truth * (1 - truth) / len(values))
            assert abs(statistics.fmean(values) - truth) < 3.5 * standard_error


@pytest.mark.parametrize(("family", "prompts"), SIMS)
def test_no_random_prompt_beats_the_enumerated_optimum(family: str, prompts: int) -> None:
    sim, chance = PromptSim(family, seed=2, difficulty=0.6, prompts=prompts), random.Random(5)
    best = sim.optimum()
    assert sim.expected_score(best.prompts) == pytest.approx(best.score, abs=1e-12)
    scores = [
        sim.expected_score(random_prompts(sim, chance))
        for _ in range(2000 if family in ("additive", "drifting") else 200)
    ]
    assert max(scores) <= best.score + 1e-12
    assert len({*scores}) > 20
    assert sim.normalised_score(best.prompts) == pytest.approx(1.0)
    assert sim.normalised_score(sim.initial_prompts) == 0.0


def small_world(**constants: Any) -> PromptSetting:
    rules = tuple(
        AnswerRule(name, (f"Do {name} {name}er.",), ((name,), (f"{name}er",)), f"It lacks {name}ness.")
        for name in ("wash", "iron", "fold")
    )
    kinds = (Kind("a", frozenset({"wash", "iron"}), weight=3.0), Kind("b", frozenset({"fold"}), weight=1.0))
    conflict = RuleInteraction("iron", "fold", both=-4.0)
    world = World(
        rules, kinds, {"prompt": ("wash", "iron", "fold")}, pairs=(conflict,), base=-2.0, gain=4.0, **constants
    )
    return PromptSetting(world, {"prompt": "Begin."})


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_optimum_of_a_small_world_is_the_one_computed_by_hand() -> None:
    sim = PromptSim(small_world())
    by_hand = {
        "": (3 * logistic(-2) + logistic(-2)) / 4,
        "fold": (3 * logistic(-2) + logistic(2)) / 4,
        "wash": (3 * logistic(0) + logistic(-2)) / 4,
        "wash fold": (3 * logistic(0) + logistic(2)) / 4,
        "wash iron": (3 * logistic(2) + logistic(-2)) / 4,
        "iron fold": (3 * logistic(0 - 4) + logistic(2 - 4)) / 4,
        "wash iron fold": (3 * logistic(2 - 4) + logistic(2 - 4)) / 4,
    }
    for rules, score in by_hand.items():
        text = "\n".join(f"Do {rule} {rule}er." for rule in rules.split())
        assert sim.expected_score(text) == pytest.approx(score, abs=1e-12)
    best = max(by_hand, key=by_hand.__getitem__)
    assert best == "wash iron"
    assert (sim.optimum().score, sim.optimum().stated) == (pytest.approx(by_hand[best]), {"wash", "iron"})


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_of_a_random_world_is_the_best_of_all_texts_with_its_keywords(seed: int) -> None:
    chance = random.Random(seed)
    rules = tuple(
        AnswerRule(name, (f"{name}.",), ((name,),), "It fails.")
        if positive
        else AnswerRule(name, (f"Not {name}.",), ((name,),), "", True)
        for name, positive in ((name, chance.random() < 0.6) for name in ("wash", "iron", "fold", "press"))
    )
    names = [rule.name for rule in rules]
    kinds = tuple(Kind("a", frozenset(chance.sample(names, 2)), chance.uniform(0.01, 1)) for _ in range(3))
    drawn = [(chance.sample(names, 2), chance.uniform(-2, 2), chance.uniform(-2, 2)) for _ in range(2)]
    pairs = tuple(RuleInteraction(first, second, alone, both) for (first, second), alone, both in drawn)
    world = World(
        rules,
        kinds,
        {"prompt": tuple(names)},
        pairs=pairs,
        base=-1,
        gain=2,
        free_words=2,
        word_cost=chance.random() / 2,
    )
    sim = PromptSim(PromptSetting(world, {"prompt": ""}))
    scores: dict[str, float] = {}
    for size in range(5):
        for chosen in itertools.combinations(rules, size):
            forbidden = [rule.name for rule in chosen if rule.forbids]
            lines = [rule.name for rule in chosen if not rule.forbids] + [" ".join(["not", *forbidden])] * bool(
                forbidden
            )
            scores["\n".join(lines)] = sim.expected_score("\n".join(lines))
    assert len(scores) == 16
    assert sim.optimum().score == pytest.approx(max(scores.values()), abs=1e-9)
    assert sim.expected_score(sim.optimum().prompts) == pytest.approx(max(scores.values()), abs=1e-9)


def test_where_words_are_dear_the_optimum_leaves_rules_out_and_is_written_in_keywords() -> None:
    sim = PromptSim(small_world(free_words=2, word_cost=1.5))
    best = sim.optimum()
    # four words for two rules cost 3: wash and iron have -2 + 4 - 3 = -1 on three quarters of the tasks
    assert best.stated == {"wash"}
    assert best.prompts == {"prompt": "wash washer"}
    assert best.score == pytest.approx((3 * logistic(0) + logistic(-2)) / 4)
    assert sim.expected_score("Do wash washer.") < best.score


def outcomes(seed: int) -> str:
    """Return all that a seed decides, as text."""
    sim = PromptSim("flaky", seed=seed)
    attempts = [sim.attempt("Ask for the order number.", task, replica=1) for task in sim.tasks(40)]
    reflection = sim.reflect("The tone was cold about the mishap. Write a new prompt.")
    return repr((attempts, sim.optimum().score, sim.optimum().prompts, sim.initial_prompts, reflection))


def test_the_same_seed_has_the_same_outcomes_in_another_process_and_another_seed_has_not() -> None:
    program = f"from benchmarks.promptsim import PromptSim\n{inspect.getsource(outcomes)}\nprint(outcomes(3))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == outcomes(3) + "\n"
    assert outcomes(4) != outcomes(3)


# ---- the families --------------------------------------------------------------------------------------------------------


def test_additive_every_needed_rule_helps_on_top_of_any_others() -> None:
    sim = PromptSim("additive", seed=1)
    best = sim.optimum().stated
    for rules in itertools.chain.from_iterable(itertools.combinations(sorted(best), size) for size in range(4)):
        for more in best - {*rules}:
            assert sim.expected_score(written([*rules, more])) > sim.expected_score(written(rules))


@pytest.mark.parametrize("seed", range(3))
def test_clustered_no_prompt_for_a_single_cluster_is_best(seed: int) -> None:
    sim = PromptSim("clustered", seed=seed)
    clusters: dict[str, set[str]] = {}
    for kind in sim.world.kinds:
        clusters.setdefault(kind.cluster, set()).update(kind.needs)
    assert len(clusters) == 3
    assert all(one.isdisjoint(two) for one, two in itertools.combinations(clusters.values(), 2))
    for needs in clusters.values():
        assert sim.expected_score(written(needs)) < 0.5 * sim.optimum().score
    assert sim.optimum().stated == set().union(*clusters.values())


@pytest.mark.parametrize("prompts", [1, 3])
def test_deceptive_either_rule_alone_harms_and_both_help(prompts: int) -> None:
    for seed, difficulty in itertools.product(range(3), (0.0, 1.0)):
        sim = PromptSim("deceptive", seed=seed, difficulty=difficulty, prompts=prompts)
        [pair] = sim.world.pairs
        both = {pair.first, pair.second}
        assert both <= sim.optimum().stated
        for rules in (set[str](), sim.optimum().stated - both):
            score = {
                added: sim.expected_score(
                    {
                        name: written(placed for placed in each if placed in {*rules, *added})
                        for name, each in sim.world.components.items()
                    }
                )
                for added in ((), (pair.first,), (pair.second,), (pair.first, pair.second))
            }
            assert max(score[(pair.first,)], score[(pair.second,)]) < score[()] < score[(pair.first, pair.second)]


@pytest.mark.parametrize("seed", range(4))
def test_faulty_component_one_prompt_alone_has_to_change(seed: int) -> None:
    sim = PromptSim("faulty_component", seed=seed)
    first, best = sim.initial_prompts, sim.optimum()
    gains = {name: sim.normalised_score({**first, name: best.prompts[name]}) for name in first}
    faulty = max(gains, key=gains.__getitem__)
    assert gains.pop(faulty) == pytest.approx(1.0)
    assert max(gains.values()) == pytest.approx(0.0)
    failed = [sim.attempt(first, task) for task in sim.tasks(300)]
    place = list(first).index(faulty)
    symptoms = {rule.symptom for rule in RULES}
    for number in range(3):
        shows = [any(symptom in each.answers[number] for symptom in symptoms) for each in failed]
        assert any(shows) == (number == place), "only the faulty component's answers show a symptom"


def test_flaky_rollouts_hang_and_rewards_are_wrong_at_the_stated_share() -> None:
    sim = PromptSim("flaky", seed=2)
    attempts = [sim.attempt(sim.optimum().prompts, task) for task in sim.tasks(3000)]
    hung = [attempt for attempt in attempts if math.isinf(attempt.seconds)]
    ended = [attempt for attempt in attempts if attempt.answers]
    wrong = [attempt for attempt in ended if attempt.solved != bool(attempt.reward)]
    for share in (len(hung) / len(attempts), len(wrong) / len(ended)):
        assert abs(share - 0.1) < 4 * math.sqrt(0.1 * 0.9 / len(ended))
    assert {(attempt.reward, attempt.solved) for attempt in hung} == {(0.0, False)}


def test_heavy_tailed_latency_is_lognormal() -> None:
    sim = PromptSim("heavy_tailed", seed=2)
    logs = [math.log(sim.attempt("", task).seconds) for task in sim.tasks(3000)]
    assert abs(statistics.fmean(logs) - math.log(0.01)) < 4 * 1.5 / math.sqrt(3000)
    assert statistics.pstdev(logs) == pytest.approx(1.5, rel=0.06)
    seconds = sorted(map(math.exp, logs))
    assert seconds[-1] > 50 * statistics.median(seconds)


def test_scalar_only_feedback_names_no_symptom() -> None:
    for family, wanted in (("scalar_only", False), ("additive", True)):
        sim = PromptSim(family, seed=2)
        answers = [sim.attempt(sim.initial_prompts, task).answers[0] for task in sim.tasks(200)]
        assert any(answer.startswith("Not solved.") for answer in answers)
        assert any(rule.symptom in answer for rule in RULES for answer in answers) is wanted


@pytest.mark.parametrize("seed", range(3))
def test_drifting_tasks_change_the_optimum_at_the_stated_number(seed: int) -> None:
    sim = PromptSim("drifting", seed=seed)
    drift = sim.world.drifts_at
    assert drift == 200
    before, after = sim.optimum(at=drift - 1), sim.optimum(at=drift)
    assert before.stated.isdisjoint(after.stated)
    assert sim.optimum(at=0) == before and sim.optimum(at=10_000) == after
    assert sim.expected_score(before.prompts, at=drift) < 0.2 < 0.9 < after.score
    both = written([*before.stated, *after.stated])
    assert sim.expected_score(both, at=drift) < after.score - 0.1, "no prompt is good at both times"
    assert "before" in sim.tasks(1, start=drift - 1)[0]["text"]
    assert "after" in sim.tasks(1, start=drift)[0]["text"]


def test_a_symptom_is_shown_at_the_stated_rate_and_names_an_unmet_rule() -> None:
    sim = PromptSim("additive", seed=6, difficulty=1.0)
    prompt = written(list(sim.optimum().stated)[:3])
    failed = [
        (task["number"], answer)
        for task in sim.tasks(2000)
        for answer in sim.attempt(prompt, task).answers
        if answer.startswith("Not solved.")
    ]
    shown = [(number, rule) for number, answer in failed for rule in RULES if rule.symptom in answer]
    rate = sim.behaviour.symptom_rate
    assert abs(len(shown) / len(failed) - rate) < 4 * math.sqrt(rate * (1 - rate) / len(failed))
    assert not any(rule.stated_in(prompt) for _, rule in shown)


# ---- errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PromptSim("addtive"), "did you mean 'additive'"),
        (lambda: PromptSim(difficulty=2), "difficulty is 2"),
        (lambda: PromptSim(prompts=2), "prompts is 2"),
        (lambda: PromptSim("faulty_component", prompts=1), "not with 'faulty_component'"),
        (lambda: PromptSim().expected_score({"promt": ""}), r"the prompts are \['promt'\]"),
        (lambda: PromptSim(prompts=3).expected_score("one"), "plan, search, write"),
        (lambda: World(RULES[:2], (Kind("a", frozenset({"tidy"})),), {"p": ("greeting", "order")}), "no rule 'tidy'"),
        (
            lambda: World(RULES[:2], (Kind("a", frozenset()),), {"p": ("greeting",)}),
            "each rule of the world exactly once",
        ),
        (
            lambda: World((AnswerRule("x", ("X.",), (("x",),), "An x."),), (Kind("a", frozenset("x")),), {"p": ("x",)}),
            "'An x.' of the rule 'x' states",
        ),
        (lambda: PromptSim(PromptSetting(small_world().world, {"other": ""})), r"the prompts are \['other'\]"),
    ],
)
def test_what_is_impossible_is_refused_with_a_remedy(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_setting_can_be_perfect_feedback() -> None:
    setting = small_world()
    sim = PromptSim(PromptSetting(setting.world, setting.initial_prompts, Behaviour(symptom_rate=1.0)))
    answers = [sim.attempt("", task).answers[0] for task in sim.tasks(50)]
    assert all("It lacks" in answer for answer in answers if answer.startswith("Not"))
