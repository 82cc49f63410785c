"""Start, steer, kill and continue runs of `steered_child.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leyden.training.runs import open_run
from leyden.training.runs.control import ControlLine, read_control

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


STARTED: list[subprocess.Popen[str]] = []
"""The processes of a test, which `end_all` ends."""


def end_all() -> None:
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def start(kind: str, directory: Path, n_steps: int, **plan: Any) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.trainer.steered_child",
        kind,
        str(directory),
        str(n_steps),
        json.dumps(plan),
    ]
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    STARTED.append(process)
    return process


def run(kind: str, directory: Path, n_steps: int, *, code: int = 0, **plan: Any) -> str:
    """Run it to its end, and return what it printed."""
    process = start(kind, directory, n_steps, **plan)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == code, printed
    return printed


def leyden(*arguments: object, code: int | None = 0) -> str:
    """Run a command, and return its standard output, or its error if it fails."""
    command = [sys.executable, "-m", "leyden", *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout if done.returncode == 0 else done.stderr


def until(happened: Callable[[], Any], process: subprocess.Popen[str] | None = None, seconds: float = 60) -> Any:
    """Wait until something has happened, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline, "it has not happened"
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    return found


def steps(directory: Path) -> int:
    """The steps that the run has recorded."""
    path = directory / "metrics.jsonl"
    return path.read_text().count('"train"') if path.exists() else 0


def answers(directory: Path, command: str | None = None) -> list[ControlLine]:
    return [line for line in read_control(directory) if line.state != "asked" and command in (None, line.command)]


def metrics(directory: Path) -> list[tuple[int, str, dict[str, Any]]]:
    return [(row.iteration, row.stage, row.metrics) for row in open_run(directory).metrics()]
