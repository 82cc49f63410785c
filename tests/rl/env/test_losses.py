"""Episodes that are lost, and simulators that say nothing: what is counted, said, and when it is enough."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.errors import ConfigError, SimulatorError
from leyden.rl.collector import Collector
from leyden.rl.env import vectorize_env
from leyden.rl.policy import AllOne
from leyden.rl.seed import SeedPlan
from leyden.rl.trainer import Trainer, TrainingVessel
from tests.rl.env.test_kinds import KINDS
from tests.rl.env.worlds import OnceUnlucky, Push, Sight, Unlucky, Walk, factory, play

ROOT = Path(__file__).parents[3]
BAD, GOOD = ("raise", "construct", 0), ("", "", 0)


def collect(venv: Any, n_episode: int | None = None) -> Any:
    return Collector(AllOne(venv.observation_space, venv.action_space), venv).collect(n_episode=n_episode)


@pytest.mark.parametrize("kind", KINDS)
def test_skipping_gives_up_when_a_whole_pass_fails(kind: Any) -> None:
    plan = SeedPlan([BAD] * 7, repeat=-1)
    with (
        vectorize_env(factory(Unlucky), kind, 2, seeds=plan, on_worker_error="skip") as venv,
        pytest.raises(
            SimulatorError, match=r"(?s)8 episodes in a row .* environment 0 .* seed 0: OSError: the quarry"
        ) as caught,
    ):
        collect(venv, 3)
    assert caught.value.seed_index == 0 and len(venv.lost) == 8  # two at a time


def test_an_endless_source_is_given_up_after_a_thousand() -> None:
    def endless() -> Any:
        while True:
            yield ("raise", "step", 0)

    with (
        vectorize_env(factory(Unlucky), concurrency=3, seeds=endless(), on_worker_error="skip") as venv,
        pytest.raises(SimulatorError, match="episodes in a row failed"),
    ):
        play(venv)
    assert 1000 <= len(venv.lost) <= 1003


def test_an_episode_that_ends_begins_the_count_anew() -> None:
    items = [GOOD, *[BAD] * 9, GOOD, *[BAD] * 9]
    with vectorize_env(factory(Unlucky), seeds=SeedPlan(items, repeat=3), on_worker_error="skip") as venv:
        assert len(play(venv)) == 6 and len(venv.lost) == 54


def test_a_collect_counts_what_it_skipped_and_warns_with_the_first_reason(caplog: pytest.LogCaptureFixture) -> None:
    items = [GOOD, BAD, GOOD, BAD, BAD]
    with (
        caplog.at_level(logging.WARNING),
        vectorize_env(factory(Unlucky), concurrency=2, seeds=items, on_worker_error="skip") as venv,
    ):
        result = collect(venv)
        assert (result.n_episodes, result.n_lost, result.metrics["lost"]) == (2, 3, 3.0)
        assert [(lost.seed_index, lost.again) for lost in result.lost] == [(1, False), (3, False), (4, False)]
        assert "the quarry is closed" in result.lost[0].reason
        assert len(caplog.records) == 1 and "seed 1: environment 1 failed at step 0: OSError" in caplog.text
        venv.use_seeds([GOOD, BAD])
        assert collect(venv).n_lost == 1
        assert len(caplog.records) == 2
        venv.use_seeds([GOOD])
        assert collect(venv).metrics["lost"] == 0.0


def test_a_collect_of_which_nothing_is_left_is_an_error() -> None:
    with (
        vectorize_env(factory(Unlucky), seeds=[BAD, BAD], on_worker_error="skip") as venv,
        pytest.raises(SimulatorError, match=r"no episode .* 2 were lost; the first, of seed 0 .* the quarry is closed"),
    ):
        collect(venv)


def test_retried_episodes_are_listed_and_not_counted_as_left_out(tmp_path: Path) -> None:
    items = [(str(tmp_path), number) for number in range(3)]
    with vectorize_env(factory(OnceUnlucky), seeds=items, on_worker_error="retry") as venv:
        result = collect(venv)
    assert result.n_episodes == 3 and result.n_lost == 0 and "lost" not in result.metrics
    assert [lost.again for lost in result.lost] == [True] * 3


@pytest.mark.parametrize(
    ("policy", "says"), [("raise", "With on_worker_error='retry' or"), ("retry", "as often as `max_retries`")]
)
def test_the_error_names_the_remedy_that_is_left(policy: Any, says: str) -> None:
    with (
        vectorize_env(factory(Unlucky), seeds=[BAD], on_worker_error=policy, max_retries=1) as venv,
        pytest.raises(SimulatorError, match=says) as caught,
    ):
        venv.reset()
    assert ("'retry' or" in str(caught.value)) == (policy == "raise")


def dies_at_first(mark: Path) -> Any:
    """A factory whose first call kills its process."""
    if not mark.exists():
        mark.touch()
        os._exit(9)
    return factory(Walk)()


@pytest.mark.parametrize("policy", ["retry", "skip", "raise"])
def test_a_worker_that_dies_while_it_starts_is_started_again(policy: Any, tmp_path: Path) -> None:
    def make() -> Any:
        return dies_at_first(tmp_path / "mark")

    if policy == "raise":
        with pytest.raises(
            SimulatorError, match="environment 0 could not be made: its worker process ended with exit code"
        ):
            vectorize_env(make, "shmem", 1, on_worker_error=policy)
        return
    with vectorize_env(make, "shmem", 1, seeds=range(2), on_worker_error=policy) as venv:
        assert len(play(venv)) == 2


def test_a_worker_that_always_dies_while_it_starts_is_given_up() -> None:
    with pytest.raises(SimulatorError, match=r"could not be made.*exit code 9"):
        vectorize_env(lambda: os._exit(9), "shmem", 1, on_worker_error="retry")
    assert not psutil.Process().children() or all(
        "leyden-env" not in child.name() for child in psutil.Process().children()
    )


class Pausing(Walk):
    """Waits in its second step."""

    def step(self, action: float) -> None:
        super().step(action)
        if self.steps == 2 and self.initial == 3:
            time.sleep(0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_environment_that_says_nothing_is_named(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        vectorize_env(factory(Pausing), kind, 4, seeds=range(4), quiet_seconds=0.1) as venv,
    ):
        assert len(play(venv)) == 4
    (first, *_) = [record.message for record in caplog.records if "not returned" in record.message]
    assert "environment 3" in first and "at step 1 of the episode of seed 3, has not returned for 0.1 s" in first
    assert ("(worker " in first) == (kind in ("subproc", "shmem"))


def slow_to_make() -> Any:
    time.sleep(0.4)
    return factory(Walk)()


def test_a_worker_that_is_long_in_starting_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        vectorize_env(slow_to_make, "shmem", 1, quiet_seconds=0.05).close()
    said = [record.message.partition(" s to make")[0] for record in caplog.records]
    assert said[:3] == [f"worker 0 takes more than {seconds:g}" for seconds in (0.05, 0.1, 0.2)]


def test_the_time_before_a_warning_is_above_0() -> None:
    with pytest.raises(ConfigError, match="quiet_seconds is 0"):
        vectorize_env(factory(), quiet_seconds=0)


def test_the_watch_ends_with_its_environment() -> None:
    import threading

    def watches() -> int:
        return sum(thread.name == "leyden-env-watch" for thread in threading.enumerate())

    before = watches()
    venv = vectorize_env(factory(), seeds=range(3))
    forgotten = vectorize_env(factory(), seeds=range(3))
    assert watches() == before + 2
    venv.close()
    del forgotten
    deadline = time.monotonic() + 5
    while watches() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watches() == before


def test_a_program_from_standard_input_is_told_why_it_can_have_no_workers() -> None:
    program = (
        "from leyden.rl.env import vectorize_env\n"
        "if __name__ == '__main__':\n    vectorize_env('CartPole-v1', 'shmem', 2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=program, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert "ConfigError" in done.stderr and "save it in a file" in done.stderr


def test_every_stage_of_a_trainer_has_the_number_of_episodes_it_lost() -> None:
    vessel = TrainingVessel(
        simulator_fn=Unlucky,
        state_interpreter=Sight(),
        action_interpreter=Push(),
        policy=AllOne(Sight.observation_space, Push.action_space),
        train_initial_states=[GOOD],
        val_initial_states=[GOOD, BAD, GOOD, BAD],
        episode_per_iter=2,
    )
    trainer = Trainer(
        max_iters=1, val_every_n_iters=1, finite_env_type="dummy", env_options={"on_worker_error": "skip"}
    )
    trainer.fit(vessel)
    assert trainer.metrics["lost"] == 0.0 and trainer.metrics["val/lost"] == 2.0
