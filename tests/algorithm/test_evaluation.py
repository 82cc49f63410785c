"""An agent is measured: means, intervals, repeats, failures."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.algorithm.evaluation import Evaluation, EvaluationResult
from leyden.errors import ConfigError
from leyden.statistics import estimate


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Wilson's interval as statsmodels.stats.proportion.proportion_confint(..., method="wilson") has it
        (0, 10, 0.0, 0.27753),
        (5, 10, 0.23659, 0.76341),
        (98, 100, 0.93003, 0.99449),
    ],
)
def test_rewards_of_zero_and_one_have_wilsons_interval(successes: int, n: int, low: float, high: float) -> None:
    found = estimate([[1.0]] * successes + [[0.0]] * (n - successes))
    assert (found.method, found.mean) == ("Wilson", successes / n)
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


def test_the_bootstrap_covers_the_true_mean_in_about_95_of_100_samples() -> None:
    numbers = random.Random(1)
    covered = 0
    for _ in range(30):
        found = estimate([[numbers.gauss(3.0, 1.0)] for _ in range(40)])
        assert found.low is not None and found.high is not None
        covered += found.low <= 3.0 <= found.high
    assert 25 <= covered <= 30


def test_repeats_of_one_task_are_one_piece_of_evidence() -> None:
    once = estimate([[0.2], [0.8], [0.5]])
    repeated = estimate([[0.2] * 10, [0.8] * 10, [0.5] * 10])
    assert (once.mean, once.low, once.high) == (repeated.mean, repeated.low, repeated.high)
    assert estimate([[0.5, 0.7]]).low is None


@ly.rollout
async def agent(task: dict[str, float]) -> float:
    if task["reward"] < 0:
        raise ValueError("too small")
    return task["reward"]


def measured(rewards: list[float], **options: Any) -> EvaluationResult:
    algorithm = Evaluation(**options)
    trainer = ly.Trainer(algorithm=algorithm, store="memory")
    return trainer.fit(agent, val_dataset=[{"reward": reward} for reward in rewards]).result


def test_every_task_runs_as_often_as_wanted_and_failures_are_counted() -> None:
    result = measured([0.5, 1.0, -1.0], repeats=2)
    assert [(each.task, each.repeat, each.reward) for each in result.rollouts] == [
        (0, 0, 0.5),
        (0, 1, 0.5),
        (1, 0, 1.0),
        (1, 1, 1.0),
        (2, 0, None),
        (2, 1, None),
    ]
    assert result.reward is not None
    assert result.reward.mean == 0.75
    assert result.reward_with_failures_as_zero.mean == pytest.approx(0.5)
    ((reason, count, example),) = result.failures
    assert (reason, count) == ("ValueError: too small", 2)
    assert example in {each.rollout_id for each in result.rollouts}


def test_more_tasks_than_the_queue_holds_are_measured() -> None:
    rewards = [number / 150 for number in range(150)]
    result = measured(rewards)
    assert [each.reward for each in result.rollouts] == rewards
    assert result.reward is not None
    assert result.reward.mean == pytest.approx(statistics.fmean(rewards))


def test_nothing_to_measure_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs tasks"):
        measured([])
    with pytest.raises(ConfigError, match="repeats is 0"):
        Evaluation(repeats=0)


@pytest.mark.parametrize("progress", [True, False])
def test_fit_shows_how_an_evaluation_ended_and_each_number_once(
    progress: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    @ly.rollout
    def agent(task: int) -> float:
        if task == 3:
            raise ValueError("no such tool")
        return task / 4

    caplog.set_level("WARNING")
    ly.Trainer(algorithm=Evaluation(), run_dir=tmp_path / "run", progress=progress).fit(agent, [1, 2, 3])
    shown = capfd.readouterr().err if progress else caplog.text
    assert shown.count("0.375") == 1
    assert shown.count("ValueError: no such tool") == 1
    assert f"run: {tmp_path / 'run'}" in shown


def test_two_data_sets_are_refused_because_one_is_measured() -> None:
    with pytest.raises(ConfigError, match="Evaluation measures on one data set and was given two"):
        ly.Trainer(algorithm=Evaluation(), store="memory").fit(agent, [1], val_dataset=[2])
