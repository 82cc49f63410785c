"""`fit` names a fault while it works: in the log, once, at most one a minute, and nothing that the log has said."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

import leyden as ly
from leyden.doctor import FitWatch, watch
from leyden.training.runs.recorded_runs import FailedRollout
from tests.doctor.recorded import record, steps


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_SECONDS", 0.0)


def failed(reason: str, n: int = 8) -> list[FailedRollout]:
    return [FailedRollout(f"ro-{reason[:1]}{number}", "at-1", "exception", reason, 1.0) for number in range(n)]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "leyden.doctor.watch"]


@pytest.mark.usefixtures("seconds")
def test_each_fault_is_named_once_and_the_root_cause_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures = [*failed("KeyError: 'answer'"), *failed("the prompt has 90 tokens; the context has 64, answer included")]
    fit = FitWatch(record(tmp_path / "run", steps(reward=[0.0] * 4, rollouts=[8] * 4), failures=failures))
    for number in range(4):
        fit.look()
        assert len(said(caplog)) == min(number + 1, 2)
    first, second = said(caplog)
    assert first.startswith("prompts are longer than the model's context (8 rollouts failed: the prompt has 90 tokens")
    assert second.startswith("the agent's code fails") and f"leyden doctor {tmp_path}/run" in second


def test_the_next_finding_waits_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit = FitWatch(record(tmp_path / "run", failures=failed("KeyError: 'answer'")))
    fit.look()
    assert said(caplog) == []


@pytest.mark.usefixtures("seconds")
def test_what_the_log_has_warned_of_is_not_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flat = {"reward": [0.0] * 4, "groups": [2] * 4, "flat_groups": [2] * 4}
    FitWatch(record(tmp_path / "quiet", steps(**flat))).look()
    assert len(said(caplog)) == 1
    warning = "steps 1 to 3: nothing to learn, because in each of the 2 groups all rewards are equal"
    FitWatch(record(tmp_path / "warned", steps(**flat), warnings=[warning])).look()
    assert len(said(caplog)) == 1


@pytest.mark.usefixtures("seconds")
def test_a_run_of_many_steps_is_looked_at_by_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    n = 20_000
    names = {f"metric_{number}": [0.123456789] * n for number in range(12)}
    run = record(tmp_path / "run", steps(**names, kl=[0.01] * (n - 20) + [2.0] * 20, reward=[0.5] * n))
    FitWatch(run).look()
    assert "(20 of 1,288 steps" in said(caplog)[0]


@pytest.mark.usefixtures("seconds")
def test_a_folder_that_was_moved_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = record(tmp_path / "run", failures=failed("KeyError: 'answer'"))
    fit = FitWatch(run)
    run.rename(tmp_path / "moved")
    fit.look()
    assert said(caplog) == []


@pytest.mark.usefixtures("seconds")
def test_a_fit_looks_while_it_works(tmp_path: Path) -> None:
    named = threading.Event()

    class Listens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "the agent's code fails" in record.getMessage():
                named.set()

    @ly.rollout
    def agent(task: int) -> float:
        if task < 4:
            raise KeyError("answer")
        return float(named.wait(50))

    log = logging.getLogger("leyden.doctor.watch")
    log.addHandler(handler := Listens())
    try:
        ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run", progress=False).fit(agent, list(range(6)))
    finally:
        log.removeHandler(handler)
    assert named.is_set()
    assert "the agent's code fails" in (tmp_path / "run" / "run.log").read_text()
