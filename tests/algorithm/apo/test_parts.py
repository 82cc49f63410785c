"""The pure parts of APO: which texts can be used, which candidate is first, and how sure a difference is."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.algorithm.apo.plan import Costs
from leyden.algorithm.apo.requests import CRITIQUE_FIELDS, EDIT_FIELDS, RequestTemplate, shipped_requests
from leyden.algorithm.apo.round import Round
from leyden.algorithm.apo.search import Search
from leyden.algorithm.evaluation import Estimate
from leyden.algorithm.evaluator import Score, Scores
from leyden.algorithm.prompts.candidate import Branch, Candidate, ranked
from leyden.algorithm.prompts.comparison import Comparison, compare
from leyden.algorithm.prompts.journal import Journal
from leyden.algorithm.prompts.texts import new_prompt_of, problem_with
from leyden.errors import CheckpointError, ConfigError
from leyden.types import PromptTemplate


def candidate(text: str, round_: int = 0) -> Candidate:
    return Candidate({"prompt": PromptTemplate(template=text)}, round_)


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        ("Be kind.", "Be kind."),
        ("Sure!\n<new_prompt>\nBe kind.\n</new_prompt>\nDone.", "Be kind."),
        ("<new_prompt>a</new_prompt> or rather <new_prompt>b</new_prompt>", "b"),
        ("```text\nBe kind.\n```", "Be kind."),
        ("Use ```x``` here", "Use ```x``` here"),
        ("<new_prompt>Be ki", None),
        ("", ""),
    ],
)
def test_the_prompt_is_found_in_an_answer(answer: str, prompt: str | None) -> None:
    assert new_prompt_of(answer) == prompt


@pytest.mark.parametrize("engine", ["jinja", "poml"])
def test_placeholders_of_other_engines_must_stay_as_they_are(engine: str) -> None:
    prompt = PromptTemplate.model_validate({"template": "Do {{ task }}", "engine": engine})
    assert problem_with("Please do {{ task }} and {json}", prompt, max_characters=100) is None
    assert problem_with("Please do {{ work }}", prompt, max_characters=100) == "it lacks the placeholder {{ task }}"


@pytest.mark.parametrize(
    "answer",
    [
        "<new_prompt>Write <new_prompt>{a}</new_prompt> as an example.</new_prompt>",
        "<new_prompt>Write {a} between <new_prompt> tags.</new_prompt>",
        "<new_prompt>Write {a} before </new_prompt> each time.</new_prompt>",
        "Write {a} before </new_prompt>",
    ],
)
def test_tags_inside_a_new_prompt_are_refused_instead_of_taking_half(answer: str) -> None:
    problem = problem_with(new_prompt_of(answer), PromptTemplate(template="{a}"), max_characters=100)
    assert problem is not None and "inside the new prompt; write each once" in problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{% if x %}Yes, {{ y }}{% endif %}", None),
        ("{% endif %}{{ y }}{% if x %}", "its tags are {% endif %} {% if x %}, and must be {% if x %} {% endif %}"),
        ("{% if x %}{{ y }}{% endif %}{% endif %}", "its tags are {% if x %} {% endif %} {% endif %}"),
        ("{% if x %}{{ y }}{% endif %} {# {{ y }}", "it has {# outside"),
        ("{% if x %}{{ y }}{% endif %} {{ y", "it has {{ outside"),
        ("{% if x %}{{ y }}{% endif %} }}", "it has }} outside"),
        ("{% if x %}{{ y }}{% endif %} {%", "it has {% outside"),
    ],
)
def test_a_jinja_template_keeps_its_tags_in_their_order_and_gets_no_half_ones(text: str, problem: str | None) -> None:
    prompt = PromptTemplate(template="{% if x %}{{ y }}{% endif %}", engine="jinja")
    found = problem_with(text, prompt, max_characters=100)
    assert found is None if problem is None else found is not None and found.startswith(problem)


@given(st.text(alphabet="ab{}", max_size=12))
def test_a_text_without_a_problem_can_be_formatted_with_the_same_values(text: str) -> None:
    prompt = PromptTemplate(template="{a}")
    if problem_with(text, prompt, max_characters=20) is None:
        PromptTemplate(template=text).format(a=1)


def test_candidates_are_ranked_by_mean_then_age_each_once() -> None:
    a, b, c = candidate("a"), candidate("b", 1), candidate("c", 1)
    again = candidate("a", 2)
    assert ranked([a, b, c, again], {a.key: 0.5, b.key: 0.5, c.key: 0.9}) == [c, a, b]


def test_a_search_is_the_same_after_a_checkpoint() -> None:
    first = candidate("a {x}")
    child = first.edit("prompt", "b {x}", place=Branch(0, 3), parent=("rs-1", 2), reason="why")
    search = Search(first, [child, first], best=child)
    search.add(child, {0: 1.0, 7: 0.25})
    assert Search.from_json(search.as_json()) == search
    assert (child.round, child.branch, child.edited) == (1, 3, "prompt")


def test_a_comparison_is_paired_and_says_how_sure_it_is() -> None:
    hard = {task: task / 20 for task in range(20)}
    better = compare(hard, {task: reward + 0.01 for task, reward in hard.items()})
    assert better.difference.mean == pytest.approx(0.01)
    assert better.is_sure
    assert str(better).endswith("20 better, 0 worse of 20 tasks; sure)")
    few = compare({0: 0.0, 1: 0.0, 5: 0.0}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert (few.tasks, few.better, few.is_sure) == (2, 2, False)


@given(st.integers(0, 12), st.integers(0, 12))
def test_the_chance_of_a_comparison_is_the_tail_of_a_fair_coin(better: int, worse: int) -> None:
    rewards = [1.0] * better + [-1.0] * worse + [0.0]
    found = compare(dict.fromkeys(range(len(rewards)), 0.0), dict(enumerate(rewards)))
    n = better + worse
    assert found.chance == pytest.approx(sum(math.comb(n, k) * 0.5**n for k in range(better, n + 1)))


def test_a_journal_forgets_a_line_that_was_cut_off_and_refuses_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "reflections.jsonl"
    Journal(path).add("0/1/edit", "Grüße", purpose="edit")
    with path.open("ab") as file:
        file.write(b'{"place": "0/2/edit", "ans')
    again = Journal(path)
    assert (again.get("0/1/edit"), again.get("0/2/edit")) == ("Grüße", None)
    again.add("0/2/edit", "there")
    assert Journal(path).get("0/2/edit") == "there"
    path.write_text("no JSON\n")
    with pytest.raises(CheckpointError, match="line 1 is no answer"):
        Journal(path)


def test_requests_have_their_fields(tmp_path: Path) -> None:
    assert len(shipped_requests("critique")) == 3
    assert len(shipped_requests("edit")) == 2
    for kind, fields in (("critique", CRITIQUE_FIELDS), ("edit", EDIT_FIELDS)):
        for path in shipped_requests(kind):
            filled = RequestTemplate(path, fields).fill(**dict.fromkeys(fields, "$5 {x}"))
            assert "$5 {x}" in filled
    own = tmp_path / "own.txt"
    for text, message in (
        ("Only $prompt", r"lacks or does not know \$rollouts; its fields are \$prompt, \$rollouts"),
        ("$prompt $rollouts $more", r"lacks or does not know \$more"),
        ("$prompt $rollouts costs $ 5", "has a \\$ without a name"),
    ):
        own.write_text(text)
        with pytest.raises(ConfigError, match=message):
            RequestTemplate(own, CRITIQUE_FIELDS)
    with pytest.raises(ConfigError, match="cannot be read"):
        RequestTemplate(tmp_path / "none.txt", CRITIQUE_FIELDS)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 20), st.integers(0, 9), st.integers(0, 300))
def test_the_branches_of_a_round_fit_what_is_left(gradient: int, sample: int, more: int, test: int, left: int) -> None:
    costs = Costs(gradient, sample, sample + more, test)
    search = Search(candidate("a"))
    branches = costs.affordable(16, left, search)
    assert branches == 0 or sample + branches * (gradient + sample) + more + 2 * test <= left


def test_the_best_of_many_equal_candidates_is_rarely_called_better() -> None:
    n_runs, n_tasks, k = 300, 24, 16
    wrong = {1: 0, k: 0}
    for run in range(n_runs):
        chance = random.Random(run)
        first, *others = [[chance.random() < 0.5 for _ in range(n_tasks)] for _ in range(k + 1)]
        best = max(others, key=sum)
        better, worse = (sum(a != b and a == won for a, b in zip(best, first, strict=True)) for won in (True, False))
        for n_compared in wrong:
            comparison = Comparison(Estimate(0.0, None, None, "none"), better, worse, n_tasks, n_compared)
            wrong[n_compared] += comparison.chance <= 0.05
    assert wrong[k] / n_runs <= 0.05
    assert wrong[1] / n_runs > 0.15, "without the correction, luck is called an improvement"


def test_a_correction_widens_the_interval_and_is_named() -> None:
    first, second = ({task: float(task < n) for task in range(24)} for n in (4, 18))
    one, many = compare(first, second), compare(first, second, n_compared=50)
    assert one.difference.low is not None and many.difference.low is not None
    assert many.difference.low < one.difference.low
    assert str(many).endswith("as the best of 50)")


def test_the_prompt_whose_edits_help_is_rewritten_most_often_and_no_prompt_is_given_up() -> None:
    search, names = Search(candidate("a")), ["plan", "search", "write"]
    assert [search.name_to_improve(names, turn, "s") for turn in range(3)] == names
    search.edits = {"plan": (6, 0), "search": (10, 6), "write": (6, 0)}
    chosen = [search.name_to_improve(names, turn, str(turn)) for turn in range(300)]
    assert chosen.count("search") > 200
    assert set(chosen) == set(names)
    assert Search.from_json(json.loads(json.dumps(search.as_json()))).edits == search.edits


def test_an_edit_counts_as_a_success_if_it_raised_the_reward_of_its_parent() -> None:
    search = Search(candidate("a"))
    search.rewards = {"a": {0: 0.0, 1: 1.0}, "b": {0: 1.0, 1: 1.0}, "c": {0: 0.0, 1: 1.0}}
    search.count_edits([("plan", "a", "b"), ("plan", "a", "c"), ("write", "b", "a")], [0, 1])
    assert search.edits == {"plan": (2, 1), "write": (1, 0)}
    assert search.extremes == (0.0, 1.0)


def test_a_batch_with_the_highest_reward_on_every_task_shows_nothing() -> None:
    def scores(*rewards: float) -> Scores:
        return Scores([Score(task, 0, reward, None, None) for task, reward in enumerate(rewards)])

    assert Round(known_rewards=(0.0, 1.0)).shows_nothing(scores(1.0, 1.0))
    assert not Round(known_rewards=(0.0, 1.0)).shows_nothing(scores(1.0, 0.0))
    assert not Round(known_rewards=(0.0, 0.0)).shows_nothing(scores(0.0, 0.0)), "no better reward is known"
    assert not Round().shows_nothing(scores(1.0))
