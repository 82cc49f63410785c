"""A run keeps its best weights, notices when the policy falls, goes back, and hands back the best."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("openai")

import leyden as ly  # noqa: E402
from leyden.algorithm.policy_gradient.collapse import STATE, CollapseWatch, Measured  # noqa: E402
from leyden.cli.demo import WEIGHTS  # noqa: E402
from leyden.engine.untyped import load_tensors  # noqa: E402
from leyden.errors import ConfigError, PolicyDiverged  # noqa: E402
from leyden.training.runs import open_run  # noqa: E402
from tests.algorithm import falling  # noqa: E402
from tests.algorithm.falling import BROKEN, PLANTS, RATE  # noqa: E402

# ---- what the watch decides ------------------------------------------------------------------------------------------


def step(
    reward: float, chance: random.Random, *, tasks: int = 8, rollouts: int = 8, spread: float = 0.2
) -> list[list[float]]:
    """Return the rewards of 0 and 1 of a step whose tasks differ by up to `spread`."""
    rates = [min(1.0, max(0.0, reward + chance.uniform(-spread, spread))) for _ in range(tasks)]
    return [[float(chance.random() < rate) for _ in range(rollouts)] for rate in rates]


def falls_of(watch: CollapseWatch, steps: Sequence[list[list[float]]], *, n_distinct: int = 5) -> list[int]:
    """Return the steps in which a watch sees a fall."""
    return [at for at, groups in enumerate(steps, 1) if watch.look(at, groups, n_answers=64, n_distinct=n_distinct)]


@given(st.integers(0, 10**6), st.floats(0.0, 0.9), st.sampled_from([0.5, 0.8, 1.0]), st.integers(2, 40))
def test_a_run_that_learns_or_stays_is_never_taken_for_a_fallen_one(
    seed: int, start: float, end: float, rise: int
) -> None:
    chance = random.Random(seed)
    levels = [start + (max(start, end) - start) * min(1.0, at / rise) for at in range(40)]
    assert falls_of(CollapseWatch(), [step(level, chance) for level in levels]) == []


@given(st.integers(0, 10**6), st.floats(0.0, 0.4), st.integers(3, 10))
def test_a_fall_is_seen_in_two_steps(seed: int, start: float, rise: int) -> None:
    chance = random.Random(seed)
    levels = [start + (0.95 - start) * min(1.0, at / rise) for at in range(rise + 4)]
    fallen = [step(start / 4, chance) for _ in range(2)]
    watch = CollapseWatch()
    assert falls_of(watch, [step(level, chance) for level in levels]) == []
    assert falls_of(watch, fallen)


def test_one_answer_for_everything_is_a_fall_unless_it_is_the_right_one() -> None:
    chance = random.Random(1)
    for levels, sees in (([0.1] * 6, True), ([0.1, 0.4, 0.8, 1.0, 1.0, 1.0], False)):
        watch = CollapseWatch()
        assert falls_of(watch, [step(level, chance, spread=0.0) for level in levels[:4]]) == []
        assert bool(falls_of(watch, [step(level, chance, spread=0.0) for level in levels[4:]], n_distinct=1)) is sees
    assert falls_of(CollapseWatch(), [step(0.1, chance) for _ in range(9)], n_distinct=1) == [], "it never had others"


def test_a_divergence_alone_is_a_fall_only_if_it_is_enormous() -> None:
    watch = CollapseWatch()
    assert watch.updated(1, None) == watch.updated(1, 0.3) == ""
    assert watch.updated(2, 9.0) == "step 2: the update has moved the policy by a kl of 9 a token"


def test_validations_and_training_rewards_are_never_compared_with_each_other() -> None:
    chance, watch = random.Random(2), CollapseWatch(by_validation=True)
    assert falls_of(watch, [step(0.9, chance) for _ in range(4)]) == []
    watch.keep(3)
    low, high = dict.fromkeys(range(20), 0.1), dict.fromkeys(range(20), 0.9)
    assert watch.validated(4, low) == (True, ""), "the first validation is the best one, however low"
    watch.keep(4, low)
    assert not watch.is_best(), "a training reward replaces no validation"
    assert watch.last_is_worse() is None
    assert falls_of(watch, [step(0.9, chance)]) == [], "0.9 in training is no validation"
    assert watch.validated(5, high) == (True, "")
    watch.keep(5, high)
    is_best, fall = watch.validated(6, low)
    assert not is_best and fall == "the validation after step 6: the reward has fallen from 0.9 to 0.1"
    assert watch.last_is_worse() == "validation reward 0.9 after step 5, 0.1 at last"


def test_a_validation_is_compared_task_by_task() -> None:
    tasks = {place: float(place % 2) for place in range(40)}
    watch = CollapseWatch(by_validation=True)
    watch.validated(0, tasks)
    assert watch.validated(1, tasks)[0]
    watch.keep(1, tasks)
    watch.validated(2, tasks | {1: 0.0, 3: 0.0})
    assert watch.last_is_worse() is None, "two tasks of forty are noise"
    watch.validated(3, {place: reward - 0.1 for place, reward in tasks.items()})
    assert watch.last_is_worse() is not None, "every task is worse, by less than the tasks differ"


def test_a_reward_that_does_not_come_back_with_the_weights_is_not_blamed_on_them_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chance, watch = random.Random(3), CollapseWatch()
    assert falls_of(watch, [step(0.9, chance) for _ in range(4)]) == []
    watch.keep(4)
    assert falls_of(watch, [step(0.1, chance)])
    watch.went_back()
    assert falls_of(watch, [step(0.1, chance) for _ in range(6)]) == []
    assert "although the policy has its best weights. Look for a change of the reward" in caplog.text


@given(st.integers(0, 10**6))
def test_a_watch_that_was_written_and_read_decides_as_before(seed: int) -> None:
    chance, watch = random.Random(seed), CollapseWatch(by_validation=True)
    falls_of(watch, [step(chance.random(), chance) for _ in range(5)])
    watch.keep(4, {0: chance.random(), 1: chance.random()})
    watch.updated(5, chance.random())
    read = STATE.validate_python(json.loads(json.dumps(asdict(watch))))
    assert read == watch
    groups = step(chance.random(), chance)
    assert read.look(6, groups, n_answers=9, n_distinct=1) == watch.look(6, groups, n_answers=9, n_distinct=1)


def test_equal_rewards_have_noise_too() -> None:
    watch = CollapseWatch()
    watch.look(1, [[0.0, 1.0]], n_answers=2, n_distinct=2)
    watch.look(2, [[1.0, 1.0, 1.0]], n_answers=3, n_distinct=1)
    assert watch.recent[-1] == Measured(1.0, (1 / 3) ** 2)
    assert watch.look(3, [[0.0, 0.0, 0.0]], n_answers=3, n_distinct=1) == "", "three rollouts prove little"


# ---- runs that fall --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's policy, taught to say 4."""
    folder = tmp_path_factory.mktemp("four")
    falling.fit(
        WEIGHTS,
        folder / "run",
        "",
        n_steps=5,
        rollouts_per_task=32,
        minibatch_size=16,
        optim=ly.OptimParams(learning_rate=1e-3),
    )
    return folder / "run" / "model"


def rows_of(directory: Path, stage: str = "train") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["stage"] == stage]


@pytest.mark.parametrize(
    "plant", [each if each in ("kl", "loss") else pytest.param(each, marks=pytest.mark.slow) for each in PLANTS]
)
def test_a_planted_collapse_is_found_within_two_steps_and_the_run_goes_back(
    model: Path, plant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    falls = falling.fit(model, tmp_path / "run", plant)
    rows = rows_of(tmp_path / "run")
    assert [row["iteration"] for row in rows] == list(range(1, 8)), "a restore counts no step twice"
    went_back = {row["iteration"]: row["restored_to"] for row in rows if "restored_to" in row}
    assert len(went_back) == 1 and falls._collapse.restores == 1
    ((at, to),) = went_back.items()
    assert BROKEN + 1 <= at <= BROKEN + 3 and to <= BROKEN
    versions = [row["policy_version"] for row in rows]
    assert versions == sorted(versions), "a version is never given twice"
    (said,) = [message for message in caplog.messages if "goes back to the weights" in message]
    assert f"the weights after step {to}, with half the learning rate (now 5e-06)" in said
    assert said in (tmp_path / "run" / "run.log").read_text()
    if plant == "reward":
        assert "Look for a change of the reward" in caplog.text
    else:
        assert rows[-1]["reward"] > 0.8
    rates = [row["learning_rate"] for row in rows if row["iteration"] > at and "learning_rate" in row]
    assert set(rates) <= {RATE / 2}
    assert not (tmp_path / "run" / "model-last").exists(), "the run ended near its best"


def test_a_run_that_is_not_to_go_back_hands_back_its_best_weights_and_keeps_the_last(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for choice, steps in (("stop", BROKEN + 2), ("warn", 5)):
        directory = tmp_path / choice
        falls = falling.fit(model, directory, "kl", on_collapse=choice, n_steps=5)
        assert len(rows_of(directory)) in (steps, steps - 1)
        assert falls._collapse.restores == 0 and all("restored_to" not in row for row in rows_of(directory))
        best, last = (load_tensors(directory / name / "model.safetensors") for name in ("model", "model-last"))
        kept = load_tensors(directory / "best" / "model.safetensors")
        assert all(torch.equal(best[name], kept[name]) for name in kept)
        assert not all(torch.equal(last[name], best[name]) for name in kept)
    assert "model/ has the best, model-last/ the last" in caplog.text
    assert open_run(tmp_path / "stop").state == "succeeded"


def test_a_loss_that_is_not_finite_ends_a_run_that_is_not_to_go_back(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyDiverged, match="lower the learning_rate"):
        falling.fit(model, tmp_path / "run", "loss", hand_back="last")
    assert not (tmp_path / "run" / "best").exists()
    with pytest.raises(ConfigError, match="hand_back='last' keeps no weights to go back to"):
        falling.algorithm(model, "", hand_back="last", on_collapse="restore")


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_while_it_goes_back_ends_as_one_that_was_not(model: Path, tmp_path: Path) -> None:
    falling.fit(model, tmp_path / "whole", "kl")
    for kill in ("before", "after"):
        command = [sys.executable, "-m", "tests.algorithm.falling", str(model), str(tmp_path / kill), "kl", kill]
        environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
        assert subprocess.run(command, env=environment, capture_output=True).returncode == -signal.SIGKILL
        assert len(rows_of(tmp_path / kill)) in (BROKEN, BROKEN + 1)
        falling.fit(model, tmp_path / kill, "kl", resume=True)
        for file in ("model/model.safetensors", "best/model.safetensors", "best/optimizer.safetensors"):
            assert (tmp_path / kill / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
        names = ("iteration", "reward", "restored_to", "policy_version", "learning_rate", "loss")
        ended = [
            [{name: row.get(name) for name in names} for row in rows_of(tmp_path / each)] for each in (kill, "whole")
        ]
        assert ended[0] == ended[1]
        assert sum("restored_to" in row for row in rows_of(tmp_path / kill)) == 1


@pytest.mark.slow
def test_validations_decide_which_weights_are_handed_back_also_of_recorded_rollouts(
    model: Path, tmp_path: Path
) -> None:
    """SFT learns to imitate answers of which none is right; the model was better before."""
    tries = falling.algorithm(WEIGHTS, "", n_steps=1, optim=ly.OptimParams(learning_rate=1e-9))
    proxy = ly.LLMProxy(deterministic_seed=5)
    ly.Trainer(algorithm=tries, run_dir=tmp_path / "tries", llm_proxy=proxy, progress=False).fit(
        falling.says_no_four, [0]
    )
    backend = ly.EmbeddedBackend(model, device="cpu", max_length=128, seed=1)
    options = {"source": tmp_path / "tries", "select": "all", "min_reward": 1.0, "items_per_step": 8, "warmup_steps": 0}
    sft = ly.SFT(
        backend, n_steps=8, val_every_n_steps=1, max_tokens=4, optim=ly.OptimParams(learning_rate=3e-3), **options
    )
    ly.Trainer(algorithm=sft, run_dir=tmp_path / "run", progress=False).fit(falling.says_four, None, [0] * 40)
    rows = rows_of(tmp_path / "run")
    assert sft._collapse.restores >= 1 and any("restored_to" in row for row in rows)
    rewards = [row["reward"] for row in rows_of(tmp_path / "run", "val")]
    assert min(rewards) < 0.4 < max(rewards)
