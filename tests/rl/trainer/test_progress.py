"""A fit shows its progress and its end as a run of an LLM agent does, unless it is told to be quiet."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import ConfigError
from leyden.rl import Trainer
from leyden.training import Callback, Checkpoint, ProgressBar
from leyden_compat.qlib import trainer as qlib
from tests.rl.parts import vessel_of


def fit(trainer: type[Trainer] = Trainer, *callbacks: Callback, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_iters": 3, "val_every_n_iters": 2, "finite_env_type": "dummy"}
    made = trainer(callbacks=callbacks, **(defaults | options))
    made.fit(vessel_of())
    return made


def test_a_fit_shows_a_first_line_its_iterations_and_a_summary(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = fit(run_dir=tmp_path / "walk")
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "run walk | PPO | 17 initial states, 6 episodes an iteration"
    number = r"-?[\d.,]+"
    assert re.fullmatch(rf"iteration 1/3  reward {number}  {number} episodes/s  {number} steps/s  0:0\d left", lines[1])
    assert ["val/reward" in line for line in lines[1:4]] == [False, True, False]
    assert re.fullmatch(r"finished in 0:\d\d", lines[4])
    assert lines[5] == f"episodes: 18 with {trainer.total_steps} steps"
    assert lines[6].startswith("reward: ") and "best" in lines[6]
    assert any(line.startswith("validation: ") for line in lines)
    assert [line.split()[-1] for line in lines if "leyden " in line] == [str(tmp_path / "walk")] * 2


def test_a_fit_without_a_folder_has_the_same_summary_and_gets_its_callbacks_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    mine = Callback()
    trainer = fit(Trainer, mine)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "run | PPO | 17 initial states, 6 episodes an iteration"
    assert lines[5].startswith("episodes: 18 with") and any(line.startswith("reward: ") for line in lines)
    assert trainer.callbacks == [mine] and len(trainer.loggers) == 1


def test_a_resumed_fit_sums_up_the_whole_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(Trainer, Checkpoint(tmp_path / "checkpoints"), run_dir=tmp_path)
    before = capfd.readouterr().err
    Trainer(
        max_iters=4, finite_env_type="dummy", run_dir=tmp_path, callbacks=[Checkpoint(tmp_path / "checkpoints")]
    ).fit(vessel_of(), resume=True)
    after = capfd.readouterr().err
    first = r"^reward: (\S+) ->"
    assert re.findall(first, before, re.M) == re.findall(first, after, re.M) != []
    assert "iteration 4/4" in after and "iteration 3/4" not in after and "episodes: 24 with" in after


def test_a_quiet_fit_and_one_under_the_alias_show_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    fit(progress=False)
    fit(qlib.Trainer)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConfigError, match="progress is 'no'; possible: True, False"):
        fit(progress="no")


def test_a_bar_of_the_programs_own_stays_the_only_one(capfd: pytest.CaptureFixture[str]) -> None:
    fit(Trainer, ProgressBar(metrics=["distance"], unit="walks"))
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("iteration")]
    assert len(shown) == 3 and all("distance" in line and "walks/s" in line for line in shown)


def test_the_summary_of_an_interrupted_fit_says_so_and_a_failed_one_has_none(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Interrupts(Callback):
        def on_train_start(self, loop: Any, vessel: Any) -> None:
            if loop.current_iter == 1:
                os.kill(os.getpid(), signal.SIGINT)

    fit(Trainer, Interrupts())
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("stopped in ") for line in lines) and lines[-1] == "stopped: interrupted"
    assert not any(line.startswith("iteration 3") for line in lines)

    class Fails(Callback):
        def on_train_end(self, loop: Any, vessel: Any) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(Trainer, Fails())
    assert "finished" not in capfd.readouterr().err
