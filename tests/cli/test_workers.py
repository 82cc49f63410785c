"""`leyden workers`, as a user runs it."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

import pytest

from leyden.cli import main, run_views, store_export, store_options
from leyden.cli.connecting import answer_of, connect
from leyden.store import SqliteLightningStore
from tests.machine_clock import MachineClock

FIGURES = {
    "cpu_percent": 12.4,
    "memory_percent": 34,
    "disk_free_percent": 56.0,
    "store_latency_seconds": 0.0015,
    "rollouts_running": 2,
    "attempts_succeeded": 7,
    "attempts_ended": 9,
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["leyden", "workers", *arguments])
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
    assert said(capsys, monkeypatch, url) == ["no worker reported within the last day"]
    asyncio.run(work())
    head, first, second = said(capsys, monkeypatch, url)
    assert head == "worker health status heard CPU % memory % free disk % latency running succeeded"
    assert first.startswith("a[b] healthy unknown, paused")
    assert first.endswith("s ago 12 34 56 1.5 ms 2 7 of 9")
    assert second.startswith("c ended unknown")
    shown = json.loads("".join(said(capsys, monkeypatch, url, "--json")))
    assert [(worker["worker_id"], worker["health"]) for worker in shown] == [("a[b]", "healthy"), ("c", "ended")]


def test_a_worker_is_as_old_as_the_stores_clock_says(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    machine_clock: MachineClock,
) -> None:
    async def work() -> None:
        async with SqliteLightningStore(tmp_path / "s.db") as store:
            await store.update_worker("a", FIGURES)

    asyncio.run(work())
    machine_clock.step(2 * 86_400)
    assert said(capsys, monkeypatch, str(tmp_path / "s.db"))[1].startswith("a healthy unknown 0 s ago")


def test_a_server_that_is_away_is_reported_at_once_and_an_error_in_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(sys, "argv", ["leyden", "workers", url, "--wait", "0.3"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"the store at {url} does not answer (connection refused); waiting, retrying ..."
    assert last.startswith(f"leyden: the store at {url} does not answer (connection refused), for 0 s now")


@pytest.mark.parametrize(
    "command",
    [
        ["resources", "list", "--store"],
        ["resources", "show", "x", "1", "--store"],
        ["resources", "freeze", "x", "1", "--why", "y", "--store"],
        ["learning", "list", "--store"],
        ["learning", "stop", "--store"],
        ["store", "export", "out", "--url"],
        ["samples"],
        ["runs"],
    ],
    ids=" ".join,
)
def test_every_command_that_reads_or_changes_a_store_gives_up_on_a_dead_server_in_the_same_time(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store_options.WAIT_SECONDS == 10
    for module in (store_options, run_views, store_export):
        monkeypatch.setattr(module, "WAIT_SECONDS", 0.2)
    url = f"http://127.0.0.1:{free_port()}"
    wait = ["--wait", "0.2"] if command == ["samples"] else []
    monkeypatch.setattr(sys, "argv", ["leyden", *command, url, *wait])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "does not answer (connection refused), for 0 s now" in capsys.readouterr().err


async def test_a_server_that_comes_later_is_connected_to(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    connecting = asyncio.ensure_future(connect("the store", url))
    async with asyncio.timeout(10):
        said = ""
        while not said:  # until it has tried once
            await asyncio.sleep(0.01)
            said = capsys.readouterr().err
        assert said == "the store does not answer (connection refused); waiting, retrying ...\n"
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port):
            await connecting
    assert capsys.readouterr().err == "connected to the store\n"


async def test_a_server_that_accepts_and_is_silent_is_reported_within_two_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    silence = asyncio.get_running_loop().create_future()
    asking = asyncio.ensure_future(answer_of("the store", silence))
    async with asyncio.timeout(2.5):
        said = ""
        while not said:
            await asyncio.sleep(0.05)
            said = capsys.readouterr().err
    assert said == "the store accepted the connection and has not answered yet; waiting ...\n"
    silence.set_result(7)
    assert await asking == 7
