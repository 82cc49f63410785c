"""A real process is killed by SIGKILL, resumed, and leaves what an uninterrupted one leaves."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.crash import outcome
from tests.training.toy import MEMORY_DISK

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes by SIGKILL")


@pytest.fixture
def quick_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        yield Path(folder)


def start(*arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.training.crash", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def finish(folder: Path) -> None:
    process = start("run", str(folder))
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_kill_before_any_change_to_the_file_system_loses_and_doubles_nothing(quick_disk: Path) -> None:
    process = start("explore", str(quick_disk))
    points = process.communicate(timeout=55)[0]
    assert process.returncode == 0
    assert int(points) > 50


def test_kills_at_random_times_lose_and_double_nothing(quick_disk: Path) -> None:
    whole, parts = quick_disk / "whole", quick_disk / "parts"
    finish(whole)
    times, kills = random.Random(0), 0
    for _ in range(4):
        process = start("run", str(parts))
        while not (parts / "checkpoints").exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(times.uniform(0.02, 0.15))
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    finish(parts)
    assert kills, "some kill must have come in time"
    assert outcome(parts) == outcome(whole)
