"""`leyden store`, as a user runs it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from leyden.cli import main
from leyden.store import LightningStoreClient, SqliteLightningStore

LEYDEN = [sys.executable, "-c", "from leyden.cli import main; main()"]
SOON = 30.0


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Any, str]:
    """The exit code and everything that a call which ends by itself says, in one line."""
    monkeypatch.setattr(sys, "argv", ["leyden", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    for name, value in {"handlers": [], "propagate": True, "level": logging.NOTSET}.items():
        monkeypatch.setattr(logging.getLogger("leyden"), name, value)  # as they are now, when the test is over
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    return ended.value.code, " ".join((told.out + told.err).split())


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A running `leyden store`, its URL and its first line."""
    process = subprocess.Popen(
        [*LEYDEN, "store", *arguments], stdout=subprocess.PIPE, text=True, env=os.environ | environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+?(?=,|\s)", line)
        assert found, line
        yield process, found[0], line
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_a_file_until_it_is_told_to_stop(tmp_path: Path, stop: signal.Signals) -> None:
    path = tmp_path / "new" / "store.db"
    with serving("--url", f"sqlite://{path}", "--port", "0") as (process, url, line):
        assert f"sqlite://{path}" in line
        assert "without a token" in line
        assert process.stdout is not None
        assert process.stdout.readline().strip().endswith(f"{url}/openapi.json")

        async def use() -> None:
            async with LightningStoreClient(url) as client:
                await client.enqueue_rollout("kept", rollout_id="ro-1")

        asyncio.run(use())
        process.send_signal(stop)
        assert process.wait(SOON) == 0

    async def look() -> str:
        async with SqliteLightningStore(path) as store:
            return (await store.get_rollout_by_id("ro-1")).input

    assert asyncio.run(look()) == "kept"


def test_the_environment_may_hold_the_token_and_retention_is_run(tmp_path: Path) -> None:
    arguments = ("--url", str(tmp_path / "s.db"), "--port", "0", "--keep-rollouts", "1", "--keep-days", "0.5")
    with serving(*arguments, LEYDEN_STORE_TOKEN="sesame") as (process, url, line):
        assert "with the token" in line
        assert "sesame" not in line

        async def use() -> None:
            async with LightningStoreClient(url, token="sesame") as client:
                for k in range(3):
                    rollout = await client.start_rollout(k)
                    await client.update_attempt(rollout.rollout_id, "latest", status="succeeded")

        asyncio.run(use())
        process.terminate()
        assert process.wait(SOON) == 0

    async def look() -> int:
        async with SqliteLightningStore(tmp_path / "s.db") as store:
            return (await store.query_rollouts()).total

    assert asyncio.run(look()) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--host", "0.0.0.0"), "--token"),
        (("--host", "0.0.0.0", "--token", ""), "token is empty"),
        (("--url", "mysql://x/y"), "cannot open a store at 'mysql://x/y'"),
        (("--url", "http://localhost:4747"), "served already"),
        (("--durability", "eternal"), "durability must be one of process, power"),
        (("--port", "70000"), "65535"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: Sequence[str],
    reason: str,
) -> None:
    given = ("--url", str(tmp_path / "s.db")) if "--url" not in arguments else ()
    code, text = said(capsys, monkeypatch, "store", "--port", "0", *given, *arguments)
    assert code != 0
    assert reason in text
    assert "Traceback" not in text


def test_a_port_and_a_file_that_are_taken_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ("--url", str(tmp_path / "s.db"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, text = said(capsys, monkeypatch, "store", *file, "--port", port)
        assert (code, f"port={port}" in text) == (1, True)
    with serving(*file, "--port", "0") as (process, url, _):
        code, text = said(capsys, monkeypatch, "store", *file, "--port", "0")
        assert code == 1
        assert f"in use by process {process.pid}" in text
        assert url in text


def test_an_older_file_is_upgraded_and_can_then_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        scripts = sorted(
            files("leyden.store.sql").joinpath("migrations", "sqlite").iterdir(), key=lambda each: each.name
        )
        connection.executescript(
            scripts[0].read_text() + "PRAGMA user_version = 1; PRAGMA application_id = 0x4C595244;"
        )
    assert said(capsys, monkeypatch, "runs", str(path))[0] == 1
    assert said(capsys, monkeypatch, "store", "upgrade", str(path)) == (0, f"{path} is up to date")
    assert said(capsys, monkeypatch, "runs", str(path))[0] == 0
    missing = tmp_path / "missing.db"
    assert said(capsys, monkeypatch, "store", "upgrade", str(missing)) == (
        1,
        f"leyden: there is no store in a file at {missing}; give the path of one, such as .leyden/NAME/store.sqlite",
    )
    assert not missing.exists()


def test_help_shows_how(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = said(capsys, monkeypatch, "store", "--help")
    assert code == 0
    for word in ("leyden store --url sqlite:", "--keep-days", "LEYDEN_STORE_TOKEN", "4747"):
        assert word in text


def test_it_shows_its_metrics_to_those_who_have_the_token_and_watches_its_store_if_asked(tmp_path: Path) -> None:
    with serving("--url", str(tmp_path / "s.db"), "--port", "0", "--monitor", LEYDEN_STORE_TOKEN="secret") as (
        _,
        url,
        _,
    ):
        asked = urllib.request.Request(f"{url}/metrics", headers={"Authorization": "Bearer secret"})
        deadline, page = time.monotonic() + SOON, ""
        while "leyden_store_reachable" not in page:  # until the monitor has looked, which it does at once
            assert time.monotonic() < deadline, page
            with urllib.request.urlopen(asked) as answer:
                page = answer.read().decode()
        assert 'leyden_store_reachable{worker=""} 1.0' in page
