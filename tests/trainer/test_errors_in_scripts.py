"""An error of `fit` begins with the error: no frames of Leyden, no chain of its own making; and Ctrl-C is one line."""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import logging
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.errors import ConfigError, LeydenError, UnknownRollout


@ly.rollout
async def agent(task: str) -> float:
    return 1.0


@ly.algo
async def asks_for_what_there_is_not(*, store: ly.LightningStore, train_dataset: Any) -> None:
    await store.get_rollout_by_id("ro-1")


@ly.algo
async def fails(*, train_dataset: Any) -> None:
    helper()


def helper() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("it is missing") from error


def shown(function: Callable[[], Any]) -> tuple[str, list[str]]:
    """The error's traceback as a script shows it, and the functions whose frames it has."""
    linecache.clearcache()
    with pytest.raises(Exception) as caught:
        function()
    error = caught.value
    links = [error]
    while (link := links[-1].__cause__) is not None:
        links.append(link)
    frames = [frame.name for link in links for frame in traceback.extract_tb(link.__traceback__)]
    return "".join(traceback.format_exception(error)), [name for name in frames if name not in {"shown", "<lambda>"}]


def test_an_error_of_leydens_has_one_frame_and_no_chain(tmp_path: Path) -> None:
    text, frames = shown(lambda: ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run").fit(agent, []))
    assert frames == ["fit"]
    assert "During handling" not in text
    assert "direct cause" not in text
    assert "ConfigError: Baseline needs tasks to run" in text


def test_it_is_so_under_a_running_event_loop_and_in_dev_too(tmp_path: Path) -> None:
    async def notebook() -> tuple[str, list[str]]:
        return shown(lambda: ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run").fit(agent, []))

    assert asyncio.run(notebook())[1] == ["fit"]
    assert shown(lambda: ly.Trainer().dev(agent, []))[1] == ["dev"]
    assert set(shown(lambda: ly.Trainer(algorithm="baselin"))[1]) == {"__init__"}
    trainer = ly.Trainer(algorithm="baseline", store=ly.InMemoryLightningStore())
    assert shown(lambda: asyncio.run(trainer.afit(agent, [])))[1][-1] == "afit"


def test_the_users_own_frames_stay() -> None:
    def fit(algorithm: Any) -> Callable[[], Any]:
        return lambda: ly.Trainer(algorithm=algorithm, store=ly.InMemoryLightningStore()).fit(agent, ["task"])

    assert shown(fit(asks_for_what_there_is_not))[1] == ["fit", "asks_for_what_there_is_not"]
    text, frames = shown(fit(fails))
    assert frames == ["fit", "fails", "helper", "helper"]  # the last one is of the KeyError, the user's own chain
    assert "KeyError: 'missing'" in text
    assert "The above exception was the direct cause" in text


def test_an_error_of_neither_leyden_nor_the_user_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: Any, *_: Any, **__: Any) -> None:
        raise AssertionError("a fault of ours")

    trainer = ly.Trainer(algorithm="baseline", store=ly.InMemoryLightningStore())
    monkeypatch.setattr("leyden._lib.frames._AGENTS", ())
    monkeypatch.setattr("leyden._lib.frames.is_users_file", lambda filename: False)
    monkeypatch.setattr(type(trainer.runner), "init", breaks)
    frames = shown(lambda: trainer.fit(agent, ["task"]))[1]
    assert {"run_blocking", "execute", "breaks"} < set(frames)


def test_the_whole_traceback_is_in_the_log_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "leyden")
    with contextlib.suppress(UnknownRollout):
        trainer = ly.Trainer(algorithm=asks_for_what_there_is_not, store=ly.InMemoryLightningStore())
        trainer.fit(agent, ["task"])
    assert "in run_blocking" in caplog.text
    assert "in rollout_row" in caplog.text


def test_the_log_of_the_run_keeps_the_whole_traceback_and_the_terminal_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @ly.algo
    async def ends_badly(*, store: ly.LightningStore, train_dataset: Any) -> None:
        await store.enqueue_rollout("task")
        helper()

    logger = logging.getLogger("leyden")
    before = logger.handlers[:], logger.level, logger.propagate
    ly.setup_logging("INFO")
    try:
        with pytest.raises(ValueError, match="it is missing"):
            ly.Trainer(algorithm=ends_badly, run_dir=tmp_path / "run").fit(agent, ["task"])
    finally:
        logger.handlers[:], logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    assert "Traceback" not in capsys.readouterr().err
    log = (tmp_path / "run" / "run.log").read_text()
    assert "in algorithm_bundle" in log
    assert "    ValueError: it is missing" in log


def test_the_signature_is_what_it_was() -> None:
    with pytest.raises(TypeError, match="agnt"):
        ly.Trainer().fit(agnt=agent)  # pyright: ignore[reportCallIssue] -- a slip
    assert asyncio.iscoroutinefunction(ly.Trainer().afit)
    assert issubclass(ConfigError, LeydenError)


STOPPED = """
import asyncio
import leyden as ly

@ly.rollout
async def agent(task):
    print("begun", flush=True)
    await asyncio.sleep(60)

ly.Trainer(algorithm="baseline").fit(agent, ["task"])
"""


@pytest.mark.slow
@pytest.mark.merge
def test_a_script_that_is_stopped_says_one_line_and_ends_with_130(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "begun\n"
        script.send_signal(signal.SIGINT)
        _, errors = script.communicate(timeout=30)
    assert script.returncode == 130
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("the run was stopped")


def test_a_path_is_a_store_and_no_import_path(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    assert ly.Trainer(algorithm="baseline", store=str(path)).fit(agent, ["task"]).rollouts["succeeded"] == 1
    assert path.exists()
