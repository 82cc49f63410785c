"""A simulator run leaves the files that a run of an LLM agent leaves, and the same reader opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.errors import ConfigError
from leyden.rl import Trainer
from leyden.training import Callback, Checkpoint
from leyden.training.runs import open_run
from tests.rl.parts import vessel_of


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trainer_of(run_dir: Path | None, *callbacks: Callback, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_iters": 2, "finite_env_type": "dummy", "concurrency": 2}
    return Trainer(**(defaults | options), callbacks=callbacks, run_dir=run_dir)


class Fails(Callback):
    """Raises in an iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_train_end(self, loop: Any, vessel: Any) -> None:
        if loop.current_iter == self.iteration:
            raise ZeroDivisionError("in a callback")


def test_a_fit_with_a_run_dir_is_a_run_of_kind_rl(tmp_path: Path) -> None:
    trainer_of(tmp_path, val_every_n_iters=2).fit(vessel_of())
    run = open_run(tmp_path)
    assert (run.record.kind, run.state) == ("rl", "succeeded")
    assert [(row.stage, row.iteration) for row in run.metrics()] == [("train", 1), ("train", 2), ("val", 2)]
    assert run.record.config["algorithm"]["name"].startswith("leyden.rl.policy")
    assert run.record.config["data"]["train"]["digest"]
    changed = run.record.config["not_default"]
    assert changed["trainer.max_iters"] == 2 and changed["vessel.policy.lr"] == 0.003
    assert not [path for path in changed if path.endswith(("run_dir", "concurrency", "initial_states", "eps_clip"))]
    assert run.summary_metrics().reward is not None
    files = {"run.json", "metrics.jsonl", "failures.jsonl", "run.log", "report.html"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert "polyline" in (tmp_path / "report.html").read_text()


def test_a_fit_that_failed_resumes_at_its_checkpoint_with_its_metrics_cut(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoints", every_n_iters=2)
    with pytest.raises(ZeroDivisionError):
        trainer_of(tmp_path, checkpoint, Fails(3), max_iters=4).fit(vessel_of(val_initial_states=None))
    run = open_run(tmp_path)
    assert (run.state, run.record.cause) == ("failed", "ZeroDivisionError: in a callback")
    assert [row.iteration for row in run.metrics()] == [1, 2, 3]
    with pytest.raises(ConfigError, match="holds a run already; pass resume=True"):
        trainer_of(tmp_path).fit(vessel_of())

    trainer = trainer_of(tmp_path, Checkpoint(tmp_path / "checkpoints", every_n_iters=2), max_iters=4)
    trainer.fit(vessel_of(val_initial_states=None), resume=True)
    assert [row.iteration for row in run.metrics()] == [1, 2, 3, 4]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert run.state == "succeeded"


def test_a_test_after_the_fit_is_a_row_of_the_run(tmp_path: Path) -> None:
    trainer, vessel = trainer_of(tmp_path, max_iters=1), vessel_of()
    trainer.fit(vessel)
    trainer.test(vessel)
    assert [(row.stage, row.iteration) for row in open_run(tmp_path).metrics()] == [
        ("train", 1),
        ("val", 1),
        ("test", 1),
    ]


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume=True needs a run; give the trainer run_dir="):
        trainer_of(None).fit(vessel_of(), resume=True)
    with pytest.raises(ConfigError, match="holds no run to resume"):
        trainer_of(tmp_path / "none").fit(vessel_of(), resume=True)
