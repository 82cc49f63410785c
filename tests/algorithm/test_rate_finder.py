"""The finder of learning rates: equal starts, a recommendation, and a table on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("openai")

import leyden as ly  # noqa: E402
from leyden.algorithm.policy_gradient.collapse import Measured  # noqa: E402
from leyden.algorithm.policy_gradient.rate_finder import RateFinder, RateTrial  # noqa: E402
from leyden.cli.demo import WEIGHTS  # noqa: E402
from leyden.errors import ConfigError  # noqa: E402
from tests.algorithm.falling import says_four  # noqa: E402


def finder(**options: Any) -> RateFinder:
    backend = ly.EmbeddedBackend(WEIGHTS, device="cpu", max_length=128, seed=1)
    defaults = {"steps_per_rate": 2, "tasks_per_step": 2, "rollouts_per_task": 8, "max_tokens": 4}
    return RateFinder(backend, **{**defaults, **options})


def test_every_rate_begins_with_the_same_weights_and_rollouts_and_one_that_breaks_the_policy_is_named(
    tmp_path: Path,
) -> None:
    tried = finder(rates=[1e-6, 1e-3, 1e30])
    summary = ly.Trainer(algorithm=tried, run_dir=tmp_path / "run", progress=False).fit(says_four, [0])
    assert [trial.rate for trial in tried.trials] == [1e-6, 1e-3, 1e30]
    assert len({trial.rewards[0] for trial in tried.trials}) == 1, "the first rollouts are shared"
    assert [len(trial.rewards) for trial in tried.trials[:2]] == [3, 3]
    assert "not finite" in tried.trials[2].fall and tried.trials[2].last is None
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["learning_rate"] for row in rows] == [rate for rate in tried.rates for _ in range(3)]
    first = [row for row in rows if row["iteration"] in (1, 4, 7)]
    for name in ("loss", "grad_norm", "entropy"):
        assert len({row[name] for row in first}) == 1, "the first gradient is that of the start weights"
    assert summary.rollouts["succeeded"] == 16 * (1 + 2 + 2)
    assert summary.result == tried.recommended
    assert not (tmp_path / "run" / "best").exists() and not (tmp_path / "run" / "model").exists()


def test_the_smallest_rate_that_is_as_good_as_the_best_is_recommended() -> None:
    found = finder(rates=[1e-5, 1e-4, 1e-3, 1e-2])
    assert found.recommended is None
    levels = {1e-5: 0.15, 1e-4: 0.78, 1e-3: 0.8, 1e-2: 0.9}
    found.trials = [RateTrial(rate, [0.1, level], last=Measured(level, 0.03**2)) for rate, level in levels.items()]
    found.trials[-1].fall = "step 3: the reward has fallen"
    assert found.recommended == 1e-4
    for trial in found.trials:
        trial.last = Measured(0.12, 0.03**2)
    assert found.recommended is None, "nothing has learned"


def test_rates_that_cannot_be_compared_are_refused() -> None:
    for rates in ([1e-3], [1e-3, 1e-3]):
        with pytest.raises(ConfigError, match="two different rates or more"):
            finder(rates=rates)
    with pytest.raises(ConfigError, match="rates is -1"):
        finder(rates=[1e-3, -1.0])
    assert len(finder().rates) == 5, "by default, rates around the one for the model's size"


AGENT = """
import os, signal
import openai
import leyden as ly

calls = 0

@ly.llm_rollout
async def agent(task: dict, llm: ly.LLM) -> float:
    global calls
    calls += 1
    if calls == task["stop"]:
        os.kill(os.getpid(), signal.SIGINT)
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        answer = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": "guess 0..9"}], **llm.sampling_parameters
        )
    return float((answer.choices[0].message.content or "").strip() == "4")
"""


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 7])
def test_the_command_prints_a_line_for_each_rate_and_keeps_what_was_tried_before_ctrl_c(
    stop: int, tmp_path: Path
) -> None:
    (tmp_path / "asks.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"stop": stop}) + "\n")
    options = ["--rates", "1e-6,1e-4", "--steps", "1", "--tasks-per-step", "1", "--rollouts", "4", "--max-tokens", "4"]
    command = [sys.executable, "-m", "leyden", "lr-range", "asks.py:agent", "--tasks", "tasks.jsonl", *options]
    ended = subprocess.run([*command, "--model", str(WEIGHTS)], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == (130 if stop else 0), ended.stderr
    (first,) = [line for line in ended.stdout.splitlines() if line.lstrip().startswith("1e-06")]
    assert len(first.split()) == 4, "the rate, its kl, and the reward before and after the update"
    assert ("stopped: 1 rates are not tried to the end" in ended.stdout) == bool(stop)
    assert "no rate has raised the reward by more than noise" in ended.stdout
