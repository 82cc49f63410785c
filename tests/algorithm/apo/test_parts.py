"""The pure parts of APO: which texts can be used, which candidate is first, and how sure a difference is."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.algorithm.apo.joining import Joined, edit_prices, join_edits
from leyden.algorithm.apo.plan import Costs
from leyden.algorithm.apo.requests import CRITIQUE_FIELDS, EDIT_FIELDS, RequestTemplate, shipped_requests
from leyden.algorithm.apo.round import ignored_warning
from leyden.algorithm.apo.search import Search
from leyden.algorithm.collector import CollectedRollout
from leyden.algorithm.evaluator import Score
from leyden.algorithm.prompts.candidate import Branch, Candidate, name_to_improve
from leyden.algorithm.prompts.comparison import Comparison, compare
from leyden.algorithm.prompts.journal import Journal
from leyden.algorithm.prompts.texts import problem_with, rollouts_as_text
from leyden.errors import CheckpointError, ConfigError
from leyden.statistics import Effects, Estimate
from leyden.types import EnqueueRolloutRequest, PromptTemplate, Rollout, Span, semconv


def candidate(text: str, round_: int = 0) -> Candidate:
    return Candidate({"prompt": PromptTemplate(template=text)}, round_)


@pytest.mark.parametrize("engine", ["jinja", "poml"])
def test_placeholders_of_other_engines_must_stay_as_they_are(engine: str) -> None:
    prompt = PromptTemplate.model_validate({"template": "Do {{ task }}", "engine": engine})
    assert problem_with("Please do {{ task }} and {json}", prompt, max_characters=100) is None
    assert problem_with("Please do {{ work }}", prompt, max_characters=100) == "it lacks the placeholder {{ task }}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{% if x %}Yes, {{ y }}{% endif %}", None),
        ("{% endif %}{{ y }}{% if x %}", "its tags are {% endif %} {% if x %}, and must be {% if x %} {% endif %}"),
        ("{% if x %}{{ y }}{% endif %}{% endif %}", "its tags are {% if x %} {% endif %} {% endif %}"),
        ("{% if x %}{{ y }}{% endif %} {# {{ y }}", "it has {# outside"),
        ("{% if x %}{{ y }}{% endif %} {{ y", "it has {{ outside"),
        ("{% if x %}{{ y }}{% endif %} }}", None),
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


def test_a_search_is_the_same_after_a_checkpoint() -> None:
    first = candidate("a {x}")
    child = first.edit("prompt", "b {x}", place=Branch(0, 3), parent=("rs-1", 2), reason="why")
    search = Search([first])
    assert search.add(child, 0) and not search.add(child, 0), "an equal candidate is added once"
    search.train[1].update({0: 1.0, 7: 0.25})
    search.val[0].update({3: 0.5})
    search.best, search.read[0] = 1, {7: 2}
    assert Search.from_json(json.loads(json.dumps(search.as_json()))) == search
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
def test_the_candidates_that_run_in_a_round_fit_what_is_left(
    gradient: int, sample: int, more: int, test: int, left: int
) -> None:
    costs = Costs(gradient, sample, sample + more, test)
    runs = costs.affordable(16, left, Search([candidate("a")]))
    assert runs == 0 or (2 + runs) * gradient + 2 * sample + more + 2 * test <= left


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 8), st.integers(0, 4))
def test_a_budget_that_is_not_refused_has_room_for_one_new_prompt(
    gradient: int, sample: int, more: int, test: int
) -> None:
    costs = Costs(gradient, sample, sample + more, test)
    least = next(limit for limit in itertools.count() if is_enough(costs, limit))
    measured = Search([candidate("a")], best=0)
    measured.val[0] = dict.fromkeys(range(costs.val), 0.0)
    assert costs.affordable(16, least - costs.val, measured) == 1
    assert costs.affordable(16, least, Search([candidate("a")])) >= 1, "without an initial validation"


def is_enough(costs: Costs, limit: int) -> bool:
    try:
        costs.check(limit)
    except ConfigError:
        return False
    return True


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
    names = ["plan", "search", "write"]
    assert [name_to_improve(names, {}, turn, "s") for turn in range(3)] == names
    edits = {"plan": (6, 0), "search": (10, 6), "write": (6, 0)}
    chosen = [name_to_improve(names, edits, turn, str(turn)) for turn in range(300)]
    assert chosen.count("search") > 200
    assert set(chosen) == set(names)


def searched(*rewards: dict[int, float]) -> Search:
    """Return a search whose first candidate has a child for each further argument, with rewards on training tasks."""
    search = Search([candidate("0")])
    for number in range(1, len(rewards)):
        search.add(search.candidates[0].edit("prompt", str(number), place=None, parent=None, reason=""), 0)
    search.train = list(rewards)
    return search


def test_an_edit_counts_as_a_success_if_it_is_believed_to_have_helped() -> None:
    bad, good = dict.fromkeys(range(8), 0.0), dict.fromkeys(range(8), 1.0)
    assert searched(bad, good, dict.fromkeys(range(8), -1.0), {}).successes() == {"prompt": (2, 1)}


def test_values_that_are_shown_are_possible_rewards() -> None:
    half, best = dict.fromkeys(range(8), 0.5), dict.fromkeys(range(8), 1.0)
    search = searched(half, best, best)
    search.add(candidate("both edits"), 1, [1, 2])
    assert search.values()[3] > 1.2
    assert search.bounded_values() == [*search.values()[:3], 1.0]


def test_the_critic_reads_the_worst_runs_and_none_of_a_candidate_that_solves_all() -> None:
    search = searched({0: 1.0, 1: 0.5, 2: 0.0, 3: 0.0}, {0: 1.0, 1: 1.0}, {})
    assert {*search.worst_tasks(0, 2, "seed")} == {2, 3}
    assert search.worst_tasks(0, 3, "seed")[2] == 1
    assert len({tuple(search.worst_tasks(0, 2, str(seed))) for seed in range(9)}) == 2, "branches read in another order"
    assert search.worst_tasks(1, 2, "seed") == search.worst_tasks(2, 2, "seed") == []
    assert searched({0: 0.0, 1: 0.0}).worst_tasks(0, 1, "seed"), "no better reward is known"


def test_critics_read_different_failures_before_they_read_one_again() -> None:
    search = searched({0: 1.0, 1: 0.0, 2: 0.0, 3: 0.5})
    read: list[int] = []
    for branch in range(6):
        [task] = search.worst_tasks(0, 1, str(branch))
        search.read[0][task] = search.read[0].get(task, 0) + 1
        read.append(task)
    assert ({*read[:2]}, read[2], {*read[3:5]}, read[5]) == ({1, 2}, 3, {1, 2}, 3)
    assert search.worst_tasks(0, 4, "seed")[3] == 0, "a success is read after all failures"


def test_candidates_are_drawn_more_often_the_better_they_look() -> None:
    search = searched(dict.fromkeys(range(6), 0.0), dict.fromkeys(range(6), 1.0), {})
    model = search.effects()

    def best(seed: int) -> int:
        effects = model.draw(random.Random(seed))
        return max(range(3), key=lambda place: effects.value(search.edits[place]))

    drawn = [best(seed) for seed in range(200)]
    assert drawn.count(1) > drawn.count(2) > drawn.count(0), "a new prompt may be as good as the best"
    assert model.draw(random.Random(1)) == model.draw(random.Random(1))
    assert search.ranked([0, 1, 2])[0] == 1


# ---- joined edits --------------------------------------------------------------------------------


def written(*sentences: str) -> Search:
    """Return a search whose first prompt has a child with each of these sentences added."""
    first = candidate("Help. {x}")
    search = Search([first])
    search.train[0][0] = 0.0
    for place, sentence in enumerate(sentences):
        text = f"Help. {{x}}\n{sentence}"
        search.add(first.edit("prompt", text, place=Branch(0, place), parent=("rs-0", 1), reason=sentence), 0)
    return search


def join(search: Search, place: int, gains: list[float], *, max_characters: int = 1000) -> Joined:
    prices = edit_prices(search, 0.1)
    return join_edits(search, place, Effects(0.0, [0.0, *gains]), prices, max_characters=max_characters)


def test_edits_that_are_worth_their_length_are_joined_and_the_others_are_undone() -> None:
    search = written("Be kind.", "Be brief.", "Be so very extraordinarily kind.")
    assert edit_prices(search, 0.1)[3] > edit_prices(search, 0.1)[1] > 0
    joined = join(search, 1, [0.1, 0.1, -0.1])
    assert (joined.edits, joined.prompts["prompt"].template) == ((1, 2), "Help. {x}\nBe kind.\nBe brief.")
    made = joined.candidate(search, Branch(4, 1), ("rs-0", 1))
    assert (joined.parent, made.round, made.branch, made.edited) == (0, 5, 1, "prompt")
    assert made.reason == "Be kind.\nBe brief.", "its parent is the prompt that ran"
    assert search.add(made, joined.parent, joined.edits)
    search.train[4][0] = 1.0
    undone = join(search, 4, [0.1, -0.1, 0.0])
    assert (undone.parent, undone.edits, undone.prompts["prompt"].template) == (4, (1,), "Help. {x}\nBe kind.")
    assert undone.candidate(search, Branch(5, 0), ("rs-4", 1)).reason == "Undone: Be brief."
    barely = 1.5 * edit_prices(search, 0.1)[1]
    assert join(search, 0, [barely, 0.0, barely]).edits == (1,), "the long one has a higher price"


def test_a_joined_prompt_gets_few_edits_at_once_and_keeps_to_the_limit_of_its_length() -> None:
    search = written("Be kind.", "Be brief.", "Be quick.", "Be exact.")
    assert join(search, 0, [0.1, 0.2, 0.3, 0.4]).edits == (3, 4)
    assert join(search, 0, [0.1, 0.2, 0.3, 0.4], max_characters=25).edits == (4,)


def test_an_edit_of_a_sentence_that_the_prompt_has_changed_is_left_out() -> None:
    first = candidate("Be rude. {x}")
    search = Search([first])
    for place, text in enumerate(("Be kind. {x}", "Be quick. {x}")):
        search.add(first.edit("prompt", text, place=Branch(0, place), parent=None, reason=""), 0)
    assert join(search, 1, [0.2, 0.2]).prompts == search.candidates[1].prompts


def test_a_prompt_whose_last_edit_is_undone_is_the_users_prompt_to_the_letter() -> None:
    first = candidate("Help.  {x}\n")
    search = Search([first])
    search.add(first.edit("prompt", "Help.\n{x}\nBe kind.", place=Branch(0, 0), parent=None, reason=""), 0)
    search.train[1][0] = 0.0
    joined = join(search, 1, [-0.1])
    assert (joined.edits, joined.prompts) == ((), first.prompts), "or it would run as a new prompt"


def test_rewards_that_never_differ_are_warned_of_once_they_are_many() -> None:
    few, many = [dict.fromkeys(range(2), 0.0)] * 4, [{0: 1.0, 1: 0.0}] * 9
    assert ignored_warning(searched(*few), ["prompt"]) is None
    warning = ignored_warning(searched(*many), ["prompt"])
    assert warning is not None and warning.startswith("all 9 prompts have equal rewards, on each of 2 tasks")
    assert ignored_warning(searched(*many, {0: 0.0}), ["prompt"]) is None


def test_of_a_long_conversation_the_critic_reads_the_beginning_and_the_end() -> None:
    ids = {"rollout_id": "ro-1", "attempt_id": "at-1", "trace_id": "0" * 31 + "1", "name": semconv.MESSAGE}
    bodies = [f"turn {number}: {'x' * 1000}" for number in range(30)]
    said = [
        Span(**ids, span_id=f"{n:016x}", sequence_id=n, attributes={semconv.MESSAGE_BODY: body})
        for n, body in enumerate(bodies, 1)
    ]
    rollout = Rollout(rollout_id="ro-1", input={"ticket": "lost"}, start_time=0.0)
    collected = CollectedRollout(0, EnqueueRolloutRequest(input=rollout.input), rollout, said, 0.0, cached=False)
    text = rollouts_as_text([Score(0, 0, 0.0, None, collected)])
    assert "task: " in text and "turn 0:" in text and "turn 29:" in text
    assert "turn 15:" not in text and "characters left out" in text
    assert len(text) < 8_200 and text.endswith("</run>")
