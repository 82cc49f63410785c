"""Recorded runs and a dashboard that serves them, in a process of its own as users start it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import leyden as ly

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b]52;c;aGk=\x07\u202egnp.exe"
"""A text that is dangerous as markup, on a terminal, and to the eye."""


@ly.rollout
async def agent(task: dict[str, Any]) -> float:
    if task["n"] == 13:
        raise ValueError(f"unlucky {HOSTILE}")
    ly.emit_message(f"the answer to {task['n']} is {task['n'] * 2}")
    return (task["n"] % 4) / 4


def make_run(folder: Path, n_tasks: int = 40) -> None:
    tasks = [{"n": n, "text": HOSTILE} for n in range(n_tasks)]
    ly.Trainer(algorithm="baseline", run_dir=folder).fit(agent, val_dataset=tasks)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, one that is damaged, and one that a newer version wrote."""
    root = tmp_path_factory.mktemp("dashboard") / "runs"
    make_run(root / "first")
    make_run(root / "second", 20)
    for name, text in (("damaged", '{"run_id": "run-'), ("newer", '{"run_id": "run-9", "format": 99}')):
        (root / name).mkdir()
        (root / name / "run.json").write_text(text)
    return root


class Served:
    """Pages at an address."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        return self.ask(urllib.request.Request(self.url + path.lstrip("/"), headers=headers))

    def ask(self, request: urllib.request.Request) -> tuple[int, dict[str, str], bytes]:
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, dict(reply.headers), reply.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def view(self, name: str, **query: Any) -> Any:
        given = "&".join(f"{key}={value}" for key, value in query.items())
        status, _, body = self.get(f"api/{name}?{given}")
        assert status == 200, body
        return json.loads(body)


class Dashboard(Served):
    """A started `leyden dashboard`."""

    def __init__(self, place: Path | str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "leyden", "dashboard", str(place), "--port", "0", *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+?/(?=#| )", line)
        assert found is not None, line
        super().__init__(found[0])

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture(scope="session")
def dashboard(runs: Path) -> Iterator[Dashboard]:
    started = Dashboard(runs)
    yield started
    assert started.stop() == 0
