"""Scores of another judge stand beside the first rewards, each from one version of one judge, and none is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import ConfigError
from leyden.training.runs import RecordedRollout, RecordedRun
from leyden.training.runs.dataset import Selection
from leyden.training.runs.rescoring import Rescored, rescore
from leyden.types import Feedback
from tests.training.runs.recorded_attempts import USER, Call, Played, record, said
from tests.training.runs.test_dataset import rows_of


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    """Twelve rollouts with rewards 0, 1, 0, 1, ..., whose answer is their number."""
    return record(
        tmp_path / "run", [Played(n, [Call([USER], [said(f"{n}")], tools=())], float(n % 2)) for n in range(12)]
    )


def score(run: RecordedRun, judge: Any, **options: Any) -> Rescored:
    options = {"name": "judged", "judge_id": "rescore:j:1", "selection": Selection(modes=()), **options}

    async def work() -> Rescored:
        async with run.open_store(read_only=False) as store:
            return await rescore(run, store, judge, **options)

    return asyncio.run(work())


def feedback_of(run: RecordedRun) -> list[Feedback]:
    return list(run.read_store(lambda store: store.query_feedback(source="judged")))


def rewards_of(run: RecordedRun) -> dict[str, float]:
    rows, _ = rows_of(run, selection=Selection(reward="judged"))
    return {row["provenance"]["rollout"]: row["provenance"]["reward"] for row in rows}


def by_answer(record: RecordedRollout) -> float:
    return float(record.answer) / 10


async def by_conversation(record: RecordedRollout) -> int:
    await asyncio.sleep(0)
    assert record.conversations[0]["messages"][0] == USER
    return record.task + int(record.reward or 0)


@pytest.mark.parametrize(("judge", "scores"), [(by_answer, lambda n: n / 10), (by_conversation, lambda n: n + n % 2)])
def test_a_judge_scores_each_rollout_once_and_the_first_rewards_stay(run: RecordedRun, judge: Any, scores: Any) -> None:
    progress = list[tuple[int, int]]()
    found = score(run, judge, on_progress=lambda *each: progress.append(each))
    assert (found.scored, found.left, found.failures, progress[-1]) == (12, 0, [], (12, 12))
    assert rewards_of(run) == {f"ro-{n}": scores(n) for n in range(12)}
    assert [row["provenance"]["reward"] for row in rows_of(run)[0]] == [float(n % 2) for n in range(12)]
    first = feedback_of(run)
    assert all(
        each.kind == "reward" and each.given_time and each.feedback_id.startswith("rescore:j:1:") for each in first
    )
    again = score(run, judge)
    assert (again.scored, again.left, again.scores == found.scores) == (0, 0, True)
    assert feedback_of(run) == first


def test_a_judge_that_fails_in_the_middle_continues_where_it_stopped(run: RecordedRun) -> None:
    seen = list[int]()

    def judge(record: RecordedRollout) -> float:
        seen.append(record.task)
        if record.task % 4 == 3 and len(seen) <= 12:
            raise RuntimeError("the server is away")
        return 1.0

    found = score(run, judge, concurrency=3)
    assert (found.scored, found.left) == (9, 3)
    assert sorted(found.failures) == [(f"ro-{n}", "RuntimeError: the server is away") for n in (11, 3, 7)]
    assert score(run, judge).scored == 3
    assert seen[12:] == [3, 7, 11] and len(feedback_of(run)) == 12


def test_a_judge_that_always_fails_is_not_asked_for_ever(tmp_path: Path) -> None:
    run = record(tmp_path / "run", [Played(n, [], 1.0) for n in range(40)])
    asked = list[int]()

    async def judge(record: RecordedRollout) -> float:
        asked.append(record.task)
        raise OSError("no key")

    found = score(run, judge, concurrency=4)
    assert 10 <= len(found.failures) == len(asked) < 20 and found.left == 40


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "good", None, [1.0, 2.0]])
def test_a_score_that_is_no_finite_number_is_a_failure(run: RecordedRun, value: Any) -> None:
    found = score(run, lambda record: value if record.task == 5 else True)
    assert (found.scored, len(feedback_of(run))) == (11, 11)
    ((rollout_id, reason),) = found.failures
    assert rollout_id == "ro-5" and reason.startswith("ConfigError: the score is ")


def test_scores_of_two_versions_of_a_judge_are_never_mixed(run: RecordedRun) -> None:
    score(run, lambda _: 1.0)
    with pytest.raises(ConfigError, match="12 rollouts have a score 'judged' of another judge or another version"):
        score(run, lambda _: 2.0, judge_id="rescore:j:2")

    def fails_at_six(record: RecordedRollout) -> float:
        if record.task == 6:
            raise RuntimeError
        return 2.0

    assert score(run, fails_at_six, judge_id="rescore:j:2", again=True).scored == 11
    with pytest.raises(ConfigError, match="some scores 'judged' are of another judge than others"):
        rewards_of(run)
    assert score(run, lambda _: 2.0, judge_id="rescore:j:2", again=True).scored == 1
    assert set(rewards_of(run).values()) == {2.0}
    assert score(run, lambda _: 1.5, judge_id="rescore:j:1", again=True).scored == 12, "back to the first version"
    assert set(rewards_of(run).values()) == {1.5}
    assert [each.value for each in feedback_of(run)].count(1.0) == 12, "the first scores are still there"


def test_names_and_rollouts_that_cannot_be_scored_are_refused(tmp_path: Path) -> None:
    run = record(tmp_path / "run", [Played(0, [], 1.0, {"style": 0.5}), Played(1, [], None, status="failed")])
    for name in ("style", "primary"):
        with pytest.raises(ConfigError, match=f"'{name}' is a dimension of the reward"):
            score(run, lambda _: 1.0, name=name)
    with pytest.raises(ConfigError, match="the name of scores"):
        score(run, lambda _: 1.0, name="two\nlines")
    assert score(run, lambda _: 1.0).scored == 1, "a failed rollout is not judged"
    selection = Selection("status == 'failed'", modes=())
    assert score(run, lambda _: 1.0, name="failed", selection=selection).scored == 1


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], {"rollouts": 0, "correlation": None, "gained": None, "lost": None}),
        ([(0.0, 0.0), (1.0, 1.0)], {"correlation": 1.0, "gained": [], "lost": []}),
        ([(0.0, 1.0), (1.0, 0.0)], {"correlation": -1.0, "gained": ["0"], "lost": ["1"]}),
        ([(0.0, 0.5), (1.0, 0.5)], {"correlation": None, "gained": ["0"], "lost": []}),
        ([(-1.0, 0.6), (1.0, 0.4)], {"gained": ["0"], "lost": ["1"]}),
        ([(3.0, 1.0), (7.0, 1.0), (9.0, 0.0)], {"gained": None, "lost": None}),  # no line between solved and not
        ([(None, 1.0), (1.0, 0.0)], {"rollouts": 1, "correlation": None, "lost": ["1"]}),
    ],
)
def test_scores_are_compared_with_the_rewards_beside_them(pairs: list[Any], expected: dict[str, Any]) -> None:
    found = Rescored(scores={f"{n}": (*pair, None) for n, pair in enumerate(pairs)}).comparison()
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name
