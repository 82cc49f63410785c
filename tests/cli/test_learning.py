"""`leyden learning` shows cycles and releases, and is the kill switch."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from leyden.cli import main
from leyden.serving.continual import CanarySettings, begin, start_canary
from leyden.store import SqliteLightningStore
from leyden.types import PromptTemplate

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def leyden(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process; return its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leyden", "learning", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


async def _write(path: str) -> None:
    async with SqliteLightningStore(path) as store:
        for text in ("one", "two"):
            await store.update_resources("rs", {"prompt": PromptTemplate(template=text)})
        await store.set_label("production", "rs", 1)
        release = await begin(store, "r-1", candidate=("rs", 2), production=("rs", 1), why="200 new rewards")
        await start_canary(store, release, CanarySettings(share=0.5), why="better on held-out tasks")


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "store.db")
    asyncio.run(_write(path))
    return path


def test_a_canary_is_shown_and_the_kill_switch_takes_it_back(leyden: Run, path: str) -> None:
    code, printed, _ = leyden("list", "--store", path)
    assert code == 0
    assert printed.startswith("r-1  canary  rs 2  since ") and printed.endswith(": better on held-out tasks\n")
    assert ", until " in printed
    at = ("--store", path, "--who", "ann", "--why", "complaints")
    assert leyden("stop", *at)[:2] == (0, "r-1 is rolled_back\nlearning is stopped\n")
    assert leyden("stop", *at)[:2] == (0, "learning is stopped\n")
    printed = leyden("list", "--store", path)[1].splitlines()
    assert printed[0] == "learning is stopped; `leyden learning allow` allows it again"
    assert printed[1].startswith("r-1  rolled_back  rs 2") and printed[1].endswith(": complaints")
    code, printed, _ = leyden("list", "--store", path, "--json")
    assert [row["state"] for row in json.loads(printed)] == ["rolled_back"]
    assert leyden("allow", *at)[:2] == (0, "learning is allowed\n")
    assert "stopped" not in leyden("list", "--store", path)[1]


def test_nothing_can_be_stopped_where_nothing_is_in_production(leyden: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "empty.db")
    asyncio.run(_create(path))
    code, _, error = leyden("stop", "--store", path)
    assert code == 1 and "has the label 'production'" in error


async def _create(path: str) -> None:
    async with SqliteLightningStore(path):
        pass
