"""`leyden workers`, as a user runs it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from leyden.cli import main
from leyden.store import SqliteLightningStore

FIGURES = {
    "cpu_percent": 12.4,
    "memory_percent": 34,
    "disk_free_percent": 56.0,
    "store_latency_seconds": 0.0015,
    "rollouts_running": 2,
    "attempts_succeeded": 7,
    "attempts_ended": 9,
}


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["leyden", "workers", url])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_it_shows_each_worker_with_what_it_said_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite://{tmp_path / 's.db'}"

    async def work() -> None:
        async with SqliteLightningStore(tmp_path / "s.db") as store:
            await store.update_worker("a[b]", FIGURES)
            await store.pause_worker("a[b]")
            await store.update_worker("c", {"ended": True, "cpu_percent": "hot"})

    asyncio.run(SqliteLightningStore(tmp_path / "s.db").close())
    assert said(capsys, monkeypatch, url) == ["no worker was heard of in the last day"]
    asyncio.run(work())
    head, first, second = said(capsys, monkeypatch, url)
    assert head == "worker health status heard CPU % memory % free disk % latency running succeeded"
    assert first.startswith("a[b] healthy unknown, paused")
    assert first.endswith("s ago 12 34 56 1.5 ms 2 7 of 9")
    assert second.startswith("c ended unknown")
