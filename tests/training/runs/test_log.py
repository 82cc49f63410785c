"""The log of a run, while other programs rotate it."""

from __future__ import annotations

import logging
import shutil
import stat
from pathlib import Path

import pytest

from leyden.training.runs.log import RunLog

logger = logging.getLogger("leyden.test")


def test_the_log_of_a_run_follows_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    log = RunLog(path, "run")
    log.open()
    try:
        logger.info("first")
        path.rename(tmp_path / "run.log.1")
        logger.info("second")
        log.write("third")
        path.rename(tmp_path / "run.log.2")
        path.touch()  # logrotate's `create`
        logger.info("fourth")
        shutil.copy(path, tmp_path / "run.log.3")
        with path.open("r+b") as file:
            file.truncate()  # and its `copytruncate`
        logger.info("fifth")
    finally:
        log.close()
    texts = [(tmp_path / f"run.log{end}").read_text() for end in (".1", ".2", ".3", "")]
    assert [[word for word in ("first", "second", "third", "fourth", "fifth") if word in text] for text in texts] == [
        ["first"],
        ["second", "third"],
        ["fourth"],
        ["fifth"],
    ]
    assert "\0" not in texts[-1]


def test_a_log_that_cannot_be_opened_again_disturbs_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    log = RunLog(folder / "run.log", "run")
    log.open()
    try:
        shutil.rmtree(folder)
        logger.info("lost")
    finally:
        log.close()
    assert "lost" in capsys.readouterr().err  # `logging` reports it


def test_only_this_user_reads_the_log(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.log", "run")
    log.open()
    log.close()
    assert stat.S_IMODE((tmp_path / "run.log").stat().st_mode) == 0o600
